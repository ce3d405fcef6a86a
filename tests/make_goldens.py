"""Makes tests/goldens again: two small random Qwen3 models and what transformers computes of them.

    python tests/make_goldens.py        # needs torch: pip install '.[parity]'

Each is a Hugging Face directory with a golden.npz (experiments/golden.py says what is in it). Norm
weights are away from 1 and the other weights large, so that no part of the model is idle.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
import transformers

from experiments.golden import Golden, transformers_golden

GOLDENS = Path(__file__).parent / "goldens"
SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, rms_norm_eps=1e-6)
MODELS = {  # grouped queries with a head_dim that is not hidden_size / heads; then what differs
    "tied": dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    | dict(tie_word_embeddings=True, rope_theta=1e6, published=True),
    "untied": dict(num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    | dict(tie_word_embeddings=False, rope_theta=5e6, published=False),
}


def main() -> None:
    for name, sizes in MODELS.items():
        directory = GOLDENS / name
        for seed in itertools.count():
            write_model(directory, seed, **sizes)
            golden = transformers_golden(directory)
            if telling(golden):
                break
        print(f"{directory}: seed {seed}")
        np.savez_compressed(directory / "golden.npz", **golden)


def write_model(directory: Path, seed: int, rope_theta: float, published: bool, **sizes) -> None:
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, **sizes, rope_parameters=rope)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:  # a small embedding, or every token would be followed by itself
                parameter.normal_(std=0.3 if "embed" in name else parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    if published:  # as the published files are: theta at top level
        path = directory / "config.json"
        fields = json.loads(path.read_text())
        del fields["rope_parameters"]
        path.write_text(json.dumps(fields | {"rope_theta": rope_theta}, indent=2) + "\n")


def telling(golden: Golden) -> bool:
    """Whether the greedy tokens are of many kinds and none was close to call."""
    kinds = len(np.unique(golden["gen_ids"])), len(np.unique(golden["bgen_ids"]))
    margins = [
        np.diff(np.sort(golden[name])[..., -2:]).min() for name in ("gen_logits", "bgen_logits")
    ]
    return min(kinds) >= 8 and min(margins) > 5e-3


if __name__ == "__main__":
    main()
