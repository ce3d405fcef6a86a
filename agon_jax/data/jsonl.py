"""A user's own problems: one JSON object a line, its fields named by settings.

Reads a file into Problem records and refuses, with file and line, whatever would make training
score against nothing: a missing or empty gold, a column that is not there, a broken line.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from agon_jax.data.problem import Problem


class DataError(ValueError):
    """The problems cannot be used as they are; the message says where and what would mend it."""


class _Number(str):
    """A JSON number as it was written: a float would turn the gold 0.10 into 0.1."""


def read_jsonl(
    path: str | Path, question_field: str, answer_field: str, id_field: str = ""
) -> list[Problem]:
    """The problems of a file, in its order.

    Question and answer are text; an answer may be a number too and is then taken digit by digit as
    written. Without id_field the id is file name and line, so it stands as long as the file does.
    """
    path = Path(path)
    problems: list[Problem] = []
    line_of_id: dict[str, int] = {}
    for line, row in _rows(path):
        where = f"{path}:{line}"
        question = _text(row, question_field, "data.question_field", where)
        answer = _text(row, answer_field, "data.answer_field", where, number=True)
        identity = f"{path.name}:{line}"
        if id_field:
            identity = _text(row, id_field, "data.id_field", where, number=True)
        if identity in line_of_id:
            raise DataError(
                f"{where}: {id_field} {identity!r} stands on line {line_of_id[identity]} too: ids"
                " must be unique (without data.id_field the line number is the id)"
            )
        line_of_id[identity] = line
        problems.append(Problem(identity, question, answer))
    if not problems:
        raise DataError(f"{path}: no problems in it: expected one JSON object a line")
    return problems


def _rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line that is not blank."""
    try:
        # Lines are split as bytes: JSON strings may hold U+2028, which ends a line of text.
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(
                line.decode("utf-8"),
                parse_float=_Number,
                parse_int=_Number,
                parse_constant=_refuse_constant,
            )
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a line of JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}:{number}: expected a JSON object, {{...}}, found {_kind(row)}: the file"
                " must be JSON Lines, one object a line"
            )
        yield number, row


def _text(row: dict, field: str, setting: str, where: str, *, number: bool = False) -> str:
    if field not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: no field {field!r} ({setting}); there are: {there}")
    value = row[field]
    if not isinstance(value, str) or (isinstance(value, _Number) and not number):
        expected = "text or a number" if number else "text"
        raise DataError(f"{where}: field {field!r} is {_kind(value)}; it must be {expected}")
    text = str(value).strip()
    if not text:
        raise DataError(f"{where}: field {field!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} holds half a character: {error.reason}"
        ) from error
    return text


def _kind(value: object) -> str:
    """What a JSON value is, in words for a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, _Number):
        return f"the number {value}"
    return {dict: "an object", list: "a list"}.get(type(value), "text")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
