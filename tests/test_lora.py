import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.config import LORA_TARGETS, LoraConfig
from agon_jax.models import convert
from agon_jax.models.layers import Einsum
from agon_jax.models.lora import init_lora, merge, policy_variables
from agon_jax.models.qwen3 import Qwen3

GOLDEN = Path(__file__).parent / "goldens" / "untied"
LORA = LoraConfig(rank=4, alpha=16.0)
ONLY_O = dataclasses.replace(LORA, targets=("o_proj",))


@functools.cache
def base():
    return convert.load(GOLDEN, "float32")


draw = jax.jit(init_lora, static_argnums=(1, 3))
join = jax.jit(merge, static_argnums=2)


def adapter(seed: int = 0, noise_std: float = 0.0, lora: LoraConfig = LORA):
    return draw(base()[1], lora, jax.random.key(seed), noise_std)


@functools.partial(jax.jit, static_argnums=0)
def logits(lora: LoraConfig | None, variables):
    tokens = jnp.asarray([[5, 60, 2, 2, 17], [9, 8, 33, 0, 1]])
    positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
    lm = Qwen3(base()[0], lora)
    hidden = lm.apply(variables, tokens, positions, positions >= 0)
    return lm.apply(variables, hidden, method="logits")


def of(adapter, lora: LoraConfig | None = LORA) -> np.ndarray:
    return np.asarray(logits(lora, {"params": base()[1], "lora": adapter}))


def of_base() -> np.ndarray:
    return np.asarray(logits(None, {"params": base()[1]}))


# The start


def test_policy_a_starts_as_the_base_bit_for_bit():
    fresh = adapter()
    assert all(not factors["b"].any() for factors in fresh["layers"].values())
    np.testing.assert_array_equal(of(fresh), of_base())


def test_policy_b_starts_beside_the_base_by_noise_of_the_std_asked_for():
    fresh = adapter(noise_std=0.1)
    values = np.concatenate([np.ravel(factors["b"]) for factors in fresh["layers"].values()])
    assert values.std() == pytest.approx(0.1, rel=0.1)
    assert abs(values.mean()) < 0.015
    assert np.abs(of(fresh) - of_base()).max() > 0.1


def test_the_first_matrices_are_uniform_by_their_inputs_and_differ_by_policy_and_layer():
    config = base()[0]
    one, other = adapter(0), adapter(1)
    inputs = dict.fromkeys(LORA_TARGETS, config.embed_dim)
    inputs |= {"o_proj": config.num_heads * config.head_dim, "down_proj": config.mlp_dim}
    for name, fan_in in inputs.items():
        a = np.asarray(one["layers"][name]["a"])
        assert 0.9 * fan_in**-0.5 < np.abs(a).max() <= fan_in**-0.5
        assert a.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.2)
        assert (a != other["layers"][name]["a"]).all()
        assert (a[0] != a[1]).all()


def test_the_first_gradient_moves_b_and_not_a():
    params = base()[1]

    def loss(adapter):
        return jnp.sum(jnp.sin(logits(LORA, {"params": params, "lora": adapter})))

    gradient = jax.jit(jax.grad(loss))(adapter())
    for factors in gradient["layers"].values():
        assert not factors["a"].any()
        assert (np.abs(factors["b"]).reshape(2, -1).max(axis=1) > 1e-3).all()  # in every layer


# What it computes


def test_the_scale_is_alpha_over_rank():
    lora = LoraConfig(rank=8, alpha=16.0)
    a, b = jnp.zeros((3, 8)).at[1, 2].set(1), jnp.zeros((8, 5)).at[2, 4].set(1)
    matrix = Einsum("BTD,DF->BTF", (3, 5), jnp.float32, lora)
    kernel = jnp.ones((3, 5))
    x = jnp.asarray([[[1.0, 1.0, 1.0]]])
    y = matrix.apply({"params": {"kernel": kernel}, "lora": {"a": a, "b": b}}, x)
    np.testing.assert_array_equal(y, [[[3, 3, 3, 3, 5]]])
    tree = {"layers": {"up_proj": {"kernel": kernel[None]}}}
    merged = merge(tree, {"layers": {"up_proj": {"a": a[None], "b": b[None]}}}, lora)
    expected = np.ones((3, 5))
    expected[1, 4] += 2
    np.testing.assert_array_equal(merged["layers"]["up_proj"]["kernel"][0], expected)


@pytest.mark.parametrize("lora", [LORA, ONLY_O], ids=["every matrix", "one"])
def test_merged_equals_applied(lora):
    drawn = adapter(noise_std=0.1, lora=lora)
    assert set(drawn["layers"]) == set(lora.targets)
    before = jax.tree.map(np.copy, base()[1])
    merged = join(base()[1], drawn, lora)
    jax.tree.map(np.testing.assert_array_equal, base()[1], before)  # the base is as it was
    applied = of(drawn, lora)
    assert np.abs(applied - of_base()).max() > 0.1
    np.testing.assert_allclose(logits(None, {"params": merged}), applied, atol=1e-4)


def test_a_merged_base_keeps_its_dtype_and_what_is_not_targeted():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base()[1])
    merged = join(params, adapter(noise_std=0.1, lora=ONLY_O), ONLY_O)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(jnp.bfloat16)}
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), merged, params)
    assert changed["layers"].pop("o_proj") == {"kernel": True}
    assert not any(jax.tree.leaves(changed))


def test_an_adapter_of_a_matrix_that_is_no_target_is_not_read():
    drawn = adapter(noise_std=0.1)
    pruned = {"layers": {"o_proj": drawn["layers"]["o_proj"]}}
    np.testing.assert_array_equal(of(drawn, ONLY_O), of(pruned, ONLY_O))


def test_stacked_adapters_give_each_policy_its_own():
    two = adapter(0, 0.1), adapter(1, 0.1)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *two)
    params = base()[1]
    both = jax.vmap(lambda adapter: logits(LORA, {"params": params, "lora": adapter}))(stack)
    assert np.abs(both[0] - both[1]).max() > 0.1
    for policy, own in enumerate(two):
        np.testing.assert_allclose(both[policy], of(own), atol=1e-4)


# What a policy is


def test_a_policys_variables_are_base_and_adapter_or_a_tree_of_its_own():
    params, drawn = base()[1], adapter(noise_std=0.1)
    variables = policy_variables(params, drawn, "lora")
    np.testing.assert_array_equal(logits(LORA, variables), of(drawn))
    whole = join(params, drawn, LORA)
    variables = policy_variables(params, whole, "full")
    assert set(variables) == {"params"}
    np.testing.assert_allclose(logits(None, variables), of(drawn), atol=1e-4)
