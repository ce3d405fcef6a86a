"""Sampling: completions of full length, drawn as a training step draws its drafts."""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from measure import matmul_flops, measured, median, memory_bandwidth
from work import (
    TEMPERATURE,
    TOP_P,
    Work,
    attention_flops,
    head_parameters,
    init_weights,
    matrix_parameters,
    random_tokens,
)

from agon_jax.config import SamplingConfig
from agon_jax.models.qwen3 import Qwen3
from agon_jax.sampler import Completion, make_sampler, replicate


def run(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """New tokens a second after warm-up, and the share of the nearer of two limits."""
    lm, base, trainables = init_weights(work, args.lora, 2, args.param_dtype, args.dtype)
    draw = prepare(work, args, lm)
    base, trainables = replicate(base), replicate(trainables)

    def once():
        draw(base, trainables, 1)

    result = measured(once, args.reps, work.rows * work.new_tokens)
    return {**result, **_limits(work, args, median(result["seconds"]))}


def prepare(
    work: Work, args: argparse.Namespace, lm: Qwen3
) -> Callable[[PyTree, PyTree, int], list[tuple[np.ndarray, Completion]]]:
    """draw(base, trainables, slot): (prompt, completion) of every row, with new keys a call."""
    sampling = SamplingConfig(
        temperature=TEMPERATURE,
        top_p=TOP_P,
        max_new_tokens=work.new_tokens,
        max_draft_prompt_tokens=work.prompt_tokens,
        max_challenge_prompt_tokens=work.prompt_tokens,
        rows_per_device=-(-work.rows // jax.local_device_count()),
    )
    sample = make_sampler(
        lm,
        sampling,
        train="lora" if args.lora else "full",
        eos_ids=(),  # no completion ends early
        pad_id=0,
        valid_vocab=work.model.vocab_size,
    )
    prompts = list(random_tokens(work, (work.problems, work.prompt_tokens), seed=1))
    calls = itertools.count()

    def draw(base, trainables, slot):
        rng = np.random.default_rng(next(calls))
        keys = rng.integers(0, 2**32, (work.problems, work.rollouts, 2), np.uint32)
        drawn = sample(base, trainables, slot, prompts, keys)
        rows = [(prompts[index], each) for index, group in drawn for each in group]
        assert all(len(completion.tokens) == work.new_tokens for _, completion in rows)
        return rows

    return draw


def least_flops(work: Work) -> int:
    """Of the matrix products: one prefill a problem, and every new token once."""
    model, prompt, new = work.model, work.prompt_tokens, work.new_tokens
    prefilled, drawn = work.problems * prompt, work.rows * new
    pairs = work.problems * prompt**2 // 2 + work.rows * new * (prompt + new // 2)
    flops = 2 * matrix_parameters(model) * (prefilled + drawn) + attention_flops(model, pairs)
    return flops + 2 * head_parameters(model) * drawn


def _limits(work: Work, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The least time that the matrix products, or one reading of weights and cache a step, take."""
    model, prompt, new = work.model, work.prompt_tokens, work.new_tokens
    layers, head = matrix_parameters(model), head_parameters(model)
    flops = least_flops(work)
    devices = jax.local_device_count()
    weight_bytes = (layers + head) * np.dtype(args.param_dtype).itemsize * devices
    a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    cached = work.problems * prompt + work.rows * new // 2
    step_bytes = weight_bytes + a_token * cached * np.dtype(args.dtype).itemsize
    shares = {
        "matmul": flops / (matmul_flops(args.dtype) * devices) / seconds,
        "bandwidth": step_bytes * new / (memory_bandwidth() * devices) / seconds,
    }
    nearer = max(shares, key=lambda name: shares[name])
    return {"gflop": flops / 1e9, "limit": nearer, "share_of_limit": shares[nearer]}
