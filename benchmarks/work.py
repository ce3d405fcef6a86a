"""The work that the benchmarks do: model sizes, batch shapes, and what they cost at the least.

"small" is the common work on which other systems were measured; its weights are random, since no
benchmark reads what is written. Each part (sample, update, step) runs the same `Work`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from agon_jax.config import LoraConfig
from agon_jax.models.lora import init_lora
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base

TEMPERATURE, TOP_P = 0.6, 0.95
LORA = LoraConfig(rank=16, alpha=32.0)


@dataclass(frozen=True)
class Work:
    """A model, and one batch of rollouts of fixed lengths."""

    model: Qwen3Config
    problems: int
    rollouts: int  # of a problem
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        return self.problems * self.rollouts


def _sizes(vocab, embed, mlp, layers, heads, kv_heads, head_dim) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=True,
    )


CONFIGS = {
    "tiny": Work(_sizes(256, 64, 128, 2, 4, 2, 16), 2, 4, 16, 16),
    "small": Work(_sizes(4096, 256, 768, 6, 8, 4, 32), 8, 8, 64, 128),
    "qwen3-0.6b": Work(_sizes(151936, 1024, 3072, 28, 16, 8, 128), 8, 8, 256, 1024),
    "qwen3-4b": Work(_sizes(151936, 2560, 9728, 36, 32, 8, 128), 8, 8, 256, 1024),
}


def init_weights(
    work: Work, lora: bool, policies: int, param_dtype: str, dtype: str
) -> tuple[Qwen3, PyTree, PyTree]:
    """The model, a random base, and trainables [policy, ...]: adapters, or whole trees."""
    lm = Qwen3(work.model, LORA if lora else None, jnp.dtype(dtype))

    @jax.jit
    def init(key):
        base = jax.tree.map(lambda leaf: leaf.astype(param_dtype), init_base(lm, key))
        if lora:
            trees = [
                init_lora(base, LORA, jax.random.fold_in(key, i), 0.02) for i in range(policies)
            ]
        else:
            trees = [base] * policies
        return base, jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    return lm, *init(jax.random.key(0))


def random_tokens(work: Work, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """int32 ids, none of them below 2."""
    return np.random.default_rng(seed).integers(2, work.model.vocab_size, shape, np.int32)


def matrix_parameters(model: Qwen3Config) -> int:
    """Weights that every token is multiplied with, without the head's."""
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return model.num_layers * (attention + 3 * model.embed_dim * model.mlp_dim)


def head_parameters(model: Qwen3Config) -> int:
    return model.vocab_size * model.embed_dim


def attention_flops(model: Qwen3Config, pairs: int) -> int:
    """Scores and weighted values of `pairs` (query, key) pairs, in every layer and head."""
    return 4 * pairs * model.num_layers * model.num_heads * model.head_dim
