"""One GRPO step of every policy of a stack, as one compiled program over the mesh.

The last stage of the data's way: a Batch and the stack's TrainState go in, the next state and each
policy's metrics come out. A policy's step is written without the policy axis and mapped over it,
optimizer included, so that no policy's gradient clips another's. The state is donated; the base is
read, never differentiated and never returned.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from agon_jax import grpo
from agon_jax.batching import Batch
from agon_jax.config import OptimizerConfig, RunConfig
from agon_jax.models.lora import init_lora, policy_variables
from agon_jax.models.qwen3 import Qwen3, init_base
from agon_jax.sharding import RULES, batch_sharding, batch_shards, replicated, tree_shardings


class TrainState(NamedTuple):
    """What training moves; all leaves are [policy, ...]."""

    trainable: PyTree  # float32: adapters, or whole models
    opt_state: PyTree
    step: Array  # int32 [policy]: optimizer updates made


class Updater(NamedTuple):
    """The compiled functions of a stack."""

    init_state: Callable[[PyTree], TrainState]  # of trainable trees, leaves [policy, ...]
    update: Callable[[TrainState, PyTree, Batch], tuple[TrainState, dict[str, Array]]]


def make_schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """Learning rate of update 0, 1, ..: linear warm-up, then linear decay to 0 after the last one.

    Warm-up over w updates gives 1/w, 2/w, .. of the rate, so that the first already moves. What
    counts are optimizer updates: not micro-batches, and not updates that were skipped.
    """
    warmup = round(config.warmup_fraction * updates)

    def schedule(count):
        rising = (count + 1) / max(warmup, 1)
        falling = (updates - count) / max(updates - warmup, 1) if config.decay == "linear" else 1
        return config.learning_rate * jnp.clip(jnp.minimum(rising, falling), 0, 1)

    return schedule


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """One policy's AdamW behind clipping by global norm; weight decay leaves the norms alone."""

    def decayed(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", tree)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.adamw(
            make_schedule(config, updates),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def make_update(lm: Qwen3, run: RunConfig, mesh: Mesh, valid_vocab: int) -> Updater:
    """The update of a stack whose policies share one base of the model `lm`.

    update(state, base, batch) donates `state` and takes `base` from sharding.place and `batch`
    from batching.to_global. Metrics' leaves are float32 [policy]; means are over the tokens that
    count in the loss. Where no row of a policy counts, its state is kept to the bit and `skipped`
    is 1. Ids from `valid_vocab` on have probability 0, as in the sampler.
    """
    updates = run.total_steps * run.grpo.inner_steps
    tx = make_optimizer(run.optimizer, updates)
    step_policy = _make_policy_step(
        make_score(lm, run, valid_vocab), tx, make_schedule(run.optimizer, updates), run
    )

    def new_state(trainable: PyTree) -> TrainState:
        trainable = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trainable)
        policies = jax.tree.leaves(trainable)[0].shape[0]
        return TrainState(trainable, jax.vmap(tx.init)(trainable), jnp.zeros(policies, jnp.int32))

    def one_trainable(base: PyTree) -> PyTree:
        if run.model.train == "lora":
            base = init_lora(base, run.lora, jax.random.key(0))
        return jax.tree.map(lambda leaf: leaf[None], base)

    def update(state: TrainState, base: PyTree, batch: Batch):
        batch = micro_batches(batch, run.optimizer.micro_batch, mesh)
        counted = batch.live & (batch.completion_lengths > 0)
        if run.grpo.mask_truncated:
            counted &= ~batch.truncated
        # batching puts live rows first, so that whole micro-batches of dead ones are at the end.
        needed = counted.any(axis=(0, 2))
        parts = jnp.where(needed, jnp.arange(len(needed)) + 1, 0).max()
        return jax.vmap(step_policy, in_axes=(0, None, 0, 0, None))(
            state, base, batch, counted, parts
        )

    base = jax.eval_shape(lambda: init_base(lm, jax.random.key(0)))
    state_shardings = tree_shardings(
        jax.eval_shape(lambda base: new_state(one_trainable(base)), base), mesh, ("policy",)
    )
    return Updater(
        jax.jit(new_state, out_shardings=state_shardings),
        jax.jit(
            update,
            in_shardings=(state_shardings, tree_shardings(base, mesh), batch_sharding(mesh)),
            out_shardings=(state_shardings, replicated(mesh)),
            donate_argnums=0,
        ),
    )


def make_score(
    lm: Qwen3, run: RunConfig, valid_vocab: int
) -> Callable[[PyTree, Batch], grpo.Scores]:
    """score(variables, rows): log-probs and entropies of the completion tokens, [row, completion].

    At the sampling temperature, over the whole vocabulary; values beyond a length mean nothing.
    """

    def score(variables: PyTree, rows: Batch) -> grpo.Scores:
        prompt_time, time = rows.prompt_tokens.shape[-1], rows.completion_tokens.shape[-1]
        tokens = jnp.concatenate([rows.prompt_tokens, rows.completion_tokens], axis=-1)
        # Slots before the prompt are negative, so real tokens count from 0 whatever the padding.
        position = jnp.arange(prompt_time + time) - (prompt_time - rows.prompt_lengths[:, None])
        lengths = rows.prompt_lengths + rows.completion_lengths
        mask = (position >= 0) & (position < lengths[:, None])
        hidden = lm.apply(variables, tokens, jnp.maximum(position, 0), mask)
        return grpo.token_logprobs(
            lambda h: lm.apply(variables, h, method="logits"),
            hidden[:, prompt_time - 1 : -1],  # a token is scored where its predecessor stands
            rows.completion_tokens,
            temperature=run.sampling.temperature,
            valid_vocab=valid_vocab,
            chunk=run.grpo.logprob_chunk,
            head_is_trained=run.model.train == "full",
        )

    return score


def micro_batches(batch: Batch, size: int, mesh: Mesh) -> Batch:
    """[policy, batch, ...] to [policy, part, row, ...]; `size` 0 makes one part.

    A part takes equally many rows from each device's share, so that none has to move: `size` is
    rounded up to a multiple of the devices. The last part is filled up with rows of length 0.
    """
    shards = batch_shards(mesh)
    share = batch.live.shape[1] // shards
    rows = min(-(-size // shards) or share, share)  # of one device in one part
    parts = -(-share // rows)
    spec = PartitionSpec(None, None, RULES["batch"])

    def cut(leaf: Array) -> Array:
        policies, _, *rest = leaf.shape
        leaf = leaf.reshape(policies, shards, share, *rest)
        leaf = jnp.pad(leaf, ((0, 0), (0, 0), (0, parts * rows - share)) + ((0, 0),) * len(rest))
        leaf = jnp.moveaxis(leaf.reshape(policies, shards, parts, rows, *rest), 2, 1)
        leaf = leaf.reshape(policies, parts, shards * rows, *rest)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(cut, batch)


def _make_policy_step(
    score: Callable[[PyTree, Batch], grpo.Scores],
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    run: RunConfig,
):
    """The inner steps of one policy on one batch of rollouts, without the policy axis."""
    settings = run.grpo

    def gradient(trainable, base, batch, old, first, reference, mask, weights, parts):
        """The loss's gradient over all parts, and the scores of every token in them."""

        def part_loss(trainable, part):
            rows, old, reference, mask, weights = part
            scores = score(policy_variables(base, trainable, run.model.train), rows)
            old = jnp.where(first, jax.lax.stop_gradient(scores.logprobs), old)
            losses = grpo.token_losses(
                scores.logprobs,
                old,
                rows.sampler_logprobs,
                reference,
                rows.advantages,
                mask,
                settings,
            )
            return (weights * losses).sum(), scores

        def add_part(index, carry):
            total, found = carry
            part = jax.tree.map(lambda x: x[index], (batch, old, reference, mask, weights))
            grads, scores = jax.grad(part_loss, has_aux=True)(trainable, part)
            found = jax.tree.map(lambda every, one: every.at[index].set(one), found, scores)
            return jax.tree.map(jnp.add, total, grads), found

        nothing = jax.tree.map(jnp.zeros_like, (trainable, grpo.Scores(weights, weights)))
        return jax.lax.fori_loop(0, parts, add_part, nothing)

    def reference_logprobs(base, batch, weights, parts):
        """Of the base without adapter, which KL holds the policy to."""

        def score_part(index, found):
            rows = jax.tree.map(lambda x: x[index], batch)
            return found.at[index].set(score({"params": base}, rows).logprobs)

        return jax.lax.fori_loop(0, parts, score_part, jnp.zeros_like(weights))

    def step_policy(
        state: TrainState,
        base: PyTree,
        batch: Batch,
        counted: Bool[Array, "part row"],
        parts: Int[Array, ""],
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        time = batch.completion_tokens.shape[-1]
        mask = grpo.length_mask(batch.completion_lengths, time) & counted[..., None]
        weights = grpo.token_weights(
            batch.completion_lengths,
            counted,
            time,
            settings.loss_norm,
            run.sampling.max_new_tokens,
        )
        anything = counted.any()
        reference = None
        if settings.kl_coef > 0:
            reference = reference_logprobs(base, batch, weights, parts)

        def inner_step(carry, index):
            state, old = carry
            grads, scores = gradient(
                state.trainable, base, batch, old, index == 0, reference, mask, weights, parts
            )
            # The policy before its first inner step needs no pass of its own.
            old = jnp.where(index == 0, scores.logprobs, old)
            changes, opt_state = tx.update(grads, state.opt_state, state.trainable)
            trainable = optax.apply_updates(state.trainable, changes)
            moved = TrainState(trainable, opt_state, state.step + 1)
            tokens = old, batch.sampler_logprobs, reference, batch.advantages, mask, settings
            metrics = grpo.token_metrics(scores, *tokens) | {
                "loss": (weights * grpo.token_losses(scores.logprobs, *tokens)).sum(),
                "grad_norm": optax.tree.norm(grads),
                "learning_rate": schedule(state.step),
            }
            moved = jax.tree.map(lambda new, kept: jnp.where(anything, new, kept), moved, state)
            return (moved, old), metrics

        (state, _), metrics = jax.lax.scan(
            inner_step, (state, jnp.zeros_like(weights)), jnp.arange(settings.inner_steps)
        )
        metrics = {
            name: values.max() if name.endswith("_max") else values.mean()
            for name, values in metrics.items()
        } | {
            "counted_rows": counted.sum(),
            "counted_tokens": mask.sum(),
            "skipped": ~anything,
        }
        return state, jax.tree.map(lambda value: value.astype(jnp.float32), metrics)

    return step_policy
