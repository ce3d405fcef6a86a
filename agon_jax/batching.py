"""Streams of rollouts, one for each policy, to one padded Batch; and a host's part to the whole.

Comes after the advantages and before the update, in NumPy. Tokens are taken as they were sampled.
What is padding is told by lengths alone, never by ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from agon_jax.sharding import batch_sharding, batch_shards

SHORTEST_STEP = 16  # between padded lengths: below it, compiling costs more than padding


class Row(NamedTuple):
    """One rollout and what it taught."""

    prompt_tokens: np.ndarray  # int32 [prompt]
    completion_tokens: np.ndarray  # int32 [completion], stop token included
    logprobs: np.ndarray  # float32 [completion], as the sampler reported them
    advantage: float
    live: bool  # False: its group has no variance, so it gives no signal
    truncated: bool  # cut at the length cap


class Batch(NamedTuple):
    """The rollouts of one step, leaves [policy, batch, ...]. A row of padding has length 0."""

    prompt_tokens: jax.Array | np.ndarray  # int32 [policy, batch, prompt], left-padded
    prompt_lengths: jax.Array | np.ndarray  # int32 [policy, batch]
    completion_tokens: jax.Array | np.ndarray  # int32 [policy, batch, completion], right-padded
    completion_lengths: jax.Array | np.ndarray  # int32 [policy, batch]
    sampler_logprobs: jax.Array | np.ndarray  # float32 [policy, batch, completion]
    advantages: jax.Array | np.ndarray  # float32 [policy, batch]
    live: jax.Array | np.ndarray  # bool [policy, batch]
    truncated: jax.Array | np.ndarray  # bool [policy, batch]


def bucket(length: int) -> int:
    """The padded length that holds `length`: multiples of 16, from 128 on four for each doubling.

    So the number of programs to compile grows with the logarithm of the longest sequence, and
    less than a fifth of a long one is padding.
    """
    step = max(SHORTEST_STEP, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-max(length, 1) // step) * step


def make_batch(
    streams: Sequence[Sequence[Row]], pad_id: int, mesh: Mesh, row_multiple: int = 1
) -> Batch:
    """This host's part of a batch, one stream for each policy, in NumPy.

    All rows are used; rows of padding fill up to a multiple of `row_multiple` and of the host's
    shards. Live rows come first in every shard, so that the update may stop where they end. On
    several hosts all call this together, and agree on one shape.
    """
    shards = batch_shards(mesh) // jax.process_count()
    multiple = int(np.lcm(row_multiple, shards))
    rows = [row for stream in streams for row in stream]
    shape = _agreed(
        -(-max(1, *map(len, streams)) // multiple) * multiple,
        bucket(max((len(row.prompt_tokens) for row in rows), default=1)),
        bucket(max((len(row.completion_tokens) for row in rows), default=1)),
    )
    size, prompt_time, completion_time = shape
    batch = _padding(len(streams), size, prompt_time, completion_time, pad_id)
    for policy, stream in enumerate(streams):
        live_first = sorted(stream, key=lambda row: not row.live)
        for index, row in enumerate(live_first):
            slot = policy, index % shards * (size // shards) + index // shards
            prompt, completion = len(row.prompt_tokens), len(row.completion_tokens)
            if not prompt or len(row.logprobs) != completion:
                raise ValueError(
                    f"a rollout of policy {policy} has {prompt} prompt tokens (at least 1), and"
                    f" {len(row.logprobs)} log-probs for {completion} completion tokens"
                )
            batch.prompt_tokens[*slot, prompt_time - prompt :] = row.prompt_tokens
            batch.prompt_lengths[slot] = prompt
            batch.completion_tokens[*slot, :completion] = row.completion_tokens
            batch.completion_lengths[slot] = completion
            batch.sampler_logprobs[*slot, :completion] = row.logprobs
            batch.advantages[slot] = row.advantage
            batch.live[slot] = row.live
            batch.truncated[slot] = row.truncated
    return batch


def padding_share(batch: Batch) -> float:
    """Share of the batch's token slots that hold no token; rows of padding count."""
    slots = batch.prompt_tokens.size + batch.completion_tokens.size
    tokens = int(batch.prompt_lengths.sum()) + int(batch.completion_lengths.sum())
    return 1 - tokens / slots


def to_global(batch: Batch, mesh: Mesh) -> Batch:
    """The whole batch on the devices, out of what each host holds; rows stay with their host."""
    sharding = batch_sharding(mesh)
    return Batch(*(jax.make_array_from_process_local_data(sharding, leaf) for leaf in batch))


def _padding(policies: int, rows: int, prompt: int, completion: int, pad_id: int) -> Batch:
    row = (policies, rows)
    return Batch(
        prompt_tokens=np.full((*row, prompt), pad_id, np.int32),
        prompt_lengths=np.zeros(row, np.int32),
        completion_tokens=np.full((*row, completion), pad_id, np.int32),
        completion_lengths=np.zeros(row, np.int32),
        sampler_logprobs=np.zeros((*row, completion), np.float32),
        advantages=np.zeros(row, np.float32),
        live=np.zeros(row, bool),
        truncated=np.zeros(row, bool),
    )


def _agreed(*sizes: int) -> tuple[int, ...]:
    """The largest of each size over the hosts."""
    if jax.process_count() == 1:
        return sizes
    with jax.transfer_guard("allow"):  # three numbers, on their way through the devices
        everyone = multihost_utils.process_allgather(np.array(sizes, np.int32))
    return tuple(int(size) for size in everyone.max(axis=0))
