"""Trains a pair of policies by Agon, or by another row of the paper's table.

    python experiments/train.py --config models/embedded.gin tasks/arithmetic.gin \\
        methods/agon.gin --workdir runs/agon
    python experiments/train.py --config models/qwen3_0_6b.gin tasks/jsonl.gin \\
        methods/agon.gin --set data.path=problems.jsonl run.epochs=2 --workdir runs/mine

WORKDIR gets config.gin and settings.json (every setting), metrics.jsonl, TensorBoard events,
checkpoints and, at the end, report.json and heldout.jsonl: what each stage made of each held-out
problem. The same command again goes on with a run that was stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agon_jax.trainer import train
from experiments.evaluate import stage_table, wide_console, write_report
from experiments.settings import add_setting_arguments, claim_workdir, load_run, refusing


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_setting_arguments(parser)
    parser.add_argument(
        "--workdir", type=Path, required=True, help="where the run goes, or goes on"
    )
    args = parser.parse_args(arguments)
    run = load_run(args.config, args.set)
    if claim_workdir(args.workdir, run):
        print(f"{args.workdir} holds this run: it goes on from its newest checkpoint", flush=True)
    report = train(run, args.workdir)
    if report is None:
        print(f"trained; data.heldout_size = 0, so nothing was evaluated. See {args.workdir}")
        return 0
    write_report(report, args.workdir)
    wide_console().print(stage_table(report.numbers()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
