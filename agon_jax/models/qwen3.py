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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from agon_jax.config import LoraConfig
from agon_jax.models.layers import (
    Einsum,
    RMSNorm,
    causal_attention,
    rope,
    shared_prompt_attention,
)


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
    dtype: DTypeLike
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
        x = self.finish(x, causal_attention(q, k, v, mask))
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
    dtype: DTypeLike = jnp.float32
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
        """Hidden states after the final norm. Positions count real tokens; mask False: padding."""
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


def stacked_layers(variables: PyTree) -> PyTree:
    """The variables of all blocks, leaves [L, ...]."""
    return {name: tree["layers"] for name, tree in variables.items() if "layers" in tree}


def layer(variables: PyTree, index: int | Int[Array, ""]) -> PyTree:
    """The variables of one block, for `Block.apply`, out of the scanned stack."""
    return jax.tree.map(lambda leaf: leaf[index], stacked_layers(variables))


class DecodeCache(NamedTuple):
    """What one more token of every row needs: keys and values, and how far they reach.

    `prompt` and `own` are one KeysValues with a leading L axis, or a tuple of one for each layer.
    """

    prompt: KeysValues | tuple[KeysValues, ...]  # keys [prompt K H S], values [prompt K S H]
    prompt_lengths: Int[Array, " prompt"]
    own: KeysValues | tuple[KeysValues, ...]  # keys [prompt completion K H W], values [.. K W H]
    step: Int[Array, ""]  # entries of `own` that are filled; the same in every row


def init_cache(
    keys_values: KeysValues, prompt_lengths: Int[Array, " prompt"], completions: int
) -> DecodeCache:
    """The cache after `prefill` of right-padded prompts, for `completions` rows a prompt, W = 0."""
    keys = jnp.einsum("LPSKH->LPKHS", keys_values.keys)
    values = jnp.einsum("LPSKH->LPKSH", keys_values.values)
    layers, prompts, kv_heads, head_dim, _ = keys.shape
    rows = (layers, prompts, completions, kv_heads)
    own = KeysValues(
        jnp.zeros((*rows, head_dim, 0), keys.dtype), jnp.zeros((*rows, 0, head_dim), keys.dtype)
    )
    return DecodeCache(KeysValues(keys, values), prompt_lengths, own, jnp.zeros((), jnp.int32))


def unstack_cache(cache: DecodeCache) -> DecodeCache:
    """The same cache by layer."""

    def by_layer(stacked: KeysValues) -> tuple[KeysValues, ...]:
        return tuple(map(KeysValues, *stacked))

    return cache._replace(prompt=by_layer(cache.prompt), own=by_layer(cache.own))


def widen_cache(cache: DecodeCache, window: int) -> DecodeCache:
    """The same cache with room for `window` entries of each row's own."""

    def widen(leaf, axis):
        widths = [(0, 0)] * leaf.ndim
        widths[axis] = (0, window - leaf.shape[axis])
        return jnp.pad(leaf, widths)

    own = jax.tree.map(
        lambda kv: KeysValues(widen(kv.keys, -1), widen(kv.values, -2)),
        cache.own,
        is_leaf=lambda node: isinstance(node, KeysValues),
    )
    return cache._replace(own=own)


def decode(
    lm: Qwen3,
    variables: PyTree[Float[Array, "..."]],
    tokens: Int[Array, "prompt completion"],
    cache: DecodeCache,
    layers: tuple[PyTree[Float[Array, "..."]], ...] | None = None,
) -> tuple[Float[Array, "prompt completion D"], DecodeCache]:
    """Final hidden states of one more token a row, and the cache that holds it too.

    The token stands at position prompt_length + step; cache.step must be below W. With a cache by
    layer, `layers` holds the weights of each (`layer`), and the layers are unrolled; otherwise they
    are scanned, and the weights read where they lie.
    """
    block = Block(lm.config, lm.dtype, lm.lora)
    rows = tokens.shape
    positions = jnp.repeat(cache.prompt_lengths + cache.step, rows[1])[:, None]

    def through(x, weights, prompt, own, index=()):
        """One layer; `own` is its own entries, or those of all where index = (layer,)."""
        q, k, v = block.apply(weights, x, positions, method="project")
        q, k, v = (a.reshape(*rows, *a.shape[2:]) for a in (q, k, v))
        own = KeysValues(
            _write(own.keys, k[..., None], (*index, 0, 0, 0, 0, cache.step)),
            _write(own.values, v[..., None, :], (*index, 0, 0, 0, cache.step, 0)),
        )
        past = KeysValues(*(leaf[index] for leaf in own))
        visible = jnp.arange(prompt.values.shape[-2]) < cache.prompt_lengths[:, None]
        own_visible = jnp.arange(past.values.shape[-2]) <= cache.step
        attended = shared_prompt_attention(q, *prompt, visible, *past, own_visible)
        attended = attended.reshape(-1, 1, *attended.shape[2:])
        return block.apply(weights, x, attended, method="finish"), own

    def scanned(carry, inputs):
        weights, prompt, index = inputs
        return through(carry[0], weights, prompt, carry[1], (index,)), None

    x = lm.apply(variables, tokens.reshape(-1, 1), method="embed")
    if layers is None:
        inputs = (stacked_layers(variables), cache.prompt, jnp.arange(lm.config.num_layers))
        (x, own), _ = jax.lax.scan(scanned, (x, cache.own), inputs)
    else:
        own = []
        for weights, prompt, past in zip(layers, cache.prompt, cache.own, strict=True):
            x, past = through(x, weights, prompt, past)
            own.append(past)
        own = tuple(own)
    hidden = lm.apply(variables, x, method="final_norm").reshape(*rows, -1)
    return hidden, cache._replace(own=own, step=cache.step + 1)


def _write(cache, entry, place):
    entry = entry.reshape((1,) * (cache.ndim - entry.ndim) + entry.shape)
    return jax.lax.dynamic_update_slice(cache, entry, place)
