"""Training, start here: roles, drafts, challenges, verdicts, rewards, advantages, update; again.

`train` is the whole line of the data's way. Every noun in it is the paper's and has a module of its
own; the rows of the paper's table are settings of the method, and never branches of the line.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from agon_jax.batching import Row
from agon_jax.checkpoint import Checkpoints
from agon_jax.config import RunConfig
from agon_jax.data.batches import load_problems, make_batches
from agon_jax.evaluate import Report, evaluate
from agon_jax.metrics import MetricsWriter, step_metrics
from agon_jax.policies import Pair, Policy, load_pair
from agon_jax.progress import Progress
from agon_jax.rewards import challenge_rewards, draft_rewards, group_advantages
from agon_jax.rollout import Stage, challenge, draft, rivals
from agon_jax.verifiers.pool import VerifierPool


def train(run: RunConfig, workdir: Path) -> Report | None:
    """Trains a pair, going on where `workdir` left off, and evaluates it on the held-out problems.

    Writes metrics.jsonl, TensorBoard events and checkpoints under `workdir`. Returns the final
    report, or None where there are no held-out problems. A method that does not learn is only
    evaluated.
    """
    problems, heldout = load_problems(run.data)
    pair = load_pair(run)
    batches = make_batches(
        problems, run.problems_per_step, run.data.seed, jax.process_index(), jax.process_count()
    )
    steps = run.total_steps if run.method.learn else 0
    with (
        VerifierPool(run.verifier) as pool,
        Checkpoints(workdir / "checkpoints", run.keep_checkpoints) as checkpoints,
    ):
        start, states, record = checkpoints.restore_latest(pair.init_states())
        if record:
            batches.set_state(record["data"])
        totals = Totals(**record.get("totals", {}))
        with (
            MetricsWriter(workdir, start) as writer,
            Progress(steps, run.method.drafts, start) as progress,
            jax.transfer_guard("disallow"),
        ):

            def evaluated(step: int, asked: Sequence) -> Report:
                progress.phase("evaluation")
                report = evaluate(pair, pair.weights(states), asked, run, pool)
                writer.write("eval", step, {**report.numbers(), "totals": totals._asdict()})
                return report

            for step in range(start, steps):
                if heldout and run.eval_every and step % run.eval_every == 0:
                    evaluated(step, heldout[: run.eval_problems or None])
                clock = Clock(progress)
                weights = pair.weights(states)
                drafter, challenger = roles(pair, step, run)
                asked = next(batches)
                with clock.part("draft"):
                    drafts = draft(
                        drafter, weights, asked, run, pool, count=run.method.drafts, step=step
                    )
                played = [(drafter, drafts)]
                if run.method.challenge:
                    with clock.part("challenge"):
                        challenges = challenge(
                            challenger, weights, asked, drafts, run, pool, step=step
                        )
                    played.append((challenger, challenges))
                graded = grade(played, run)
                with clock.part("update"):
                    states, learned = pair.learn(states, streams_by_policy(pair, graded))
                totals = totals.after(graded, clock)
                figures = step_figures(graded, run) | learned | clock.figures(graded)
                writer.write("train", step, figures | {"totals": totals._asdict()})
                progress.step(step, figures)
                if run.save_every and ((step + 1) % run.save_every == 0 or step + 1 == steps):
                    record = {"data": batches.get_state(), "totals": totals._asdict()}
                    checkpoints.save(step + 1, states, record)
            return evaluated(steps, heldout) if heldout else None


def roles(pair: Pair, step: int, run: RunConfig) -> tuple[Policy, Policy]:
    """(drafter, challenger): they rotate each step, A drafts first; one policy plays both roles."""
    first, last = pair.policies[0], pair.policies[-1]
    return (last, first) if run.method.roles == "rotate" and step % 2 else (first, last)


class Graded(NamedTuple):
    """A stage, who wrote it and what it earned; arrays are [problem, rollout], live [problem]."""

    policy: Policy
    stage: Stage
    rewards: np.ndarray
    advantages: np.ndarray
    live: np.ndarray


def grade(played: Sequence[tuple[Policy, Stage]], run: RunConfig) -> list[Graded]:
    """Rewards and group advantages of the drafts and, where there are any, of the challenges."""
    drafts = played[0][1]
    graded = []
    for policy, stage in played:
        if stage is drafts:
            rewards = draft_rewards(stage.outcomes, run.method)
        else:
            rewards = challenge_rewards(stage.outcomes, rivals(drafts, run), run.method)
        scored = stage.outcomes.reasons != "dropped"
        advantages, live = group_advantages(rewards, run.grpo, scored)
        graded.append(Graded(policy, stage, rewards, advantages, live))
    return graded


def streams_by_policy(pair: Pair, graded: Sequence[Graded]) -> list[list[Row]]:
    """What each policy learns from: the rollouts it wrote itself, in whatever role."""
    streams: list[list[Row]] = [[] for _ in pair.policies]
    for policy, stage, _, advantages, live in graded:
        for i, group in enumerate(stage.rollouts):
            for j, rollout in enumerate(group):
                tokens, logprobs, stopped = rollout.completion
                if len(tokens):  # a dropped prompt has none
                    row = Row(
                        rollout.prompt_tokens,
                        tokens,
                        logprobs,
                        float(advantages[i, j]),
                        bool(live[i]),
                        not stopped,
                    )
                    streams[policy.index].append(row)
    return streams


def step_figures(graded: Sequence[Graded], run: RunConfig) -> dict[str, float]:
    """The step's metrics by stage, by policy and of the pair."""
    drafts = graded[0].stage
    challenges = graded[1].stage if len(graded) > 1 else None
    return step_metrics(
        drafts.outcomes,
        challenges.outcomes if challenges else None,
        rivals(drafts, run) if challenges else None,
        policies=[each.policy.name for each in graded],
        rewards=[each.rewards for each in graded],
        live=[each.live for each in graded],
    )


class Totals(NamedTuple):
    """What a run has cost so far, over all its sessions."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    seconds: float = 0.0

    def after(self, graded: Sequence[Graded], clock: "Clock") -> "Totals":
        return Totals(
            self.generated_tokens + sum(int(g.stage.outcomes.lengths.sum()) for g in graded),
            self.prefilled_tokens + sum(g.stage.prefilled_tokens for g in graded),
            self.seconds + sum(clock.seconds.values()),
        )


class Clock:
    """Wall seconds of the parts of one step."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._progress.phase(name)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def figures(self, graded: Sequence[Graded]) -> dict[str, Any]:
        """Seconds of each part, and tokens a second: generated, or gone through the update."""
        tokens = {
            name: each.stage.outcomes.lengths.sum()
            for name, each in zip(("draft", "challenge"), graded, strict=False)
        }
        tokens["update"] = sum(
            (g.stage.outcomes.lengths + g.stage.outcomes.prompt_lengths).sum() for g in graded
        )
        return (
            {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
            | {
                f"tokens_per_second/{name}": float(tokens[name]) / seconds
                for name, seconds in self.seconds.items()
            }
            | {"seconds/verify_wait": sum(g.stage.verify_seconds for g in graded)}
        )
