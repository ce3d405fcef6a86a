import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.config import GrpoConfig
from agon_jax.grpo import (
    K3_TANGENT,
    Scores,
    importance_weights,
    k3,
    length_mask,
    masked_mean,
    token_logprobs,
    token_losses,
    token_metrics,
    token_weights,
)

BATCH, TIME, EMBED, VOCAB = 3, 7, 4, 11


def scores(head, hidden, targets, chunk=6, trained=False, valid=VOCAB, temperature=0.6):
    return token_logprobs(
        lambda h: jnp.einsum("btd,vd->btv", h, head),
        hidden,
        targets,
        temperature=temperature,
        valid_vocab=valid,
        chunk=chunk,
        head_is_trained=trained,
    )


def plain(head, hidden, targets, valid=VOCAB, temperature=0.6):
    logits = (jnp.einsum("btd,vd->btv", hidden, head) / temperature)[..., :valid]
    table = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(table) * table).sum(-1)
    return jnp.take_along_axis(table, targets[..., None], -1)[..., 0], entropy


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    head = jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(BATCH, TIME, EMBED)), jnp.float32)
    return head, hidden, jnp.asarray(rng.integers(0, 9, (BATCH, TIME)), jnp.int32)


@pytest.mark.parametrize("chunk", [1, 6, 9, 1000])  # 6 and 9 leave a last span that is not full
@pytest.mark.parametrize("trained", [False, True])
def test_chunked_scores_and_gradients_equal_the_whole(arrays, chunk, trained):
    head, hidden, targets = arrays
    weight = jnp.arange(1.0, BATCH * TIME + 1).reshape(BATCH, TIME)

    def loss(function, **options):
        return lambda head, hidden: (
            (weight * function(head, hidden, targets, valid=9, **options)[0]) ** 2
        ).sum()

    chunked = scores(head, hidden, targets, chunk, trained, valid=9)
    np.testing.assert_allclose(chunked, plain(head, hidden, targets, valid=9), atol=2e-6)
    got = jax.grad(loss(scores, chunk=chunk, trained=trained), (0, 1))(head, hidden)
    want = jax.grad(loss(plain), (0, 1))(head, hidden)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=1e-3)
    np.testing.assert_allclose(got[0], want[0] if trained else 0 * head, rtol=2e-5, atol=1e-3)


def test_entropy_gives_no_gradient(arrays):
    head, hidden, targets = arrays
    for trained in (False, True):
        grads = jax.grad(
            lambda *args, t=trained: scores(*args, targets, trained=t).entropy.sum(), (0, 1)
        )(head, hidden)
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("trained", [False, True])
def test_no_array_of_batch_time_vocab_exists(trained):
    batch, time, vocab, chunk = 4, 32, 1000, 8
    head, hidden = jnp.zeros((vocab, EMBED)), jnp.zeros((batch, time, EMBED))
    targets = jnp.zeros((batch, time), jnp.int32)

    def loss(head, hidden):
        return scores(head, hidden, targets, chunk, trained, valid=900).logprobs.sum()

    gradient = jax.value_and_grad(loss, argnums=(0, 1) if trained else 1)
    largest = max(sizes(jax.make_jaxpr(gradient)(head, hidden).jaxpr))
    assert largest == chunk * vocab
    memory = jax.jit(gradient).lower(head, hidden).compile().memory_analysis()
    assert memory.temp_size_in_bytes < batch * time * vocab * 4


def sizes(jaxpr):
    """Elements of every array in a program, those of the programs inside it included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(out.aval.shape) for out in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_length_mask_knows_no_ids():
    assert length_mask(jnp.array([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]


def test_masked_mean_of_nothing_is_zero():
    values = jnp.array([1.0, jnp.nan])
    assert masked_mean(values, jnp.array([True, False])) == 1
    assert masked_mean(values, jnp.array([False, False])) == 0


VALUES = jnp.array([[2, 2, 2, 2, 2, 6, 5, 3, 2, 4], [10, 3, 4, 5, 2, 3, 4, 1, 1, 3]], jnp.float32)


@pytest.mark.parametrize("norm, loss", [("dapo", 20 / 6), ("grpo", 6.0), ("dr_grpo", 1.0)])
def test_loss_norms_by_hand(norm, loss):
    lengths, counted = jnp.array([5, 1]), jnp.array([True, True])
    weights = token_weights(lengths, counted, 10, norm, 10)
    assert (weights * VALUES).sum() == pytest.approx(loss)
    padded = token_weights(lengths, counted, 20, norm, 10)
    np.testing.assert_array_equal(padded[:, :10], weights)
    assert not padded[:, 10:].any()


@pytest.mark.parametrize("norm", ["grpo", "dapo", "dr_grpo"])
def test_a_row_that_does_not_count_is_as_if_absent(norm):
    both = token_weights(jnp.array([5, 7]), jnp.array([True, False]), 10, norm, 10)
    alone = token_weights(jnp.array([5]), jnp.array([True]), 10, norm, 10)
    np.testing.assert_array_equal(both[:1], alone)
    assert not both[1].any()
    assert not token_weights(jnp.array([5, 7]), jnp.array([False] * 2), 10, norm, 10).any()


def test_k3_by_hand_and_beyond_overflow():
    d = jnp.array([0, 0.1, -0.1, -5, 5])
    np.testing.assert_allclose(k3(d), [0, 0.00517, 0.00484, 4.0067, 142.41], rtol=1e-3)
    np.testing.assert_allclose(k3(jnp.array([1e-3])), [5.0017e-7], rtol=1e-3)
    far = jnp.array([K3_TANGENT, 100, 1e4, -1e4, jnp.finfo(jnp.bfloat16).max])
    value, slope = jax.vmap(jax.value_and_grad(lambda x: k3(x)))(far)
    assert jnp.isfinite(slope).all() and jnp.isfinite(value[:4]).all()
    assert (value >= 0).all() and (slope[jnp.array([1, 2, 4])] > 0).all() and slope[3] == -1


def test_clipped_loss_by_hand():
    ratio = jnp.array([[0.5, 1.0, 1.25, 2.0], [0.5, 1.0, 1.25, 2.0]])
    grpo = GrpoConfig(clip_low=0.2, clip_high=0.3)
    mask = jnp.ones((2, 4), bool)

    def losses(ratio, advantages=(2.0, -1.0)):
        zeros = jnp.zeros_like(ratio)
        return token_losses(jnp.log(ratio), zeros, zeros, None, jnp.array(advantages), mask, grpo)

    want = [[-1.0, -2.0, -2.5, -2.6], [0.8, 1.0, 1.25, 2.0]]
    np.testing.assert_allclose(losses(ratio), want, rtol=1e-6)
    slope = jax.grad(lambda r: losses(r).sum())(ratio)
    np.testing.assert_allclose(slope, [[-2, -2, -2, 0], [0, 1, 1, 1]], rtol=1e-6)
    metrics = token_metrics(
        Scores(jnp.log(ratio), jnp.ones_like(ratio)),
        jnp.zeros((2, 4)),
        jnp.full((2, 4), 0.25),
        None,
        jnp.array([2.0, -1.0]),
        mask,
        grpo,
    )
    assert metrics["clipped_high"] == metrics["clipped_low"] == 1 / 8
    assert metrics["ratio"] == pytest.approx(4.75 / 4)
    assert metrics["ratio_deviation_max"] == pytest.approx(1.0)
    assert metrics["logprob_gap"] == metrics["logprob_gap_max"] == 0.25
    assert metrics["entropy"] == 1 and "kl" not in metrics


def test_kl_and_importance_weight_join_the_loss():
    logprobs, old, sampler, reference = (jnp.full((1, 1), x) for x in (-1.0, -1.0, -2.0, -0.5))
    mask, advantages = jnp.ones((1, 1), bool), jnp.array([3.0])
    grpo = GrpoConfig(kl_coef=0.1, importance_cap=2.0)
    loss = token_losses(logprobs, old, sampler, reference, advantages, mask, grpo)
    assert loss[0, 0] == pytest.approx(-3.0 * 2 + 0.1 * (math.exp(0.5) - 0.5 - 1))
    kept = importance_weights(old, jnp.full((1, 1), -1.5), mask, 2.0)
    assert kept[0, 0] == pytest.approx(math.exp(0.5))
    slope = jax.grad(lambda x: importance_weights(x, sampler, mask, 9.0).sum())(old)
    assert not slope.any()


def test_what_is_masked_has_no_value_and_a_finite_zero_gradient():
    wild = jnp.array([[-1.0, -jnp.inf, jnp.nan, -3e38]])
    mask = jnp.array([[True, False, False, False]])
    grpo = GrpoConfig(kl_coef=0.5, importance_cap=2.0)

    def loss(logprobs, other):
        return token_losses(logprobs, other, other, other, jnp.array([1.0]), mask, grpo).sum()

    value, slopes = jax.value_and_grad(loss, (0, 1))(wild, jnp.array([[-1.0, jnp.nan, 0, 1e9]]))
    assert value == -1
    assert slopes[0].tolist() == [[-1, 0, 0, 0]]
    assert jnp.isfinite(slopes[1]).all()


def test_a_ratio_beyond_float32_stays_finite():
    logprobs, zero = jnp.array([[0.0]]), jnp.array([[-1e4]])
    mask = jnp.ones((1, 1), bool)
    for advantage in (1.0, -1.0):
        value, slope = jax.value_and_grad(
            lambda x, a=advantage: token_losses(
                x, zero, zero, None, jnp.array([a]), mask, GrpoConfig()
            ).sum()
        )(logprobs)
        assert jnp.isfinite(value) and jnp.isfinite(slope).all()
