"""One token from the logits of one place: temperature, top-k, top-p, and the log-prob it had.

Randomness is two uniform numbers a draw, from the row's own key, so a row's token depends on
nothing beside it, and nothing here sorts a vocabulary. The sampler calls `choose_tokens` at every
step; the log-probs are of the distribution that the trainer scores.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from agon_jax.config import SamplingConfig

LANES = 128  # a token id is place * LANES + lane; each half is drawn with its own uniform number
KEY_KIND = "threefry2x32"  # of the keys' data, whatever jax_default_prng_impl says


def choose_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    step: Int[Array, ""],
    sampling: SamplingConfig,
    valid_vocab: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Every row's token and its log-prob, float32.

    Ids >= valid_vocab (rows that only pad the vocabulary) are never chosen and have no mass. The
    log-prob is log softmax(logits / temperature) over all valid ids, whatever top-k, top-p or
    greedy leave to choose from.
    """
    scaled = logits.astype(jnp.float32) / sampling.temperature
    if valid_vocab < scaled.shape[-1]:
        scaled = jnp.where(jnp.arange(scaled.shape[-1]) < valid_vocab, scaled, -jnp.inf)
    top = scaled.max(-1)
    weights = jnp.exp(scaled - top[:, None])
    if sampling.greedy:
        tokens = jnp.argmax(scaled, -1)
    else:
        tokens = draw(keep_top_k(weights, sampling.top_k), keys, step, sampling.top_p)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], -1)[:, 0]
    return tokens, chosen - top - jnp.log(weights.sum(-1))


def keep_top_k(weights: Float[Array, "B V"], top_k: int) -> Float[Array, "B V"]:
    """Weights with all but the k largest at 0; ties with the k-th stay. k = 0 keeps all."""
    if not 0 < top_k < weights.shape[-1]:
        return weights
    least = jax.lax.top_k(weights, top_k)[0][:, -1:]
    return jnp.where(weights >= least, weights, 0)


def draw(
    weights: Float[Array, "B V"], keys: UInt32[Array, "B 2"], step: Int[Array, ""], top_p: float
) -> Int[Array, " B"]:
    """A token of each row's nucleus, with probability in proportion to its weight.

    The nucleus: the tokens i for which those heavier than i hold less than top_p of the mass. So
    the token that crosses top_p is in, equal weights are in or out together, and the heaviest is
    always in. It is never built. A token drawn from all is kept if it is in the nucleus, which one
    sum over the heavier ones tells; if it is not, neither are the lighter ones, and the next draw
    is from the heavier ones alone. What is kept is distributed as the nucleus is, after 1 / top_p
    draws on average at most, and about log2(1 / top_p) where top_p is small.
    """
    batch, vocab = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % LANES))).reshape(batch, -1, LANES)
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(
        jax.random.wrap_key_data(keys, impl=KEY_KIND), step
    )
    lanes = weights.sum(1)
    enough = top_p * lanes.sum(-1)

    def draw_again(state):
        attempt, lanes, floor, tokens, done = state
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, attempt), (2,)))(
            step_keys
        )
        lane = _inverse_cdf(lanes, uniform[:, 0])
        column = jnp.take_along_axis(weights, lane[:, None, None], 2)[..., 0]
        eligible = jnp.where(column > floor[:, None], column, 0)
        place = _inverse_cdf(eligible, uniform[:, 1])
        floor = jnp.take_along_axis(column, place[:, None], 1)[:, 0]
        lanes = jnp.where(weights > floor[:, None, None], weights, 0).sum(1)
        heavier = lanes.sum(-1)
        tokens = jnp.where(done, tokens, place * LANES + lane)
        # The second clause ends top_p = 0, and rows of NaN, in which nothing is heavier.
        done |= (heavier < enough) | ~(heavier > 0)
        return attempt + 1, lanes, floor, tokens, done

    start = (
        jnp.zeros((), jnp.int32),
        lanes,
        jnp.full(batch, -1.0),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
    )
    return jax.lax.while_loop(lambda state: ~state[-1].all(), draw_again, start)[3]


def _inverse_cdf(weights: Float[Array, "B n"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The index at which the running sum of weights passes uniform * total; never of weight 0."""
    running = jnp.cumsum(weights, -1)
    passed: Bool[Array, "B n"] = (running > uniform[:, None] * running[:, -1:]) & (weights > 0)
    # Sums that round differently may leave nothing that passes: then the heaviest.
    return jnp.where(passed.any(-1), jnp.argmax(passed, -1), jnp.argmax(weights, -1))
