"""The words between the policies: prompts, and what is read out of a completion.

Text only; tokens end and begin in tokenizer.py, which gives `Sections`. From those come the answer
for the verifier, the format reward phi, and the summary that the rival reads. Model output is
hostile: everything here is linear in its length.
"""

import re
from typing import NamedTuple

from agon_jax.config import PromptConfig
from agon_jax.withhold import boxes, cap, withhold

ANSWER_TAG = re.compile(r"</?answer>")
REASONING_TAG = re.compile(r"</?think>|<\|channel>|<channel\|>")  # spelled out, not as a token
SLOT = re.compile(r"\{(question|summary)\}")


class Sections(NamedTuple):
    """A completion cut at its reasoning block."""

    closed: bool  # a reasoning block was closed
    well_formed: bool  # exactly one block, opened first, closed once, no control token in or after
    reasoning: str  # inside the block; nobody else reads it
    after: str  # what follows the block, stripped; empty when it was not closed


def draft_prompt(question: str, prompts: PromptConfig) -> str:
    """What the drafter is asked. Braces in the question are text."""
    return _fill(prompts.draft, question=question)


def challenge_prompt(question: str, summary: str, prompts: PromptConfig) -> str:
    """What the challenger is asked; an empty summary is named as such."""
    return _fill(
        prompts.challenge, question=question, summary=summary.strip() or prompts.empty_summary
    )


def _fill(template: str, **values: str) -> str:
    return SLOT.sub(
        lambda slot: values.get(slot[1], slot[0]), template
    )  # one pass: values are text


def parse_answer(after: str) -> str | None:
    r"""The last answer block's content, or else the last box's; a box in the block is unwrapped.

    None when there is neither, or when that last one is empty: an earlier one was not the answer.
    """
    tags = list(ANSWER_TAG.finditer(after))
    for opened, closed in zip(reversed(tags[:-1]), reversed(tags[1:]), strict=True):
        if (opened[0], closed[0]) == ("<answer>", "</answer>"):
            content = after[opened.end() : closed.start()]
            boxed = _last_box(content)
            return (content if boxed is None else boxed).strip() or None
    return (_last_box(after) or "").strip() or None


def _last_box(text: str) -> str | None:
    """The content of the last box that is closed; of nested ones, the innermost."""
    closed = [(content, end) for _, content, end in boxes(text) if text[end : end + 1] == "}"]
    return text[slice(*closed[-1])] if closed else None


def format_reward(sections: Sections) -> bool:
    """phi: a well-formed reasoning block that is closed, then exactly one answer block, at the end.

    A summary may stand between them; a marker spelled out in letters counts as a second block.
    """
    if not (sections.closed and sections.well_formed):
        return False
    if REASONING_TAG.search(sections.reasoning) or REASONING_TAG.search(sections.after):
        return False
    tags = list(ANSWER_TAG.finditer(sections.after))
    if [tag[0] for tag in tags] != ["<answer>", "</answer>"]:
        return False
    content = sections.after[tags[0].end() : tags[1].start()]
    return bool(content.strip()) and not sections.after[tags[1].end() :].strip()


def summary(sections: Sections, prompts: PromptConfig) -> str:
    """What a rival may read: the text after the block, its answer withheld, at most
    `max_summary_chars`. Empty when no block was closed: the raw trace is never shown."""
    if not sections.closed:
        return ""
    answer = parse_answer(sections.after)
    return cap(withhold(sections.after, answer, prompts.withheld), prompts.max_summary_chars)
