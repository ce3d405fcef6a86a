"""A whole GRPO step of one policy: its drafts are drawn, given rewards at random, and learned from.

Left out are text and verifiers. With kl_coef 0 no pass but the update's own scores anything.
"""

import argparse
from typing import Any

import jax
import numpy as np
import part_sample
import part_update
from measure import matmul_flops, measured, median
from work import Work

from agon_jax.batching import Row
from agon_jax.config import GrpoConfig
from agon_jax.rewards import group_advantages
from agon_jax.sampler import replicate


def run(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """New tokens a second of whole steps, and the share of what the matrix products allow."""
    prepared = part_update.prepare(work, args)
    draw = part_sample.prepare(work, args, prepared.lm)
    state, base = prepared.state, replicate(prepared.base)
    rng = np.random.default_rng(0)

    def once():
        nonlocal state
        drawn = draw(base, replicate(state.trainable), 0)
        rewards = rng.normal(size=(work.problems, work.rollouts))
        advantages, _ = group_advantages(rewards, GrpoConfig(), np.ones_like(rewards, bool))
        rows = [
            Row(prompt, completion.tokens, completion.logprobs, advantage, True, False)
            for (prompt, completion), advantage in zip(drawn, advantages.flat, strict=True)
        ]
        state, metrics = prepared.update(state, prepared.base, prepared.batch(rows))
        return metrics

    result = measured(once, args.reps, work.rows * work.new_tokens)
    flops = part_sample.least_flops(work) + part_update.least_flops(work, args.lora)
    limit = matmul_flops(args.dtype) * jax.device_count()
    share = flops / limit / median(result["seconds"])
    return {**result, "gflop": flops / 1e9, "limit": "matmul", "share_of_limit": share}
