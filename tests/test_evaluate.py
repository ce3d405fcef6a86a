"""Intervals against the paper's printed ones, and a report's figures against hand counts."""

import numpy as np
import pytest

from agon_jax.data.problem import Problem
from agon_jax.evaluate import Report, clopper_pearson, stage_numbers
from agon_jax.outcomes import Outcomes
from agon_jax.rollout import Stage


def outcomes(correct, answers=None, lengths=None) -> Outcomes:
    correct = np.array(correct, bool)[:, None]
    n = len(correct)
    return Outcomes(
        correct=correct,
        format_ok=np.ones((n, 1), bool),
        lengths=np.array(lengths or [10] * n)[:, None],
        prompt_lengths=np.full((n, 1), 7),
        truncated=np.zeros((n, 1), bool),
        answers=np.array(answers or ["1"] * n, object)[:, None],
        reasons=np.array(["right" if c else "wrong" for c in correct[:, 0]], object)[:, None],
    )


@pytest.mark.parametrize(
    ("right", "interval"),
    [(69, (18.4, 28.3)), (90, (25.0, 35.4)), (138, (40.3, 51.8)), (183, (55.2, 66.6))],
)
def test_interval_of_the_papers_table(right, interval):
    """The paper prints 23, 30, 46 and 61 % of 300, one of them (24.87 %) rounded up."""
    low, high = clopper_pearson(right, 300)
    assert (100 * low, 100 * high) == pytest.approx(interval, abs=0.14)


def test_interval_covers_as_binomial_tails_say():
    """At the bounds, the observed count is exactly as unlikely as 2.5 % on its side."""
    from scipy.stats import binom

    low, high = clopper_pearson(7, 20)
    assert binom.sf(6, 20, low) == pytest.approx(0.025)
    assert binom.cdf(7, 20, high) == pytest.approx(0.025)


def test_interval_at_the_ends():
    assert clopper_pearson(0, 10)[0] == 0.0
    assert clopper_pearson(10, 10)[1] == 1.0
    assert clopper_pearson(0, 10)[1] == pytest.approx(1 - 0.025**0.1)


@pytest.mark.parametrize(("right", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_interval_of_nothing_is_refused(right, n):
    with pytest.raises(ValueError, match=f"{right} right of {n}"):
        clopper_pearson(right, n)


def report() -> Report:
    problems = [Problem(f"p{i}", f"q{i}", "1") for i in range(4)]
    table = {
        "A": outcomes([1, 0, 0, 0], ["1", "2", "3", None]),
        "B": outcomes([1, 1, 0, 0]),
        "A->B": outcomes([1, 1, 0, 1], ["1", "1", "3", "1"], [4, 4, 4, 8]),
        "B->A": outcomes([0, 1, 0, 0]),
    }
    return Report(problems, {name: Stage([], out, 28, 0.0) for name, out in table.items()})


def test_headline_is_the_better_cascade_and_says_that_it_was_chosen():
    numbers = report().numbers()
    assert numbers["reported_stage"] == "A->B"
    assert numbers["pass@1"] == 0.75
    assert numbers["n"] == 4
    assert numbers["chosen_after_the_fact"]


def test_a_lone_drafter_is_its_own_headline():
    lone = Report([Problem("p", "q", "1")], {"A": Stage([], outcomes([1]), 7, 0.0)})
    assert lone.best == "A"
    assert not lone.numbers()["chosen_after_the_fact"]


def test_cascade_is_compared_with_the_draft_it_read():
    cascade = report().numbers()["stages"]["A->B"]
    assert cascade["repairs"] == 0.5  # problems 1 and 3
    assert cascade["harms"] == 0.0
    assert cascade["copied_wrong"] == 0.5  # "3" again, of the wrong drafts "2" and "3"
    assert report().numbers()["stages"]["B->A"]["harms"] == 0.25


def test_error_sets_of_the_policies_alone():
    assert report().numbers()["error_overlap"]["jaccard"] == pytest.approx(2 / 3)


def test_costs_of_a_stage():
    numbers = stage_numbers(report().stages["A->B"].outcomes)
    assert (numbers["tokens"], numbers["generated_tokens"]) == (5.0, 20)
    assert numbers["prefilled_tokens"] == 28
