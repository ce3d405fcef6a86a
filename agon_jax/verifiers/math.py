r"""Whether a mathematical answer is right: math-verify, with its known gaps closed.

Runs in a worker's main thread, where its alarms work. The answer arrives alone, cut out of its
block or box. What is notation is normalised here; what is mathematics is left to the library.
"""

import functools
import logging
import re
import threading

from agon_jax.verifiers.verdict import Verdict

RIGHT, WRONG = Verdict(True, "right"), Verdict(False, "wrong")
UNPARSABLE = Verdict(False, "unparsable")

INTEGER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")
REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\N{MINUS SIGN}\N{EN DASH}]", "-"),
        (r"(?<=[0-9])(?:,?\\[,;:! ]|\{,\})\s?(?=[0-9]{3}(?![0-9]))", ""),  # 1\,000  1,\!000
        (r"(?<![A-Za-z0-9.\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,4})\b", r"\1 \\times 10^{\2}"),
        (r"\\varnothing\b", r"\\emptyset"),
        (r"\\langle\b([^<>\\]{1,200})\\rangle\b", r"(\1)"),  # a vector in angle brackets
        (r"\\(?:text|mathrm)\{\s*infinity\s*\}|(?<![\\A-Za-z])infinity\b", r"\\infty"),
    )
)
TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
LETTERS = re.compile(r"\(?\s*([A-Za-z]+(?:\s+[A-Za-z]+)*)\s*\)?")
NUMBER = re.compile(r"-?[0-9.,]+|-?\\[dt]?frac\{-?[0-9]+\}\{[0-9]+\}|-?[0-9]+/[0-9]+")
BASE = re.compile(r"[0-9A-Fa-f]+_\{?[0-9]+\}?")
# Work left to the reader, between numbers; 3 \times 10^{8} is a number, and so is 2^{10}.
WORK = re.compile(
    r"[0-9)}!]\s*(?:[+*-]|\\(?:times|cdot)(?![A-Za-z])(?!\s*10\s*\^)|\\(?:div|pm)(?![A-Za-z]))"
    r"\s*[0-9(\\.]"
    r"|[0-9)}]\s*(?:\\left\s*)?\(\s*-?[0-9]"
    r"|!|\\(?:binom|sum|prod|int|gcd|max|min)(?![A-Za-z])"
)
QUOTIENT = re.compile(r"/|\\[dt]?frac")


def exact_integer(gold: str, answer: str) -> Verdict | None:
    """The verdict where both are whole numbers in digits; None is for the workers to judge.

    Notation does not matter: 12, +12, 012, 1,234 = 1234, -0 = 0. Commas must group by three.
    Compares digits, so a number of any length takes linear time.
    """
    wanted, given = _digits(gold), _digits(answer)
    if wanted is None or given is None:
        return None
    return RIGHT if wanted == given else WRONG


def _digits(text: str) -> str | None:
    match = INTEGER.fullmatch(text.strip().removeprefix("$").removesuffix("$").strip())
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0")
    return match[1].replace("+", "") + digits if digits else "0"


def verify(gold: str, answer: str, limit_s: int = 5) -> Verdict:
    """Whether the answer equals the gold. `limit_s` bounds each of three steps, in whole seconds.

    Beyond the library: an answer that leaves the work to be done ("5+7" for 12), an equation of
    unequal numbers, and letters in another order are wrong. A gold that parses to nothing, which no
    answer but its own text can meet, is told apart: the data need mending.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify's alarms need a main thread: use VerifierPool")
    wanted, given = normalise(gold), normalise(answer)
    if wanted == given:
        return RIGHT
    if not _braces_balance(given):  # would end the box it is put in
        return UNPARSABLE
    letters = _letters(wanted), _letters(given)
    if None not in letters:
        return RIGHT if letters[0] == letters[1] else WRONG
    from math_verify.errors import TimeoutException  # slow to import, and needed by workers alone

    try:
        if bool(BASE.fullmatch(wanted)) != bool(BASE.fullmatch(given)) or _is_work(wanted, given):
            return WRONG
        golds = _parse_gold(wanted, limit_s)
        if not golds:
            return Verdict(False, "bad_gold")
        parsed = _parse(given, limit_s)
        if not parsed:
            return UNPARSABLE
        if "=" in given and "=" not in wanted and _sides_differ(given, limit_s):
            return WRONG
        return RIGHT if _equal(golds, parsed, limit_s) else WRONG
    except TimeoutException:
        return Verdict(False, "timeout")
    except MemoryError:
        return Verdict(False, "memory")


def warm_up() -> None:
    """The library's slow first call; and no log line of it, which would quote hostile output."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    verify(r"\frac{1}{2}", "0.5")


def normalise(text: str) -> str:
    """One notation for what may be written in several."""
    text = " ".join(text.split()).strip("$").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip().strip("$").strip()
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _letters(text: str) -> str | None:
    r"""A choice or a word without its dress, (C) or \text{Yes}; None for anything else."""
    match = LETTERS.fullmatch(TEXT.sub(r"\1", text).rstrip(" .").lstrip())
    if match is None:
        return None
    word = " ".join(match[1].split())
    return word if len(word) == 1 else word.casefold()


def _is_work(gold: str, answer: str) -> bool:
    """Whether a gold that is one number meets an answer that is still to be worked out."""
    gold = gold.rpartition("=")[2].strip()
    if not NUMBER.fullmatch(gold):
        return False
    result = TEXT.sub(" ", answer.rpartition("=")[2])
    whole = bool(INTEGER.fullmatch(gold))
    return bool(WORK.search(result) or (whole and QUOTIENT.search(result)))


def _braces_balance(text: str) -> bool:
    depth = 0
    for brace in re.sub(r"\\.", "", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def _sides_differ(equation: str, limit_s: int) -> bool:
    """Whether the sides are numbers and not all the same one: 3 = 5."""
    sides = [_parse(side, limit_s) for side in equation.split("=")]
    if not all(side and getattr(side[0], "is_number", False) for side in sides):
        return False
    return not all(_equal(sides[-1], side, limit_s) for side in sides[:-1])


def _parse(text: str, limit_s: int) -> list:
    """What the library makes of a text that it gets in a box; empty where it is only text to it."""
    import math_verify

    try:
        found = math_verify.parse(
            f"\\boxed{{{text}}}", parsing_timeout=limit_s, raise_on_error=True
        )
    except MemoryError:
        raise
    except Exception:  # its parsers raise of every kind on what they cannot read
        return []
    return found if any(not isinstance(each, str) for each in found) else []


@functools.lru_cache(maxsize=1024)
def _parse_gold(gold: str, limit_s: int) -> list:
    return _parse(gold, limit_s)  # N answers of a group come after another, with one gold


def _equal(gold: list, answer: list, limit_s: int) -> bool:
    import math_verify

    try:
        return math_verify.verify(gold, answer, timeout_seconds=limit_s, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # no way to compare the two
        return False
