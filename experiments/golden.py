"""Goldens: what transformers computes for a Hugging Face directory, as arrays to compare with.

Masks are 1 for tokens, positions count a row's tokens from 0 (V vocabulary, S steps):
`ids, mask, pos, logits` padded on the right, and `lids, lmask, lpos, llogits` on the left;
`gen_prompt` [1, P], `gen_ids` [S], `gen_logits` [S, V] of a greedy continuation from the cache,
which no stop token ends; `bgen_lids, bgen_lmask, bgen_ids, bgen_logits` the same of a left-padded
batch; `hidden_i` the input of layer i for gen_prompt, the last one the output of the final norm.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from agon_jax.config import SettingError

ROWS = (21, 13, 7)  # tokens of the rows whose logits are kept
PROMPTS = (11, 11, 7)  # of the batch that is continued
STEPS = 16  # greedy tokens

Golden = dict[str, np.ndarray]


def transformers_golden(directory: Path, seed: int = 0) -> Golden:
    """The golden of a directory on random tokens, in float32 on the CPU; needs torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise SettingError(
            "without --golden the reference is transformers' model, which needs torch: "
            "pip install torch, or give a golden made where there is one (--write)"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config = transformers.GenerationConfig()  # no stop tokens, no sampling
    rng = np.random.default_rng(seed)

    def draw(lengths: Sequence[int]) -> list[np.ndarray]:
        return [rng.integers(model.config.vocab_size, size=n, dtype=np.int32) for n in lengths]

    def tensors(ids: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
        arrays = {"input_ids": ids, "attention_mask": mask}
        return {name: torch.from_numpy(a.astype(np.int64)) for name, a in arrays.items()}

    def forward(ids: np.ndarray, mask: np.ndarray) -> Any:
        positions = torch.from_numpy(positions_of(mask).astype(np.int64))
        with torch.no_grad():
            return model(
                **tensors(ids, mask),
                position_ids=positions,
                use_cache=False,
                output_hidden_states=True,
            )

    def greedy(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [B, S] and the logits that chose them [B, S, V]."""
        out = model.generate(
            **tensors(ids, mask),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=STEPS,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
        logits = np.stack([step.numpy() for step in out.logits], axis=1)
        return out.sequences[:, ids.shape[1] :].numpy().astype(np.int32), logits

    golden: Golden = {}
    rows = draw(ROWS)
    for prefix, left in (("", False), ("l", True)):
        ids, mask = pad(rows, left)
        logits = forward(ids, mask).logits.numpy()
        parts = {"ids": ids, "mask": mask, "pos": positions_of(mask), "logits": logits}
        golden |= {prefix + name: part for name, part in parts.items()}
    prompts = draw(PROMPTS)
    prompt, mask = pad(prompts[:1], left=True)
    ids, logits = greedy(prompt, mask)
    golden |= {"gen_prompt": prompt, "gen_ids": ids[0], "gen_logits": logits[0]}
    hidden = enumerate(forward(prompt, mask).hidden_states)
    golden |= {f"hidden_{index}": state.numpy() for index, state in hidden}
    prompt, mask = pad(prompts, left=True)
    ids, logits = greedy(prompt, mask)
    parts = {"lids": prompt, "lmask": mask, "ids": ids, "logits": logits}
    return golden | {f"bgen_{name}": part for name, part in parts.items()}


def pad(rows: Sequence[np.ndarray], left: bool) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask), int32 [B, T], of rows of token ids with zeros on one side."""
    shape = len(rows), max(map(len, rows))
    ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for index, row in enumerate(rows):
        at = slice(-len(row), None) if left else slice(len(row))
        ids[index, at], mask[index, at] = row, 1
    return ids, mask


def positions_of(mask: np.ndarray) -> np.ndarray:
    """The place of every token among those of its row, from 0; 0 before the first."""
    return np.maximum(mask.cumsum(axis=1) - 1, 0).astype(np.int32)
