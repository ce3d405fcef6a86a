"""Published weights and the trees that `Qwen3` reads: Hugging Face directories, both ways.

A directory holds config.json and safetensors, in one file or in shards with an index. Linear
weights are published (out, in); a kernel here is (*inputs, *outputs), all layers stacked on axis 0.
Both ways are strict: every tensor is used exactly once, and one too many, missing or of another
shape is an error that names it.
"""

import dataclasses
import functools
import json
import math
import operator
import os
import shutil
import warnings
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agon_jax.models.config_json import CheckpointError, as_config_json, read_config, read_json
from agon_jax.models.lora import INPUT_AXES
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COPIED = (  # of the directory that a saved one is `like`
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
HEAD = "lm_head.weight"
NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": HEAD,
}
PARENTS = {
    "input_layernorm": "",
    "q_proj": "self_attn.",
    "k_proj": "self_attn.",
    "v_proj": "self_attn.",
    "q_norm": "self_attn.",
    "k_norm": "self_attn.",
    "o_proj": "self_attn.",
    "post_attention_layernorm": "",
    "gate_proj": "mlp.",
    "up_proj": "mlp.",
    "down_proj": "mlp.",
}
FLOATS = ("F32", "BF16", "F16")  # safetensors' names of the dtypes that are read


class Place(NamedTuple):
    """Where a published tensor stands in the tree of parameters."""

    path: tuple[str, ...]
    layer: int | None  # its index on axis 0 of the leaf
    shape: tuple[int, ...]  # in the tree, without the axis of the layers
    stored: tuple[int, ...]  # as published


@functools.cache  # a trace of the model costs more than reading a small one
def base_shapes(config: Qwen3Config) -> PyTree[jax.ShapeDtypeStruct]:
    """The tree of a base as shapes, made without any memory."""
    return jax.eval_shape(lambda: init_base(Qwen3(config), jax.random.key(0)))


def layout(config: Qwen3Config) -> dict[str, Place]:
    """Every published tensor of a model by its name, layer after layer."""
    places = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(base_shapes(config)):
        path = tuple(entry.key for entry in path)
        if path[0] != "layers":
            places[NAMES[path[0]]] = Place(path, None, leaf.shape, leaf.shape)
            continue
        module, shape = path[1], leaf.shape[1:]
        stored = shape
        if path[-1] == "kernel":
            inputs = INPUT_AXES.get(module, 1)
            stored = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
        for index in range(config.num_layers):
            name = f"model.layers.{index}.{PARENTS[module]}{module}.weight"
            places[name] = Place(path, index, shape, stored)
    return dict(sorted(places.items(), key=lambda item: (item[1].layer is not None, item[1].layer)))


def load(
    directory: str | Path, param_dtype: DTypeLike
) -> tuple[Qwen3Config, PyTree[Float[np.ndarray, "..."]]]:
    """The config and the base of a Hugging Face directory, in host memory as `param_dtype`.

    Beside the result, memory holds one tensor at a time. An lm_head that equals the embedding of a
    model said to be tied is dropped; one that differs is used, with a warning, and the config says
    untied then. Raises CheckpointError.
    """
    directory = Path(directory)
    config = read_config(directory)
    with ExitStack() as files:
        tensors = _open_tensors(directory, files)
        stored = dataclasses.replace(config, tie_embeddings=HEAD not in tensors)
        if stored.tie_embeddings and not config.tie_embeddings:
            raise CheckpointError(
                f"{directory}: {HEAD} is missing, and {CONFIG} says tie_word_embeddings = false:"
                " fetch the weights again, or say true if this model is tied"
            )
        places = layout(stored)
        _check(directory, places, tensors)
        dtype = jnp.dtype(param_dtype)
        params = jax.tree.map(lambda leaf: np.empty(leaf.shape, dtype), base_shapes(stored))
        for name, place in places.items():
            tensor = tensors[name].get_tensor(name)
            if place.path[-1] == "kernel":
                tensor = tensor.T.reshape(place.shape)
            _leaf(params, place)[...] = tensor
    if config.tie_embeddings and HEAD in places:
        if np.array_equal(params["lm_head"], params["embed_tokens"]):
            del params["lm_head"]
            return config, params
        warnings.warn(
            f"{directory}: {CONFIG} says tie_word_embeddings = true, but {HEAD} differs from the"
            " embedding: it is used, and the model held as untied",
            stacklevel=2,
        )
    return stored, params


def save(
    directory: str | Path,
    config: Qwen3Config,
    params: PyTree[Float[Array | np.ndarray, "..."]],
    like: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a base as a Hugging Face directory, in its own dtype, whole or not at all.

    Tokenizer files, generation settings and token ids are those of the directory `like`, by default
    of `directory` as it is. What is there is replaced as a whole, so that no older shard survives;
    one with files that no checkpoint has is refused. Beside the base, host memory holds one
    shard. Raises ValueError for a tree that is not this config's.
    """
    directory = Path(directory).resolve()
    like = directory if like is None else Path(like)
    places = layout(config)
    _check_tree(params, base_shapes(config))
    _check_replaceable(directory)
    dtype = params["embed_tokens"].dtype
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        for name in COPIED:
            if (like / name).is_file():
                shutil.copyfile(like / name, partial / name)
        carried = read_json(like / CONFIG) if (like / CONFIG).exists() else {}
        _write_json(partial / CONFIG, as_config_json(config, dtype.name, carried))
        _write_tensors(partial, params, places, max_shard_bytes)
        _put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_tensors(directory: Path, files: ExitStack) -> dict[str, safe_open]:
    """The open file of every tensor, which an index, where there is one, lists without fail."""
    if (directory / WEIGHTS).exists():
        file = _open(directory / WEIGHTS, files)
        return dict.fromkeys(file.keys(), file)
    if not (directory / INDEX).exists():
        raise CheckpointError(f"{directory}: holds neither {WEIGHTS} nor {INDEX}")
    listed = read_json(directory / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map must map tensors to file names")
    shards = {shard: _open(directory / shard, files) for shard in sorted(set(listed.values()))}
    for shard, file in shards.items():
        expected, found = {name for name in listed if listed[name] == shard}, set(file.keys())
        if expected != found:
            raise CheckpointError(
                f"{directory / shard}: {_difference(expected, found)}; by {INDEX}"
            )
    return {name: shards[shard] for name, shard in listed.items()}


def _open(path: Path, files: ExitStack) -> safe_open:
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing")
    try:
        return files.enter_context(safe_open(path, framework="np"))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is not a whole safetensors file: {error}") from error


def _check(directory: Path, places: dict[str, Place], tensors: dict[str, safe_open]) -> None:
    if places.keys() != tensors.keys():
        difference = _difference(places.keys(), tensors.keys())
        raise CheckpointError(f"{directory}: {difference}; by the sizes in {CONFIG}")
    for name, place in places.items():
        header = tensors[name].get_slice(name)
        if tuple(header.get_shape()) != place.stored:
            raise CheckpointError(
                f"{directory}: {name} has the shape {header.get_shape()}, by the sizes in {CONFIG}"
                f" it must be {list(place.stored)}"
            )
        if header.get_dtype() not in FLOATS:
            raise CheckpointError(
                f"{directory}: {name} is {header.get_dtype()}: must be one of {', '.join(FLOATS)}"
            )


def _difference(expected: Set[str], found: Set[str]) -> str:
    """What `found` lacks and what it has besides, the first few by name."""
    parts = []
    for verdict, names in (("lacks", expected - found), ("has besides", found - expected)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{verdict} {', '.join(sorted(names)[:4])}{more}")
    return "; ".join(parts)


def _leaf(params: PyTree, place: Place) -> Any:
    """The (part of a) leaf that is a published tensor."""
    leaf = functools.reduce(operator.getitem, place.path, params)
    return leaf if place.layer is None else leaf[place.layer]


def _check_tree(params: PyTree, shapes: PyTree) -> None:
    expected, found = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in leaves
        }
        for leaves in map(jax.tree_util.tree_leaves_with_path, (shapes, params))
    )
    if expected.keys() != found.keys():
        raise ValueError(
            f"the tree is not this config's: {_difference(expected.keys(), found.keys())}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{name} has the shape {found[name]}, by the config it must be {shape}"
            )


def _check_replaceable(directory: Path) -> None:
    if not directory.exists():
        return
    for file in directory.iterdir():
        of_ours = file.name in (CONFIG, INDEX, *COPIED) or file.match("model*.safetensors")
        if not of_ours or not file.is_file():
            raise FileExistsError(f"{file} would be lost: save to another directory, or move it")


def _write_tensors(
    directory: Path, params: PyTree, places: dict[str, Place], max_shard_bytes: int
) -> None:
    """One file, or shards with an index, of at most `max_shard_bytes` or one tensor each."""
    sizes = {name: _leaf(params, place).nbytes for name, place in places.items()}
    shards, size = [[]], 0
    for name in places:
        if shards[-1] and size + sizes[name] > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sizes[name]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    for file_name, shard in zip(names, shards, strict=True):
        tensors = {name: _published(params, places[name]) for name in shard}
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        shutil.copymode(directory / CONFIG, directory / file_name)  # it keeps others out
    if len(shards) > 1:
        weight_map = {name: f for f, shard in zip(names, shards, strict=True) for name in shard}
        metadata = {"total_size": sum(sizes.values())}
        _write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _published(params: PyTree, place: Place) -> np.ndarray:
    tensor = np.asarray(jax.device_get(_leaf(params, place)))
    if place.path[-1] == "kernel":
        tensor = tensor.reshape(place.stored[::-1]).T
    return np.ascontiguousarray(tensor)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _put_in_place(new: Path, directory: Path) -> None:
    """`new` becomes `directory`; at no time is there a directory of that name that is half one."""
    if not directory.exists():
        new.rename(directory)
        return
    old = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
    directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old)
