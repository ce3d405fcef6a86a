"""The parts that language models are made of: pure arrays in and out, no cache and no state inside.

Axis glossary for everything under models/ (contractions are einsums in these letters):
B batch, T query time, S key time, D embed, N query heads, K key/value heads, G query heads per
key/value head (N = K G), H head dim, F mlp, V vocab, L layer, R rank, P policy.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from agon_jax.config import LoraConfig

QUERY_BLOCK = 512  # queries whose scores exist at once; longer sequences go block by block


class RMSNorm(nn.Module):
    """x / rms(x) in float32, rounded to the activations' dtype, then times w (Qwen3's order)."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return x.astype(self.dtype) * scale.astype(self.dtype)


class Einsum(nn.Module):
    """One weight matrix of the base, and its low-rank adapter where the `lora` collection has one.

    y = x W + (alpha / rank) (x A) B, with A of shape (*inputs, R) and B of shape (R, *outputs).
    """

    equation: str  # "BTD,DNH->BTNH": activations, kernel -> activations
    shape: tuple[int, ...]  # of the kernel
    dtype: DTypeLike
    lora: LoraConfig | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T *inputs"]) -> Float[Array, "B T *outputs"]:
        kernel = self.param("kernel", nn.initializers.normal(0.02), self.shape)
        y = jnp.einsum(self.equation, x, kernel.astype(self.dtype))
        if self.lora is None or not self.has_variable("lora", "a"):
            return y
        a = self.get_variable("lora", "a").astype(self.dtype)
        b = self.get_variable("lora", "b").astype(self.dtype)
        inputs, outputs = self.equation.split("->")
        inputs, kernel_axes = inputs.split(",")
        contracted = "".join(axis for axis in kernel_axes if axis in inputs)
        produced = "".join(axis for axis in kernel_axes if axis not in inputs)
        low = jnp.einsum(f"{inputs},{contracted}R->BTR", x, a)
        return y + self.lora.scale * jnp.einsum(f"BTR,R{produced}->{outputs}", low, b)


def rope(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], theta: float
) -> Float[Array, "B T heads H"]:
    """Rotary embedding over half-split pairs (i, i + H/2), angles in float32 (Su et al., 2021)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos = jnp.cos(angles)[:, :, None].astype(x.dtype)
    sin = jnp.sin(angles)[:, :, None].astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Grouped-query attention of a sequence to its own past, scale H^-0.5, softmax in float32.

    Who sees whom is decided by position, not by slot, so padding may stand on either side; query
    head n reads key/value head n // G. Rows of padding give finite, meaningless values. Scores are
    held for QUERY_BLOCK queries at a time and recomputed in the backward pass beyond that.
    """
    batch, time, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = (q * head_dim**-0.5).reshape(batch, time, kv_heads, num_heads // kv_heads, head_dim)

    def attend(q_block, block_positions):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_block, k).astype(jnp.float32)
        visible = (positions[:, None] <= block_positions[:, :, None]) & mask[:, None]
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)

    if time <= QUERY_BLOCK:
        return attend(q, positions).reshape(batch, time, num_heads, head_dim)
    padding = -time % QUERY_BLOCK
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))
    block_positions = jnp.pad(positions, ((0, 0), (0, padding)))
    blocks = (time + padding) // QUERY_BLOCK
    q = jnp.moveaxis(q.reshape(batch, blocks, QUERY_BLOCK, *q.shape[2:]), 1, 0)
    block_positions = jnp.moveaxis(block_positions.reshape(batch, blocks, QUERY_BLOCK), 1, 0)
    out = jax.lax.map(lambda args: jax.checkpoint(attend)(*args), (q, block_positions))
    return jnp.moveaxis(out, 0, 1).reshape(batch, time + padding, num_heads, head_dim)[:, :time]


def shared_prompt_attention(
    q: Float[Array, "prompt completion N H"],
    prompt_k: Float[Array, "prompt K H S"],
    prompt_v: Float[Array, "prompt K S H"],
    prompt_visible: Bool[Array, "prompt S"],
    own_k: Float[Array, "prompt completion K H W"],
    own_v: Float[Array, "prompt completion K W H"],
    own_visible: Bool[Array, " W"],
) -> Float[Array, "prompt completion N H"]:
    """One query of every completion, over its prompt's keys and its own.

    The completions of a prompt read its keys as one batch of queries, so those are neither repeated
    nor read once a completion. The two softmaxes, in float32, are joined by their normalisers. At
    least one own key must be visible; a prompt may have none.
    """
    prompts, completions, num_heads, head_dim = q.shape
    kv_heads = prompt_k.shape[1]
    q = (q * head_dim**-0.5).reshape(prompts, completions, kv_heads, -1, head_dim)

    def by_prompt(x):
        return jnp.swapaxes(x, 1, 2).reshape(prompts, kv_heads, -1, x.shape[-1])

    def by_completion(x):
        return jnp.swapaxes(x.reshape(prompts, kv_heads, completions, -1, x.shape[-1]), 1, 2)

    read = _attend(by_prompt(q), prompt_k, prompt_v, prompt_visible[:, None])
    prompt_out, prompt_top, prompt_total = map(by_completion, read)
    own_out, own_top, own_total = _attend(q, own_k, own_v, own_visible)
    top = jnp.maximum(prompt_top, own_top)
    prompt_share, own_share = jnp.exp(prompt_top - top), jnp.exp(own_top - top)
    total = prompt_share * prompt_total + own_share * own_total
    out = (prompt_share * prompt_out + own_share * own_out) / total
    return out.astype(q.dtype).reshape(prompts, completions, num_heads, head_dim)


def _attend(
    q: Float[Array, "*rows G H"],
    k: Float[Array, "*rows H S"],
    v: Float[Array, "*rows S H"],
    visible: Bool[Array, "*some S"],
) -> tuple[Float[Array, "*rows G H"], Float[Array, "*rows G 1"], Float[Array, "*rows G 1"]]:
    """The weighted sum of values, not yet normalised; the greatest score; the sum of weights."""
    scores = jnp.einsum("...GH,...HS->...GS", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[..., None, :], scores, jnp.finfo(jnp.float32).min)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    out = jnp.einsum(
        "...GS,...SH->...GH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out, top, weights.sum(-1, keepdims=True)
