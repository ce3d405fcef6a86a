"""Qwen3 (dense) as a pure function: tokens to hidden states, hidden states to logits.

The layers are one scanned block. Full sequences go through `Qwen3.__call__` or `prefill`, which
also returns the keys and values; decoding from a cache is `decode`, beside the sampler's needs.
Facts: grouped queries, RMS norm of q and k per head before RoPE, SiLU-gated MLP, no biases.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PyTree

from agon_jax.config import LoraConfig
from agon_jax.models.layers import Einsum, RMSNorm, causal_attention, rope


@dataclass(frozen=True)
class Qwen3Config:
    """The sizes of one checkpoint, as its config.json gives them; nothing has a default."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool


class Block(nn.Module):
    """One layer in two halves, so that whoever holds the keys and values attends in between."""

    config: Qwen3Config
    dtype: jnp.dtype
    lora: LoraConfig | None

    def setup(self):
        c = self.config
        heads, kv = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
        self.input_layernorm = RMSNorm(c.norm_eps, self.dtype)
        self.q_proj = self._matrix("BTD,DNH->BTNH", (c.embed_dim, *heads), "q_proj")
        self.k_proj = self._matrix("BTD,DKH->BTKH", (c.embed_dim, *kv), "k_proj")
        self.v_proj = self._matrix("BTD,DKH->BTKH", (c.embed_dim, *kv), "v_proj")
        self.q_norm = RMSNorm(c.norm_eps, self.dtype)
        self.k_norm = RMSNorm(c.norm_eps, self.dtype)
        self.o_proj = self._matrix("BTNH,NHD->BTD", (*heads, c.embed_dim), "o_proj")
        self.post_attention_layernorm = RMSNorm(c.norm_eps, self.dtype)
        self.gate_proj = self._matrix("BTD,DF->BTF", (c.embed_dim, c.mlp_dim), "gate_proj")
        self.up_proj = self._matrix("BTD,DF->BTF", (c.embed_dim, c.mlp_dim), "up_proj")
        self.down_proj = self._matrix("BTF,FD->BTD", (c.mlp_dim, c.embed_dim), "down_proj")

    def _matrix(self, equation: str, shape: tuple[int, ...], name: str) -> Einsum:
        targeted = self.lora is not None and name in self.lora.targets
        return Einsum(equation, shape, self.dtype, self.lora if targeted else None)

    def project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys (both normed and rotated) and values."""
        x = self.input_layernorm(x)
        q = rope(self.q_norm(self.q_proj(x)), positions, self.config.rope_theta)
        k = rope(self.k_norm(self.k_proj(x)), positions, self.config.rope_theta)
        return q, k, self.v_proj(x)

    def finish(
        self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]
    ) -> Float[Array, "B T D"]:
        """The layer's output, given its input and what the heads attended to."""
        x = x + self.o_proj(attended)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.silu(self.gate_proj(y)) * self.up_proj(y))

    def __call__(self, x, positions, mask, keep_keys_values: bool):
        q, k, v = self.project(x, positions)
        x = self.finish(x, causal_attention(q, k, v, positions, mask))
        return x, (k, v) if keep_keys_values else None


class KeysValues(NamedTuple):
    """Keys and values of every layer."""

    keys: Float[Array, "L B T K H"]
    values: Float[Array, "L B T K H"]


class Qwen3(nn.Module):
    """`lm.apply({"params": base, "lora": adapter}, tokens, positions, mask)`; "lora" may be absent.

    The base's scanned layers carry a leading L axis; adapters mirror the paths of the matrices.
    """

    config: Qwen3Config
    lora: LoraConfig | None = None
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    def setup(self):
        c = self.config
        self.embedding = self.param(
            "embed_tokens", nn.initializers.normal(0.02), (c.vocab_size, c.embed_dim)
        )
        block = nn.remat(Block, prevent_cse=False, static_argnums=(4,)) if self.remat else Block
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.num_layers,
        )(c, self.dtype, self.lora)
        self.norm = RMSNorm(c.norm_eps, self.dtype)
        if not c.tie_embeddings:
            self.head = self.param(
                "lm_head", nn.initializers.normal(0.02), (c.vocab_size, c.embed_dim)
            )

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.embedding[tokens].astype(self.dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm. Positions count real tokens; mask False is padding."""
        x, _ = self.layers(self.embed(tokens), positions, mask, False)
        return self.norm(x)

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        """As __call__, and the keys and values of every position."""
        x, keys_values = self.layers(self.embed(tokens), positions, mask, True)
        return self.norm(x), KeysValues(*keys_values)

    def final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(x)

    def logits(self, hidden: Float[Array, "*any D"]) -> Float[Array, "*any V"]:
        """Float32 logits of hidden states, through the tied embedding or the head of its own."""
        head = self.embedding if self.config.tie_embeddings else self.head
        return jnp.einsum(
            "...D,VD->...V", hidden, head.astype(self.dtype), preferred_element_type=jnp.float32
        )


def init_base(lm: Qwen3, key: Array) -> PyTree[Float[Array, "..."]]:
    """A random base, float32: normal with std 0.02, norms at 1."""
    one = jnp.zeros((1, 1), jnp.int32)
    return lm.init(key, one, one, one == 0, method=_everything)["params"]


def _everything(lm: Qwen3, tokens, positions, mask):
    return lm.logits(lm(tokens, positions, mask))


def layer(variables: PyTree, index: int | Int[Array, ""]) -> PyTree:
    """The variables of one block, for `Block.apply`, out of the scanned stack."""
    stacked = {name: tree["layers"] for name, tree in variables.items() if "layers" in tree}
    return jax.tree.map(lambda leaf: leaf[index], stacked)
