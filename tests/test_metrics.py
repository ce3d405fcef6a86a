import json
import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from agon_jax.metrics import MetricsWriter, read_metrics, step_metrics
from agon_jax.outcomes import Outcomes

# One problem, four rollouts: the rival is right, right, wrong, wrong; the challenge right, wrong,
# right, wrong.
DRAFTS = Outcomes(
    correct=np.array([[1, 1, 0, 0]], bool),
    format_ok=np.array([[1, 1, 1, 0]], bool),
    lengths=np.array([[10, 20, 30, 90]]),
    prompt_lengths=np.array([[5, 5, 5, 5]]),
    truncated=np.array([[0, 0, 0, 1]], bool),
    answers=np.array([["4", "4", "5", None]], object),
    reasons=np.array([["right", "right", "wrong", "timeout"]], object),
)
CHALLENGES = Outcomes(
    correct=np.array([[1, 0, 1, 0]], bool),
    format_ok=np.array([[1, 1, 1, 1]], bool),
    lengths=np.array([[6, 8, 20, 22]]),
    prompt_lengths=np.array([[9, 9, 9, 7]]),
    truncated=np.zeros((1, 4), bool),
    answers=np.array([["4", "7", "4", "9"]], object),
    reasons=np.array([["right", "wrong", "right", "crash"]], object),
)
REWARDS = np.array([[2.5, 2.5, 0.5, 0.0]]), np.array([[2.5, 0.5, 3.5, 0.5]])
LIVE = np.array([True]), np.array([False])


def figures(policies=("A", "B"), drafts=DRAFTS, challenges=CHALLENGES, rivals=DRAFTS):
    return step_metrics(drafts, challenges, rivals, policies=policies, rewards=REWARDS, live=LIVE)


def test_figures_of_the_stages_by_hand():
    got = figures()
    expected = {
        "draft/reward": 5.5 / 4,
        "draft/pass_rate": 0.5,
        "draft/format_rate": 0.75,
        "draft/truncated": 0.25,
        "draft/length": 37.5,  # the truncated one counts: N11
        "draft/prompt_length": 5,
        "draft/generated_tokens": 150,
        "draft/dead_groups": 0,
        "draft/verdicts/right": 2,
        "draft/verdicts/timeout": 1,
        "draft/verdicts/crash": 0,
        "challenge/reward": 7 / 4,
        "challenge/prompt_length": 8.5,
        "challenge/dead_groups": 1,
        "challenge/verdicts/crash": 1,
        "live_groups": 0.5,
    }
    assert {key: got[key] for key in expected} == expected
    assert all(type(value) is float for value in got.values())


def test_figures_of_the_pair_by_hand():
    got = figures()
    expected = {
        "challenge/conversions": 0.25,
        "challenge/losses": 0.25,
        "challenge/conversion_rate": 0.5,
        "challenge/loss_rate": 0.5,
        "challenge/copied": 1 / 3,
        "challenge/copied_right": 1 / 2,
        "challenge/copied_wrong": 0,
        "challenge/length_rival_right": 7,
        "challenge/length_rival_right_to_mean": 7 / 14,
        "errors/jaccard": 1 / 3,
        "errors/both_wrong": 0.25,
    }
    assert {key: got[key] for key in expected} == expected


def test_figures_follow_the_policies_when_the_roles_change():
    uneven = CHALLENGES._replace(correct=np.array([[1, 0, 0, 0]], bool))
    even, odd = (figures(names, challenges=uneven) for names in (("A", "B"), ("B", "A")))
    assert even["policy_A/reward"] == odd["policy_B/reward"] == even["draft/reward"]
    assert even["policy_B/pass_rate"] == odd["policy_A/pass_rate"] == 0.25
    assert even["errors/only_a_right"] == odd["errors/only_b_right"] == 0.25
    assert even["errors/only_b_right"] == odd["errors/only_a_right"] == 0


def test_one_policy_in_both_roles_is_one_policy():
    got = figures(("A", "A"))
    assert got["policy_A/reward"] == 12.5 / 8 and got["policy_A/pass_rate"] == 0.5
    assert not any(key.startswith(("policy_B", "errors/")) for key in got)


def test_without_a_challenge_there_are_drafts_alone():
    got = step_metrics(DRAFTS, policies=["A"], rewards=REWARDS[:1], live=LIVE[:1])
    assert got["policy_A/reward"] == got["draft/reward"] and got["live_groups"] == 1
    assert not any(key.startswith(("challenge/", "errors/")) for key in got)


def test_a_mean_of_nothing_is_nan_and_warns_nobody():
    wrong = DRAFTS._replace(correct=np.zeros((1, 4), bool))
    got = figures(rivals=wrong)
    assert math.isnan(got["challenge/length_rival_right"]) and math.isnan(
        got["challenge/loss_rate"]
    )
    nothing = Outcomes(*(array[:0] for array in DRAFTS))
    empty = step_metrics(
        nothing,
        nothing,
        nothing,
        policies="AB",
        rewards=[np.zeros((0, 4))] * 2,
        live=[np.zeros(0, bool)] * 2,
    )
    assert math.isnan(empty["draft/reward"]) and math.isnan(empty["live_groups"])


# Writing


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_strict_json_and_there_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write("train", 0, {"a": np.float32(0.5), "n": np.int64(3), "gap": math.nan})
        writer.write("eval", 0, {"stages": {"A": {"pass@1": np.inf, "ci95": (0.1, 0.2)}}, "s": "A"})
        text = (tmp_path / "metrics.jsonl").read_text()  # before closing: each row is flushed
    assert text.splitlines() == [
        '{"kind": "train", "step": 0, "a": 0.5, "n": 3, "gap": null}',
        '{"kind": "eval", "step": 0, "stages": {"A": {"pass@1": null, "ci95": [0.1, 0.2]}},'
        ' "s": "A"}',
    ]
    assert read_metrics(tmp_path, "train") == rows(tmp_path)[:1]


def test_a_resume_neither_repeats_nor_loses_a_step(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(12):
            writer.write("train", step, {"loss": step, "life": 1})
            if step % 5 == 0:
                writer.write("eval", step, {"pass@1": step})
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    with MetricsWriter(tmp_path, resume_step=9) as writer:
        for step in range(9, 14):
            writer.write("train", step, {"loss": step, "life": 2})
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(14))
    assert [row["life"] for row in read_metrics(tmp_path, "train")] == [1] * 9 + [2] * 5
    assert [row["step"] for row in read_metrics(tmp_path, "eval")] == [0, 5]
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:11] == kept[:11]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_a_run_killed_while_writing_goes_on(tmp_path):
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from agon_jax.metrics import MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "for step in range(4): writer.write('train', step, {'x': 1})\n"
        'writer._rows.write(\'{"kind": "tr\'); writer._rows.flush()\n'
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=os.getcwd())
    assert died.returncode == -9
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == [0, 1, 2, 3]
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.write("train", 4, {"x": 1})
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_dying_truncation_leaves_the_old_rows(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path) as writer:
        writer.write("train", 0, {})
        writer.write("train", 1, {})
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        MetricsWriter(tmp_path, resume_step=1)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]


def test_what_is_no_row_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 0}\nrubbish\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a row of metrics: b'rubbish"):
        MetricsWriter(tmp_path, resume_step=1)
    with MetricsWriter(tmp_path / "other") as writer:
        writer.write("train", 3, {})
        with pytest.raises(ValueError, match="step 3 of kind 'train' comes after 3"):
            writer.write("train", 3, {})
        with pytest.raises(ValueError, match="may not be named step"):
            writer.write("train", 4, {"step": 1})
        writer.write("eval", 3, {})  # each kind has its own steps
    with MetricsWriter(tmp_path / "other", resume_step=9) as writer:
        with pytest.raises(ValueError, match="step 2 of kind 'train' comes after 3"):
            writer.write("train", 2, {})


def events(workdir):
    """(step, tag, value) of all scalars, and the steps at which a session purged older ones."""
    from tensorboardX.proto.event_pb2 import Event

    scalars, starts = [], []
    for path in sorted((workdir / "tensorboard").glob("events.*")):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            starts += [event.step] if event.HasField("session_log") else []
    return scalars, starts


def test_tensorboard_gets_every_number_and_learns_of_a_resume(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write("train", 0, {"loss": 0.5, "gap": math.nan, "text": "no"})
        writer.write("eval", 1, {"stages": {"A": {"pass_rate": 0.25}}})
    scalars, starts = events(tmp_path)
    assert scalars == [(0, "train/loss", 0.5), (1, "eval/stages/A/pass_rate", 0.25)]
    assert starts == []
    with MetricsWriter(tmp_path, resume_step=1):
        pass
    assert 1 in events(tmp_path)[1]
