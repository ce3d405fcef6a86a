import itertools
import math

import numpy as np
import pytest

from agon_jax.complement import conversions, copying, error_overlap

A = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], bool)
B = np.array([[1, 0, 1, 0], [1, 1, 0, 0]], bool)


def test_error_overlap_by_hand():
    # Errors of A: 5, of B: 4; shared: 3 of a union of 6.
    assert error_overlap(A, B) == {
        "jaccard": 3 / 6,
        "both_right": 2 / 8,
        "only_a_right": 1 / 8,
        "only_b_right": 2 / 8,
        "both_wrong": 3 / 8,
    }


def test_error_overlap_limits():
    assert error_overlap(A, A)["jaccard"] == 1
    assert error_overlap(A, ~A)["jaccard"] == 0
    faultless = error_overlap(np.ones(3, bool), np.ones(3, bool))
    assert math.isnan(faultless["jaccard"]) and faultless["both_right"] == 1
    assert math.isnan(error_overlap(np.ones(0, bool), np.ones(0, bool))["both_wrong"])


def test_conversions_equal_their_slow_twin():
    pairs = list(zip(B.flat, A.flat, strict=True))
    repaired = sum(1 for final, rival in pairs if final and not rival)
    harmed = sum(1 for final, rival in pairs if rival and not final)
    assert conversions(final=B, rival=A) == {
        "repairs": repaired / 8,
        "harms": harmed / 8,
        "repair_rate": repaired / 5,
        "harm_rate": harmed / 3,
    }
    assert math.isnan(conversions(A, np.ones_like(A))["repair_rate"])


def test_copying_tells_right_from_wrong_answers():
    # own, rival, both right?            copied
    pairs = [
        ("12", "12", True, True),  # right, repeated
        (" 1 2", "12", True, True),  # white space aside
        ("12", "13", True, False),
        ("9", "9", False, False),  # wrong, repeated
        ("9", "8", False, False),
        ("7", "7", False, False),  # wrong, repeated
        ("6", "6", True, False),  # repeated, but the rival's verdict had timed out
        ("12", None, True, False),  # nothing to copy
        (None, "12", False, True),
        (None, None, False, False),
    ]
    own, rival, correct, rival_correct = (np.array(c, object) for c in zip(*pairs, strict=True))
    assert copying(own, rival, correct, rival_correct) == {
        "copied": 5 / 8,
        "copied_right": 2 / 3,
        "copied_wrong": 2 / 5,
    }
    square = [c[:8].reshape(2, 4) for c in (own, rival, correct, rival_correct)]
    assert copying(*square) == copying(own[:8], rival[:8], correct[:8], rival_correct[:8])


def test_arrays_that_do_not_pair_are_refused():
    row = np.ones((1, 4), bool)
    for function in (error_overlap, conversions):
        with pytest.raises(ValueError, match="pair one to one"):
            function(A, row)
    for answers in itertools.permutations([np.full((2, 4), "1"), np.full((1, 4), "1")]):
        with pytest.raises(ValueError, match="must pair"):
            copying(*answers, A, B)
