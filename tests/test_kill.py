"""A run that is killed goes on to the same end as one that was left alone."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from agon_jax.metrics import read_metrics

ROOT = Path(__file__).parent.parent
STEPS = 6
SETTINGS = (
    f"run.steps={STEPS}",
    "run.problems_per_step=2",
    "run.eval_every=3",
    "run.save_every=1",
    "run.keep_checkpoints=2",
    "method.group_size=4",
    "data.train_size=8",
    "data.heldout_size=3",
    "lora.rank=2",
    "optimizer.learning_rate=0.01",
    "sampling.max_new_tokens=48",
    "sampling.rows_per_device=8",
    "verifier.workers=1",
)


def start(workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "experiments/train.py", "--config", "demo.gin", "methods/agon.gin"]
    command += ["--set", *SETTINGS, "--workdir", str(workdir)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-2000:]
    return output


def kill_after(workdir: Path, rows: int, seconds: float) -> None:
    """SIGKILL, some time after the metrics have their first `rows` training rows."""
    process = start(workdir)
    deadline = time.monotonic() + 600
    file = workdir / "metrics.jsonl"
    while not file.exists() or len(read_metrics(workdir, "train")) < rows:
        assert process.poll() is None, process.communicate()[0][-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def untimed(workdir: Path, kind: str) -> list[dict]:
    """The rows without what a clock said."""

    def kept(row: dict) -> dict:
        clocks = ("seconds", "tokens_per_second")
        return {
            key: kept(value) if isinstance(value, dict) else value
            for key, value in row.items()
            if key.partition("/")[0] not in clocks
        }

    return [kept(row) for row in read_metrics(workdir, kind)]


def last_states(workdir: Path):
    with ocp.CheckpointManager((workdir / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == STEPS
        arguments = ocp.args.Composite(states=ocp.args.StandardRestore())
        return manager.restore(STEPS, args=arguments)["states"]


@pytest.mark.slow
def test_a_run_killed_three_times_ends_as_one_that_was_left_alone(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole))
    kill_after(killed, rows=1, seconds=0.0)  # perhaps while the first checkpoint is written
    kill_after(killed, rows=3, seconds=0.3)
    kill_after(killed, rows=5, seconds=0.05)
    assert json.loads((killed / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0
    output = finish(start(killed))
    assert f"{killed} holds this run" in output
    for kind in ("train", "eval"):
        assert untimed(killed, kind) == untimed(whole, kind)
    assert [row["step"] for row in read_metrics(killed, "train")] == list(range(STEPS))
    one, other = last_states(killed), last_states(whole)
    assert len(jax.tree.leaves(one)) > 20
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert (killed / "heldout.jsonl").read_text() == (whole / "heldout.jsonl").read_text()
