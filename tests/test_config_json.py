import json
import shutil
from pathlib import Path

import pytest

from agon_jax.models.config_json import CheckpointError, as_config_json, read_config
from agon_jax.models.qwen3 import Qwen3Config

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture
def directory(tmp_path) -> Path:
    """config.json of the tied golden, for a test to spoil."""
    shutil.copy(GOLDENS / "tied" / "config.json", tmp_path)
    return tmp_path


def test_the_sizes_come_from_config_json():
    tied = Qwen3Config(64, 16, 24, 3, 4, 2, 8, 1e6, 1e-6, True)
    untied = Qwen3Config(64, 16, 24, 2, 6, 2, 4, 5e6, 1e-6, False)
    assert read_config(GOLDENS / "tied") == tied  # theta at top level
    assert read_config(GOLDENS / "untied") == untied  # theta in rope_parameters


@pytest.mark.parametrize(
    ("remove", "fields", "message"),
    [
        (("rope_theta",), {}, "rope_theta is missing"),
        ((), {"rope_theta": 0}, "rope_theta = 0"),
        ((), {"rope_theta": "1e6"}, "rope_theta = '1e6'"),
        ((), {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta = 1e.06, .*10000"),
        ((), {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'"),
        ((), {"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type = 'linear'"),
        ((), {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ((), {"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ((), {"attention_bias": True}, "attention_bias = True"),
        ((), {"use_sliding_window": True}, "use_sliding_window = True"),
        ((), {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ((), {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (("hidden_act",), {}, "hidden_act is missing"),
        ((), {"model_type": "gemma3_text"}, "model_type = 'gemma3_text'"),
        ((), {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8"),
        (("head_dim",), {}, "head_dim is missing"),
        ((), {"head_dim": 7}, "head_dim = 7"),
        ((), {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ((), {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ((), {"vocab_size": 64.0}, "vocab_size = 64.0"),
        (("tie_word_embeddings",), {}, "tie_word_embeddings is missing"),
        (("rms_norm_eps",), {}, "rms_norm_eps is missing"),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused_by_name(directory, remove, fields, message):
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: fields[name] for name in fields if name not in remove}))
    with pytest.raises(CheckpointError, match=message):
        read_config(directory)


def test_a_config_that_cannot_be_read_is_named(directory):
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object, not list")):
        (directory / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"config.json: {message}"):
            read_config(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read: No such file"):
        read_config(directory)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_what_is_written_is_read_again(directory, name):
    config = read_config(GOLDENS / name)
    fields = as_config_json(config, "bfloat16", {"eos_token_id": [1, 2], "vocab_size": 7})
    (directory / "config.json").write_text(json.dumps(fields))
    assert read_config(directory) == config
    assert (fields["eos_token_id"], fields["dtype"]) == ([1, 2], "bfloat16")
