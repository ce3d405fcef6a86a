"""One token at a time, against the distributions it must come from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.config import SamplingConfig
from agon_jax.token_choice import choose_tokens, draw, keep_top_k

DRAWS = 8192


def keys(count: int, seed: int = 0) -> jnp.ndarray:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(2**32, size=(count, 2), dtype=np.uint32))


@functools.partial(jax.jit, static_argnames=("sampling", "valid_vocab"))
def chosen(logits, row_keys, step, sampling, valid_vocab):
    return choose_tokens(logits, row_keys, step, sampling, valid_vocab)


def sampling(**settings) -> SamplingConfig:
    return SamplingConfig(**({"temperature": 1.0, "top_p": 1.0, "top_k": 0} | settings))


def frequencies(logits: np.ndarray, settings: SamplingConfig, valid: int | None = None):
    """How often each id came in DRAWS rows of the same logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    tokens, _ = chosen(rows, keys(DRAWS), jnp.int32(3), settings, valid or len(logits))
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / DRAWS


def nucleus(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """The distribution by its definition: heavier tokens hold less than top_p of the mass."""
    weights = np.exp(np.asarray(logits, np.float64) / temperature)
    weights /= weights.sum()
    kept = np.array([weights[weights > weight].sum() < top_p for weight in weights])
    return np.where(kept, weights, 0) / weights[kept].sum()


LOGITS = np.random.default_rng(1).normal(0, 2, 300).astype(np.float32)
TIES = np.log([0.3, 0.2, 0.2, 0.2, 0.1]).astype(np.float32)


@pytest.mark.parametrize(
    ("logits", "temperature", "top_p"),
    [
        (LOGITS, 1.0, 1.0),
        (LOGITS, 0.6, 0.95),
        (LOGITS, 1.5, 0.5),
        (LOGITS, 1.0, 0.05),
        (TIES, 1.0, 0.35),
        (TIES, 1.0, 0.29),
        (np.float32([0, 0, 0, 0]), 1.0, 0.1),
        (np.float32([50, 0, -50]), 0.6, 0.95),
        (np.float32([1, -np.inf, 2]), 1.0, 0.99),
    ],
)
def test_tokens_come_as_often_as_the_nucleus_says(logits, temperature, top_p):
    expected = nucleus(logits, temperature, top_p)
    seen = frequencies(logits, sampling(temperature=temperature, top_p=top_p))
    error = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(seen - expected) <= 5 * error + 1e-12).all()
    assert ((seen > 0) <= (expected > 0)).all()


def test_the_token_that_crosses_top_p_is_in_and_equal_ones_go_together():
    assert set(np.flatnonzero(frequencies(TIES, sampling(top_p=0.35)))) == {0, 1, 2, 3}
    assert set(np.flatnonzero(frequencies(TIES, sampling(top_p=0.29)))) == {0}
    assert set(np.flatnonzero(frequencies(TIES, sampling(top_p=0.95)))) == set(range(5))


@pytest.mark.parametrize("top_p", [0.0, 1e-6])
def test_the_heaviest_token_is_always_in(top_p):
    weights = jnp.exp(jnp.asarray(LOGITS))[None]
    tokens = draw(jnp.repeat(weights, 64, 0), keys(64), jnp.int32(0), top_p)
    assert set(np.asarray(tokens)) == {LOGITS.argmax()}


def test_top_k_keeps_the_largest_and_what_ties_with_the_last_of_them():
    weights = jnp.float32([[4, 1, 3, 3, 2]])
    np.testing.assert_array_equal(keep_top_k(weights, 2), [[4, 0, 3, 3, 0]])
    np.testing.assert_array_equal(keep_top_k(weights, 1), [[4, 0, 0, 0, 0]])
    for everything in (0, 5, 9):
        np.testing.assert_array_equal(keep_top_k(weights, everything), weights)
    assert set(np.flatnonzero(frequencies(LOGITS, sampling(top_k=3)))) == set(
        np.argsort(LOGITS)[-3:]
    )


def test_ids_beyond_the_valid_vocabulary_have_no_mass():
    logits = np.concatenate([LOGITS[:40], np.full(24, 30, np.float32)])
    seen = frequencies(logits, sampling(), valid=40)
    assert seen[40:].sum() == 0
    for settings in (sampling(), sampling(greedy=True)):
        tokens, logprobs = chosen(logits[None], keys(1), jnp.int32(0), settings, 40)
        expected = jax.nn.log_softmax(jnp.asarray(LOGITS[:40]))
        np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)


@pytest.mark.parametrize(
    "settings", [sampling(top_p=0.5), sampling(top_k=4), sampling(greedy=True), sampling()]
)
def test_the_log_prob_is_of_the_whole_distribution_at_the_temperature(settings):
    rows = np.random.default_rng(2).normal(0, 3, (64, 200)).astype(np.float32)
    settings = SamplingConfig(
        temperature=0.6, top_p=settings.top_p, top_k=settings.top_k, greedy=settings.greedy
    )
    tokens, logprobs = chosen(rows, keys(64), jnp.int32(0), settings, 200)
    scaled = rows.astype(np.float64) / 0.6
    expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(64), tokens], atol=1e-5)
    if settings.greedy:
        np.testing.assert_array_equal(tokens, rows.argmax(-1))


def test_a_row_is_drawn_by_its_own_key_and_step():
    rows = jnp.broadcast_to(LOGITS, (256, len(LOGITS)))
    row_keys = keys(256)
    tokens, _ = chosen(rows, row_keys, jnp.int32(0), sampling(), len(LOGITS))
    turned, _ = chosen(rows[::-1], row_keys[::-1], jnp.int32(0), sampling(), len(LOGITS))
    np.testing.assert_array_equal(turned[::-1], tokens)
    alone, _ = chosen(rows[:1], row_keys[:1], jnp.int32(0), sampling(), len(LOGITS))
    assert alone[0] == tokens[0]
    later, _ = chosen(rows, row_keys, jnp.int32(1), sampling(), len(LOGITS))
    assert np.mean(np.asarray(later) == np.asarray(tokens)) < 0.5


def test_a_row_of_nan_comes_to_an_end_and_spoils_no_other():
    rows = np.stack([LOGITS, np.full_like(LOGITS, np.nan)])
    settings = sampling(top_p=0.9)
    tokens, logprobs = chosen(rows, keys(2), jnp.int32(0), settings, len(LOGITS))
    alone, _ = chosen(rows[:1], keys(2)[:1], jnp.int32(0), settings, len(LOGITS))
    assert tokens[0] == alone[0] and np.isfinite(logprobs[0])
    assert np.isnan(logprobs[1])
