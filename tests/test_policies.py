"""Who plays: the pair of the embedded model, and how its policies begin."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from agon_jax.batching import Row
from agon_jax.config import ModelConfig, SettingError
from agon_jax.models import convert
from agon_jax.models.lora import merge
from agon_jax.policies import init_trainables, load_pair, model_directory
from experiments.settings import load_run

SMALL = ("lora.rank=2", "run.problems_per_step=2", "method.group_size=2", "verifier.workers=1")
RUN = load_run(["models/embedded.gin", "tasks/arithmetic.gin", "methods/agon.gin"], SMALL)


@pytest.fixture(scope="module")
def pair():
    return load_pair(RUN)


@pytest.fixture(scope="module")
def base():
    return convert.load(model_directory("embedded"), "float32")[1]


def policy_of(trees, policy: int):
    return jax.tree.map(lambda leaf: np.asarray(leaf[policy]), trees)


def second_matrices(tree) -> list[np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [leaf for path, leaf in flat if path[-1].key == "b"]


def test_two_policies_on_one_base_are_one_stack(pair):
    assert [(p.name, p.index, p.stack, p.slot) for p in pair.policies] == [
        ("A", 0, 0, 0),
        ("B", 1, 0, 1),
    ]
    assert [stack.policies for stack in pair.stacks] == [(0, 1)]


def test_a_begins_as_the_base_and_b_beside_it(base):
    adapters = init_trainables(base, RUN)
    assert all((leaf == 0).all() for leaf in second_matrices(policy_of(adapters, 0)))
    noise = np.concatenate([leaf.ravel() for leaf in second_matrices(policy_of(adapters, 1))])
    np.testing.assert_allclose(noise.std(), RUN.lora.noise_std, rtol=0.05)
    again = init_trainables(base, RUN)
    jax.tree.map(np.testing.assert_array_equal, adapters, again)
    other = init_trainables(base, replace(RUN, seed=RUN.seed + 1))
    drawn = np.concatenate([leaf.ravel() for leaf in second_matrices(policy_of(other, 1))])
    assert (drawn != noise).all()
    firsts = jax.tree.leaves({name: leaf["a"] for name, leaf in adapters["layers"].items()})
    assert all((leaf[0] != leaf[1]).any() for leaf in firsts)


def test_one_policy_is_the_first_of_two(base):
    alone = init_trainables(base, replace(RUN, method=replace(RUN.method, policies=1)))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(alone)} == {1}
    both = init_trainables(base, RUN)
    jax.tree.map(np.testing.assert_array_equal, policy_of(alone, 0), policy_of(both, 0))


def test_whole_models_begin_as_the_base_and_as_the_base_with_the_noise_merged(base):
    full = init_trainables(base, replace(RUN, model=ModelConfig(path="embedded", train="full")))
    jax.tree.map(np.testing.assert_array_equal, policy_of(full, 0), base)
    noise = policy_of(init_trainables(base, RUN), 1)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-7),
        policy_of(full, 1),
        merge(base, noise, RUN.lora),
    )


def test_learning_names_the_policy_and_moves_who_has_a_signal(pair):
    states = pair.init_states()
    before = jax.device_get(states[0].trainable)
    tokens = np.array([5, 9, 12, 99], np.int32)
    logprobs = np.full(4, -1.0, np.float32)
    rows = [
        Row(tokens[:2], tokens + i, logprobs, advantage, True, False)
        for i, advantage in enumerate((1.0, -0.5, -0.5))
    ]
    dead = [row._replace(live=False, advantage=0.0) for row in rows]
    states, metrics = pair.learn(states, [dead, rows])
    assert metrics["policy_A/skipped"] == 1 and metrics["policy_B/skipped"] == 0
    assert metrics["policy_B/counted_rows"] == 3 and metrics["policy_A/counted_rows"] == 0
    assert {name.partition("/")[0] for name in metrics} == {"policy_A", "policy_B"}
    after = jax.device_get(states[0].trainable)
    moved = [
        any(
            (x[policy] != y[policy]).any()
            for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)
        )
        for policy in (0, 1)
    ]
    assert moved == [False, True]
    on_devices = pair.weights(states)[0]
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(on_devices))


def test_a_model_that_is_nowhere_is_a_wrong_setting(tmp_path):
    with pytest.raises(SettingError, match=r"model.path = .*must be a Hugging Face directory"):
        model_directory(str(tmp_path / "nowhere"))
    assert model_directory(str(tmp_path)) == tmp_path
