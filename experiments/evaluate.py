"""Evaluates a pair on held-out problems: each policy alone, and the cascade in both directions.

    python experiments/evaluate.py --workdir runs/agon
    python experiments/evaluate.py --workdir runs/mine --set data.heldout_path=other.jsonl --seed 1
    python experiments/evaluate.py --config models/qwen3_0_6b.gin tasks/jsonl.gin \\
        methods/agon.gin --set data.path=problems.jsonl --problems 50

With --workdir the pair is that run's newest checkpoint, with --config it is untrained. --out DIR
keeps the figures (report.json) and what came of every problem (heldout.jsonl).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agon_jax.checkpoint import Checkpoints
from agon_jax.config import RunConfig, SettingError
from agon_jax.data.batches import load_problems
from agon_jax.evaluate import Report, evaluate
from agon_jax.policies import Pair, load_pair
from agon_jax.rollout import Weights
from agon_jax.verifiers.pool import VerifierPool
from experiments.settings import add_setting_arguments, load_run, load_workdir, refusing

TABLE_WIDTH = 132


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_arguments(parser)
    parser.add_argument(
        "--problems", type=int, metavar="N", help="the first N held-out problems (default: all)"
    )
    parser.add_argument("--seed", type=int, help="of the sampling (default: run.seed)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to keep the results")
    args = parser.parse_args(arguments)
    if args.problems is not None and args.problems < 1:
        parser.error(f"--problems {args.problems}: must be 1 or more")
    run = run_of(args)
    problems = load_problems(run.data)[1][: args.problems]
    if not problems:
        raise SettingError("data.heldout_size = 0: must be more, or nothing is held out")
    pair, weights = load_players(run, args.workdir)
    print(f"evaluating {len(problems)} problems", file=sys.stderr, flush=True)
    with VerifierPool(run.verifier) as pool:
        report = evaluate(pair, weights, problems, run, pool, args.seed)
    wide_console().print(stage_table(report.numbers()))
    if args.out:
        write_report(report, args.out)
        print(f"written: {args.out / 'report.json'}, {args.out / 'heldout.jsonl'}")
    return 0


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """`--workdir RUN` or `--config FILE ...`, and `--set`: for `run_of` and `load_players`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", type=Path, help="a run of train.py: its newest checkpoint")
    add_setting_arguments(parser, config=source)


def run_of(args: argparse.Namespace) -> RunConfig:
    """The settings of the run, or of the files, and then those of `--set`."""
    if args.workdir:
        return load_workdir(args.workdir, args.set)
    return load_run(args.config, args.set)


def load_players(run: RunConfig, workdir: Path | None) -> tuple[Pair, Weights]:
    """The pair of a run as its newest checkpoint has it, or untrained; says which on stderr."""
    pair = load_pair(run)
    states = pair.init_states()
    step = 0
    if workdir:
        with Checkpoints(workdir / "checkpoints", run.keep_checkpoints) as checkpoints:
            step, states, _ = checkpoints.restore_latest(states)
    trained = f"after {step} steps" if step else "untrained"
    print(f"the pair of {workdir or run.model.path}, {trained}", file=sys.stderr, flush=True)
    return pair, pair.weights(states)


def wide_console() -> Console:
    """A console for tables: a log file has no width of its own, and would get 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_WIDTH))


def stage_table(numbers: dict[str, Any]) -> Table:
    """Report.numbers() for a person: a row for each stage."""
    caption = f"reported: {numbers['reported_stage']}"
    if numbers["chosen_after_the_fact"]:
        caption += ", the better cascade, chosen afterwards"
    if "error_overlap" in numbers:
        overlap = numbers["error_overlap"]["jaccard"]
        caption += f"; overlap of the error sets of A and B (Jaccard): {overlap:.2f}"
    table = Table(title=f"{numbers['n']} held-out problems", caption=caption)
    columns = (
        "stage",
        "pass@1 [95% interval]",
        "repairs",
        "harms",
        "tokens",
        "truncated",
        "format",
    )
    for column in (*columns, "generated", "prefilled"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in numbers["stages"].items():
        low, high = stage["ci95"]
        table.add_row(
            name,
            f"{stage['pass@1']:.1%} [{low:.1%}, {high:.1%}]",
            *(f"{stage[key]:.1%}" if key in stage else "-" for key in ("repairs", "harms")),
            f"{stage['tokens']:.0f}",
            f"{stage['truncated']:.1%}",
            f"{stage['format_ok']:.1%}",
            f"{stage['generated_tokens']:,}",
            f"{stage['prefilled_tokens']:,}",
        )
    return table


def write_report(report: Report, directory: Path) -> None:
    """report.json: the figures; heldout.jsonl: a line for each problem."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(report.numbers(), indent=2)
    (directory / "report.json").write_text(numbers + "\n", encoding="utf-8")
    with (directory / "heldout.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in report.records())


if __name__ == "__main__":
    sys.exit(main())
