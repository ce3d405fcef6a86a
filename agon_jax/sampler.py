"""Prompts in, completions out: one compiled program per shape, mapped over the local devices.

A request is a prompt and a key. The completions of a prompt share its prefill: keys and values of
the prompt exist once, and every row adds its own behind them, one token a step in a loop on the
device. Requests run in rounds of a fixed size, and a round is handed out while the next one runs.
A request's tokens depend on its prompt, its key and the weights, not on its place or neighbours.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from agon_jax.config import SamplingConfig
from agon_jax.models.lora import merge, policy_variables
from agon_jax.models.qwen3 import (
    DecodeCache,
    Qwen3,
    decode,
    init_cache,
    layer,
    unstack_cache,
    widen_cache,
)
from agon_jax.token_choice import choose_tokens

SHORTEST_BUCKET = 32  # prompt tokens
SHORTEST_WINDOW = 64  # completion tokens
WINDOWS = 4  # at most; each is a copy of the decode loop in the program

Sample = Callable[
    [PyTree, PyTree, int, Sequence[np.ndarray], np.ndarray],
    Iterator[tuple[int, list["Completion"]]],
]


class Completion(NamedTuple):
    """What was drawn for one request."""

    tokens: np.ndarray  # int32 [completion], the stop token included
    logprobs: np.ndarray  # float32 [completion]; see token_choice.choose_tokens
    stopped: bool  # ended by a stop token; False: cut at the length cap


class Generated(NamedTuple):
    """The completions of one round on one device, in fixed shapes."""

    tokens: Int[Array, "prompt completion time"]
    logprobs: Float[Array, "prompt completion time"]
    lengths: Int[Array, "prompt completion"]
    stopped: Bool[Array, "prompt completion"]


class _Decoding(NamedTuple):
    """What the decode loop carries."""

    cache: DecodeCache
    token: Int[Array, "prompt completion"]  # the last one
    done: Bool[Array, "prompt completion"]
    lengths: Int[Array, "prompt completion"]
    tokens: Int[Array, "time prompt completion"]
    logprobs: Float[Array, "time prompt completion"]


class Part(NamedTuple):
    """Completions of one prompt that run together: all of them, or as many as a device takes."""

    prompt: int
    completions: slice


def prompt_buckets(max_prompt_tokens: int) -> tuple[int, ...]:
    """The lengths that prompts are padded to: powers of two up to the cap, and the cap."""
    buckets, length = [], SHORTEST_BUCKET
    while length < max_prompt_tokens:
        buckets.append(length)
        length *= 2
    return (*buckets, max_prompt_tokens)


def cache_windows(max_new_tokens: int) -> tuple[int, ...]:
    """The lengths that the completions' cache grows through, doubling up to the cap.

    A step attends to the whole window, seen or not, so the cost of a step grows as the completions
    do, and memory for long ones is taken only when they come.
    """
    windows = [max_new_tokens]
    while len(windows) < WINDOWS and windows[0] > SHORTEST_WINDOW:
        windows.insert(0, -(-windows[0] // 2))
    return tuple(windows)


def replicate(tree: PyTree, devices: Sequence[jax.Device] | None = None) -> PyTree:
    """The tree, whole, on each of the local devices, as a sampler wants it."""
    mesh = jax.sharding.Mesh(np.array(devices or jax.local_devices()), ("device",))
    return jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))


def make_sampler(
    lm: Qwen3,
    sampling: SamplingConfig,
    *,
    train: str,
    eos_ids: Iterable[int],
    pad_id: int,
    valid_vocab: int,
    devices: Sequence[jax.Device] | None = None,
    unroll: bool | None = None,
) -> Sample:
    """A sampler over `devices` (default: the local ones, so that hosts need no lockstep).

    sample(base, trainables, slot, prompts, keys): base and trainables as `replicate` gives them;
    trainables' leaves are [policy, ...] and slot says whose completions these are; prompts are
    int32 [tokens]; keys are uint32 [prompt, completion, 2]. Yields (index of the prompt, its
    completions in the order of its keys) as rounds end, short prompts first. A prompt beyond
    both caps of `sampling` is an error before anything runs.

    Programs are compiled once for each (bucket of the longest prompt in a round, completions a
    prompt, rows); rows are sampling.rows_per_device, or less when a call has fewer.
    """
    devices = tuple(devices or jax.local_devices())
    unroll = devices[0].platform == "cpu" if unroll is None else unroll
    eos_ids = tuple(sorted(eos_ids))
    max_prompt_tokens = max(sampling.max_draft_prompt_tokens, sampling.max_challenge_prompt_tokens)
    buckets = prompt_buckets(max_prompt_tokens)

    def generate(base, trainables, slot, prompts, lengths, keys):
        trainable = jax.tree.map(lambda leaf: leaf[slot], trainables)
        variables = policy_variables(base, trainable, train)
        return _generate(
            lm, sampling, eos_ids, pad_id, valid_vocab, unroll, variables, prompts, lengths, keys
        )

    program = jax.pmap(generate, in_axes=(None, None, None, 0, 0, 0), devices=devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    by_device = jax.NamedSharding(mesh, jax.P("device"))

    def sample(base, trainables, slot, prompts, keys):
        _check(prompts, keys, max_prompt_tokens)
        if not len(prompts):
            return iter(())
        completions = keys.shape[1]
        together = _largest_divisor(completions, sampling.rows_per_device)
        parts = [
            Part(index, slice(start, start + together))
            for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
            for start in range(0, completions, together)
        ]
        a_device = min(
            sampling.rows_per_device // together, _power_of_two(-(-len(parts) // len(devices)))
        )
        a_round = a_device * len(devices)
        slot = jax.device_put(np.int32(slot), jax.NamedSharding(mesh, jax.P()))

        def launch(round_parts):
            arrays = _round_arrays(round_parts, prompts, keys, a_round, together, buckets, pad_id)
            arrays = jax.device_put(
                [a.reshape(len(devices), a_device, *a.shape[1:]) for a in arrays], by_device
            )
            return round_parts, program(base, trainables, slot, *arrays)

        rounds = [parts[start : start + a_round] for start in range(0, len(parts), a_round)]
        return _stream(map(launch, rounds), completions)

    return sample


def _generate(
    lm: Qwen3,
    sampling: SamplingConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    valid_vocab: int,
    unroll: bool,
    variables: PyTree[Float[Array, "..."]],
    prompts: Int[Array, "prompt S"],
    lengths: Int[Array, " prompt"],
    keys: UInt32[Array, "prompt completion 2"],
) -> Generated:
    """Completions of right-padded prompts, on one device. Prompts of length 0 are fillers.

    The loop feeds each row the token before, from the prompt's last on: so the prompt's cache is
    used up to that token, and no logits are computed outside the loop.

    unroll: each layer's weights are taken out of the stack before the loop, and an adapter on a
    float32 base is merged into them: a copy of the weights for a step that is a third faster on a
    CPU. Otherwise the layers are scanned, and weights are read where they lie. (Merging into a
    bfloat16 base would round the adapter away, so there it always stays beside.)
    """
    rows, vocab = keys.shape[:2], lm.config.vocab_size
    unrolled = None
    if unroll:
        if "lora" in variables and _is_float32(variables["params"]):
            variables = {"params": merge(variables["params"], variables["lora"], lm.lora)}
        unrolled = tuple(layer(variables, index) for index in range(lm.config.num_layers))
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    before_last = jnp.maximum(lengths - 1, 0)[:, None]
    _, keys_values = lm.apply(
        variables, prompts, positions, positions < before_last, method="prefill"
    )
    cache = init_cache(keys_values, before_last[:, 0], rows[1])
    last = jnp.take_along_axis(prompts, before_last, 1)
    filler = jnp.broadcast_to(lengths[:, None] == 0, rows)
    stops = jnp.array(eos_ids, jnp.int32)

    def one_more(state: _Decoding) -> _Decoding:
        step = state.cache.step
        hidden, cache = decode(lm, variables, state.token, state.cache, unrolled)
        logits = lm.apply(variables, hidden, method="logits")
        token, logprob = choose_tokens(
            logits.reshape(-1, vocab), keys.reshape(-1, 2), step, sampling, valid_vocab
        )
        token = jnp.where(state.done, pad_id, token.reshape(rows))
        logprob = jnp.where(state.done, 0, logprob.reshape(rows))
        return _Decoding(
            cache,
            token,
            state.done | (token[..., None] == stops).any(-1),
            state.lengths + ~state.done,
            jax.lax.dynamic_update_index_in_dim(state.tokens, token, step, 0),
            jax.lax.dynamic_update_index_in_dim(state.logprobs, logprob, step, 0),
        )

    state = _Decoding(
        cache=unstack_cache(cache) if unroll else cache,
        token=jnp.broadcast_to(last, rows),
        done=filler,
        lengths=jnp.zeros(rows, jnp.int32),
        tokens=jnp.full((sampling.max_new_tokens, *rows), pad_id, jnp.int32),
        logprobs=jnp.zeros((sampling.max_new_tokens, *rows), jnp.float32),
    )
    for window in cache_windows(sampling.max_new_tokens):
        state = state._replace(cache=widen_cache(state.cache, window))
        state = jax.lax.while_loop(
            lambda state, window=window: (state.cache.step < window) & ~state.done.all(),
            one_more,
            state,
        )
    return Generated(
        jnp.moveaxis(state.tokens, 0, -1),
        jnp.moveaxis(state.logprobs, 0, -1),
        state.lengths,
        state.done & ~filler,
    )


def _is_float32(tree: PyTree) -> bool:
    return all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tree))


def _check(prompts: Sequence[np.ndarray], keys: np.ndarray, max_prompt_tokens: int) -> None:
    if keys.shape != (len(prompts), keys.shape[1], 2) or keys.dtype != np.uint32:
        raise ValueError(
            f"keys are {keys.dtype} {keys.shape}: they must be uint32 "
            f"[{len(prompts)} prompts, completions, 2]"
        )
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= max_prompt_tokens:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens: it must have 1 to {max_prompt_tokens}, "
                "the greater of sampling.max_draft_prompt_tokens and "
                "sampling.max_challenge_prompt_tokens"
            )


def _round_arrays(
    parts: Sequence[Part],
    prompts: Sequence[np.ndarray],
    keys: np.ndarray,
    size: int,
    together: int,
    buckets: tuple[int, ...],
    pad_id: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts [size, bucket], lengths [size] and keys [size, together, 2], fillers at the end."""
    lengths = np.zeros(size, np.int32)
    lengths[: len(parts)] = [len(prompts[part.prompt]) for part in parts]
    width = next(length for length in buckets if length >= lengths.max())
    tokens = np.full((size, width), pad_id, np.int32)
    part_keys = np.zeros((size, together, 2), np.uint32)
    for row, part in enumerate(parts):
        tokens[row, : lengths[row]] = prompts[part.prompt]
        part_keys[row] = keys[part.prompt, part.completions]
    return tokens, lengths, part_keys


def _stream(
    rounds: Iterable[tuple[Sequence[Part], Generated]], completions: int
) -> Iterator[tuple[int, list[Completion]]]:
    """Whole prompts as their last part arrives; the next round is launched before one is read."""
    gathered: dict[int, list[Completion]] = {}
    rounds = iter(rounds)
    following = next(rounds, None)
    while following is not None:
        (parts, generated), following = following, next(rounds, None)
        generated = Generated(*(a.reshape(-1, *a.shape[2:]) for a in jax.device_get(generated)))
        for row, part in enumerate(parts):
            done = gathered.setdefault(part.prompt, [])
            done.extend(_read(generated, row, part.prompt))
            if len(done) == completions:
                yield part.prompt, gathered.pop(part.prompt)


def _read(generated: Generated, row: int, prompt: int) -> Iterator[Completion]:
    for tokens, logprobs, length, stopped in zip(*(array[row] for array in generated), strict=True):
        if not np.isfinite(logprobs[:length]).all():
            raise FloatingPointError(
                f"prompt {prompt}: the model's log-probs are not finite; its weights are broken, "
                "or model.dtype is too narrow for them"
            )
        yield Completion(tokens[:length].copy(), logprobs[:length].copy(), bool(stopped))


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
