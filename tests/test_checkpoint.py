"""Checkpoints: what goes in comes out, to the bit and in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.checkpoint import Checkpoints
from agon_jax.config import MeshConfig
from agon_jax.sharding import make_mesh

RECORD = {"data": {"position": 7, "seed": 3}, "totals": {"seconds": 1.5}}


def states(rank: int = 2, seed: int = 0) -> list[dict]:
    """One stack's state, split over the devices where it can be."""
    mesh = make_mesh(MeshConfig())
    rng = np.random.default_rng(seed)
    split = jax.NamedSharding(mesh, jax.P(None, mesh.axis_names[0]))
    whole = jax.NamedSharding(mesh, jax.P())
    return [
        {
            "a": jax.device_put(rng.normal(size=(2, 8, rank)).astype(np.float32), split),
            "half": jax.device_put(jnp.asarray(rng.normal(size=4), jnp.bfloat16), whole),
            "step": jax.device_put(np.full(2, seed, np.int32), whole),
        }
    ]


def test_a_state_comes_back_to_the_bit_with_its_dtypes_and_shardings(tmp_path):
    saved = states(seed=5)
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(3, saved, RECORD)
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        step, restored, record = checkpoints.restore_latest(states(seed=9))
    assert (step, record) == (3, RECORD)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)


def test_where_nothing_was_saved_the_states_are_as_they_were(tmp_path):
    fresh = states()
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        step, same, record = checkpoints.restore_latest(fresh)
    assert (step, record) == (0, {}) and same is fresh


def test_the_newest_are_kept_and_the_newest_is_restored(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, states(seed=step), {"data": step})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "3"}
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        step, restored, record = checkpoints.restore_latest(states())
    assert (step, record) == (3, {"data": 3})
    jax.tree.map(np.testing.assert_array_equal, restored, states(seed=3))


def test_a_state_of_another_rank_is_refused_and_named(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, states(rank=2), {})
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        with pytest.raises(ValueError, match=r"0\.a is \(2, 8, 2\) there and \(2, 8, 4\)"):
            checkpoints.restore_latest(states(rank=4))
        less = [{name: leaf for name, leaf in states()[0].items() if name != "half"}]
        with pytest.raises(ValueError, match=r"0\.half is \(4,\) there and missing in this run"):
            checkpoints.restore_latest(less)
