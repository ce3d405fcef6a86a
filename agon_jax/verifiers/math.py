"""Is an answer the gold? Exact integers at once, all else through math-verify.

`verify` runs in a worker process, since some expressions take for ever or all memory to compare.
The answer has been cut out of the completion before; both sides go in a box of their own, because
bare LaTeX often parses to nothing and a longer text may hold another answer.
"""

import re

from agon_jax.verifiers.verdict import Verdict

SECONDS = 5  # of math-verify's own limits on parsing and on comparing; whole seconds only
# Digits in groups of three, or plain. Leading zeros are a matter of writing.
_INTEGER = re.compile(r"([+-]?)0*(\d{1,3}(?:,\d{3})+|\d+)")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")


def exact_integer(gold: str, answer: str) -> Verdict | None:
    """The verdict where both are plain integers: signs, leading zeros and thousands commas aside.

    None where either is anything else. Compares digits as text: no limit on their number matters.
    """
    digits = _as_integer(gold), _as_integer(answer)
    if None in digits:
        return None
    return _verdict(digits[0] == digits[1])


def _as_integer(text: str) -> str | None:
    match = _INTEGER.fullmatch(text.strip())
    if match is None or not match[2].isascii():
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def verify(gold: str, answer: str) -> Verdict:
    """The verdict by math-verify; `unparsable` where either side means nothing to it.

    Letters alone are compared as text: as LaTeX, ABC would be a product and equal to CBA. A gold
    comes first, since comparing sets with relations is not symmetric.
    """
    from math_verify import parse
    from math_verify import verify as equivalent

    gold, answer = _notation(gold), _notation(answer)
    if gold == answer:
        return _verdict(True)
    if _WORDS.fullmatch(gold) or _WORDS.fullmatch(answer):
        return _verdict(gold.casefold() == answer.casefold())
    sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS) for text in (gold, answer)]
    if not all(sides):
        return Verdict(False, "unparsable")
    return _verdict(equivalent(*sides, timeout_seconds=SECONDS))


def _notation(text: str) -> str:
    """Without what is about the answer: dollars, a full stop, \\text around it all."""
    text = " ".join(text.split()).strip("$").strip().removesuffix(".").strip()
    match = re.fullmatch(r"\\(?:text|textbf|mathrm)\{([^{}]*)\}", text)
    return match[1].strip() if match else text


def _verdict(correct: bool) -> Verdict:
    return Verdict(correct, "right" if correct else "wrong")
