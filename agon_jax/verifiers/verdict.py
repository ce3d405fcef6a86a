"""The verdict on one answer."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether an answer is right, and why it was judged so."""

    correct: bool
    # right | wrong | no_answer | too_long | unparsable | bad_gold | timeout | memory | crash
    reason: str
