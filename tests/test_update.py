import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agon_jax.batching import Row, make_batch, to_global
from agon_jax.config import (
    GrpoConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
)
from agon_jax.models.lora import init_lora
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base
from agon_jax.sharding import make_mesh, place
from agon_jax.update import make_optimizer, make_schedule, make_update

CONFIG = Qwen3Config(24, 8, 16, 2, 4, 2, 4, 1e4, 1e-6, True)
VALID, PAD = 22, 3
RUN = RunConfig(
    lora=LoraConfig(rank=2, alpha=4),
    sampling=SamplingConfig(max_new_tokens=12),
    grpo=GrpoConfig(logprob_chunk=64),
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_fraction=0.0, clip_norm=0.0),
    steps=10,
)


def settings(**sections) -> RunConfig:
    """RUN with some fields of its sections replaced: settings(grpo=dict(kl_coef=0.1))."""
    replaced = {
        name: dataclasses.replace(getattr(RUN, name), **fields) for name, fields in sections.items()
    }
    return dataclasses.replace(RUN, **replaced)


@functools.cache
def updater(run: RunConfig, remat: bool = False):
    mesh = make_mesh(run.mesh, jax.devices()[: mesh_size(run.mesh)])
    lora = run.lora if run.model.train == "lora" else None
    return mesh, make_update(Qwen3(CONFIG, lora, remat=remat), run, mesh, VALID)


def mesh_size(mesh: MeshConfig) -> int:
    return max(mesh.data, 1) * mesh.fsdp * mesh.tensor


@functools.cache
def base_tree():
    return jax.tree.map(np.asarray, init_base(Qwen3(CONFIG), jax.random.key(0)))


def trainables(run: RunConfig, policies: int = 2):
    if run.model.train == "full":
        return jax.tree.map(lambda leaf: np.stack([leaf] * policies), base_tree())
    keys = jax.random.split(jax.random.key(1), policies)
    adapters = [init_lora(base_tree_on_device(), run.lora, key, 0.1) for key in keys]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *adapters)


def base_tree_on_device():
    return jax.tree.map(jnp.asarray, base_tree())


def stream(seed: int, rows: int, scale: float = 1.0, live=lambda i: True):
    """Rollouts of ragged lengths; the pad id stands among their tokens."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(rows):
        prompt, time = rng.integers(1, 10), rng.integers(1, 13)
        tokens = rng.integers(0, VALID, prompt + time)
        logprobs = rng.normal(-3, 0.1, time)
        advantage = scale * rng.normal()
        result.append(
            Row(tokens[:prompt], tokens[prompt:], logprobs, advantage, live(i), i % 4 == 3)
        )
    return result


STREAMS = [stream(0, 8), stream(1, 8)]


def step(run: RunConfig, streams=STREAMS, times: int = 1, remat: bool = False):
    """(state, metrics) after `times` updates on the same streams, as NumPy."""
    mesh, (init_state, update) = updater(run, remat)
    base = place(base_tree(), mesh)
    batch = to_global(make_batch(streams, PAD, mesh), mesh)
    state = init_state(place(trainables(run, len(streams)), mesh, ("policy",)))
    for _ in range(times):
        state, metrics = update(state, base, batch)
    return jax.device_get((state, metrics))


def assert_close(got, want, atol=1e-6, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=rtol), got, want)


def moments(state):
    """The gradient: Adam's first moment after one update without clipping, over 1 - b1."""
    [adam] = [s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s)]
    return jax.tree.map(lambda leaf: leaf / (1 - RUN.optimizer.b1), adam.mu)


def is_adam(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def test_gradient_equals_a_plain_computation():
    """One whole [time, vocab] table a row, without padding, one row at a time."""
    run = settings(grpo={"kl_coef": 0.3, "importance_cap": 1.5})
    streams = [stream(2, 2), stream(3, 2)]
    state, metrics = step(run, streams)
    lm = Qwen3(CONFIG, RUN.lora)
    base, adapters = base_tree_on_device(), trainables(run)

    def logprobs(variables, row):
        tokens = jnp.concatenate([row.prompt_tokens, row.completion_tokens])[None]
        positions = jnp.arange(tokens.shape[1])[None]
        hidden = lm.apply(variables, tokens, positions, positions >= 0)
        logits = lm.apply(variables, hidden, method="logits")[0, :, :VALID] / 0.6
        table = jax.nn.log_softmax(logits)[len(row.prompt_tokens) - 1 : -1]
        return jnp.take_along_axis(table, jnp.asarray(row.completion_tokens)[:, None], 1)[:, 0]

    for policy in range(2):

        def loss(adapter, rows):
            total = 0
            for row in rows:
                now = logprobs({"params": base, "lora": adapter}, row)
                reference = jax.lax.stop_gradient(logprobs({"params": base}, row))
                fixed = jax.lax.stop_gradient(now)
                weight = jnp.minimum(jnp.exp(fixed - row.logprobs), 1.5)
                kl = jnp.exp(reference - now) - (reference - now) - 1
                gain = jnp.exp(now - fixed) * row.advantage * weight
                total += (-gain + 0.3 * kl).mean() / len(rows)
            return total

        adapter = jax.tree.map(lambda leaf, p=policy: jnp.asarray(leaf[p]), adapters)
        value, grads = jax.jit(jax.value_and_grad(loss))(adapter, streams[policy])
        got = jax.tree.map(lambda leaf, p=policy: leaf[p], moments(state))
        assert_close(got, grads, atol=2e-6)
        assert metrics["loss"][policy] == pytest.approx(float(value), abs=1e-6)
        assert metrics["grad_norm"][policy] == pytest.approx(
            float(optax.tree.norm(grads)), rel=1e-4
        )
        assert metrics["grad_norm"][policy] > 0


def test_ratio_is_exactly_one_on_the_first_inner_step():
    _, metrics = step(RUN)
    assert (metrics["ratio"] == 1).all() and not metrics["ratio_deviation_max"].any()


@pytest.mark.parametrize(
    "norm, size", [("grpo", 1), ("grpo", 3), ("grpo", 5), ("dapo", 3), ("dr_grpo", 3)]
)  # of 8 rows: parts of 3 and of 5 leave a last one that is not full
def test_micro_batches_add_up_to_the_whole(norm, size):
    rows = [stream(0, 8, live=lambda i: i != 2), stream(1, 7)]
    options = {"loss_norm": norm, "kl_coef": 0.1, "mask_truncated": True}
    whole, metrics = step(settings(grpo=options), rows)
    parts, part_metrics = step(settings(grpo=options, optimizer={"micro_batch": size}), rows)
    assert_close(moments(parts), moments(whole))
    assert_close(part_metrics, metrics)
    assert metrics["counted_rows"].tolist() == [5, 6]


def test_dead_rows_are_as_if_absent_and_padding_changes_nothing():
    rows = stream(0, 8)
    dead = [row._replace(advantage=5.0, live=False) for row in stream(5, 8)]
    run = settings(grpo={"kl_coef": 0.1}, optimizer={"micro_batch": 2})
    alone, metrics = step(run, [rows])
    mixed, mixed_metrics = step(run, [dead + rows])
    assert_close(moments(mixed), moments(alone))
    assert_close(mixed_metrics, metrics)


def test_truncated_rows_are_masked_in_numerator_and_divisor():
    run = settings(grpo={"mask_truncated": True, "loss_norm": "dapo"})
    rows = stream(0, 8)
    state, metrics = step(run, [rows])
    kept, kept_metrics = step(run, [[row for row in rows if not row.truncated]])
    assert_close(moments(state), moments(kept))
    assert metrics["loss"] == pytest.approx(kept_metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("why", ["dead", "truncated"])
def test_without_a_row_that_counts_the_state_stays_to_the_bit(why):
    run = settings(grpo={"mask_truncated": True, "kl_coef": 0.1}, optimizer={"weight_decay": 0.1})
    mesh, (init_state, _) = updater(run)
    rows = [row._replace(live=why != "dead", truncated=True) for row in stream(0, 8)]
    state, metrics = step(run, [rows, STREAMS[1]])
    before = jax.device_get(init_state(place(trainables(run), mesh, ("policy",))))
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[0], old[0]), state, before)
    assert state.step.tolist() == [0, 1]
    assert metrics["skipped"].tolist() == [1, 0]
    assert metrics["loss"][0] == metrics["grad_norm"][0] == 0
    assert all(np.isfinite(values).all() for values in metrics.values())


def test_one_policy_does_not_move_the_other():
    run = settings(optimizer={"clip_norm": 0.1})
    loud = [row._replace(advantage=100 * row.advantage) for row in STREAMS[0]]
    state, metrics = step(run)
    louder, loud_metrics = step(run, [loud, STREAMS[1]])
    second = functools.partial(jax.tree.map, lambda leaf: leaf[1])
    jax.tree.map(np.testing.assert_array_equal, second(louder), second(state))
    assert loud_metrics["grad_norm"][0] > 10 * metrics["grad_norm"][0] > 1


def test_a_stack_of_two_is_two_stacks_of_one():
    run = settings()
    state, metrics = step(run)
    alone, alone_metrics = step(run, STREAMS[:1])  # its adapter has the first of two keys
    mesh, (init_state, update) = updater(run)
    first = jax.tree.map(lambda leaf: leaf[:1], trainables(run))
    batch = to_global(make_batch(STREAMS[:1], PAD, mesh), mesh)
    alone, alone_metrics = update(init_state(first), place(base_tree(), mesh), batch)
    take = functools.partial(jax.tree.map, lambda leaf: leaf[:1])
    assert_close(moments(jax.device_get(alone)), take(moments(state)))
    assert_close(jax.device_get(alone_metrics), take(metrics))


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("axes", [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_eight_devices_are_one(train, axes):
    data, fsdp, tensor = axes
    options = dict(model={"train": train}, grpo={"kl_coef": 0.1}, optimizer={"micro_batch": 4})
    one, metrics = step(settings(**options))
    eight, eight_metrics = step(
        settings(mesh={"data": data, "fsdp": fsdp, "tensor": tensor}, **options)
    )
    assert_close(moments(eight), moments(one), atol=1e-5)
    assert_close(eight_metrics, metrics, atol=1e-5)


def test_full_parameters_learn_with_the_head_and_leave_the_reference():
    run = settings(model={"train": "full"}, grpo={"kl_coef": 0.1})
    state, metrics = step(run, times=2)
    moved = jax.tree.map(lambda new, old: (new != old).any(), state.trainable, trainables(run))
    assert all(jax.tree.leaves(moved))
    assert (metrics["kl"] > 0).all()


def test_state_is_donated_and_the_base_is_neither_moved_nor_returned():
    mesh, (init_state, update) = updater(RUN)
    base = place(base_tree(), mesh)
    batch = to_global(make_batch(STREAMS, PAD, mesh), mesh)
    state = init_state(place(trainables(RUN), mesh, ("policy",)))
    compiled = update.lower(state, base, batch).compile()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes
    with jax.transfer_guard("disallow"):
        new, _ = update(state, base, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(base), base_tree())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(new)) == state_bytes


def test_one_program_serves_every_batch_of_a_bucket():
    mesh, (init_state, update) = updater(RUN)
    base = place(base_tree(), mesh)
    state = init_state(place(trainables(RUN), mesh, ("policy",)))
    before = update._cache_size()
    for seed in range(3):
        streams = [stream(seed, 8), stream(seed + 10, 7)]
        state, _ = update(state, base, to_global(make_batch(streams, PAD, mesh), mesh))
    assert update._cache_size() <= before + 1


def test_inner_steps_hold_on_to_the_first_policy():
    """Two inner steps equal two updates whose second measures its ratio to the first policy."""
    run = settings(grpo={"inner_steps": 2, "clip_low": 0.0, "clip_high": 0.0})
    state, metrics = step(run)
    assert state.step.tolist() == [2, 2]
    assert (metrics["ratio_deviation_max"] > 0).all()
    assert ((metrics["clipped_high"] + metrics["clipped_low"]) > 0).all()
    wide, _ = step(settings(grpo={"inner_steps": 2, "clip_low": 1.0, "clip_high": 1e6}))
    twice, _ = step(settings(), times=2)
    different = jax.tree.map(lambda a, b: (a != b).any(), wide.trainable, twice.trainable)
    assert any(jax.tree.leaves(different))  # else the ratio would be 1 on the second step too


def test_remat_changes_no_number():
    plain, _ = step(RUN)
    again, _ = step(RUN, remat=True)
    assert_close(moments(again), moments(plain))


def test_ids_beyond_the_valid_have_no_probability():
    rows = [
        row._replace(completion_tokens=np.full_like(row.completion_tokens, 5)) for row in STREAMS[0]
    ]
    _, metrics = step(RUN, [rows])
    assert metrics["entropy"] < np.log(VALID)


def test_learning_rate_counts_updates():
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_fraction=0.25), 8)
    np.testing.assert_allclose(
        [schedule(i) for i in range(9)], [1 / 2, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    )
    constant = make_schedule(OptimizerConfig(learning_rate=1.0, decay="constant"), 10)
    assert [float(constant(i)) for i in range(3)] == [1, 1, 1]
    run = settings(optimizer={"micro_batch": 2}, grpo={"inner_steps": 2})
    _, metrics = step(run)  # updates 0 and 1 of 20
    np.testing.assert_allclose(metrics["learning_rate"], 0.01 * (1 + 19 / 20) / 2, rtol=1e-5)


def test_weight_decay_spares_the_norms():
    tree = {"norm": {"scale": jnp.ones(2)}, "q_proj": {"kernel": jnp.ones((2, 2))}}
    tx = make_optimizer(OptimizerConfig(learning_rate=1.0, weight_decay=0.5, warmup_fraction=0), 10)
    changes, _ = tx.update(jax.tree.map(jnp.zeros_like, tree), tx.init(tree), tree)
    assert not changes["norm"]["scale"].any()
    np.testing.assert_allclose(changes["q_proj"]["kernel"], -0.5)
