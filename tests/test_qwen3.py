import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.models import convert
from agon_jax.models.qwen3 import Qwen3, Qwen3Config
from experiments.check_model import Model, cached_logits, sequence_logits
from experiments.golden import pad, positions_of

GOLDENS = Path(__file__).parent / "goldens"
TINY = Qwen3Config(32, 8, 12, 2, 4, 2, 6, 1e4, 1e-6, True)

# Sizes of MODELS as published: (config, parameters by the published checkpoints, tied ones once).
PUBLISHED = {
    "0.6B": (Qwen3Config(151936, 1024, 3072, 28, 16, 8, 128, 1e6, 1e-6, True), 596_049_920),
    "1.7B": (Qwen3Config(151936, 2048, 6144, 28, 16, 8, 128, 1e6, 1e-6, True), 1_720_574_976),
    "4B": (Qwen3Config(151936, 2560, 9728, 36, 32, 8, 128, 1e6, 1e-6, True), 4_022_468_096),
    "8B": (Qwen3Config(151936, 4096, 12288, 36, 32, 8, 128, 1e6, 1e-6, False), 8_190_735_360),
}


@functools.cache
def golden(name: str):
    config, params = convert.load(GOLDENS / name, "float32")
    with np.load(GOLDENS / name / "golden.npz") as file:
        return Model(Qwen3(config), {"params": params}), dict(file)


@functools.cache
def random_params(config: Qwen3Config):
    """A base in which no part is idle: norms away from 1, matrices that keep the scale."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        norm = path[-1].key == "scale"
        values = rng.uniform(0.5, 1.5, leaf.shape) if norm else rng.normal(0, 0.3, leaf.shape)
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, convert.base_shapes(config))


def tiny(dtype=jnp.float32, remat: bool = False) -> Model:
    return Model(Qwen3(TINY, dtype=dtype, remat=remat), {"params": random_params(TINY)})


def logits_of(model: Model, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits [B, T, V] of whole sequences, positions counting the real tokens."""
    mask = np.ones(tokens.shape, int) if mask is None else mask
    return sequence_logits(model, tokens, positions_of(mask), mask)


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("side", ["", "l"])
def test_logits_are_those_of_transformers(name, side):
    model, arrays = golden(name)
    ids, mask, expected = (arrays[side + key] for key in ("ids", "mask", "logits"))
    seen = mask == 1
    logits = logits_of(model, ids, mask)
    np.testing.assert_allclose(logits[seen], expected[seen], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_greedy_continuation_is_that_of_transformers(name):
    model, arrays = golden(name)
    rows = [
        row[seen == 1] for row, seen in zip(arrays["bgen_lids"], arrays["bgen_lmask"], strict=True)
    ]
    ours = cached_logits(model, rows, arrays["bgen_ids"][:, None])[:, 0]
    np.testing.assert_allclose(ours, arrays["bgen_logits"], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours.argmax(-1), arrays["bgen_ids"])


@pytest.mark.parametrize(
    "sizes",
    [
        dict(num_attention_heads=6, num_key_value_heads=3, head_dim=10, tie_word_embeddings=True),
        dict(num_attention_heads=4, num_key_value_heads=4, head_dim=4, tie_word_embeddings=False),
        dict(num_attention_heads=4, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
    ],
    ids=["grouped", "every head its own", "one key head"],
)
def test_random_models_are_those_of_transformers(sizes, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = transformers.Qwen3Config(
        vocab_size=48, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        initializer_range=0.2, rope_parameters=rope, **sizes,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    config, params = convert.load(tmp_path, "float32")
    ids = np.random.default_rng(0).integers(48, size=(2, 19))
    for side in ("left", "right"):
        mask = np.ones_like(ids)
        mask[1, slice(8) if side == "left" else slice(-8, None)] = 0
        with torch.no_grad():
            expected = model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                position_ids=torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0)),
            ).logits.numpy()
        logits = logits_of(Model(Qwen3(config), {"params": params}), ids, mask)
        assert expected.std() > 0.5
        np.testing.assert_allclose(logits[mask == 1], expected[mask == 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("unroll", [False, True], ids=["scanned", "unrolled"])
def test_prefill_and_cached_decode_equal_the_whole_sequence(unroll):
    model = tiny()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(32, size=length).astype(np.int32) for length in (9, 1, 4)]
    forced = rng.integers(32, size=(3, 2, 5)).astype(np.int32)
    cached = cached_logits(model, prompts, forced, unroll).reshape(6, 5, -1)
    rows = [
        np.concatenate([prompt, completion])
        for prompt, completions in zip(prompts, forced, strict=True)
        for completion in completions
    ]
    whole = logits_of(model, *pad(rows, left=False))
    for row, ours, expected in zip(rows, cached, whole, strict=True):
        at = slice(len(row) - 6, len(row) - 1)
        np.testing.assert_allclose(ours, expected[at], atol=1e-4, rtol=0)


def test_a_sequence_does_not_depend_on_padding_or_neighbours():
    model = tiny()
    rng = np.random.default_rng(2)
    rows = [rng.integers(32, size=length).astype(np.int32) for length in (9, 2)]
    alone = [logits_of(model, row[None])[0] for row in rows]
    for left in (False, True):
        tokens, mask = pad(rows, left)
        tokens = np.where(mask == 1, tokens, rng.integers(32, size=(2, 9)))  # pads are any token
        together = logits_of(model, tokens, mask)
        for ours, seen, expected in zip(together, mask == 1, alone, strict=True):
            np.testing.assert_allclose(ours[seen], expected, atol=1e-5, rtol=0)


def test_no_token_sees_a_later_one():
    model = tiny()
    tokens = np.random.default_rng(3).integers(32, size=(1, 9))
    other = tokens.copy()
    other[0, 5] = (other[0, 5] + 1) % 32
    before, after = (logits_of(model, each)[0] for each in (tokens, other))
    np.testing.assert_array_equal(before[:5], after[:5])
    assert np.abs(before[5:] - after[5:]).max(axis=-1).min() > 1e-3


@functools.partial(jax.jit, static_argnums=0)
def loss_gradient(lm: Qwen3, variables, tokens, mask):
    """A loss over the real tokens, the hidden states, and the gradient by every parameter."""

    def loss(variables):
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        hidden = lm.apply(variables, tokens, positions, mask)
        logits = lm.apply(variables, hidden, method="logits")
        return jnp.sum(jnp.where(mask[..., None], jnp.sin(logits), 0)), hidden

    (value, hidden), gradient = jax.value_and_grad(loss, has_aux=True)(variables)
    return value, hidden, gradient


def test_a_row_of_padding_is_finite_and_adds_nothing():
    model = tiny()
    tokens = np.random.default_rng(4).integers(32, size=(3, 9)).astype(np.int32)
    mask = np.arange(9) >= np.array([[0], [5], [9]])  # the last row is padding alone
    results = loss_gradient(*model, jnp.asarray(tokens), jnp.asarray(mask))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(results))
    tokens[~mask] = 7
    value, _, gradient = loss_gradient(*model, jnp.asarray(tokens), jnp.asarray(mask))
    assert value == results[0]
    jax.tree.map(np.testing.assert_array_equal, gradient, results[2])


def test_recomputing_the_layers_changes_no_gradient():
    tokens = jnp.asarray(np.random.default_rng(5).integers(32, size=(3, 9)), jnp.int32)
    mask = jnp.ones((3, 9), bool)
    plain, remat = (loss_gradient(*model, tokens, mask) for model in (tiny(), tiny(remat=True)))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain[2])) > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, remat)


def test_in_bfloat16_the_logits_are_float32_and_near():
    tokens = np.random.default_rng(6).integers(32, size=(2, 9))
    model = tiny(jnp.bfloat16)
    hidden, keys_values = jax.eval_shape(
        lambda *arrays: model.lm.apply(*arrays, method="prefill"),
        model.variables,
        *(jax.ShapeDtypeStruct(tokens.shape, dtype) for dtype in (jnp.int32, jnp.int32, bool)),
    )
    assert {leaf.dtype for leaf in (hidden, *keys_values)} == {jnp.dtype(jnp.bfloat16)}
    logits, exact = logits_of(model, tokens), logits_of(tiny(), tokens)
    assert logits.dtype == np.float32
    assert 0 < np.abs(logits - exact).max() < 0.1 * exact.std()


def test_an_untied_head_is_its_own():
    config = dataclasses.replace(TINY, tie_embeddings=False)
    lm = Qwen3(config)
    params = random_params(config)
    logits = lm.apply({"params": params}, jnp.eye(8), method="logits")
    np.testing.assert_allclose(logits, params["lm_head"].T, atol=1e-6)
    assert np.abs(params["lm_head"] - params["embed_tokens"]).max() > 0.01


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_have_the_published_number_of_parameters(size):
    c, published = PUBLISHED[size]
    shapes = convert.base_shapes(c)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published
    attention = c.embed_dim * c.head_dim * 2 * (c.num_heads + c.num_kv_heads) + 2 * c.head_dim
    a_layer = attention + 3 * c.embed_dim * c.mlp_dim + 2 * c.embed_dim
    tables = (1 if c.tie_embeddings else 2) * c.vocab_size * c.embed_dim
    assert tables + c.num_layers * a_layer + c.embed_dim == published
    assert sum(np.prod(place.stored) for place in convert.layout(c).values()) == published
