"""Verdicts on answers: notation is forgiven, another value is not."""

import pytest

from agon_jax.verifiers.math import exact_integer, verify


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("12", "12", True),
        ("12", "+12", True),
        ("12", " 012 ", True),
        ("0", "-0", True),
        ("1234", "1,234", True),
        ("1,234,567", "1234567", True),
        ("12", "-12", False),
        ("12", "21", False),
        ("9" * 900, "9" * 899 + "8", False),
    ],
)
def test_integers_are_compared_by_their_digits(gold, answer, correct):
    assert exact_integer(gold, answer) == (correct, "right" if correct else "wrong")


@pytest.mark.parametrize(
    "other", ["1.0", "1e3", "x", "", "1 2", "12,34", "1,23", "--1", "\u0661", "1/1"]
)
def test_anything_else_is_not_an_integer(other):
    assert exact_integer("1", other) is None
    assert exact_integer(other, "1") is None


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac{3}{4}", "3/4", True),
        ("x^2+1", "1+x^2", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(1,2)", "(1, 2)", True),
        ("42", "42.", True),
        ("42", "$42$", True),
        ("Yes", r"\text{yes}", True),
        ("Yes", "No", False),
        ("ABC", "CBA", False),
        (r"\frac{1}{2}", "2", False),
        ("4", r"4\sqrt{2}", False),
        ("(1,2)", "(2,1)", False),
    ],
)
def test_mathematics_is_compared_by_value(gold, answer, correct):
    assert verify(gold, answer).correct is correct


def test_what_means_nothing_is_unparsable():
    assert verify(r"\frac{1}{2}", r"\frac{").reason in ("unparsable", "wrong")
    assert verify("1/2", "}{") == (False, "unparsable")
