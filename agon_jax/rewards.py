"""What an outcome is worth: the rewards of both stages and the advantages of a group.

Verdicts come in as Outcomes, [problem, rollout] arrays of one stage; advantages go out to batching.
A row is a GRPO group. Plain NumPy on the host: no text, no tokens. Equations follow the paper; c is
the verdict, phi the format reward, a a draft and b the challenge that read it.
"""

import numpy as np

from agon_jax.config import GrpoConfig, MethodConfig
from agon_jax.outcomes import Outcomes

RIGHT = 2.0  # what a right answer is worth in either stage


def draft_rewards(drafts: Outcomes, method: MethodConfig) -> np.ndarray:
    """R(a) = 2 c(a) + lambda phi(a), float64 [problem, rollout]: no rival term in this stream."""
    return RIGHT * drafts.correct + method.format_weight * drafts.format_ok


def challenge_rewards(challenges: Outcomes, rivals: Outcomes, method: MethodConfig) -> np.ndarray:
    """Rewards of the challenges, float64 [problem, rollout]; rivals[i, j] is what [i, j] read.

    coop:   R(b) = 2 c(b) + lambda phi(b)
    adv:    R(b) = 2 c(b) + c(b) (1 - c(a)) + lambda phi(b)
    margin: R(b) = 2 c(b) + c(b) - c(a) + lambda phi(b)
    each with + lambda' c(b) c(a) 1[|b| < |a|] where the tie-break is on.

    Where one rival faces the whole group, c(a) = s is a constant of the row, adv is
    (3 - s) c(b) + lambda phi(b) and margin 3 c(b) + lambda phi(b) - s. So the conversion bonus
    tells no right challenge from another, and where phi is alike in the group, the standardised
    advantages are those of coop; only against a mixed phi does it still weigh, as a larger price of
    a right answer.
    In margin, c(a) does not depend on what the challenger does: being right gains 3 whatever the
    rival did, so c(a) is a baseline and no bonus.
    """
    if challenges.correct.shape != rivals.correct.shape:
        raise ValueError(
            f"challenges {challenges.correct.shape} and rivals {rivals.correct.shape} must pair one"
            " to one: repeat a shared rival over its group"
        )
    right, rival_right = challenges.correct.astype(float), rivals.correct.astype(float)
    rewards = draft_rewards(challenges, method)
    if method.reward == "adv":
        rewards += right * (1 - rival_right)
    elif method.reward == "margin":
        rewards += right - rival_right
    shorter = challenges.lengths < rivals.lengths
    return rewards + method.tie_break * right * rival_right * shorter


def group_advantages(
    rewards: np.ndarray, grpo: GrpoConfig, scored: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A = (r - mean) / (std + epsilon) over each group: float32 [problem, rollout], live [problem].

    The default std is the sample's (ddof 1), as torch.std and so TRL takes it, on which the paper
    ran; "none" divides by 1. A group is live when its rewards differ at all, whatever the scale; a
    dead one has advantage exactly 0. A rollout that is not `scored` has advantage 0 and no part in
    mean and std: it is not a reward of 0. Its reward may be NaN.
    """
    rewards = np.asarray(rewards, np.float64)  # float32 would lose near-ties: 1.00001 - 1
    scored = np.ones(rewards.shape, bool) if scored is None else np.asarray(scored, bool)
    if rewards.ndim != 2 or scored.shape != rewards.shape:
        raise ValueError(
            f"rewards {rewards.shape} and scored {scored.shape} must both be [problem, rollout]"
        )
    if not np.isfinite(rewards[scored]).all():
        raise ValueError("a scored reward is not finite: mark what has no verdict as not scored")
    highest = np.where(scored, rewards, -np.inf).max(axis=1)
    lowest = np.where(scored, rewards, np.inf).min(axis=1)
    live = highest > lowest
    count = np.maximum(scored.sum(axis=1, keepdims=True), 1)
    mean = np.where(scored, rewards, 0).sum(axis=1, keepdims=True) / count
    centred = np.where(scored & live[:, None], rewards - mean, 0)
    if grpo.advantage_std == "none":
        return centred.astype(np.float32), live
    ddof = 1 if grpo.advantage_std == "sample" else 0
    # A group of one has no sample variance; it is dead, so any finite divisor serves.
    variance = np.square(centred).sum(axis=1, keepdims=True) / np.maximum(count - ddof, 1)
    divisor = np.where(live[:, None], np.sqrt(variance) + grpo.std_epsilon, 1)
    return (centred / divisor).astype(np.float32), live


def expected_live_share(pass_rate: float, group_size: int) -> float:
    """Share of groups with mixed verdicts, 1 - (p^n + (1-p)^n), if all problems were alike at p."""
    return 1 - (pass_rate**group_size + (1 - pass_rate) ** group_size)
