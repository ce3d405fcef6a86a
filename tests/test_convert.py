import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agon_jax.models import convert
from agon_jax.models.config_json import CheckpointError

GOLDENS = Path(__file__).parent / "goldens"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q, DOWN, OUT = (
    f"model.layers.1.{name}.weight"
    for name in ("self_attn.q_proj", "mlp.down_proj", "self_attn.o_proj")
)


@pytest.fixture
def directory(tmp_path) -> Path:
    """A copy of the tied golden, for a test to spoil."""
    shutil.copytree(GOLDENS / "tied", tmp_path / "model")
    return tmp_path / "model"


def edit_config(directory: Path, **fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory: Path, tensors: dict, remove: tuple[str, ...] = ()) -> None:
    path = directory / "model.safetensors"
    new = load_file(path) | tensors
    save_file({name: tensor for name, tensor in new.items() if name not in remove}, path)


def assert_same(left, right) -> None:
    """Equal trees, bit for bit, of equal dtypes."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# Reading


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_every_tensor_stands_where_the_model_reads_it(name):
    config, params = convert.load(GOLDENS / name, "float32")
    tensors = load_file(GOLDENS / name / "model.safetensors")
    sizes = config.num_heads, config.head_dim, config.embed_dim
    np.testing.assert_array_equal(params["embed_tokens"], tensors.pop(EMBEDDING))
    if name == "untied":
        np.testing.assert_array_equal(params["lm_head"], tensors.pop(HEAD))
    np.testing.assert_array_equal(params["norm"]["scale"], tensors.pop("model.norm.weight"))
    layers = params["layers"]
    np.testing.assert_array_equal(layers["down_proj"]["kernel"][1], tensors[DOWN].T)
    # Output row n * head_dim + h of q_proj is element h of head n; likewise the columns of o_proj.
    q, o = tensors[Q].reshape(sizes), tensors[OUT].reshape(sizes[2], *sizes[:2])
    np.testing.assert_array_equal(layers["q_proj"]["kernel"][1], q.transpose(2, 0, 1))
    np.testing.assert_array_equal(layers["o_proj"]["kernel"][1], o.transpose(1, 2, 0))
    per_layer = sum(tensor.size for tensor in tensors.values())
    assert sum(leaf.size for leaf in jax.tree.leaves(layers)) == per_layer


@pytest.mark.parametrize(
    ("remove", "tensors", "message"),
    [
        ((Q,), {}, f"lacks {Q}; by the sizes"),
        (
            (),
            {"model.layers.3.mlp.up_proj.weight": (24, 16)},
            r"has besides model.layers.3.mlp",
        ),
        ((), {"model.layers.0.self_attn.q_proj.bias": (32,)}, r"has besides .*q_proj\.bias"),
        ((), {DOWN: (24, 16)}, rf"{DOWN} has the shape \[24, 16\], .* must be \[16, 24\]"),
        ((), {EMBEDDING: (60, 16)}, rf"{EMBEDDING} has the shape \[60, 16\]"),
        ((), {HEAD: (60, 16)}, rf"{HEAD} has the shape \[60, 16\]"),
    ],
)
def test_a_tensor_missing_extra_or_misshapen_is_named(directory, remove, tensors, message):
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    edit_tensors(directory, zeros, remove)
    with pytest.raises(CheckpointError, match=message):
        convert.load(directory, "float32")


def test_weights_that_are_not_floats_are_refused(directory):
    edit_tensors(directory, {DOWN: np.zeros((16, 24), np.int8)})
    with pytest.raises(CheckpointError, match=f"{DOWN} is I8"):
        convert.load(directory, "float32")


def test_half_a_file_and_no_file_are_named(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: is not a whole safetensors file"
    ):
        convert.load(directory, "float32")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        convert.load(directory, "float32")


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_every_float_is_read_as_the_dtype_asked_for(directory, source, target):
    tensors = load_file(directory / "model.safetensors")
    edit_tensors(directory, {name: tensor.astype(source) for name, tensor in tensors.items()})
    _, params = convert.load(directory, target)
    _, exact = convert.load(GOLDENS / "tied", "float32")
    rounded = jax.tree.map(lambda leaf: leaf.astype(source).astype(jnp.dtype(target)), exact)
    assert_same(params, rounded)


# The head that is there or not


def test_a_head_equal_to_the_embedding_of_a_tied_model_is_not_held_twice(directory):
    edit_tensors(directory, {HEAD: load_file(directory / "model.safetensors")[EMBEDDING]})
    config, params = convert.load(directory, "float32")
    assert config.tie_embeddings and "lm_head" not in params


def test_another_head_in_a_model_said_to_be_tied_is_used_with_a_warning(directory):
    head = load_file(directory / "model.safetensors")[EMBEDDING] + 1
    edit_tensors(directory, {HEAD: head})
    with pytest.warns(UserWarning, match="lm_head.weight differs from the embedding"):
        config, params = convert.load(directory, "float32")
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"], head)


def test_an_untied_model_keeps_a_head_equal_to_its_embedding(directory):
    edit_config(directory, tie_word_embeddings=False)
    edit_tensors(directory, {HEAD: load_file(directory / "model.safetensors")[EMBEDDING]})
    config, params = convert.load(directory, "float32")
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"], params["embed_tokens"])


def test_an_untied_model_without_a_head_is_refused(directory):
    edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing, .* = false"):
        convert.load(directory, "float32")


# Writing


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [10**9, 9000], ids=["one file", "shards"])
def test_what_is_saved_is_loaded_again(tmp_path, name, dtype, shard_bytes):
    config, params = convert.load(GOLDENS / name, dtype)
    on_device = jax.tree.map(jnp.asarray, params)
    convert.save(tmp_path / "new", config, on_device, GOLDENS / name, shard_bytes)
    assert (shard_bytes > 9000) != (tmp_path / "new/model.safetensors.index.json").exists()
    assert all(file.stat().st_size < shard_bytes + 4000 for file in (tmp_path / "new").iterdir())
    again, loaded = convert.load(tmp_path / "new", dtype)
    assert again == config
    assert_same(loaded, params)
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("shard_bytes", [10**9, 9000], ids=["one file", "shards"])
def test_transformers_loads_what_is_saved(tmp_path, shard_bytes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config, params = convert.load(GOLDENS / "untied", "float32")
    convert.save(tmp_path / "new", config, params, GOLDENS / "untied", shard_bytes)
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "new")
    with np.load(GOLDENS / "untied" / "golden.npz") as golden, torch.no_grad():
        ids, mask, expected = (golden[name] for name in ("ids", "mask", "logits"))
        logits = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()
    assert model.dtype == torch.float32
    np.testing.assert_allclose(logits[mask == 1], expected[mask == 1], atol=1e-5, rtol=0)


def test_a_saved_directory_has_the_tokenizer_and_token_ids_of_the_one_it_is_like(directory):
    edit_config(directory, eos_token_id=[5, 6], max_position_embeddings=99)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "notes.txt").write_text("mine")
    config, params = convert.load(directory, "float32")
    convert.save(directory.parent / "new", config, params, directory)
    new = directory.parent / "new"
    fields = json.loads((new / "config.json").read_text())
    assert (fields["eos_token_id"], fields["max_position_embeddings"]) == ([5, 6], 99)
    assert len({file.stat().st_mode for file in new.iterdir()}) == 1  # who reads one reads all
    assert {file.name for file in new.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_saving_again_replaces_everything_but_the_tokenizer(tmp_path):
    config, params = convert.load(GOLDENS / "untied", "float32")
    convert.save(tmp_path / "new", config, params, max_shard_bytes=9000)
    (tmp_path / "new" / "tokenizer.json").write_text("{}")
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    convert.save(tmp_path / "new", config, other)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert_same(convert.load(tmp_path / "new", "float32")[1], other)


def test_saving_takes_no_files_of_others_away(directory):
    config, params = convert.load(directory, "float32")
    with pytest.raises(FileExistsError, match=r"golden.npz would be lost"):
        convert.save(directory, config, params)
    assert (directory / "golden.npz").exists()


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    config, params = convert.load(GOLDENS / "tied", "float32")
    convert.save(tmp_path / "new", config, params)

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(convert, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        convert.save(tmp_path / "new", config, jax.tree.map(lambda leaf: leaf + 1, params))
    assert [file.name for file in tmp_path.iterdir()] == ["new"]
    assert_same(convert.load(tmp_path / "new", "float32")[1], params)


def test_a_tree_of_another_config_is_refused(tmp_path):
    config, params = convert.load(GOLDENS / "tied", "float32")
    with pytest.raises(ValueError, match="lacks lm_head"):
        convert.save(tmp_path / "new", dataclasses.replace(config, tie_embeddings=False), params)
    with pytest.raises(ValueError, match="has besides lm_head"):
        convert.save(tmp_path / "new", config, {**params, "lm_head": params["embed_tokens"]})
    with pytest.raises(ValueError, match=r"layers/down_proj/kernel has the shape \(3, 24, 16\)"):
        convert.save(tmp_path / "new", dataclasses.replace(config, mlp_dim=25), params)
    assert not list(tmp_path.iterdir())


# Shards


@pytest.fixture
def shards(tmp_path) -> Path:
    config, params = convert.load(GOLDENS / "tied", "float32")
    convert.save(tmp_path / "sharded", config, params, max_shard_bytes=15_000)
    return tmp_path / "sharded"


def test_the_index_lists_every_tensor(shards):
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    tensors = load_file(GOLDENS / "tied" / "model.safetensors")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"].values()) == {f.name for f in shards.glob("*.safetensors")}


def test_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: is missing"):
        convert.load(shards, "float32")


@pytest.mark.parametrize("where", ["index", "shard"])
def test_a_tensor_that_only_the_index_or_only_a_shard_knows_is_named(shards, where):
    index_path = shards / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = shards / index["weight_map"][Q]
    if where == "shard":
        del index["weight_map"][Q]
        index_path.write_text(json.dumps(index))
    else:
        save_file({n: t for n, t in load_file(shard).items() if n != Q}, shard)
    verdict = "lacks" if where == "index" else "has besides"
    with pytest.raises(CheckpointError, match=rf"{shard.name}: {verdict} {Q}"):
        convert.load(shards, "float32")


def test_an_index_that_is_none_is_refused(shards):
    for weight_map in ({}, {"weight_map": 1}, {"weight_map": {Q: 1}}):
        (shards / "model.safetensors.index.json").write_text(json.dumps(weight_map))
        with pytest.raises(CheckpointError, match=r"index.json: weight_map must map"):
            convert.load(shards, "float32")
