"""The sampler: the same tokens wherever a request runs, with the log-probs the model gives them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.config import LoraConfig, SamplingConfig
from agon_jax.models.lora import init_lora, merge, policy_variables
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base
from agon_jax.sampler import cache_windows, make_sampler, prompt_buckets, replicate

VOCAB, PAD, EOS = 40, 0, (3, 17)
LORA = LoraConfig(rank=2, alpha=4.0)
LM = Qwen3(Qwen3Config(VOCAB, 8, 16, 2, 4, 2, 6, 1e4, 1e-6, True), LORA)
SAMPLING = SamplingConfig(
    temperature=0.8,
    top_p=0.9,
    max_new_tokens=70,  # two windows of the cache
    max_draft_prompt_tokens=40,
    max_challenge_prompt_tokens=40,
    rows_per_device=4,
)


@functools.cache
def weights():
    """A base whose logits are far from flat, and two policies with adapters that matter."""
    base = jax.tree.map(lambda leaf: 12 * leaf if leaf.ndim > 2 else leaf, init_base(LM, _key(0)))
    base["embed_tokens"] = 15 * base["embed_tokens"]
    adapters = [init_lora(base, LORA, _key(policy), noise_std=0.3) for policy in (1, 2)]
    return base, jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)


def _key(seed: int):
    return jax.random.key(seed)


@functools.cache
def sampler(
    devices: int = 1, unroll: bool = True, eos: tuple = EOS, settings: SamplingConfig = SAMPLING
):
    some = jax.local_devices()[:devices]
    sample = make_sampler(
        LM,
        settings,
        train="lora",
        eos_ids=eos,
        pad_id=PAD,
        valid_vocab=VOCAB - 2,
        devices=some,
        unroll=unroll,
    )
    base, trainables = (replicate(tree, some) for tree in weights())
    return lambda prompts, keys, slot=0: sample(base, trainables, slot, prompts, keys)


def requests(count: int = 6, completions: int = 3, seed: int = 0):
    rng = np.random.default_rng(seed)
    lengths = [1, 40, 7, 33, 12, 2][:count]
    prompts = [rng.integers(4, VOCAB - 2, size=length).astype(np.int32) for length in lengths]
    return prompts, rng.integers(2**32, size=(count, completions, 2), dtype=np.uint32)


def ordered(results, count: int = 6):
    found = dict(results)
    assert sorted(found) == list(range(count))
    return [found[index] for index in range(count)]


@functools.cache
def reference():
    return ordered(sampler()(*requests()))


def assert_same(one, other):
    for group, expected in zip(one, other, strict=True):
        for completion, same in zip(group, expected, strict=True):
            np.testing.assert_array_equal(completion.tokens, same.tokens)
            np.testing.assert_allclose(completion.logprobs, same.logprobs, atol=2e-5)
            assert completion.stopped == same.stopped


@functools.cache
def _scores(slot: int):
    base, trainables = weights()
    variables = policy_variables(base, jax.tree.map(lambda leaf: leaf[slot], trainables), "lora")

    @jax.jit
    def logits(tokens, length):
        positions = jnp.arange(tokens.shape[0])[None]
        hidden = LM.apply(variables, tokens[None], positions, positions < length)
        return LM.apply(variables, hidden, method="logits")[0, :, : VOCAB - 2]

    return logits


def logits_of(sequence: np.ndarray, slot: int = 0) -> np.ndarray:
    padded = np.zeros(128, np.int32)
    padded[: len(sequence)] = sequence
    return np.asarray(_scores(slot)(padded, len(sequence)))[: len(sequence)]


def test_log_probs_are_those_of_the_whole_sequence():
    prompts, _ = requests()
    lengths = []
    for prompt, group in zip(prompts, reference(), strict=True):
        for tokens, logprobs, _ in group:
            logits = logits_of(np.concatenate([prompt, tokens]))[len(prompt) - 1 : -1]
            expected = jax.nn.log_softmax(logits / SAMPLING.temperature)
            taken = np.asarray(expected)[np.arange(len(tokens)), tokens]
            np.testing.assert_allclose(logprobs, taken, atol=1e-4)
            assert logprobs.dtype == np.float32 and tokens.dtype == np.int32
            lengths.append(len(tokens))
    assert max(lengths) > cache_windows(70)[0] > min(lengths)  # some outgrew the first window


def test_a_completion_ends_at_any_stop_token_or_at_the_cap():
    completions = [each for group in reference() for each in group]
    for tokens, _, stopped in completions:
        assert stopped == (tokens[-1] in EOS)
        assert not np.isin(tokens[:-1], EOS).any()
        assert stopped or len(tokens) == SAMPLING.max_new_tokens
        assert tokens.max() < VOCAB - 2
    assert {int(tokens[-1]) for tokens, _, stopped in completions if stopped} == set(EOS)
    endless = ordered(sampler(eos=())(*requests()))
    assert all(len(c.tokens) == 70 and not c.stopped for group in endless for c in group)


def test_greedy_is_the_largest_logit_of_the_whole_sequence_every_time():
    settings = dataclasses.replace(SAMPLING, greedy=True, max_new_tokens=12)
    prompts, keys = requests(count=3, completions=1)
    found = ordered(sampler(settings=settings)(prompts, keys, slot=1), 3)
    for prompt, (completion,) in zip(prompts, found, strict=True):
        sequence = list(prompt)
        for _ in range(settings.max_new_tokens):
            sequence.append(int(logits_of(np.array(sequence), slot=1)[-1].argmax()))
            if sequence[-1] in EOS:
                break
        np.testing.assert_array_equal(completion.tokens, sequence[len(prompt) :])


def test_eight_devices_write_what_one_does():
    assert_same(ordered(sampler(devices=8)(*requests())), reference())


def test_scanned_layers_write_what_unrolled_ones_do():
    assert_same(ordered(sampler(unroll=False)(*requests())), reference())


def test_neither_order_nor_neighbours_nor_rows_change_a_request():
    prompts, keys = requests()
    turned = dict(sampler()(prompts[::-1], keys[::-1]))
    assert_same([turned[5 - index] for index in range(6)], reference())
    alone = dict(sampler()(prompts[4:5], keys[4:5]))
    assert_same([alone[0]], reference()[4:5])
    one_row = sampler(settings=dataclasses.replace(SAMPLING, rows_per_device=1))
    assert_same([dict(one_row(prompts[2:3], keys[2:3]))[0]], reference()[2:3])


def test_every_key_writes_its_own_and_the_slot_says_whose():
    prompts, keys = requests(count=3)
    long = [c.tokens.tobytes() for group in reference() for c in group if len(c.tokens) > 8]
    assert len(set(long)) == len(long) > 6
    other = ordered(sampler()(prompts, keys, slot=1), 3)
    logits = logits_of(np.concatenate([prompts[1], other[1][0].tokens]), slot=1)
    scored = np.asarray(jax.nn.log_softmax(logits[39:-1] / SAMPLING.temperature))
    taken = scored[np.arange(len(other[1][0].tokens)), other[1][0].tokens]
    np.testing.assert_allclose(other[1][0].logprobs, taken, atol=1e-4)
    assert not np.array_equal(other[1][0].tokens, reference()[1][0].tokens)


def test_other_requests_of_the_same_shapes_compile_nothing_and_need_no_transfer():
    reference()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        with jax.transfer_guard("disallow"):
            assert len(ordered(sampler()(*requests(seed=9)))) == 6
            assert len(ordered(sampler()(*requests(seed=9), slot=1))) == 6
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_no_prompts_are_no_work():
    assert list(sampler()([], np.zeros((0, 3, 2), np.uint32))) == []


@pytest.mark.parametrize(
    ("lengths", "keys", "message"),
    [
        ((5, 41), np.zeros((2, 1, 2), np.uint32), "prompt 1 has 41 tokens: it must have 1 to 40"),
        ((0,), np.zeros((1, 1, 2), np.uint32), "prompt 0 has 0 tokens"),
        ((5,), np.zeros((1, 1, 2), np.int64), "keys are int64"),
        ((5,), np.zeros((2, 1, 2), np.uint32), "1 prompts, completions, 2"),
    ],
)
def test_what_cannot_be_sampled_is_refused_at_once(lengths, keys, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        sampler()([np.full(length, 5, np.int32) for length in lengths], keys)


def test_weights_that_are_broken_are_an_error_and_not_text():
    some = jax.local_devices()[:1]
    base, trainables = weights()
    broken = base | {"norm": {"scale": jnp.full(8, jnp.nan)}}
    sample = make_sampler(
        LM, SAMPLING, train="lora", eos_ids=EOS, pad_id=PAD, valid_vocab=VOCAB, devices=some
    )
    arguments = replicate(broken, some), replicate(trainables, some), 0, *requests(1, 1)
    with pytest.raises(FloatingPointError, match="prompt 0: the model's log-probs"):
        list(sample(*arguments))


def test_whole_trees_are_sampled_as_they_are():
    some = jax.local_devices()[:1]
    base, trainables = weights()
    lm = dataclasses.replace(LM, lora=None)
    sample = make_sampler(
        lm, SAMPLING, train="full", eos_ids=EOS, pad_id=PAD, valid_vocab=VOCAB - 2, devices=some
    )
    merged = [
        merge(base, jax.tree.map(lambda leaf, p=policy: leaf[p], trainables), LORA)
        for policy in (0, 1)
    ]
    stacked = replicate(jax.tree.map(lambda *leaves: jnp.stack(leaves), *merged), some)
    found = ordered(sample(replicate(base, some), stacked, 0, *requests()))
    assert_same(found, reference())


def test_buckets_and_windows_double_up_to_the_cap():
    assert prompt_buckets(20) == (20,)
    assert prompt_buckets(100) == (32, 64, 100)
    assert cache_windows(64) == (64,)
    assert cache_windows(70) == (35, 70)
    assert cache_windows(8192) == (1024, 2048, 4096, 8192)
