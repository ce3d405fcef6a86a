"""The verdict on one answer."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether an answer is right, and why it was judged so."""

    correct: bool
    reason: str  # right | wrong | no_answer | too_long | unparsable | timeout | memory | crash
