"""The scripts as a user runs them, on the embedded model: train, go on, evaluate, solve."""

import importlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agon_jax.data.jsonl import DataError
from experiments import evaluate, solve, train

SETTINGS = (
    "run.steps=2",
    "run.problems_per_step=2",
    "run.eval_every=0",
    "run.save_every=1",
    "method.group_size=2",
    "data.train_size=8",
    "data.heldout_size=3",
    "lora.rank=2",
    "sampling.max_new_tokens=12",
    "sampling.rows_per_device=4",
    "verifier.workers=1",
)
CONFIG = ("--config", "models/embedded.gin", "tasks/arithmetic.gin", "methods/agon.gin")


def arguments(workdir: Path, *settings: str) -> list[str]:
    return [*CONFIG, "--set", *SETTINGS, *settings, "--workdir", str(workdir)]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "agon"
    assert train.main(arguments(workdir)) == 0
    return workdir


def figures(directory: Path) -> dict:
    return json.loads((directory / "report.json").read_text())


def test_a_run_leaves_its_settings_metrics_checkpoints_and_report(workdir):
    left = {path.name for path in workdir.iterdir()}
    assert {"settings.json", "config.gin", "metrics.jsonl", "checkpoints", "report.json"} <= left
    records = [json.loads(line) for line in (workdir / "heldout.jsonl").read_text().splitlines()]
    assert len(records) == figures(workdir)["n"] == 3
    assert set(records[0]) >= {"question", "gold", "A", "B", "A->B", "B->A"}


def test_the_same_command_goes_on_and_a_changed_one_is_refused(workdir, capsys):
    before = figures(workdir)
    assert train.main(arguments(workdir)) == 0
    assert f"{workdir} holds this run" in capsys.readouterr().out
    assert figures(workdir) == before
    assert train.main(arguments(workdir, "method.reward=coop")) == 2
    assert "method.reward 'adv' -> 'coop'" in capsys.readouterr().err


def test_evaluate_repeats_the_report_of_the_run(workdir, tmp_path, capsys):
    assert evaluate.main(["--workdir", str(workdir), "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "after 2 steps" in output.err and "pass@1" in output.out
    assert figures(tmp_path) == figures(workdir)


def test_solve_prints_draft_summary_and_answer(workdir, capsys):
    assert solve.main(["--workdir", str(workdir), "--problem", "23+45+91+77"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("== Problem\n23+45+91+77\n")
    assert all(f"\n\n== {part}\n" in output for part in ("Draft", "Challenge", "Answer"))


def test_solve_answers_a_file_line_by_line(workdir, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "10+20+30+40"}\n\n{"question": "11+22+33+44", "x": 1}\n')
    assert solve.main(["--workdir", str(workdir), "--file", str(questions), "--first", "B"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["question"] for line in lines] == ["10+20+30+40", "11+22+33+44"]
    assert set(lines[0]) == set(solve.Exchange._fields)


def test_solve_reads_the_standard_input_and_knows_too_long_a_problem(workdir, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(SystemExit) as stopped:
        solve.main(["--workdir", str(workdir)])
    assert stopped.value.code == 2
    capsys.readouterr()
    assert solve.main(["--workdir", str(workdir), "--problem", "1+" * 500]) == 2
    assert "max_draft_prompt_tokens" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train", "evaluate", "solve", "table"])
def test_help_explains_and_a_wrong_setting_is_one_line(script, capsys, tmp_path):
    main = importlib.import_module(f"experiments.{script}").main
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"python experiments/{script}.py" in shown and "--set" in shown
    where = ["--workdir", str(tmp_path / "x")] if script in ("train", "table") else []
    wrong = [*CONFIG[:2], "--set", "method.rewrd=coop", *where]
    assert main(wrong) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: method.rewrd = coop: no such setting") and error.count("\n") == 1
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no questions in it"),
        (
            '{"question": "1+1"}\n{"problem": "2+2"}\n',
            "questions.jsonl:2: no JSON object",
        ),
        ('{"question": 3}\n', "questions.jsonl:1"),
        ('["question"]\n', "questions.jsonl:1"),
        ("question\n", "questions.jsonl:1"),
    ],
)
def test_a_broken_file_of_questions_is_refused_with_its_line(tmp_path, text, part):
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=part):
        solve.read_questions(path, "question")
    with pytest.raises(DataError, match="cannot be read"):
        solve.read_questions(tmp_path / "none.jsonl", "question")


def test_the_table_says_which_stage_is_reported_and_that_it_was_chosen():
    stage = {
        "pass@1": 0.25, "ci95": (0.1, 0.4), "n": 40, "tokens": 12.3, "generated_tokens": 12345,
        "prefilled_tokens": 999, "truncated": 0.0, "format_ok": 1.0,
    }  # fmt: skip
    numbers = stage | {"reported_stage": "B->A", "chosen_after_the_fact": True}
    numbers["stages"] = {"A": stage, "B->A": stage | {"repairs": 0.2, "harms": 0.05}}
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(evaluate.stage_table(numbers))
    shown = console.export_text()
    assert "25.0% [10.0%, 40.0%]" in shown and "12,345" in shown and "20.0%" in shown
    assert "reported: B->A, the better cascade, chosen afterwards" in shown
