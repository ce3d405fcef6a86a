import json

import pytest

from agon_jax.data.jsonl import DataError, read_jsonl
from agon_jax.data.problem import Problem


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.jsonl"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_fields_are_mapped_and_ids_are_lines_or_a_field(write):
    path = write(
        '{"problem": " How many? ", "solution": "x = {1}", "unique_id": "algebra/7", "level": 3}\n'
        "\n"
        '{"problem": "Which?", "solution": " (1, 2) ", "unique_id": 12}\n'
    )
    assert read_jsonl(path, "problem", "solution") == [
        Problem("mine.jsonl:1", "How many?", "x = {1}"),
        Problem("mine.jsonl:3", "Which?", "(1, 2)"),
    ]
    named = read_jsonl(path, "problem", "solution", "unique_id")
    assert [problem.id for problem in named] == ["algebra/7", "12"]


@pytest.mark.parametrize(
    "number", ["12", "-3", "0.10", "1e-3", "0.30000000000000004", "1.0", "9" * 5000, "1E400"]
)
def test_a_number_is_taken_as_it_is_written(write, number):
    path = write(f'{{"question": "q", "answer": {number}}}')
    assert read_jsonl(path, "question", "answer")[0].answer == number


def test_a_gold_is_not_interpreted(write):
    """The '#### 12' of GSM8K and LaTeX stay what they are; verifiers decide what they mean."""
    golds = ["reasoning\n#### 12", r"\dfrac{1}{2}", "Yes", "0"]
    rows = [{"question": f"q{i}", "answer": gold} for i, gold in enumerate(golds)]
    path = write("\r\n".join(map(json.dumps, rows)))
    assert [problem.answer for problem in read_jsonl(path, "question", "answer")] == golds


def test_text_that_would_break_lines_stays_whole(write):
    question = "a\u2028b\x85c \\n"
    path = write(
        b"\xef\xbb\xbf"
        + json.dumps({"question": question, "answer": "1"}, ensure_ascii=False).encode()
    )
    assert read_jsonl(path, "question", "answer")[0].question == question


GOOD = '{"question": "q", "answer": "1"}\n'


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"question": "q", "answer": "1"', "not a line of JSON"),
        ('{"question": "q"} {"answer": "1"}', "not a line of JSON"),
        ('{"question": "q", "answer": NaN}', "NaN is no JSON number"),
        ("[" * 100_000, "not a line of JSON"),
        (b'{"question": "\xff", "answer": "1"}', "UTF-8"),
        ('["q", "1"]', r"expected a JSON object.*found a list"),
        ('{"question": "q", "final_answer": "1"}', r"no field 'answer' \(data.answer_field\)"),
        ('{"question": "q", "final_answer": "1"}', "there are: 'question', 'final_answer'"),
        ('{"answer": "1"}', r"no field 'question' \(data.question_field\)"),
        ("{}", "there are: none"),
        ('{"question": "q", "answer": ""}', "field 'answer' is empty"),
        ('{"question": "q", "answer": " \\n"}', "field 'answer' is empty"),
        ('{"question": "  ", "answer": "1"}', "field 'question' is empty"),
        ('{"question": "q", "answer": null}', "field 'answer' is null; it must be text or a num"),
        ('{"question": "q", "answer": true}', "field 'answer' is true"),
        ('{"question": "q", "answer": ["1"]}', "field 'answer' is a list"),
        ('{"question": "q", "answer": {"v": 1}}', "field 'answer' is an object"),
        ('{"question": 7, "answer": "1"}', "field 'question' is the number 7; it must be text"),
        ('{"question": "\\ud800", "answer": "1"}', "half a character"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(write, line, message):
    """D01: a gold that is lost must not become a gold of ""."""
    line = line if isinstance(line, bytes) else line.encode()
    path = write(GOOD.encode() + line + b"\n" + GOOD.encode())
    with pytest.raises(DataError, match=message) as error:
        read_jsonl(path, "question", "answer")
    assert f"{path}:2: " in str(error.value)


def test_an_id_used_twice_is_named_with_both_lines(write):
    path = write('{"question": "q", "answer": "1", "id": 4}\n' * 2)
    with pytest.raises(DataError, match=r"mine.jsonl:2: id '4' stands on line 1 too"):
        read_jsonl(path, "question", "answer", "id")
    with pytest.raises(DataError, match="no field 'key'"):
        read_jsonl(path, "question", "answer", "key")


def test_an_empty_or_missing_file_is_named(write, tmp_path):
    with pytest.raises(DataError, match=r"mine.jsonl: no problems"):
        read_jsonl(write("\n  \n"), "question", "answer")
    with pytest.raises(DataError, match=r"none.jsonl: cannot be read: No such file"):
        read_jsonl(tmp_path / "none.jsonl", "question", "answer")
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path, "question", "answer")
