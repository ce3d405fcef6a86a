"""Who plays: the policies A and B, and the stacks that hold them.

A stack is one base and the policies that share it: their trainable trees carry a leading policy
axis, so two adapters on one base are a stack of two. `load_pair` reads base and tokenizer; samplers
and updates compile at their first call.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from agon_jax.batching import Row, make_batch, padding_share, to_global
from agon_jax.config import RunConfig, SettingError
from agon_jax.models import convert
from agon_jax.models.lora import init_lora, merge
from agon_jax.models.qwen3 import Qwen3
from agon_jax.sampler import Completion, make_sampler, replicate
from agon_jax.sharding import make_mesh, place
from agon_jax.tokenizer import Tokenizer, load_tokenizer
from agon_jax.update import TrainState, make_update

NAMES = ("A", "B")


class Policy(NamedTuple):
    """One of the pair: what a rollout needs to let it write."""

    name: str  # "A" | "B"
    index: int  # 0 | 1
    stack: int  # index of its stack in the pair
    slot: int  # its place on the stack's policy axis
    tokenizer: Tokenizer
    sample: Callable[
        [PyTree, Sequence[np.ndarray], np.ndarray], Iterator[tuple[int, list[Completion]]]
    ]


class Stack(NamedTuple):
    """The policies that share one base, and the one compiled update over them."""

    policies: tuple[int, ...]  # indices into Pair.policies, in slot order
    init_state: Callable[[], TrainState]
    learn: Callable[[TrainState, Sequence[Sequence[Row]]], tuple[TrainState, dict[str, np.ndarray]]]


class Pair(NamedTuple):
    """The policies and their stacks; the train states are values that the trainer holds."""

    policies: tuple[Policy, ...]
    stacks: tuple[Stack, ...]

    def init_states(self) -> list[TrainState]:
        """The train state of every stack before its first step."""
        return [stack.init_state() for stack in self.stacks]

    def weights(self, states: Sequence[TrainState]) -> list[PyTree]:
        """What the samplers read: each stack's trainable tree, on every local device."""
        return [replicate(state.trainable) for state in states]

    def learn(
        self, states: Sequence[TrainState], streams: Sequence[Sequence[Row]]
    ) -> tuple[list[TrainState], dict[str, float]]:
        """One update of every stack on its policies' streams; metrics are named by policy."""
        learned, metrics = [], {}
        for state, stack in zip(states, self.stacks, strict=True):
            state, by_slot = stack.learn(state, [streams[index] for index in stack.policies])
            learned.append(state)
            for slot, index in enumerate(stack.policies):
                name = self.policies[index].name
                metrics |= {f"policy_{name}/{key}": float(v[slot]) for key, v in by_slot.items()}
        return learned, metrics


def load_pair(run: RunConfig) -> Pair:
    """The pair that a run's settings ask for: one base, one stack, one or two policies.

    Raises SettingError where the model's directory does not exist; what is wrong inside it,
    `models.convert` and `tokenizer` say.
    """
    directory = model_directory(run.model.path)
    tokenizer = load_tokenizer(directory)
    config, base = convert.load(directory, run.model.param_dtype)
    lora = run.lora if run.model.train == "lora" else None
    lm = Qwen3(config, lora, jnp.dtype(run.model.dtype), run.model.remat)
    mesh = make_mesh(run.mesh)
    names = NAMES[: run.method.policies]
    init_state, update = make_update(lm, run, mesh, tokenizer.vocab_size)
    sample = make_sampler(
        lm,
        run.sampling,
        train=run.model.train,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        valid_vocab=tokenizer.vocab_size,
    )
    update_base = place(base, mesh)
    sampler_base = replicate(base)

    def learn(state, streams):
        rows = run.problems_per_step * 2 * run.method.group_size // len(names)
        batch = make_batch(streams, tokenizer.pad_id, mesh, rows // jax.process_count())
        state, metrics = update(state, update_base, to_global(batch, mesh))
        padding = np.full(len(names), padding_share(batch))
        return state, {**jax.device_get(metrics), "padding": padding}

    def sampler(slot: int):
        return lambda weights, prompts, keys: sample(sampler_base, weights, slot, prompts, keys)

    stack = Stack(
        tuple(range(len(names))),
        lambda: init_state(place(init_trainables(base, run), mesh, ("policy",))),
        learn,
    )
    policies = tuple(
        Policy(name, index, 0, index, tokenizer, sampler(index)) for index, name in enumerate(names)
    )
    return Pair(policies, (stack,))


def init_trainables(base: PyTree, run: RunConfig) -> PyTree:
    """The policies' own parameters before training, leaves [policy, ...].

    A's adapter changes nothing yet, B's holds noise; with full-parameter training A starts as the
    base and B as the base with that same noise merged in.
    """
    key = jax.random.key(run.seed)
    adapters = [
        init_lora(base, run.lora, jax.random.fold_in(key, index), noise_std)
        for index, noise_std in enumerate((0.0, run.lora.noise_std)[: run.method.policies])
    ]
    if run.model.train == "full":
        adapters = [merge(base, adapter, run.lora) for adapter in adapters]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)


def model_directory(path: str) -> Path:
    """The directory of a base: a user's own, or the one in the package for "embedded"."""
    directory = (
        Path(str(resources.files("agon_jax") / "embedded")) if path == "embedded" else Path(path)
    )
    if not directory.is_dir():
        raise SettingError(
            f"model.path = {path!r}: must be a Hugging Face directory of Qwen3 on this machine, or"
            " 'embedded'"
        )
    return directory
