import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from agon_jax.models import layers
from agon_jax.models.layers import RMSNorm, causal_attention, rope

LENGTHS = (8, 5, 0)  # the last row is padding alone


def attention_inputs(left: bool):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 8, 4, 6)).astype(np.float32)
    k, v = rng.normal(size=(2, 3, 8, 2, 6)).astype(np.float32)
    places, lengths = np.arange(8), np.array(LENGTHS)[:, None]
    mask = places >= 8 - lengths if left else places < lengths
    return tuple(map(jnp.asarray, (q, k, v, mask)))


def one_query_at_a_time(q, k, v, mask) -> np.ndarray:
    """The definition, in float64; zeros where there is no token."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(*q.shape[:3]):
        if not mask[b, t]:
            continue
        seen = np.flatnonzero(mask[b, : t + 1])
        head = n // (q.shape[2] // k.shape[2])
        weights = np.exp(k[b, seen, head] @ q[b, t, n] / np.sqrt(q.shape[-1]))
        out[b, t, n] = weights @ v[b, seen, head] / weights.sum()
    return out


def values_and_gradients(inputs):
    """Attention, and the gradients by q, k and v of a sum over the tokens."""
    q, k, v, mask = inputs

    def total(q, k, v):
        out = causal_attention(q, k, v, mask)
        return jnp.sum(jnp.where(mask[:, :, None, None], jnp.sin(out), 0)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


@pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])
def test_attention_is_its_definition(left):
    inputs = attention_inputs(left)
    out = np.asarray(jax.jit(causal_attention)(*inputs))
    mask = np.asarray(inputs[-1])
    expected = one_query_at_a_time(*map(np.asarray, inputs))
    np.testing.assert_allclose(out[mask], expected[mask], atol=1e-5)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("block", [3, 4], ids=["a last block that is not full", "full blocks"])
def test_attention_by_blocks_is_the_same_with_the_same_gradients(block, monkeypatch):
    inputs = attention_inputs(left=True)
    plain = values_and_gradients(inputs)
    monkeypatch.setattr(layers, "QUERY_BLOCK", block)
    by_blocks = values_and_gradients(inputs)
    mask = np.asarray(inputs[-1])
    np.testing.assert_allclose(by_blocks[0][mask], plain[0][mask], atol=1e-6)
    for ours, expected in zip(by_blocks[1:], plain[1:], strict=True):
        assert np.isfinite(np.asarray(ours)).all()
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_attention_by_blocks_never_holds_the_scores_of_every_query(monkeypatch):
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 4096), bool)

    def peak() -> int:
        program = jax.jit(functools.partial(causal_attention)).lower(shape, shape, shape, mask)
        return program.compile().memory_analysis().temp_size_in_bytes

    scores = 2 * 4096 * 4096 * 4
    assert peak() < scores / 3
    monkeypatch.setattr(layers, "QUERY_BLOCK", 4096)
    assert peak() > scores / 3


def test_rope_turns_pairs_half_a_head_apart():
    x = np.random.default_rng(1).normal(size=(1, 2, 1, 6)).astype(np.float32)
    positions = jnp.asarray([[0, 7]])
    turned = np.asarray(rope(jnp.asarray(x), positions, 100.0))
    np.testing.assert_array_equal(turned[0, 0], x[0, 0])
    for i in range(3):
        angle = 7 * 100.0 ** (-i / 3)
        pair = x[0, 1, 0, i] + 1j * x[0, 1, 0, i + 3]
        expected = pair * np.exp(1j * angle)
        np.testing.assert_allclose(
            turned[0, 1, 0, [i, i + 3]], [expected.real, expected.imag], atol=1e-6
        )


def test_the_norm_rounds_before_the_weight_multiplies():
    x = np.random.default_rng(2).normal(size=(4, 64)).astype(ml_dtypes.bfloat16)
    scale = np.random.default_rng(3).uniform(0.5, 1.5, 64).astype(np.float32)
    norm = RMSNorm(1e-6, jnp.bfloat16)
    out = norm.apply({"params": {"scale": jnp.asarray(scale)}}, jnp.asarray(x))
    wide = x.astype(np.float32)
    unit = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    expected = unit.astype(ml_dtypes.bfloat16) * scale.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(out), expected)
    assert (expected != (unit * scale).astype(ml_dtypes.bfloat16)).any()  # the other order
