"""What the compiled update holds, beside the logits it never holds.

    python benchmarks/memory.py [--vocab 151936] [--batch 16] [--time 512]

Compiles the real update, without weights, and prints the temporary bytes that the compiler planned
beside those of one float32 [batch, time, vocab] array: for one vocabulary and its half, and for
several sizes of grpo.logprob_chunk. What grows with the vocabulary is the chunk's share alone.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table
from work import CONFIGS, LORA

from agon_jax.batching import Batch
from agon_jax.config import GrpoConfig, MeshConfig, OptimizerConfig, RunConfig, SamplingConfig
from agon_jax.models.lora import init_lora
from agon_jax.models.qwen3 import Qwen3, init_base
from agon_jax.sharding import make_mesh
from agon_jax.update import make_update

PROMPT = 64
CHUNKS = (256, 1024, 4096)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--batch", type=int, default=16, help="rows of a policy")
    parser.add_argument("--time", type=int, default=512, help="completion tokens of a row")
    args = parser.parse_args(argv)
    table = Table(title=f"One policy, {args.batch} rows of {args.time} completion tokens, LoRA")
    for column in ("vocabulary", "logprob_chunk", "temporary MiB", "MiB of all logits", "share"):
        table.add_column(column, justify="right")
    for vocab in (args.vocab // 2, args.vocab):
        logits = 4 * args.batch * args.time * vocab
        for chunk in CHUNKS:
            held = temporary_bytes(vocab, args.batch, args.time, chunk)
            row = (f"{held / 2**20:,.0f}", f"{logits / 2**20:,.0f}", f"{held / logits:.2f}")
            table.add_row(f"{vocab:,}", str(chunk), *row)
    Console().print(table)


def temporary_bytes(vocab: int, batch: int, time: int, chunk: int) -> int:
    """Bytes that the compiled update needs beside its arguments and results."""
    model = dataclasses.replace(CONFIGS["small"].model, vocab_size=vocab, num_layers=2)
    run = RunConfig(
        lora=LORA,
        sampling=SamplingConfig(max_new_tokens=time),
        grpo=GrpoConfig(logprob_chunk=chunk),
        optimizer=OptimizerConfig(micro_batch=0),
        mesh=MeshConfig(),
    )
    lm = Qwen3(model, LORA)
    init_state, update = make_update(lm, run, make_mesh(run.mesh), vocab)
    base = jax.eval_shape(lambda: init_base(lm, jax.random.key(0)))
    adapters = jax.eval_shape(lambda base: stacked(init_lora(base, LORA, jax.random.key(0))), base)
    state = jax.eval_shape(init_state, adapters)
    compiled = update.lower(state, base, batch_shapes(batch, time)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def batch_shapes(batch: int, time: int) -> Batch:
    def of(dtype, *rest):
        return jax.ShapeDtypeStruct((1, batch, *rest), dtype)

    return Batch(
        prompt_tokens=of(jnp.int32, PROMPT),
        prompt_lengths=of(jnp.int32),
        completion_tokens=of(jnp.int32, time),
        completion_lengths=of(jnp.int32),
        sampler_logprobs=of(jnp.float32, time),
        advantages=of(jnp.float32),
        live=of(bool),
        truncated=of(bool),
    )


if __name__ == "__main__":
    main()
