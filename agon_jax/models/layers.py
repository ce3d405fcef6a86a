"""The parts that language models are made of: pure arrays in and out, no cache and no state inside.

Axis glossary for everything under models/ (contractions are einsums in these letters):
B batch, T query time, S key time, D embed, N query heads, K key/value heads, G query heads per
key/value head (N = K G), H head dim, F mlp, V vocab, L layer, R rank, P policy.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from agon_jax.config import LoraConfig

QUERY_BLOCK = 512  # queries whose scores exist at once; longer sequences go block by block
EXACT = jax.lax.Precision.HIGHEST  # for sums: a TPU would round float32 operands to bfloat16
MASKED = -1e30  # added to a score: nothing is left of it, and a row of nothing else stays finite


class RMSNorm(nn.Module):
    """x / rms(x) in float32, rounded to the activations' dtype, then times w (Qwen3's order)."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        square = jnp.einsum("...D,...D->...", x, x, precision=EXACT) / x.shape[-1]
        x = jnp.einsum("...D,...->...D", x, jax.lax.rsqrt(square + self.epsilon), precision=EXACT)
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
        kernel = self.param("kernel", nn.initializers.normal(0.02), self.shape).astype(self.dtype)
        if self.lora is None or not self.has_variable("lora", "a"):
            return jnp.einsum(self.equation, x, kernel)
        a, b = (self.get_variable("lora", name).astype(self.dtype) for name in "ab")
        return _adapted(self.equation, self.lora.scale, x, kernel, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _adapted(equation, scale, x, kernel, a, b):
    """x W + scale (x A) B, with a backward pass of its own.

    The mathematics is what jax would derive. Derived, the products of the small gradients want
    their wide operands transposed, and every product computes its operands again: on a CPU that
    took twice the time.
    """
    return _adapted_forward(equation, scale, x, kernel, a, b)[0]


def _adapted_forward(equation, scale, x, kernel, a, b):
    outer, inner, outputs, produced = _axes(equation)
    low = jnp.einsum(f"{outer},{inner}R->BTR", x, a)
    y = jnp.einsum(equation, x, kernel) + scale * jnp.einsum(f"BTR,R{produced}->{outputs}", low, b)
    return y, (x, kernel, a, b, low)


def _adapted_backward(equation, scale, saved, dy):
    x, kernel, a, b, low = saved
    outer, inner, outputs, produced = _axes(equation)
    dy = jax.lax.optimization_barrier(dy)
    dlow = scale * jnp.einsum(f"{outputs},R{produced}->BTR", dy, b)
    dx = jnp.einsum(f"{outputs},{inner}{produced}->{outer}", dy, kernel)
    dx += jnp.einsum(f"BTR,{inner}R->{outer}", dlow, a)
    dkernel = jnp.einsum(f"{outer},{outputs}->{inner}{produced}", x, dy)
    da = jnp.moveaxis(jnp.einsum(f"BTR,{outer}->R{inner}", dlow, x), 0, -1)
    db = scale * jnp.einsum(f"BTR,{outputs}->R{produced}", low, dy)
    return dx, dkernel, da, db


_adapted.defvjp(_adapted_forward, _adapted_backward)


def _axes(equation: str) -> tuple[str, str, str, str]:
    """Of "BTD,DNH->BTNH": the input's axes, those contracted, the output's, those produced."""
    operands, outputs = equation.split("->")
    outer, kernel = operands.split(",")
    inner = "".join(axis for axis in kernel if axis in outer)
    return outer, inner, outputs, kernel.removeprefix(inner)


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
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Grouped-query attention of a sequence to its own past, scale H^-0.5, softmax in float32.

    A row's tokens stand in order, with padding on either side; query head n reads key/value head
    n // G. Rows of padding give finite, meaningless values. Scores are computed again in the
    backward pass. Up to QUERY_BLOCK queries go in quarters, each over the keys up to its own end,
    which leaves out most pairs that do not count; more of them go through a loop, which has the
    scores of QUERY_BLOCK queries in memory at a time.
    """
    batch, time, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = (q * head_dim**-0.5).reshape(batch, time, kv_heads, -1, head_dim)
    q = jnp.einsum("BTKGH->BKGTH", q)
    k, v = jnp.einsum("BSKH->BKHS", k), jnp.einsum("BSKH->BKSH", v)
    slots = jnp.arange(time)

    @jax.checkpoint
    def attend(q, q_slots, k, v):
        end = k.shape[-1]
        seen = mask[:, None, :end] & (slots[:end] <= q_slots[:, None])
        scores = q.reshape(batch, kv_heads, -1, head_dim) @ k
        scores = scores.reshape(*q.shape[:-1], end).astype(jnp.float32)
        scores += jnp.where(seen, 0.0, MASKED)[:, None, None]
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - top).reshape(batch, kv_heads, -1, end)
        share = (1 / weights.sum(-1)).astype(v.dtype)
        out = weights.astype(v.dtype) @ v
        out = jnp.einsum("BKQH,BKQ->BKQH", out, share, precision=EXACT)
        return out.reshape(q.shape)

    if time <= QUERY_BLOCK:
        quarter = -(-time // 4)
        ends = [(start, min(start + quarter, time)) for start in range(0, time, quarter)]
        out = [
            attend(q[..., start:end, :], slots[start:end], k[..., :end], v[..., :end, :])
            for start, end in ends
        ]
        out = jnp.concatenate(out, axis=-2)
    else:
        blocks = -(-time // QUERY_BLOCK)
        padding = blocks * QUERY_BLOCK - time
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
        q = jnp.moveaxis(q.reshape(*q.shape[:3], blocks, QUERY_BLOCK, head_dim), 3, 0)
        q_slots = jnp.arange(blocks * QUERY_BLOCK).reshape(blocks, QUERY_BLOCK)
        out = jax.lax.map(lambda block: attend(*block, k, v), (q, q_slots))
        out = jnp.moveaxis(out, 0, 3).reshape(*q.shape[1:4], -1, head_dim)[..., :time, :]
    return jnp.einsum("BKGTH->BTKGH", out).reshape(batch, time, num_heads, head_dim)


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
