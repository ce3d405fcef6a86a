"""The pair on held-out problems: each policy alone, and the cascade in both directions.

One rollout per problem and stage, as the paper evaluates. Both directions of the cascade are run
and the better one is the headline, which is a choice made afterwards: reports say so.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy.stats import beta

from agon_jax import complement
from agon_jax.config import RunConfig
from agon_jax.data.problem import Problem
from agon_jax.outcomes import Outcomes
from agon_jax.policies import Pair, Policy
from agon_jax.rollout import Rollout, Stage, Weights, challenge, draft
from agon_jax.verifiers.pool import VerifierPool


class Report(NamedTuple):
    """Stages by name: "A" and "B" are drafts alone, "A->B" is B's challenge of A's draft."""

    problems: list[Problem]
    stages: dict[str, Stage]

    @property
    def finals(self) -> list[str]:
        """The stages whose answer counts: the cascades, or the lone drafter."""
        return [name for name in self.stages if "->" in name] or list(self.stages)

    @property
    def best(self) -> str:
        """The final stage with most right answers; chosen after the fact when there are two."""
        return max(self.finals, key=lambda name: self.stages[name].outcomes.correct.sum())

    def numbers(self) -> dict[str, Any]:
        """Everything a table or a metrics row needs, JSON-able."""
        best = stage_numbers(self.stages[self.best].outcomes)
        result = {
            "pass@1": best["pass@1"],
            "ci95": best["ci95"],
            "n": best["n"],
            "reported_stage": self.best,
            "chosen_after_the_fact": len(self.finals) > 1,
            "stages": {name: stage_numbers(stage.outcomes) for name, stage in self.stages.items()},
        }
        if "B" in self.stages:
            a, b = self.stages["A"].outcomes, self.stages["B"].outcomes
            result["error_overlap"] = complement.error_overlap(a.correct, b.correct)
        for name in self.finals:
            if "->" in name:
                drafts, final = (
                    self.stages[name.split("->")[0]].outcomes,
                    self.stages[name].outcomes,
                )
                result["stages"][name] |= complement.conversions(final.correct, drafts.correct)
                result["stages"][name] |= complement.copying(
                    final.answers, drafts.answers, final.correct, drafts.correct
                )
        return result

    def records(self) -> list[dict[str, Any]]:
        """One JSON-able record a problem: gold, and answer, verdict and tokens of each stage."""
        return [
            {
                "id": problem.id,
                "question": problem.question,
                "gold": problem.answer,
                **{
                    name: {
                        "answer": stage.outcomes.answers[i, 0],
                        "correct": bool(stage.outcomes.correct[i, 0]),
                        "reason": stage.outcomes.reasons[i, 0],
                        "format_ok": bool(stage.outcomes.format_ok[i, 0]),
                        "tokens": int(stage.outcomes.lengths[i, 0]),
                        "prompt_tokens": int(stage.outcomes.prompt_lengths[i, 0]),
                        "summary": stage.rollouts[i][0].summary,
                    }
                    for name, stage in self.stages.items()
                },
            }
            for i, problem in enumerate(self.problems)
        ]

    def exchange(self, index: int) -> tuple[Problem, Rollout, Rollout | None]:
        """The problem, its draft and the challenge, in the direction reported."""
        drafter = self.best.split("->")[0]
        drafted = self.stages[drafter].rollouts[index][0]
        challenged = self.stages[self.best].rollouts[index][0] if "->" in self.best else None
        return self.problems[index], drafted, challenged


def evaluate(
    pair: Pair,
    weights: Weights,
    problems: Sequence[Problem],
    run: RunConfig,
    pool: VerifierPool,
    seed: int | None = None,
) -> Report:
    """Every policy's draft of every problem, and every cascade the method trains.

    The sampling keys depend on the seed (run.seed by default) and the problem alone, so two points
    of a curve differ by the policies and not by their luck.
    """
    run = dataclasses.replace(run, seed=run.seed if seed is None else seed)
    stages = {}
    for policy in pair.policies:
        stages[policy.name] = draft(
            policy, weights, problems, run, pool, count=1, step=0, stage=f"evaluate {policy.name}"
        )
    if run.method.challenge:
        for drafter, challenger in directions(pair):
            name = f"{drafter.name}->{challenger.name}"
            stages[name] = challenge(
                challenger,
                weights,
                problems,
                stages[drafter.name],
                run,
                pool,
                step=0,
                stage=f"evaluate {name}",
            )
    return Report(list(problems), stages)


def directions(pair: Pair) -> list[tuple[Policy, Policy]]:
    """(drafter, challenger) of every cascade: both ways for two policies, itself for one."""
    first, last = pair.policies[0], pair.policies[-1]
    return [(first, last)] if first == last else [(first, last), (last, first)]


def stage_numbers(outcomes: Outcomes) -> dict[str, Any]:
    """pass@1 with its interval, and what the stage cost in tokens."""
    right, n = int(outcomes.correct.sum()), outcomes.correct.size
    return {
        "pass@1": right / n,
        "ci95": clopper_pearson(right, n),
        "n": n,
        "tokens": float(outcomes.lengths.mean()),
        "generated_tokens": int(outcomes.lengths.sum()),
        "prefilled_tokens": int(outcomes.prompt_lengths.sum()),
        "truncated": float(outcomes.truncated.mean()),
        "format_ok": float(outcomes.format_ok.mean()),
    }


def clopper_pearson(right: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact binomial interval of right / n (Clopper and Pearson, 1934)."""
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"{right} right of {n}: need n >= 1 and 0 <= right <= n")
    tail = (1 - confidence) / 2
    low = 0.0 if right == 0 else float(beta.ppf(tail, right, n - right + 1))
    high = 1.0 if right == n else float(beta.ppf(1 - tail, right + 1, n - right))
    return low, high
