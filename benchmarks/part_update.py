"""The update: one GRPO step of one policy on one batch of rollouts, optimizer included."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree
from measure import matmul_flops, measured, median
from work import (
    LORA,
    TEMPERATURE,
    Work,
    attention_flops,
    head_parameters,
    init_weights,
    matrix_parameters,
    random_tokens,
)

from agon_jax.batching import Batch, Row, make_batch, to_global
from agon_jax.config import (
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
)
from agon_jax.models.qwen3 import Qwen3
from agon_jax.sharding import make_mesh, place
from agon_jax.update import TrainState, make_update


def run(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, prompts included, and the share of what the matrix products allow."""
    prepared = prepare(work, args)
    state, batch = prepared.state, prepared.batch(rollouts(work))

    def once():
        nonlocal state
        state, metrics = prepared.update(state, prepared.base, batch)
        return metrics

    result = measured(once, args.reps, work.rows * (work.prompt_tokens + work.new_tokens))
    flops = least_flops(work, args.lora)
    limit = matmul_flops(args.dtype) * jax.device_count()
    share = flops / limit / median(result["seconds"])
    return {**result, "gflop": flops / 1e9, "limit": "matmul", "share_of_limit": share}


class Prepared(NamedTuple):
    """The update of a stack of one policy, and what it works on."""

    lm: Qwen3
    mesh: Mesh
    update: Callable[[TrainState, PyTree, Batch], tuple[TrainState, dict[str, jax.Array]]]
    state: TrainState
    base: PyTree

    def batch(self, rows: Sequence[Row]) -> Batch:
        return to_global(make_batch([rows], 0, self.mesh), self.mesh)


def prepare(work: Work, args: argparse.Namespace) -> Prepared:
    settings = RunConfig(
        model=ModelConfig(train="lora" if args.lora else "full"),
        lora=LORA,
        sampling=SamplingConfig(temperature=TEMPERATURE, max_new_tokens=work.new_tokens),
        optimizer=OptimizerConfig(micro_batch=args.micro_batch),
        mesh=MeshConfig(),
        steps=1000,
    )
    lm, base, trainables = init_weights(work, args.lora, 1, args.param_dtype, args.dtype)
    mesh = make_mesh(settings.mesh)
    init_state, update = make_update(lm, settings, mesh, work.model.vocab_size)
    state = init_state(place(trainables, mesh, ("policy",)))
    return Prepared(lm, mesh, update, state, place(base, mesh))


def rollouts(work: Work) -> list[Row]:
    """As many as a step draws, all of them live and of full length."""
    prompts = random_tokens(work, (work.rows, work.prompt_tokens), seed=1)
    completions = random_tokens(work, (work.rows, work.new_tokens), seed=2)
    advantages = np.random.default_rng(3).normal(size=work.rows)
    logprobs = np.full(work.new_tokens, -np.log(work.model.vocab_size), np.float32)
    return [
        Row(prompt, completion, logprobs, advantage, live=True, truncated=False)
        for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True)
    ]


def least_flops(work: Work, lora: bool) -> int:
    """Of the matrix products without recomputation, causal attention, and a head on completions.

    A trained matrix costs three products a token (value, input's and its own gradient), a frozen
    one two.
    """
    model, time = work.model, work.prompt_tokens + work.new_tokens
    products = 2 if lora else 3
    flops = 2 * products * matrix_parameters(model) * work.rows * time
    flops += 2 * products * head_parameters(model) * work.rows * work.new_tokens
    flops += 3 * attention_flops(model, work.rows * time**2 // 2)
    if lora:  # A and B of all seven matrices, trained
        sides = 7 * model.embed_dim + 3 * model.mlp_dim
        sides += 2 * model.head_dim * (model.num_heads + model.num_kv_heads)
        flops += 2 * 3 * LORA.rank * model.num_layers * sides * work.rows * time
    return flops
