"""The sums: deterministic, right, and never on both sides of the split."""

import pytest

from agon_jax.data import arithmetic


def terms_of(problem):
    return tuple(sorted(int(term) for term in problem.question.split("+")))


def test_every_problem_is_a_sum_of_four_two_digit_numbers_with_its_answer():
    for split in arithmetic.load(200, 100, seed=1):
        for problem in split:
            terms = terms_of(problem)
            assert len(terms) == 4 and all(10 <= term <= 99 for term in terms)
            assert problem.answer == str(sum(terms)) and problem.kind == "math"


def test_sizes_ids_and_order_depend_on_the_seed_alone():
    train, heldout = arithmetic.load(300, 50, seed=3)
    assert (len(train), len(heldout)) == (300, 50)
    assert len({problem.id for problem in train + heldout}) == 350
    assert arithmetic.load(300, 50, seed=3) == (train, heldout)
    assert arithmetic.load(100, 20, seed=3) == (train[:100], heldout[:20])
    assert arithmetic.load(300, 50, seed=4)[0] != train


def test_no_held_out_sum_is_trained_on_in_any_order_of_terms_under_any_seed():
    trained = set()
    heldout = set()
    for seed in range(5):
        train, test = arithmetic.load(2000, 300, seed)
        assert len({terms_of(problem) for problem in train}) == 2000  # no reordered doubles
        trained |= {terms_of(problem) for problem in train}
        heldout |= {terms_of(problem) for problem in test}
    assert not trained & heldout
    assert all(arithmetic.is_heldout(terms[::-1]) for terms in heldout)


def test_the_split_is_pinned():
    """Changing it would put sums the embedded model was warmed up on among the held-out ones."""
    train, heldout = arithmetic.load(2, 2, seed=0)
    assert [problem.question for problem in train + heldout] == PINNED


PINNED = ["17+92+38+50", "13+77+49+67", "79+18+46+39", "77+30+85+45"]


@pytest.mark.parametrize("sizes", [(-1, 10), (10, arithmetic.LARGEST_SPLIT + 1)])
def test_sizes_out_of_range_are_refused_by_name(sizes):
    with pytest.raises(ValueError, match=r"data\.(train|heldout)_size = "):
        arithmetic.load(*sizes, seed=0)
