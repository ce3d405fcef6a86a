"""Text to tokens and back, for any Hugging Face fast tokenizer and its chat template.

Knows a family's stop ids and its private reasoning block. Prompts become ids here with thinking
on; a completion is cut at its block on ids, never on text, since text can spell a marker out.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32
from transformers import PreTrainedTokenizerFast

from agon_jax.prompts import Sections

logger = logging.getLogger(__name__)


class Markers(NamedTuple):
    """The strings around a reasoning block, each one token."""

    open: str
    close: str
    header: str = ""  # what a block starts with by convention


MARKERS = (
    Markers("<think>", "</think>"),  # Qwen3, Qwen3.5
    Markers("<|channel>", "<channel|>", "thought"),  # Gemma 4
)


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer with what a rollout must know of it; made by `load_tokenizer`."""

    fast: PreTrainedTokenizerFast
    eos_ids: frozenset[int]  # any of these ends a completion
    pad_id: int  # may be one of eos_ids: masks come from lengths
    open_id: int
    close_id: int
    header: str  # text that a reasoning block starts with by convention

    @cached_property
    def vocab_size(self) -> int:
        """Entries of the tokenizer; a model may have more logits, which mean nothing."""
        return len(self.fast)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Turns, roles, stops and all else that is special, but not the block's own markers."""
        return _special_ids(self.fast) - {self.open_id, self.close_id}

    @cached_property
    def control_strings(self) -> tuple[str, ...]:
        """The texts of control_ids, longest first."""
        strings = self.fast.convert_ids_to_tokens(sorted(self.control_ids))
        return tuple(sorted(strings, key=len, reverse=True))

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.control_strings)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """The ids of a text; control strings in it are read as control tokens."""
        return self.fast.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " time"], special: bool = False) -> str:
        """The text of ids, with or without the special tokens."""
        return self.fast.decode(
            [int(i) for i in ids],
            skip_special_tokens=not special,
            clean_up_tokenization_spaces=False,
        )

    def render(self, user_text: str, system: str = "") -> Int32[np.ndarray, " prompt"]:
        """The prompt for one user turn, up to where the model goes on, thinking on.

        A space takes the place of each control string in the texts: only the template speaks in
        control tokens.
        """
        user_text, system = (self._control.sub(" ", text) for text in (user_text, system))
        return np.array(_render(self.fast, user_text, system), np.int32)

    def sections(
        self, prompt_ids: Int[np.ndarray, " prompt"], completion_ids: Int[np.ndarray, " time"]
    ) -> Sections:
        """The completion cut at its reasoning block (of several, at the last that is closed).

        What a block that is opened again and never closed holds is in neither section: it is
        private, and no reasoning that led to an answer. Without a closed block, all is reasoning.
        """
        ids = completion_ids[: _first(np.isin(completion_ids, list(self.eos_ids)))]
        opens, closes = (np.flatnonzero(ids == i) for i in (self.open_id, self.close_id))
        opened = self._opens_block(prompt_ids)
        if not closes.size:
            start = 0 if opened or not opens.size else opens[0] + 1
            return Sections(False, False, self._reasoning(ids[start:]), "")
        close = closes[-1]
        before = opens[opens < close]
        start = before[-1] + 1 if before.size else 0
        after = ids[close + 1 :]
        well_formed = (
            closes.size == 1
            and opens.size == (0 if opened else 1)
            and (opened or (before.size == 1 and self._is_blank(ids[: before[0]])))
            and not np.isin(ids, list(self.control_ids)).any()
        )
        return Sections(
            True,
            bool(well_formed),
            self._reasoning(ids[start:close]),
            self.decode(after[: _first(after == self.open_id)]).strip(),
        )

    def _opens_block(self, prompt_ids: Int[np.ndarray, " prompt"]) -> bool:
        """Whether the model goes on inside a block that the prompt's end opened (Qwen3.5)."""
        opens = np.flatnonzero(prompt_ids == self.open_id)
        if not opens.size:
            return False
        tail = self.decode(prompt_ids[opens[-1] + 1 :], special=True)
        return tail.strip() in ("", self.header)

    def _reasoning(self, ids: Int[np.ndarray, " time"]) -> str:
        return self.decode(ids).strip().removeprefix(self.header).strip()

    def _is_blank(self, ids: Int[np.ndarray, " time"]) -> bool:
        return not self.decode(ids, special=True).strip()


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    Stop ids are the union of what config.json, generation_config.json and the tokenizer name, and
    the token that ends a turn in the chat template. Raises ValueError where the directory has no
    fast tokenizer, no stop id, no reasoning markers, or a template that will not let it think.
    """
    directory = Path(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(
            f"{directory} has no tokenizer.json: a fast tokenizer is needed; save one there with "
            "transformers' save_pretrained"
        )
    fast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    open_id, close_id, header = _find_markers(fast, directory)
    if not fast.chat_template:
        logger.warning("%s has no chat template: prompts are plain text", directory)
    else:
        prompt = _render(fast, "x", "")
        if close_id in prompt[_last(prompt, open_id) :]:
            raise ValueError(
                f"the chat template of {directory} closes the reasoning block in the prompt, with "
                "enable_thinking=True too: use the template of a model that thinks"
            )
    named = _named_ids(directory, "eos_token_id")
    eos_ids = {*named, fast.eos_token_id, _turn_end(fast)} - {None}
    if not eos_ids:
        raise ValueError(
            f"{directory} names no stop token: set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json"
        )
    for eos_id in eos_ids:
        if not 0 <= eos_id < len(fast):
            raise ValueError(
                f"{directory} names the stop id {eos_id}, but its tokenizer has {len(fast)} "
                "entries: config and tokenizer belong to different models"
            )
    pads = [fast.pad_token_id, *_named_ids(directory, "pad_token_id"), min(eos_ids)]
    pad_id = next(i for i in pads if i is not None)
    return Tokenizer(fast, frozenset(eos_ids), pad_id, open_id, close_id, header)


def _find_markers(fast: PreTrainedTokenizerFast, directory: Path) -> tuple[int, int, str]:
    for markers in MARKERS:
        ids = [fast.encode(marker, add_special_tokens=False) for marker in markers[:2]]
        texts = [fast.convert_ids_to_tokens(each) for each in ids]
        if texts == [[markers.open], [markers.close]]:
            return ids[0][0], ids[1][0], markers.header
    known = " or ".join(f"{markers.open} and {markers.close}" for markers in MARKERS)
    raise ValueError(
        f"the tokenizer of {directory} has no reasoning markers: it must hold {known}, each as one "
        "token; add them with add_tokens, and train the model to use them"
    )


def _render(fast: PreTrainedTokenizerFast, user_text: str, system: str) -> list[int]:
    """A user turn's ids by the chat template; without one, the bare text."""
    if not fast.chat_template:
        text = "".join(f"{part}\n\n" for part in (system, user_text) if part)
        start = [] if fast.bos_token_id is None else [fast.bos_token_id]
        return start + fast.encode(text, add_special_tokens=False)
    turns = [("system", system)] if system else []
    text = fast.apply_chat_template(
        [{"role": role, "content": content} for role, content in [*turns, ("user", user_text)]],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    return fast.encode(text, add_special_tokens=False)  # the template wrote the start token


def _turn_end(fast: PreTrainedTokenizerFast) -> int | None:
    """The special token that the chat template puts behind what the assistant says."""
    if not fast.chat_template:
        return None
    said = "something"
    text = fast.apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}], tokenize=False
    )
    behind = fast.encode(text.rpartition(said)[2].lstrip(), add_special_tokens=False)
    return behind[0] if behind and behind[0] in _special_ids(fast) else None


def _special_ids(fast: PreTrainedTokenizerFast) -> frozenset[int]:
    added = {i for i, token in fast.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(fast.all_special_ids))


def _named_ids(directory: Path, key: str) -> list[int]:
    """The ids under a key of either config file; a model with several parts nests its text's."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            value = part.get(key)
            found += value if isinstance(value, list) else [] if value is None else [value]
    return found


def _first(hits: np.ndarray) -> int:
    """The index of the first True, or the length."""
    return int(hits.argmax()) if hits.any() else len(hits)


def _last(ids: list[int], wanted: int) -> int:
    """The index of the last occurrence, or 0."""
    return len(ids) - 1 - ids[::-1].index(wanted) if wanted in ids else 0
