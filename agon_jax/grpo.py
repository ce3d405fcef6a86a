"""The mathematics of GRPO over arrays: log-probabilities, clipped loss, KL, masks and weights.

Pure functions of [..., time] arrays over completion tokens; neither text nor roles nor devices
are known here. A batch's weights are fixed before it is cut into micro-batches, so that the
gradients of the parts add up to the gradient of the whole.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agon_jax.config import GrpoConfig

K3_TANGENT = 10.0  # beyond this log-ratio the k3 estimate goes on along its tangent
MAX_LOG_RATIO = 20.0  # |log ratio| is cut here, so that no ratio overflows


class Scores(NamedTuple):
    """What the policy makes of each completion token."""

    logprobs: Array  # float32 [batch, time] of the token that stands there
    entropy: Array  # float32 [batch, time] in nats, of the distribution it was drawn from


def length_mask(lengths: Int[Array, "*batch"], time: int) -> Bool[Array, "*batch time"]:
    """True before a row's length. Masks come from lengths, never from ids: a pad may be an EOS."""
    return jnp.arange(time) < lengths[..., None]


def masked_mean(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Mean of the values where the mask is True; 0 where it nowhere is."""
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)


def token_logprobs(
    logits: Callable[[Float[Array, "batch chunk D"]], Float[Array, "batch chunk V"]],
    hidden: Float[Array, "batch time D"],
    targets: Int[Array, "batch time"],
    *,
    temperature: float,
    valid_vocab: int,
    chunk: int,
    head_is_trained: bool,
) -> Scores:
    """log softmax(logits(hidden) / temperature)[targets], and the entropy, without its gradient.

    Ids from `valid_vocab` on have probability 0. About `chunk` tokens' logits exist at a time, in
    the backward pass too. Each chunk is a span of time over all rows, so that rows may be split
    over devices. A frozen head costs two products with the vocabulary and not three: a token's
    log-prob depends on its own hidden state alone, so that its gradient is known with its value,
    and the backward pass only scales it. A trained head's chunks are recomputed there.
    """
    batch, time, _ = hidden.shape
    spans = -(-time // max(1, chunk // batch))
    span = -(-time // spans)
    padding = spans * span - time

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, spans, span, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, spans * span, *x.shape[3:])[:, :time]

    def score(hidden_span, target_span):
        scaled = logits(hidden_span).astype(jnp.float32) / temperature
        if valid_vocab < scaled.shape[-1]:
            scaled = jnp.where(
                jnp.arange(scaled.shape[-1]) < valid_vocab, scaled, jnp.finfo(jnp.float32).min
            )
        top = jax.lax.stop_gradient(scaled.max(axis=-1, keepdims=True))
        exp = jnp.exp(scaled - top)
        total = exp.sum(axis=-1)
        normalizer = jnp.log(total) + top[..., 0]
        chosen = jnp.take_along_axis(scaled, target_span[..., None], axis=-1)[..., 0]
        # A TPU would round float32 operands to bfloat16.
        weighted = jnp.einsum("...V,...V->...", exp, scaled, precision="highest")
        entropy = normalizer - weighted / total
        return chosen - normalizer, jax.lax.stop_gradient(entropy)

    def score_with_gradient(args):
        hidden_span, target_span = args
        logprobs, pullback, entropy = jax.vjp(
            lambda h: score(h, target_span), hidden_span, has_aux=True
        )
        return logprobs, entropy, pullback(jnp.ones_like(logprobs))[0]

    if head_is_trained:
        score_again = jax.checkpoint(score)
        spans_scored = jax.lax.map(lambda args: score_again(*args), (cut(hidden), cut(targets)))
        return Scores(*map(join, spans_scored))
    spans_scored = jax.lax.map(
        score_with_gradient, jax.lax.stop_gradient((cut(hidden), cut(targets)))
    )
    logprobs, entropy, gradient = map(join, spans_scored)
    return Scores(_with_gradient(logprobs, hidden, gradient), entropy)


@jax.custom_vjp
def _with_gradient(logprobs, hidden, gradient):
    """`logprobs`, whose derivative by `hidden` is `gradient`, row by row."""
    return logprobs


def _with_gradient_forward(logprobs, hidden, gradient):
    return logprobs, gradient


def _with_gradient_backward(gradient, cotangent):
    return None, cotangent[..., None].astype(gradient.dtype) * gradient, None


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


def token_weights(
    lengths: Int[Array, "*batch"],
    counted: Bool[Array, "*batch"],
    time: int,
    loss_norm: str,
    max_new_tokens: int,
) -> Float[Array, "*batch time"]:
    """What each token's loss is multiplied by, so that the loss is a plain sum over a batch.

    Only rows that are `counted` have weight, and only they divide: dropping a row and giving it
    no weight are the same. With n_i tokens in counted row i of R counted rows:
    grpo: 1 / (R n_i) (mean of row means); dapo: 1 / sum(n) (token mean);
    dr_grpo: 1 / (R max_new_tokens) (a constant a row, so that length is no advantage).
    """
    mask = length_mask(lengths, time) & counted[..., None]
    rows = jnp.maximum((counted & (lengths > 0)).sum(), 1)
    if loss_norm == "grpo":
        divisor = rows * jnp.maximum(lengths, 1)[..., None]
    elif loss_norm == "dapo":
        divisor = jnp.maximum(mask.sum(), 1)
    else:
        divisor = rows * max_new_tokens
    return mask / divisor.astype(jnp.float32)


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp(d) - d - 1 of d = log p_reference - log p_policy: an unbiased, non-negative KL estimate.

    http://joschu.net/blog/kl-approx.html. Beyond K3_TANGENT the exponential goes on along its
    tangent: finite, and its gradient still points back to the reference.
    """
    near = jnp.minimum(log_ratio, K3_TANGENT)
    beyond = jnp.maximum(log_ratio - K3_TANGENT, 0) * jnp.exp(K3_TANGENT)
    return jnp.maximum(jnp.expm1(near) + beyond - log_ratio, 0)


def importance_weights(
    old_logprobs: Float[Array, "*batch time"],
    sampler_logprobs: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    cap: float,
) -> Float[Array, "*batch time"]:
    """min(p_trainer / p_sampler, cap), without gradient: corrects for a sampler that rounds apart.

    Both sides are the policy before the update, over the whole vocabulary at the sampling
    temperature. Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy
    RL training" (truncated importance sampling).
    """
    gap = jnp.where(mask, old_logprobs - sampler_logprobs, 0)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.minimum(gap, MAX_LOG_RATIO)), cap))


def ratios(
    logprobs: Float[Array, "*batch time"],
    old_logprobs: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
) -> Float[Array, "*batch time"]:
    """p / p_old of each token, 1 outside the mask."""
    gap = jnp.where(mask, logprobs - old_logprobs, 0)
    return jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def token_losses(
    logprobs: Float[Array, "*batch time"],
    old_logprobs: Float[Array, "*batch time"],
    sampler_logprobs: Float[Array, "*batch time"],
    reference_logprobs: Float[Array, "*batch time"] | None,
    advantages: Float[Array, "*batch"],
    mask: Bool[Array, "*batch time"],
    grpo: GrpoConfig,
) -> Float[Array, "*batch time"]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) [times the importance weight] + kl_coef k3.

    r = p / p_old. 0 outside the mask, with zero gradient whatever stands there.
    """
    ratio = ratios(logprobs, old_logprobs, mask)
    advantage = advantages[..., None]
    clipped = jnp.clip(ratio, 1 - grpo.clip_low, 1 + grpo.clip_high)
    loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    if grpo.importance_cap > 0:
        loss *= importance_weights(old_logprobs, sampler_logprobs, mask, grpo.importance_cap)
    if reference_logprobs is not None:
        loss += grpo.kl_coef * k3(jnp.where(mask, reference_logprobs - logprobs, 0))
    return jnp.where(mask, loss, 0)


def token_metrics(
    scores: Scores,
    old_logprobs: Float[Array, "*batch time"],
    sampler_logprobs: Float[Array, "*batch time"],
    reference_logprobs: Float[Array, "*batch time"] | None,
    advantages: Float[Array, "*batch"],
    mask: Bool[Array, "*batch time"],
    grpo: GrpoConfig,
) -> dict[str, Float[Array, ""]]:
    """What is watched of the tokens that count in the loss. Keys ending in _max are maxima."""
    ratio = ratios(scores.logprobs, old_logprobs, mask)
    gap = jnp.where(mask, jnp.abs(old_logprobs - sampler_logprobs), 0)
    advantage = advantages[..., None]
    too_high = (ratio > 1 + grpo.clip_high) & (advantage > 0)
    too_low = (ratio < 1 - grpo.clip_low) & (advantage < 0)
    metrics = {
        "entropy": masked_mean(scores.entropy, mask),
        "ratio": masked_mean(ratio, mask),
        "ratio_deviation_max": jnp.abs(ratio - 1).max(),
        "clipped_high": masked_mean(too_high.astype(jnp.float32), mask),
        "clipped_low": masked_mean(too_low.astype(jnp.float32), mask),
        "logprob_gap": masked_mean(gap, mask),
        "logprob_gap_max": gap.max(),
    }
    if grpo.importance_cap > 0:
        weights = importance_weights(old_logprobs, sampler_logprobs, mask, grpo.importance_cap)
        metrics["importance_weight"] = masked_mean(weights, mask)
    if reference_logprobs is not None:
        metrics["kl"] = masked_mean(k3(reference_logprobs - scores.logprobs), mask)
    return metrics
