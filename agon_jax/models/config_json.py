"""config.json of a Hugging Face directory, read as a Qwen3Config and written again.

Published files give rope_theta at top level or inside rope_parameters; both are read. No size has
a default, since transformers' own are those of no published checkpoint. What this implementation
does not compute (sliding windows, scaled RoPE, biases, quantized weights) is refused by name.
"""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from agon_jax.config import SettingError
from agon_jax.models.qwen3 import Qwen3Config

SIZES = {  # Qwen3Config's name -> config.json's
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
REQUIRED = {"model_type": "qwen3", "hidden_act": "silu"}
ABSENT_OR = {  # settings that change the computation unless they have one of these values
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
CARRIED = (  # what a checkpoint made from another keeps of it
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "initializer_range",
)


class CheckpointError(SettingError):
    """A model's directory cannot be used; the message names the file, what in it, and the mend."""


def read_config(directory: str | Path) -> Qwen3Config:
    """The sizes that a directory's config.json states; CheckpointError where they are not Qwen3's.

    tie_embeddings is the file's word; `convert.load` holds it against the tensors.
    """
    path = Path(directory) / "config.json"
    fields = read_json(path)
    for name, wanted in REQUIRED.items():
        if fields.get(name) != wanted:
            _refuse(path, name, fields.get(name), repr(wanted))
    for name, allowed in ABSENT_OR.items():
        if fields.get(name) not in allowed:
            _refuse(path, name, fields[name], f"{json.dumps(allowed[0])} or absent")
    for kind in fields.get("layer_types") or ():
        if kind != "full_attention":
            _refuse(path, "layer_types", kind, "'full_attention' throughout")

    sizes = {}
    for ours, theirs in SIZES.items():
        value = sizes[ours] = fields.get(theirs)
        if type(value) is not int or value < 1:
            _refuse(path, theirs, value, "a whole number >= 1")
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        wanted = f"a divisor of num_attention_heads = {sizes['num_heads']}"
        _refuse(path, "num_key_value_heads", sizes["num_kv_heads"], wanted)
    if sizes["head_dim"] % 2:
        _refuse(path, "head_dim", sizes["head_dim"], "even, as RoPE turns pairs")
    tied = fields.get("tie_word_embeddings")
    if not isinstance(tied, bool):
        _refuse(path, "tie_word_embeddings", tied, "true or false")
    epsilon = _positive(path, "rms_norm_eps", fields.get("rms_norm_eps"))
    return Qwen3Config(
        **sizes, rope_theta=_rope_theta(path, fields), norm_eps=epsilon, tie_embeddings=tied
    )


def as_config_json(config: Qwen3Config, dtype: str, like: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that transformers 4 and 5 load as this model.

    Token ids and the longest position are those of `like`, the fields of another config.json.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **REQUIRED,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "use_sliding_window": False,
        "dtype": dtype,
        **{name: like[name] for name in CARRIED if name in like},
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where there is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # of JSON and of UTF-8
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(fields).__name__}")
    return fields


def _rope_theta(path: Path, fields: dict[str, Any]) -> float:
    found = {"rope_theta": fields.get("rope_theta")}
    for place in ("rope_parameters", "rope_scaling"):  # transformers 5's name, and 4's
        rope = fields.get(place) or {}
        if not isinstance(rope, dict):
            _refuse(path, place, rope, "an object or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            _refuse(path, f"{place}.rope_type", kind, "'default': scaled RoPE is not implemented")
        if rope.get("partial_rotary_factor", 1) != 1:
            _refuse(path, f"{place}.partial_rotary_factor", rope["partial_rotary_factor"], "1")
        found[f"{place}.rope_theta"] = rope.get("rope_theta")
    stated = {name: _positive(path, name, v) for name, v in found.items() if v is not None}
    if not stated:
        raise CheckpointError(
            f"{path}: rope_theta is missing, at top level and in rope_parameters: take it from the"
            " published config.json of this model"
        )
    if len(set(stated.values())) > 1:
        each = ", ".join(f"{name} = {value:g}" for name, value in stated.items())
        raise CheckpointError(f"{path}: {each}: must be the same")
    return next(iter(stated.values()))


def _positive(path: Path, name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        _refuse(path, name, value, "a number > 0")
    return float(value)


def _refuse(path: Path, name: str, value: object, allowed: str) -> NoReturn:
    shown = "is missing" if value is None else f"= {value!r}"
    raise CheckpointError(f"{path}: {name} {shown}: must be {allowed}")
