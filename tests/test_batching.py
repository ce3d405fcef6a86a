import jax
import numpy as np
import pytest

from agon_jax.batching import Row, bucket, make_batch, padding_share, to_global
from agon_jax.config import MeshConfig
from agon_jax.sharding import make_mesh

PAD = 7


def row(prompt, completion, advantage=1.0, live=True, truncated=False):
    logprobs = -np.arange(1, len(completion) + 1, dtype=np.float32)
    return Row(np.array(prompt), np.array(completion), logprobs, advantage, live, truncated)


def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def fake_shards(monkeypatch, count):
    monkeypatch.setattr("agon_jax.batching.batch_shards", lambda mesh: count)


def test_rows_keep_their_tokens_and_padding_is_told_by_length_alone():
    first = row([1, 2, PAD], [PAD, 3, PAD], advantage=0.5, truncated=True)  # pad is the EOS too
    batch = make_batch([[first], [row([4], [5]), row([6], [8, 9])]], PAD, mesh())
    assert batch.prompt_tokens.shape == batch.completion_tokens.shape == (2, 2, 16)
    assert batch.prompt_tokens[0, 0, -3:].tolist() == [1, 2, PAD]
    assert batch.completion_tokens[0, 0, :3].tolist() == [PAD, 3, PAD]
    assert (batch.prompt_tokens[0, 0, :-3] == PAD).all()
    assert batch.prompt_lengths.tolist() == [[3, 0], [1, 1]]
    assert batch.completion_lengths.tolist() == [[3, 0], [1, 2]]
    assert batch.sampler_logprobs[0, 0, :4].tolist() == [-1, -2, -3, 0]
    assert batch.advantages.tolist() == [[0.5, 0], [1, 1]]
    assert batch.live.tolist() == [[True, False], [True, True]]
    assert batch.truncated.tolist() == [[True, False], [False, False]]


def test_no_row_is_dropped_and_sizes_are_multiples():
    stream = [row([1], [i]) for i in range(10)]
    batch = make_batch([stream, stream[:3]], PAD, mesh(), row_multiple=4)
    assert batch.live.shape == (2, 12)
    assert sorted(batch.completion_tokens[0, :10, 0]) == list(range(10))
    assert batch.live.sum(axis=1).tolist() == [10, 3]
    assert padding_share(batch) == 1 - 2 * 13 / (2 * 12 * 32)


def test_a_step_without_rows_still_has_a_shape():
    batch = make_batch([[], []], PAD, mesh(), row_multiple=4)
    assert batch.live.shape == (2, 4) and not batch.live.any()


def test_live_rows_come_first_in_every_shard(monkeypatch):
    fake_shards(monkeypatch, 2)
    stream = [row([1], [i], live=i % 3 == 0) for i in range(8)]  # 0, 3, 6 live
    batch = make_batch([stream], PAD, mesh())
    assert batch.completion_tokens[0, :, 0].tolist() == [0, 6, 2, 5, 3, 1, 4, 7]
    assert batch.live[0].tolist() == [True, True, False, False, True, False, False, False]


def test_rows_are_a_multiple_of_the_shards_and_of_the_asked(monkeypatch):
    fake_shards(monkeypatch, 4)
    assert make_batch([[row([1], [2])] * 5], PAD, mesh(), row_multiple=6).live.shape == (1, 12)


def test_buckets_are_few_and_hold_their_length():
    sizes = [bucket(length) for length in range(10_000)]
    assert all(length <= size for length, size in enumerate(sizes))
    assert sorted(set(sizes))[:10] == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192]
    assert len(set(sizes)) == 33
    assert all(length > 0.8 * size for length, size in enumerate(sizes) if length > 64)


@pytest.mark.parametrize("bad", [row([], [1]), row([1], [1, 2])._replace(logprobs=np.zeros(1))])
def test_a_malformed_row_is_refused(bad):
    with pytest.raises(ValueError, match="policy 1"):
        make_batch([[row([1], [1])], [bad]], PAD, mesh())


def test_to_global_moves_every_leaf_explicitly():
    batch = make_batch([[row([1], [2])]], PAD, mesh())
    with jax.transfer_guard("disallow"):
        placed = to_global(batch, mesh())
    assert all(isinstance(leaf, jax.Array) for leaf in placed)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), placed, batch))
