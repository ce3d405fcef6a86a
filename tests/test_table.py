"""The table over methods and seeds, from runs that are done."""

import json
from pathlib import Path

import pytest

from agon_jax.evaluate import clopper_pearson
from experiments import table
from experiments.settings import claim_workdir, load_run


def stage(right: int, n: int, tokens: float) -> dict:
    return {"pass@1": right / n, "ci95": clopper_pearson(right, n), "n": n, "tokens": tokens}


def finish(workdir: Path, method: str, seed: int, stages: dict, reported: str, seconds: float):
    """A run that is done, as the trainer and the table leave it."""
    run = load_run(["demo.gin", f"methods/{method}.gin"], [f"run.seed={seed}", f"data.seed={seed}"])
    claim_workdir(workdir / f"{method}-{seed}", run)
    totals = {"generated_tokens": 1000, "prefilled_tokens": 100, "seconds": seconds}
    row = {"kind": "eval", "stages": stages, "reported_stage": reported, "totals": totals}
    rows = [row | stages[reported] | {"step": step} for step in (0, 60)]
    if "B" in stages:
        rows = [each | {"error_overlap": {"jaccard": 0.25 * (seed + 1)}} for each in rows]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (workdir / f"{method}-{seed}" / "metrics.jsonl").write_text(text)
    (workdir / f"{method}-{seed}" / "exchange.txt").write_text(f"Exchange of {method}, {seed}\n")


@pytest.fixture
def workdir(tmp_path) -> Path:
    for seed, right in ((0, 60), (1, 70)):
        finish(tmp_path, "grpo", seed, {"A": stage(right, 100, 44.0)}, "A", 10.0 * (seed + 1))
        cascades = {"A->B": stage(right + 20, 100, 40.0), "B->A": stage(right - 20, 100, 41.0)}
        alone = {"A": stage(right, 100, 44.0), "B": stage(right - 5, 100, 46.0)}
        finish(tmp_path, "agon", seed, alone | cascades, "A->B", 30.0)
    return tmp_path


def test_verdicts_are_pooled_over_seeds_and_costs_averaged(workdir, capsys):
    arguments = ["--workdir", str(workdir), "--methods", "grpo", "agon", "--seeds", "0", "1"]
    assert table.main(arguments) == 0
    methods = json.loads((workdir / "result.json").read_text())["methods"]
    assert list(methods) == ["grpo", "agon"]
    grpo, agon = methods["grpo"], methods["agon"]
    assert (grpo["pass@1"], grpo["n"]) == (130 / 200, 200)
    assert grpo["ci95"] == list(clopper_pearson(130, 200))
    assert (grpo["seconds"], grpo["pass@1_by_seed"]) == (15.0, [0.6, 0.7])
    assert (agon["pass@1"], agon["stages"]["B->A"]["pass@1"]) == (170 / 200, 90 / 200)
    assert (agon["error_overlap"], agon["stages"]["A->B"]["tokens"]) == (0.375, 40.0)
    shown = capsys.readouterr().out
    low, high = clopper_pearson(170, 200)
    assert f"85.0% [{low:.1%}, {high:.1%}]" in shown
    assert "A 65.0% / B 60.0%" in shown and "44 / 40" in shown
    assert "chosen afterwards" in shown and "Exchange of agon, 0" in shown
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_other_settings_is_refused(workdir, capsys):
    arguments = ["--workdir", str(workdir), "--methods", "grpo", "--seeds", "0"]
    assert table.main([*arguments, "--set", "optimizer.learning_rate=0.1"]) == 2
    assert "optimizer.learning_rate 0.001 -> 0.1" in capsys.readouterr().err
