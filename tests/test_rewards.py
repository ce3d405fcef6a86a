import itertools
import math

import numpy as np
import pytest

from agon_jax.config import GrpoConfig, MethodConfig
from agon_jax.outcomes import Outcomes
from agon_jax.rewards import (
    challenge_rewards,
    draft_rewards,
    expected_live_share,
    group_advantages,
)


def outcomes(correct, format_ok=None, lengths=None):
    correct = np.atleast_2d(np.asarray(correct, bool))
    like = np.zeros(correct.shape, int)
    return Outcomes(
        correct=correct,
        format_ok=correct | True if format_ok is None else np.atleast_2d(format_ok).astype(bool),
        lengths=like + 10 if lengths is None else np.atleast_2d(lengths),
        prompt_lengths=like + 5,
        truncated=like.astype(bool),
        answers=np.full(correct.shape, "1", object),
        reasons=np.full(correct.shape, "right", object),
    )


# (c_a, c_b, phi): coop, adv, margin at lambda = 0.5, worked out by hand.
TRUTH_TABLE = {
    (0, 0, 0): (0.0, 0.0, 0.0),
    (0, 0, 1): (0.5, 0.5, 0.5),
    (0, 1, 0): (2.0, 3.0, 3.0),
    (0, 1, 1): (2.5, 3.5, 3.5),
    (1, 0, 0): (0.0, 0.0, -1.0),
    (1, 0, 1): (0.5, 0.5, -0.5),
    (1, 1, 0): (2.0, 2.0, 2.0),
    (1, 1, 1): (2.5, 2.5, 2.5),
}


@pytest.mark.parametrize("column, mode", [(0, "coop"), (1, "adv"), (2, "margin")])
def test_truth_table_of_each_mode(column, mode):
    cases = list(TRUTH_TABLE)
    rivals = outcomes([[a for a, _, _ in cases]], [[1] * 8])
    challenges = outcomes([[b for _, b, _ in cases]], [[phi for _, _, phi in cases]])
    rewards = challenge_rewards(challenges, rivals, MethodConfig(reward=mode))
    np.testing.assert_array_equal(rewards[0], [TRUTH_TABLE[case][column] for case in cases])


def test_a_draft_has_no_rival_term_and_lambda_weighs_the_format():
    drafts = outcomes([[0, 0, 1, 1]], [[0, 1, 0, 1]])
    for mode in ("coop", "adv", "margin"):
        rewards = draft_rewards(drafts, MethodConfig(reward=mode, format_weight=0.25))
        np.testing.assert_array_equal(rewards, [[0, 0.25, 2, 2.25]])


def test_tie_break_only_where_both_are_right_and_the_challenge_is_shorter():
    cases = list(itertools.product((0, 1), (0, 1), (9, 10, 11)))  # c_a, c_b, |b| against |a| = 10
    rivals = outcomes([[a for a, _, _ in cases]])
    challenges = outcomes([[b for _, b, _ in cases]], lengths=[[n for _, _, n in cases]])
    for mode in ("coop", "adv", "margin"):
        without = challenge_rewards(challenges, rivals, MethodConfig(reward=mode))
        broken = challenge_rewards(challenges, rivals, MethodConfig(reward=mode, tie_break=0.3))
        expected = [0.3 if case == (1, 1, 9) else 0 for case in cases]
        np.testing.assert_allclose((broken - without)[0], expected, atol=1e-12)


def test_an_unpaired_rival_is_refused():
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 1\).*shared rival"):
        challenge_rewards(outcomes([[1, 0, 1, 0]]), outcomes([[1]]), MethodConfig())


EXACT = GrpoConfig(std_epsilon=0.0)


@pytest.mark.parametrize("rival_right", [0, 1])
def test_a_shared_rival_gives_the_bonus_no_gradient_of_its_own(rival_right):
    """(3 - s) c + lambda phi: with phi alike it is affine in the reward of coop."""
    challenges = outcomes([[1, 1, 0, 1, 0, 0]])
    rivals = outcomes([[rival_right] * 6])
    adv = challenge_rewards(challenges, rivals, MethodConfig(reward="adv"))
    coop = challenge_rewards(challenges, rivals, MethodConfig(reward="coop"))
    assert len(set(adv[challenges.correct])) == 1  # the right ones cannot be told apart
    np.testing.assert_allclose(
        group_advantages(adv, EXACT)[0], group_advantages(coop, EXACT)[0], rtol=1e-6
    )
    # Without the division by std it rescales the same direction: a larger step, not another one.
    plain = GrpoConfig(advantage_std="none")
    np.testing.assert_allclose(
        group_advantages(adv, plain)[0],
        (3 - rival_right) / 2 * group_advantages(coop, plain)[0],
        rtol=1e-6,
    )


def test_a_shared_rival_that_failed_still_shifts_the_price_of_a_right_answer_against_format():
    """The limit of the claim: with mixed phi the advantages are not those of coop."""
    challenges = outcomes([[1, 1, 0, 0]], [[1, 0, 1, 0]])
    rivals = outcomes([[0] * 4])
    adv = challenge_rewards(challenges, rivals, MethodConfig(reward="adv"))
    coop = challenge_rewards(challenges, rivals, MethodConfig(reward="coop"))
    assert adv[0, 0] - adv[0, 1] == coop[0, 0] - coop[0, 1] == 0.5  # among the right: format only
    difference = group_advantages(adv, EXACT)[0] - group_advantages(coop, EXACT)[0]
    assert abs(difference).max() > 0.01


def test_with_its_own_rivals_the_bonus_tells_right_challenges_apart():
    challenges, rivals = outcomes([[1, 1, 0, 0]]), outcomes([[0, 1, 0, 1]])
    advantages, _ = group_advantages(
        challenge_rewards(challenges, rivals, MethodConfig(reward="adv")), EXACT
    )
    assert advantages[0, 0] > advantages[0, 1] > advantages[0, 2] == advantages[0, 3]


def expected_gradient(mode, rival_right, logit=0.3):
    """d E[R] / d logit of a challenger that is right with probability sigmoid(logit), exactly."""
    p = 1 / (1 + math.exp(-logit))
    challenges, rivals = outcomes([[1, 0]]), outcomes([[rival_right] * 2])
    right, wrong = challenge_rewards(challenges, rivals, MethodConfig(reward=mode))[0]
    return p * right * (1 - p) + (1 - p) * wrong * -p  # sum of pi R dlog(pi)


def test_margin_is_independent_of_the_rival_and_adv_is_not():
    """c(a) does not depend on the challenger's action: in margin it moves no expected gradient."""
    assert expected_gradient("margin", 0) == pytest.approx(expected_gradient("margin", 1))
    assert expected_gradient("adv", 0) == pytest.approx(1.5 * expected_gradient("adv", 1))
    assert expected_gradient("coop", 0) == pytest.approx(expected_gradient("coop", 1))
    # A shared rival's term leaves the group mean with everything else: 3 c + lambda phi remains.
    challenges = outcomes([[1, 0, 0, 1]], [[1, 0, 1, 0]])
    met = [
        group_advantages(
            challenge_rewards(challenges, outcomes([[s] * 4]), MethodConfig(reward="margin")), EXACT
        )[0]
        for s in (0, 1)
    ]
    np.testing.assert_array_equal(*met)


def slow_advantages(group, grpo, scored):
    """The same for one group, in plain Python."""
    kept = [r for r, s in zip(group, scored, strict=True) if s]
    if not kept or max(kept) == min(kept):
        return [0.0] * len(group), False
    mean = math.fsum(kept) / len(kept)
    ddof = {"sample": 1, "population": 0}.get(grpo.advantage_std)
    divisor = 1.0
    if ddof is not None:
        variance = math.fsum((r - mean) ** 2 for r in kept) / (len(kept) - ddof)
        divisor = math.sqrt(variance) + grpo.std_epsilon
    return [(r - mean) / divisor if s else 0.0 for r, s in zip(group, scored, strict=True)], True


@pytest.mark.parametrize("kind", ["sample", "population", "none"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_advantages_equal_their_slow_twin(kind, epsilon):
    rng = np.random.default_rng(0)
    rewards = rng.choice([0, 0.5, 2, 2.5, 3.5], size=(40, 5))
    rewards[0], rewards[1] = 2.5, [0, 0, 0, 0, 3.5]
    scored = rng.random((40, 5)) < 0.8
    scored[1], scored[2], scored[3] = True, False, [True, False, False, False, False]
    grpo = GrpoConfig(advantage_std=kind, std_epsilon=epsilon)
    for mask in (None, scored):
        advantages, live = group_advantages(rewards, grpo, mask)
        assert advantages.dtype == np.float32 and live.dtype == bool
        for row in range(40):
            seen = [True] * 5 if mask is None else mask[row].tolist()
            slow, alive = slow_advantages(rewards[row].tolist(), grpo, seen)
            np.testing.assert_allclose(advantages[row], slow, rtol=1e-5, atol=1e-6)
            assert live[row] == alive


@pytest.mark.parametrize(
    "kind, epsilon, expected",
    [("sample", 1e-6, 0.6196), ("population", 1e-6, 0.8335), ("sample", 1e-4, 0.0468)],
)
def test_nearly_equal_rewards_are_not_floored(kind, epsilon, expected):
    """N01 of the fault log: a variance floor made these 100 times too small."""
    rewards = np.array([[1.0, 1.00001]], np.float32)
    grpo = GrpoConfig(advantage_std=kind, std_epsilon=epsilon)
    advantages, live = group_advantages(rewards, grpo)
    np.testing.assert_allclose(advantages, [[-expected, expected]], atol=1e-4)
    assert live.all()
    assert group_advantages(np.array([[1, 1 + 1e-9]]), grpo)[1].all()  # equal in float32


def test_unscored_rollouts_are_left_out_and_not_counted_as_zero():
    """N18: rewards [1, 0, None, 0], and a group without any score."""
    rewards = np.array([[1, 0, np.nan, 0], [np.nan] * 4])
    scored = np.isfinite(rewards)
    advantages, live = group_advantages(rewards, GrpoConfig(advantage_std="none"), scored)
    np.testing.assert_allclose(advantages, [[2 / 3, -1 / 3, 0, -1 / 3], [0] * 4], rtol=1e-6)
    assert live.tolist() == [True, False]
    standardised, _ = group_advantages(rewards, GrpoConfig(), scored)
    assert np.isfinite(standardised).all() and standardised[0, 2] == 0
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(rewards, GrpoConfig())


@pytest.mark.parametrize("kind", ["sample", "population", "none"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_dead_groups_and_groups_of_one_are_finite_zeros(kind, epsilon):
    """N19, and a reward whose mean does not round back to itself."""
    grpo = GrpoConfig(advantage_std=kind, std_epsilon=epsilon)
    for rewards in ([[0.7]], [[2.1] * 7], [[0.0] * 4]):
        advantages, live = group_advantages(np.array(rewards), grpo)
        assert not live.any() and (advantages == 0).all()


def test_advantages_are_per_group_and_not_over_the_batch():
    """N22: nothing crosses from one row to another."""
    plain = GrpoConfig(advantage_std="none")
    pairs, _ = group_advantages(np.array([[0.0, 1], [0, 10]]), plain)
    np.testing.assert_array_equal(pairs, [[-0.5, 0.5], [-5, 5]])
    dead, live = group_advantages(np.array([[1.0, 1], [0, 0]]), plain)
    assert (dead == 0).all() and not live.any()
    two, _ = group_advantages(np.array([[0.0, 1], [0, 10]]), GrpoConfig())
    assert abs(two).max() <= math.sqrt(0.5)  # a pair is bounded, however far apart


def test_shapes_are_checked():
    for bad in (np.zeros(4), np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match="problem, rollout"):
            group_advantages(bad, GrpoConfig())
    with pytest.raises(ValueError, match="problem, rollout"):
        group_advantages(np.zeros((2, 4)), GrpoConfig(), np.ones((4,), bool))


@pytest.mark.parametrize("size, dead", [(2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)])
def test_expected_live_share_is_the_share_seen(size, dead):
    """U05: at p = 0.1819 small groups are mostly dead."""
    assert 1 - expected_live_share(0.1819, size) == pytest.approx(dead, abs=1e-3)
    rewards = np.random.default_rng(0).random((20000, size)) < 0.1819
    _, live = group_advantages(rewards, GrpoConfig())
    assert live.mean() == pytest.approx(1 - dead, abs=0.01)
