"""Speed of one part of a training step, as one JSON line.

    python benchmarks/bench.py --part sample [--config small] [--lora] [--reps 5]

tokens_per_s is the median after warm-up; compile_s what the first call spent on compiling;
peak_memory_mb the most that the process (or the device, where it tells) ever held;
share_of_limit how near the work comes to a limit measured in the same process.
"""

import argparse
import json
from collections.abc import Sequence

import jax
import part_sample
import part_step
import part_update
from work import CONFIGS

PARTS = {"sample": part_sample.run, "update": part_update.run, "step": part_step.run}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument(
        "--lora", action="store_true", help="adapters on a frozen base, not full trees"
    )
    parser.add_argument("--reps", type=int, default=5, help="timed calls after the first")
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=8,
        help="rows of one backward pass; 0: all at once (default: %(default)s, which suits a CPU)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    setting = {name: getattr(args, name) for name in ("part", "config", "lora", "dtype")}
    machine = {"backend": jax.default_backend(), "devices": jax.local_device_count()}
    result = PARTS[args.part](CONFIGS[args.config], args)
    print(json.dumps({"system": "agon_jax", **setting, **machine, **result}))


if __name__ == "__main__":
    main()
