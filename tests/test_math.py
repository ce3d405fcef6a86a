"""Verdicts on answers: notation is forgiven, another value is not, nor work left to be done."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agon_jax.verifiers.math import exact_integer, verify


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("12", "12", True),
        ("12", "+12", True),
        ("12", " 012 ", True),
        ("7", "007", True),
        ("12", "$12$", True),
        ("0", "-0", True),
        ("1234", "1,234", True),
        ("1,234,567", "1234567", True),
        ("12", "-12", False),
        ("12", "21", False),
        ("9" * 5000, "9" * 4999 + "8", False),
    ],
)
def test_integers_are_compared_by_their_digits(gold, answer, correct):
    assert exact_integer(gold, answer) == (correct, "right" if correct else "wrong")


@given(st.integers(), st.integers())
def test_as_python_compares_them(a, b):
    assert exact_integer(str(a), f"{b:,}").correct is (a == b)
    assert exact_integer(f"{a:,}", str(a)).correct


@pytest.mark.parametrize(
    "other",
    ["1.0", "1e3", "x", "", "1 2", "12,34", "1,23", "--1", "\u0661", "1/1", "1.", "1,", "+", "$"],
)
def test_anything_else_is_not_an_integer(other):
    assert exact_integer("1", other) is None
    assert exact_integer(other, "1") is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\frac12"),
        (r"\dfrac{3}{4}", "3/4"),
        ("0.25", "1/4"),
        ("x^2+1", "1+x^2"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("(1,2)", "(1, 2)"),
        (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
        ("42", "42."),
        ("42", "$42$."),
        ("42", "x = 42"),
        ("42", r"42\text{ cm}"),
        ("-5", "\N{MINUS SIGN}5"),
        ("-5", "\N{EN DASH}5"),
        ("1000", r"1\,000"),
        ("32349", r"32,\! 349"),
        ("0.001", "1e-3"),
        ("1000000", "10^6"),
        ("1024", "2^{10}"),
        ("300000000", r"3 \times 10^{8}"),
        (r"\emptyset", r"\varnothing"),
        ("(1,2)", r"\langle 1,2\rangle"),
        (r"\infty", r"\text{infinity}"),
        (r"45^\circ", "45^{\\circ}"),
        ("Yes", r"\text{yes}"),
        ("C", r"\text{(C)}"),
        ("no solution", r"\text{No solution.}"),
        ("0 < x < 12.5", "0<x<12.5"),
        ("(0,12.5)", "(0,12.5)"),
        (r"2^{\aleph_0}", r"2^{\aleph_0}"),
    ],
)
def test_what_is_right(gold, answer):
    assert verify(gold, answer) == (True, "right")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "2"),
        ("4", r"4\sqrt{2}"),
        ("(1,2)", "(2,1)"),
        ("4", "3, 4"),
        ("4", r"3 \text{ or } 4"),
        ("Yes", "No"),
        ("ABC", "CBA"),
        ("O", "0"),
        ("C", "D"),
        ("5", "3 = 5"),
        ("5", "5 = 3"),
        ("10101_2", "10101"),
        ("10101", "10101_2"),
        ("3.14", r"\pi"),
        ("(0,12.5)", "x = 12.5"),
    ],
)
def test_what_is_wrong(gold, answer):
    assert verify(gold, answer) == (False, "wrong")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("12", "5+7"),
        ("12", "5 + 7 = 5 + 7"),
        ("x=12", "5+7"),
        ("236", "23+45+91+77"),
        ("12", "20-8"),
        ("12", "3*4"),
        ("12", r"3 \cdot 4"),
        ("12", r"3\times4"),
        ("12", "(3)(4)"),
        ("12", "3(4)"),
        ("12", "24/2"),
        ("12", r"\frac{24}{2}"),
        ("12", r"24\div2"),
        ("24", "4!"),
        ("6", r"\binom{4}{2}"),
        ("1/2", "1/3+1/6"),
        ("0.5", "1-0.5"),
        ("4", r"\gcd(4,8)"),
        ("4", r"\sqrt{16}+0"),
    ],
)
def test_a_number_is_not_met_by_work_left_to_be_done(gold, answer):
    """Else a policy learns to hand the question back."""
    assert verify(gold, answer) == (False, "wrong")


def test_work_is_an_answer_where_the_gold_is_an_expression():
    assert verify("n!+1", "1+n!").correct
    assert verify("2+3i", "3i+2").correct


@pytest.mark.parametrize("answer", ["}{", r"1} \boxed{2", "{", r"\frac{"])
def test_what_would_leave_its_box_is_unparsable(answer):
    assert verify("1/2", answer) == (False, "unparsable")


def test_a_gold_that_means_nothing_is_met_by_its_text_alone():
    assert verify(r"\}\{", "1/2") == (False, "bad_gold")
    assert verify(r"\}\{", r"\}\{").correct


def test_a_slow_answer_ends_at_the_limit():
    assert verify("1/2", "9^{9^{9^{9}}}", limit_s=1).reason in ("timeout", "unparsable", "wrong")


def test_off_the_main_thread_it_fails_aloud_and_not_as_a_wrong_answer():
    caught = []

    def judge():
        try:
            caught.append(verify("3/7", "6/14"))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert isinstance(caught[0], RuntimeError)
