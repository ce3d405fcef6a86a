"""Takes the final answer, and whatever could pose as control, out of a text that a rival will read.

Works on text alone, in linear time: it is model output, and hostile. The answer goes wherever it
stands: in answer blocks and boxes, in "the answer is ...", and as a bare mention in any spelling
that differs by notation only. A hole is marked by a character that no text holds until all is cut.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

# Invisible characters: two tokens that look like one could pass for another text.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# Control strings of the chat formats in use. None of them matches white space, so that putting a
# space in the place of one never makes another out of what stood around it.
CONTROL = re.compile(
    r"""<</?SYS>>
    | <\|[^<>|\s]{0,48}\|?> | <[^<>|\s]{1,48}\|>  # <|im_end|>  <|turn>  <channel|>
    | <\uff5c[^<>\uff5c\s]{1,48}\uff5c>  # <\uff5cUser\uff5c>, with a full-width bar
    | </?(?:think|thinking|thought|reasoning|reflection|answer|s|bos|eos|pad|unk|mask|cls|sep
        |tools?|tool_calls?|tool_responses?|function|start_of_turn|end_of_turn|image_soft_token
        |(?:start|end)_of_(?:image|audio)|unused[0-9]{1,5}|fim_[a-z]{1,16})>
    | \[/?(?:INST|THINK|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|CONTENT|ARGS|IMG)\]
    | /(?:no_)?think  # Qwen3's switches""",
    re.VERBOSE | re.IGNORECASE,
)
HOLE = "\0"
PASSES = 4  # what still mentions its answer after so many cuts was written to do so

BLOCK_TAG = re.compile(r"<\s{0,4}(/?)\s{0,4}answer\s{0,4}>", re.IGNORECASE)
BRACES = re.compile(r"(?P<box>\\{1,3}(?:boxed|fbox)\s*\{)|(?P<escaped>\\[\s\S])|[{}]")
STATED = re.compile(
    r"\banswers?\b[^\n.:=]{0,40}?(?:[:=]|\b(?:is|are|was|were|be|equals?)\b)[\s:=*]*", re.IGNORECASE
)
SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|\n|$")
TOKEN = re.compile(
    r"""(?P<short_frac>\\[dt]?frac[0-9]{2}(?![0-9]))
    | (?P<bracket>\\(?:left|right)[()\[\]|])
    | (?P<command>\\(?:[A-Za-z]+|[\s\S]))
    | (?P<number>[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3}){1,8}(?!,?[0-9])(?:\.[0-9]+)?
        | [0-9]+(?:\.[0-9]+)? | \.[0-9]+)
    | (?P<word>[^\W\d_][^\W_]*)
    | (?P<space>\s+)
    | [\s\S]""",
    re.VERBOSE,
)
# What typesets and does not mean; a product sign is as good as none.
TYPESETTING = frozenset(
    [
        *("${}*`~\N{MIDDLE DOT}\N{MULTIPLICATION SIGN}\N{DOT OPERATOR}" + HOLE),
        *(f"\\{character}" for character in "()[],;!: $\n"),
        *(
            rf"\{word}"
            for word in (
                "quad qquad left right big bigl bigr Big displaystyle cdot times "
                "text textbf textit mathrm mathbf mathit operatorname"
            ).split()
        ),
    ]
)
SAME = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\varnothing": "\\emptyset",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
}
UNITS = frozenset(["^", "\\circ", "°", "%", "\\%", "€", "£"])
ASCII_PUNCTUATION = frozenset("!\"#%&'()*+,-./:;<=>?@[\\]^_`|~")
WRAPPED_HOLE = re.compile(
    r"(\$\$?|\*\*?|`)[ \t]?\0[ \t]?\1|\\\(\s?\0\s?\\\)|\\\[\s?\0\s?\\\]|\{\0\}"
)
LONGEST_EXACT = 18  # digits of a number whose fractions are spelled out


class Token(NamedTuple):
    """A piece of a text by what it means."""

    meaning: str
    start: int
    end: int


def without_control(text: str) -> str:
    """The text with a space for every control string, of any model family, and no invisibles."""
    return CONTROL.sub(" ", INVISIBLE.sub("", text))


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""(start, start of the content, end of the content) of every \boxed{} and \fbox{}, by start.

    Braces balance; a box that is never closed ends with its line.
    """
    found, open_braces = [], []
    for match in BRACES.finditer(text):
        if match["escaped"]:
            continue
        if match[0] != "}":
            open_braces.append((match.start(), match.end(), bool(match["box"])))
        elif open_braces:
            start, content, is_box = open_braces.pop()
            if is_box:
                found.append((start, content, match.start()))
    line_end = 0
    for start, content, is_box in open_braces:
        if is_box:
            if line_end < content:
                line_end = text.find("\n", content) % (len(text) + 1)  # none is -1: the text's end
            found.append((start, content, line_end))
    return sorted(found)


def withhold(text: str, answer: str | None, marker: str) -> str:
    """The text without its answer and without control strings; `marker` stands in every hole.

    Without a known answer, what the text says "the answer is" counts as one. A text that goes on
    mentioning its answer however often it is cut is dropped whole.
    """
    text = _cut_boxes(_cut_blocks(INVISIBLE.sub("", text)))
    text, said = _cut_statements(text)
    spellings = _spellings(_meanings(answer or said))
    if not answer:
        numbers = {meaning for meaning in _meanings(said) if meaning[0].isdigit()}
        spellings |= {(number,) for number in numbers if len(numbers) == 1}
    for _ in range(PASSES):
        text, cuts = _cut_mentions(CONTROL.sub(" ", text), spellings)
        if not cuts:
            break
    else:
        text = HOLE
    text = _tidy(text).replace(HOLE, marker or " ")
    return re.sub(r"[ \t]+", " ", text).strip()


def cap(text: str, limit: int) -> str:
    """At most `limit` characters, cut between words and numbers: half of one may be an answer."""
    if len(text) <= limit:
        return text
    end = 0
    for match in TOKEN.finditer(text):
        if match.end() > limit:
            break
        end = match.end()
    return text[:end].rstrip()


def _cut_blocks(text: str) -> str:
    """Answer blocks; one that is not closed takes the rest, one that is not opened its line."""
    kept, position, inside = [], 0, False
    for tag in BLOCK_TAG.finditer(text):
        before = text[position : tag.start()]
        if tag[1] and not inside:
            before = before[: before.rfind("\n") + 1]
        if not inside:
            kept += [before, HOLE]
        inside = not tag[1]
        position = tag.end()
    return "".join(kept if inside else [*kept, text[position:]])


def _cut_boxes(text: str) -> str:
    kept, position = [], 0
    for start, _, end in boxes(text):
        if start >= position:  # else inside the box before
            kept += [text[position:start], HOLE]
            position = min(end + (text[end : end + 1] == "}"), len(text))
    return "".join([*kept, text[position:]])


def _cut_statements(text: str) -> tuple[str, str]:
    """What stands after "the answer is" up to the sentence's end, and the last such statement."""
    kept, position, said = [], 0, ""
    while match := STATED.search(text, position):
        end = SENTENCE_END.search(text, match.end()).start()  # type: ignore[union-attr]
        if statement := text[match.end() : end].strip():
            said = statement
            kept += [text[position : match.end()], HOLE]
        else:
            kept.append(text[position : match.end()])
        position = end
    return "".join([*kept, text[position:]]), said


def _cut_mentions(text: str, spellings: set[tuple[str, ...]]) -> tuple[str, int]:
    """Every place where the text spells one of these out, as whole tokens; and how many."""
    tokens = list(_tokens(text))
    between = "\x1f"
    line = between + between.join(token.meaning for token in tokens) + between
    offsets = list(accumulate((len(token.meaning) + 1 for token in tokens), initial=0))
    spans = []
    for spelling in spellings:
        wanted = between + between.join(spelling) + between
        place = line.find(wanted)
        while place >= 0:
            first = bisect_right(offsets, place) - 1
            spans.append((tokens[first].start, tokens[first + len(spelling) - 1].end))
            place = line.find(wanted, place + len(wanted) - 1)
    kept, position = [], 0
    for start, end in sorted(spans):
        if end > position:
            kept += [text[position:start], HOLE]
            position = _closed(text, start, end)
    return "".join([*kept, text[position:]]), len(spans)


def _closed(text: str, start: int, end: int) -> int:
    """The end of a span with the braces that close in its wake: those of \\frac{1}{2}."""
    missing = text.count("{", start, end) - text.count("}", start, end)
    while missing > 0 and text[end : end + 1] == "}":
        end, missing = end + 1, missing - 1
    return end


def _tokens(text: str) -> Iterator[Token]:
    for match in TOKEN.finditer(text):
        kind, word = match.lastgroup, match[0]
        if kind == "short_frac":  # \frac12 is a half
            for meaning in ("\\frac", word[-2], word[-1]):
                yield Token(meaning, match.start(), match.end())
        elif kind != "space" and word not in TYPESETTING:
            if kind == "number":
                word = _plain_number(word)
            elif kind == "bracket":
                word = word[-1]
            elif kind == "word" and len(word) > 1:  # a lone letter names something: case matters
                word = word.casefold()
            yield Token(SAME.get(word, word), match.start(), match.end())


def _plain_number(digits: str) -> str:
    r"""1,234.50, 1{,}234.5 and 1\,234.5 are 1234.5; by text, as ints of any length would not do."""
    whole, point, rest = re.sub(r"[^0-9.]", "", digits).partition(".")
    rest = rest.rstrip("0")
    return (whole.lstrip("0") or "0") + (point + rest if rest else "")


def _meanings(text: str) -> tuple[str, ...]:
    meanings = [token.meaning for token in _tokens(without_control(text))]
    while meanings and meanings[-1] in (".", ",", ";"):
        meanings.pop()
    return tuple(meanings[1:] if meanings[:1] == ["+"] else meanings)


def _spellings(answer: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The answer itself; the value of a variable, the magnitude of a number, its other notation."""
    found = {answer}
    if answer[1:2] == ("=",):
        found.add(answer[2:])
    for spelling in list(found):
        if spelling[:1] == ("-",):
            found.add(spelling[1:])
    for number, *rest in [spelling for spelling in found if spelling]:
        if number[0].isdigit() and all(word in UNITS or word[1:].isalpha() for word in rest):
            found.add((number,))
    for spelling in list(found):
        found |= _other_notations(tuple(word for word in spelling if word != "-"))
    return {spelling for spelling in found if set(spelling) - ASCII_PUNCTUATION}


def _other_notations(spelling: tuple[str, ...]) -> set[tuple[str, ...]]:
    """A fraction's ways: \\frac{p}{q}, p/q, and its decimals where they end; from any of them.

    Signs apart: the magnitude goes wherever it stands.
    """
    if len(spelling) == 1:
        over = (spelling[0], "1") if "." in spelling[0] else ()
    elif len(spelling) == 3 and spelling[0] == "\\frac":
        over = spelling[1:]
    else:
        over = spelling[::2] if len(spelling) == 3 and spelling[1] == "/" else ()
    if not over or any(not x[0].isdigit() or len(x) > LONGEST_EXACT for x in over):
        return set()
    if not over[1].strip("0."):
        return set()
    value = Fraction(over[0]) / Fraction(over[1])
    whole = value.denominator == 1
    ways = {(str(value.numerator),)} if whole else set()
    for p, q in (over, (str(value.numerator), str(value.denominator))):
        if q != "1":
            ways |= {("\\frac", p, q), ("\\frac", "-", p, q), (p, "/", q)}
    scaled = value * 10**LONGEST_EXACT
    if scaled.denominator == 1 and not whole:
        digits = str(scaled.numerator).rjust(LONGEST_EXACT + 1, "0")
        ways.add((_plain_number(f"{digits[:-LONGEST_EXACT]}.{digits[-LONGEST_EXACT:]}"),))
    return ways


def _tidy(text: str) -> str:
    """White space in order, and each hole without the marks that wrapped it."""
    text = re.sub(r"\n[ \t\n]*\n", "\n\n", re.sub(r"[ \t]+", " ", text))
    for _ in range(2):
        text = WRAPPED_HOLE.sub(HOLE, text)
    return re.sub(r"\0(?:\s?\0)+", HOLE, text)
