"""Runs methods side by side at one generation budget and prints the paper's table for them.

    python experiments/table.py --workdir runs/demo --methods zero_shot grpo agon --seeds 0
    python experiments/table.py --workdir runs/table --seeds 0 1 2

Every run lives in WORKDIR/METHOD-SEED; a finished one is read, a stopped one goes on. Writes
WORKDIR/result.json, WORKDIR/curves.png and, for every run, its held-out records and one exchange.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from agon_jax.evaluate import Report, clopper_pearson
from agon_jax.metrics import read_metrics
from agon_jax.rollout import Rollout
from agon_jax.trainer import train
from experiments.evaluate import wide_console
from experiments.settings import add_setting_arguments, claim_workdir, load_run, refusing

METHODS = {  # in the order of the table
    "zero_shot": "zero-shot",
    "zero_shot_pair": "zero-shot cascade",
    "grpo": "grpo",
    "one_policy": "one policy, both roles",
    "coop": "cooperative exchange",
    "shared_rival": "shared rival",
    "margin": "margin",
    "fixed_roles": "fixed roles",
    "tie_break": "agon + tie-break",
    "agon": "agon",
}
STAGES = ("A", "B", "A->B", "B->A", "A->A")


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True, help="where all runs go")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    add_setting_arguments(parser, default=["demo.gin"])
    args = parser.parse_args(arguments)
    console = wide_console()
    for seed in args.seeds:
        for method in args.methods:
            run_one(args, method, seed, console)
    runs = {
        method: [final_row(args.workdir / f"{method}-{seed}") for seed in args.seeds]
        for method in args.methods
    }
    result = {
        "seeds": args.seeds,
        "methods": {METHODS[method]: pooled(rows) for method, rows in runs.items()},
    }
    (args.workdir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_curves(args.workdir, args.methods, args.seeds)
    console.print(as_table(result))
    console.print(NOTE)
    last = args.workdir / f"{args.methods[-1]}-{args.seeds[0]}" / "exchange.txt"
    console.print(last.read_text(), markup=False, highlight=False)
    console.print(f"Written: {args.workdir / 'result.json'}, {args.workdir / 'curves.png'}")
    return 0


NOTE = (
    "pass@1 on the held-out problems, one rollout per stage, with the exact (Clopper-Pearson) 95%"
    " interval; over several seeds the verdicts are pooled. Where a method has two cascades the"
    " better one is reported, chosen afterwards. Tokens are the mean of a draft, then of the final"
    " stage. Generated and prefilled tokens and seconds are those of training, a run."
)


def run_one(args: argparse.Namespace, method: str, seed: int, console: Console) -> None:
    """Trains and evaluates a method, unless its workdir says that this is done."""
    workdir = args.workdir / f"{method}-{seed}"
    settings = [*args.set, f"run.seed={seed}", f"data.seed={seed}"]
    run = load_run([*args.config, f"methods/{method}.gin"], settings)
    claim_workdir(workdir, run)
    if (workdir / "exchange.txt").exists():
        console.print(f"{METHODS[method]}, seed {seed}: done before, in {workdir}")
        return
    console.rule(f"{METHODS[method]}, seed {seed}")
    began = time.perf_counter()
    report = train(run, workdir)
    if report is None:
        raise SystemExit("data.heldout_size = 0: a table needs held-out problems")
    with (workdir / "heldout.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in report.records())
    (workdir / "exchange.txt").write_text(as_exchange(report), encoding="utf-8")
    console.print(f"{METHODS[method]}: {time.perf_counter() - began:.0f} s with compilation")


def final_row(workdir: Path) -> dict[str, Any]:
    return read_metrics(workdir, "eval")[-1]


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one method over its seeds: verdicts pooled, costs averaged."""

    def rate(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
        n = sum(each["n"] for each in figures)
        right = round(sum(each["pass@1"] * each["n"] for each in figures))
        return {"pass@1": right / n, "ci95": clopper_pearson(right, n), "n": n}

    stages = {}
    for name in STAGES:
        seen = [row["stages"][name] for row in rows if name in row["stages"]]
        if seen:
            tokens = sum(each["tokens"] for each in seen) / len(seen)
            stages[name] = rate(seen) | {"tokens": tokens}
    totals = [row["totals"] for row in rows]
    overlaps = [row["error_overlap"]["jaccard"] for row in rows if "error_overlap" in row]
    return rate(rows) | {
        "reported_stages": [row["reported_stage"] for row in rows],
        "pass@1_by_seed": [row["pass@1"] for row in rows],
        "stages": stages,
        "error_overlap": sum(overlaps) / len(overlaps) if overlaps else None,
        **{key: sum(total[key] for total in totals) / len(totals) for key in totals[0]},
    }


def as_table(result: dict[str, Any]) -> Table:
    table = Table(title="Held-out problems")
    for column in (
        "method", "pass@1 [95% interval]", "n", "drafter alone", "A->B", "B->A",
        "tokens", "generated", "prefilled", "seconds",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in result["methods"].items():
        stages = row["stages"]
        low, high = row["ci95"]
        alone = " / ".join(
            f"{policy} {percent(stages[policy])}" for policy in "AB" if policy in stages
        )
        cascades = [stage for stage in stages if "->" in stage]
        best = max(cascades, key=lambda stage: stages[stage]["pass@1"], default="A")
        table.add_row(
            name,
            f"{row['pass@1']:.1%} [{low:.1%}, {high:.1%}]",
            str(row["n"]),
            alone,
            percent(stages.get("A->B") or stages.get("A->A")),
            percent(stages.get("B->A")),
            " / ".join(
                f"{stages[stage]['tokens']:.0f}" for stage in dict.fromkeys((best[0], best))
            ),
            f"{row['generated_tokens']:,.0f}",
            f"{row['prefilled_tokens']:,.0f}",
            f"{row['seconds']:.0f}",
        )
    return table


def percent(figures: dict[str, Any] | None) -> str:
    return f"{figures['pass@1']:.1%}" if figures else "-"


def as_exchange(report: Report) -> str:
    """One held-out problem as the pair met it; if there is one, a draft that the rival mended."""
    draft_name = report.best.split("->")[0]
    drafted = report.stages[draft_name].outcomes.correct[:, 0]
    final = report.stages[report.best].outcomes.correct[:, 0]
    mended = [i for i in range(len(final)) if final[i] and not drafted[i]]
    index = mended[0] if mended else 0
    problem, draft, challenge = report.exchange(index)
    lines = [f"Problem {problem.id}: {problem.question}    (gold: {problem.answer})", ""]
    lines += [f"Draft by {draft_name}:", *whole(draft)]
    lines += ["", f"Its verdict: {report.stages[draft_name].outcomes.reasons[index, 0]}"]
    if challenge is not None:
        lines += ["", "Summary the rival read, the answer withheld:", f"  {draft.summary!r}"]
        lines += ["", f"Challenge by {report.best[-1]}:", *whole(challenge)]
        lines += ["", f"Its verdict: {report.stages[report.best].outcomes.reasons[index, 0]}"]
    return "\n".join(lines) + "\n"


def whole(rollout: Rollout) -> list[str]:
    sections = rollout.sections
    return [f"  reasoning: {sections.reasoning}", f"  after it:  {sections.after}"]


def draw_curves(workdir: Path, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """curves.png: pass@1 and tokens of every stage over the steps, a column for each method."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    learning = [
        name for name in methods if len(read_metrics(workdir / f"{name}-{seeds[0]}", "eval")) > 1
    ]
    if not learning:
        return
    figure, axes = plt.subplots(
        2, len(learning), figsize=(4 * len(learning), 6), sharex="col", sharey="row", squeeze=False
    )
    for column, method in enumerate(learning):
        for stage, colour in zip(STAGES, ("C0", "C1", "C2", "C3", "C4"), strict=True):
            for i, seed in enumerate(seeds):
                rows = read_metrics(workdir / f"{method}-{seed}", "eval")
                rows = [row for row in rows if stage in row["stages"]]
                for line, key in enumerate(("pass@1", "tokens")):
                    axes[line, column].plot(
                        [row["step"] for row in rows],
                        [row["stages"][stage][key] for row in rows],
                        color=colour,
                        label=stage if rows and i == 0 else None,
                    )
        axes[0, column].set_title(METHODS[method])
        axes[0, column].legend()
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("pass@1, held-out")
    axes[1, 0].set_ylabel("tokens generated")
    figure.tight_layout()
    figure.savefig(workdir / "curves.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
