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
    q: Float[Array, "B N H"],
    prompt_k: Float[Array, "prompt K S H"],
    prompt_v: Float[Array, "prompt K S H"],
    prompt_visible: Bool[Array, "prompt S"],
    own_k: Float[Array, "B K W H"],
    own_v: Float[Array, "B K W H"],
    own_visible: Bool[Array, " W"],
) -> Float[Array, "B N H"]:
    """One query a row over its prompt's keys and its own; B = prompt * completions.

    Rows of a prompt stand together and read its keys as one batch of queries, so those are neither
    repeated nor read once a row. The softmax runs over both segments jointly, in float32. At least
    one key of a row's own must be visible.
    """
    batch, num_heads, head_dim = q.shape
    prompts, kv_heads = prompt_k.shape[:2]
    q = (q * head_dim**-0.5).reshape(prompts, -1, kv_heads, num_heads // kv_heads, head_dim)
    completions = q.shape[1]
    own_k, own_v = (a.reshape(prompts, completions, *a.shape[1:]) for a in (own_k, own_v))

    float32 = {"preferred_element_type": jnp.float32}
    low = jnp.finfo(jnp.float32).min
    prompt_scores = jnp.einsum("PCKGH,PKSH->PCKGS", q, prompt_k, **float32)
    prompt_scores = jnp.where(prompt_visible[:, None, None, None], prompt_scores, low)
    own_scores = jnp.einsum("PCKGH,PCKWH->PCKGW", q, own_k, **float32)
    own_scores = jnp.where(own_visible, own_scores, low)

    top = jnp.maximum(prompt_scores.max(-1), own_scores.max(-1))[..., None]
    prompt_weights = jnp.exp(prompt_scores - top)
    own_weights = jnp.exp(own_scores - top)
    total = prompt_weights.sum(-1) + own_weights.sum(-1)
    out = jnp.einsum("PCKGS,PKSH->PCKGH", prompt_weights.astype(q.dtype), prompt_v, **float32)
    out += jnp.einsum("PCKGW,PCKWH->PCKGH", own_weights.astype(q.dtype), own_v, **float32)
    return (out / total[..., None]).astype(q.dtype).reshape(batch, num_heads, head_dim)
