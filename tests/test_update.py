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
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
)
from agon_jax.models.lora import init_lora
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base
from agon_jax.sharding import make_mesh, place
from agon_jax.update import make_optimizer, make_schedule, make_update

CONFIG = Qwen3Config(24, 8, 16, 2, 4, 2, 4, 1e4, 1e-6, True)
VALID, PAD, ROWS = 22, 3, 8
# Every test of one program shares it, since compiling is what these tests cost: 8 rows in parts of
# 3, the last not full. Without clipping, so that Adam's first moment tells the gradient.
RUN = RunConfig(
    lora=LoraConfig(rank=2, alpha=4, targets=("k_proj", "o_proj", "up_proj")),
    sampling=SamplingConfig(max_new_tokens=12),
    grpo=GrpoConfig(
        logprob_chunk=64,
        loss_norm="dapo",
        kl_coef=0.3,
        importance_cap=1.5,
        mask_truncated=True,
    ),
    optimizer=OptimizerConfig(
        learning_rate=0.01, warmup_fraction=0.0, clip_norm=0.0, weight_decay=0.1, micro_batch=3
    ),
    steps=10,
)


def settings(**sections) -> RunConfig:
    """RUN with some fields of its sections replaced: settings(grpo={"kl_coef": 0.1})."""
    replaced = {
        name: dataclasses.replace(getattr(RUN, name), **fields) for name, fields in sections.items()
    }
    return dataclasses.replace(RUN, **replaced)


@functools.cache
def updater(run: RunConfig, remat: bool = False):
    devices = max(run.mesh.data, 1) * run.mesh.fsdp * run.mesh.tensor
    mesh = make_mesh(run.mesh, jax.devices()[:devices])
    lora = run.lora if run.model.train == "lora" else None
    return mesh, make_update(Qwen3(CONFIG, lora, remat=remat), run, mesh, VALID)


def base_tree():
    shapes = jax.eval_shape(lambda: init_base(Qwen3(CONFIG), jax.random.key(0)))
    return drawn(shapes, 0, 0.1)


def trainables(run: RunConfig, policies: int = 2):
    """Leaves [policy, ...]; a stack of one has the first of two policies."""
    base = base_tree()
    if run.model.train == "full":
        return jax.tree.map(lambda leaf: np.stack([leaf] * policies), base)
    shapes = jax.eval_shape(lambda b: init_lora(b, run.lora, jax.random.key(0)), base)
    adapters = [drawn(shapes, seed, 0.3) for seed in range(policies)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *adapters)


def drawn(shapes, seed: int, std: float):
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.float32(
            (path[-1].key == "scale") + rng.normal(scale=std, size=leaf.shape)
        ),
        shapes,
    )


def stream(seed: int, rows: int = ROWS):
    """Rollouts of ragged lengths, the pad id among their tokens, every fourth truncated."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(rows):
        prompt, time = rng.integers(1, 10), rng.integers(1, 13)
        tokens = rng.integers(0, VALID, prompt + time)
        logprobs = rng.normal(-3, 0.1, time)
        result.append(
            Row(tokens[:prompt], tokens[prompt:], logprobs, rng.normal(), True, i % 4 == 3)
        )
    return result


STREAMS = [stream(0), stream(1)]


def batch_of(streams, mesh):
    return to_global(make_batch(streams, PAD, mesh, ROWS), mesh)


def step(run: RunConfig, streams=STREAMS, times: int = 1, remat: bool = False):
    """(state, metrics) after `times` updates on the same streams, as NumPy."""
    mesh, (init_state, update) = updater(run, remat)
    base = place(base_tree(), mesh)
    batch = batch_of(streams, mesh)
    state = init_state(place(trainables(run, len(streams)), mesh, ("policy",)))
    for _ in range(times):
        state, metrics = update(state, base, batch)
    return jax.device_get((state, metrics))


def assert_close(got, want, atol=1e-6, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=rtol), got, want)


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def of_policy(index: int, tree):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def gradient(state):
    """Adam's first moment after one update without clipping, over 1 - b1."""
    [adam] = [s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s)]
    return jax.tree.map(lambda leaf: leaf / (1 - RUN.optimizer.b1), adam.mu)


def is_adam(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def test_gradient_equals_a_plain_computation():
    """The whole [row, time, vocab] table of rows without padding in front, in one piece."""
    state, metrics = step(RUN)
    lm, adapters = Qwen3(CONFIG, RUN.lora), trainables(RUN)
    base = jax.tree.map(jnp.asarray, base_tree())

    def logprobs(variables, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = lm.apply(variables, tokens, positions, positions >= 0)
        table = lm.apply(variables, hidden, method="logits")[:, :-1, :VALID] / 0.6
        return jnp.take_along_axis(jax.nn.log_softmax(table), tokens[:, 1:, None], 2)[..., 0]

    @jax.jit
    @jax.value_and_grad
    def loss(adapter, tokens, scored, sampled, advantages):
        now = logprobs({"params": base, "lora": adapter}, tokens)
        reference = logprobs({"params": base}, tokens)
        fixed = jax.lax.stop_gradient(now)
        gain = jnp.exp(now - fixed) * advantages[:, None]
        gain *= jnp.minimum(jnp.exp(fixed - sampled), 1.5)
        kl = jnp.exp(reference - now) - (reference - now) - 1
        return (scored * (0.3 * kl - gain)).sum() / scored.sum()

    for policy, rows in enumerate(STREAMS):
        rows = [row for row in rows if not row.truncated]
        tokens = np.zeros((len(rows), 24), np.int32)
        scored, sampled = np.zeros((2, len(rows), 23), np.float32)
        for i, row in enumerate(rows):
            first, time = len(row.prompt_tokens) - 1, len(row.completion_tokens)
            tokens[i, : first + 1 + time] = [*row.prompt_tokens, *row.completion_tokens]
            scored[i, first : first + time] = 1
            sampled[i, first : first + time] = row.logprobs
        advantages = np.array([row.advantage for row in rows])
        value, grads = loss(of_policy(policy, adapters), tokens, scored, sampled, advantages)
        assert_close(of_policy(policy, gradient(state)), grads, atol=2e-6)
        assert metrics["loss"][policy] == pytest.approx(float(value), abs=1e-6)
        norm = float(optax.tree.norm(grads))
        assert metrics["grad_norm"][policy] == pytest.approx(norm, rel=1e-4) and norm > 0
        assert metrics["counted_rows"][policy] == len(rows)
        assert metrics["counted_tokens"][policy] == scored.sum()


def test_ratio_is_exactly_one_on_the_first_inner_step():
    _, metrics = step(RUN)
    assert (metrics["ratio"] == 1).all() and not metrics["ratio_deviation_max"].any()


@pytest.mark.parametrize("size, remat", [(5, False), (0, True)])
def test_neither_parts_nor_recomputation_change_a_number(size, remat):
    state, metrics = step(RUN)
    other, other_metrics = step(settings(optimizer={"micro_batch": size}), remat=remat)
    assert_close(gradient(other), gradient(state))
    assert_close(other_metrics, metrics)


@pytest.mark.parametrize("why", ["dead", "truncated"])
def test_rows_that_do_not_count_are_as_if_absent(why):
    rows = [row._replace(truncated=False) for row in stream(0, 4)]
    out = {"live": False} if why == "dead" else {"truncated": True}
    others = [row._replace(advantage=5.0, **out) for row in stream(5, 4)]
    alone, metrics = step(RUN, [rows, STREAMS[1]])
    mixed, mixed_metrics = step(RUN, [others + rows, STREAMS[1]])
    assert_close(gradient(mixed), gradient(alone))
    assert_close(mixed_metrics, metrics)


@pytest.mark.parametrize("out", [{"live": False}, {"truncated": True}])
def test_without_a_row_that_counts_the_state_stays_to_the_bit(out):
    mesh, (init_state, _) = updater(RUN)
    state, metrics = step(RUN, [[row._replace(**out) for row in STREAMS[0]], STREAMS[1]])
    before = jax.device_get(init_state(place(trainables(RUN), mesh, ("policy",))))
    assert_equal(of_policy(0, state), of_policy(0, before))
    assert state.step.tolist() == [0, 1]
    assert metrics["skipped"].tolist() == [1, 0]
    assert metrics["loss"][0] == metrics["grad_norm"][0] == 0
    assert all(np.isfinite(values).all() for values in metrics.values())


def test_a_stack_of_two_is_two_stacks_of_one():
    state, metrics = step(RUN)
    alone, alone_metrics = step(RUN, STREAMS[:1])
    assert_close(of_policy(0, gradient(alone)), of_policy(0, gradient(state)))
    assert_close(of_policy(0, alone_metrics), of_policy(0, metrics))


@pytest.mark.parametrize("train, axes", [("lora", (8, 1)), ("lora", (2, 2)), ("full", (1, 4))])
def test_eight_devices_are_one(train, axes):
    mesh = {"data": axes[0], "fsdp": axes[1], "tensor": 8 // (axes[0] * axes[1])}
    one, metrics = step(settings(model={"train": train}))
    eight, eight_metrics = step(settings(model={"train": train}, mesh=mesh))
    assert_close(gradient(eight), gradient(one), atol=1e-5)
    assert_close(eight_metrics, metrics, atol=1e-5)


def test_full_parameters_all_move_and_leave_the_reference():
    run = settings(model={"train": "full"})
    state, metrics = step(run, times=2)
    moved = jax.tree.map(lambda new, old: (new != old).any(), state.trainable, trainables(run))
    assert all(jax.tree.leaves(moved))
    assert (metrics["kl"] > 0).all()


def test_state_is_donated_and_the_base_is_neither_moved_nor_returned():
    mesh, (init_state, update) = updater(RUN)
    base, batch = place(base_tree(), mesh), batch_of(STREAMS, mesh)
    state = init_state(place(trainables(RUN), mesh, ("policy",)))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = update.lower(state, base, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state_bytes
    with jax.transfer_guard("disallow"):
        new, _ = update(state, base, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_equal(jax.device_get(base), base_tree())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(new)) == state_bytes


def test_one_program_serves_every_batch_of_a_bucket():
    mesh, (init_state, update) = updater(RUN)
    base = place(base_tree(), mesh)
    state = init_state(place(trainables(RUN), mesh, ("policy",)))
    state, _ = update(state, base, batch_of(STREAMS, mesh))
    before = update._cache_size()
    for seed in range(3):
        streams = [stream(seed, 8 - seed), stream(seed + 10, 7)]
        state, _ = update(state, base, batch_of(streams, mesh))
    assert update._cache_size() == before


def test_inner_steps_hold_on_to_the_first_policy_and_clip_each_alone():
    run = settings(
        grpo={"inner_steps": 2, "clip_low": 0.0, "clip_high": 0.0},
        optimizer={"clip_norm": 0.001},
    )
    state, metrics = step(run)
    assert state.step.tolist() == [2, 2]
    np.testing.assert_allclose(metrics["learning_rate"], 0.01 * (1 + 19 / 20) / 2, rtol=1e-5)
    # The second step measures its ratio to the policy before the first; else it would be 1.
    assert (metrics["ratio_deviation_max"] > 0).all()
    assert (metrics["clipped_high"] + metrics["clipped_low"] > 0).all()
    loud = [row._replace(advantage=100 * row.advantage) for row in STREAMS[0]]
    louder, loud_metrics = step(run, [loud, STREAMS[1]])
    assert loud_metrics["grad_norm"][0] > 10 * metrics["grad_norm"][0]
    assert_equal(of_policy(1, louder), of_policy(1, state))


def test_learning_rate_counts_updates():
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_fraction=0.25), 8)
    np.testing.assert_allclose(
        [schedule(i) for i in range(9)], [1 / 2, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    )
    constant = make_schedule(OptimizerConfig(learning_rate=1.0, decay="constant"), 10)
    assert [float(constant(i)) for i in range(3)] == [1, 1, 1]


def test_weight_decay_spares_the_norms():
    tree = {"norm": {"scale": jnp.ones(2)}, "q_proj": {"kernel": jnp.ones((2, 2))}}
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.5, warmup_fraction=0)
    tx = make_optimizer(config, 10)
    changes, _ = tx.update(jax.tree.map(jnp.zeros_like, tree), tx.init(tree), tree)
    assert not changes["norm"]["scale"].any()
    np.testing.assert_allclose(changes["q_proj"]["kernel"], -0.5)
