"""One stage of the exchange: prompts to completions, and completions to verdicts.

`draft` samples every problem's drafts; `challenge` hands each draft's summary to the rival. The
verifier works on the rounds that are back while the device samples the next. Tokens are always
those of the policy that wrote them; between the stages only the summary's text passes.
"""

import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from agon_jax import prompts as words
from agon_jax.config import RunConfig
from agon_jax.data.problem import Problem
from agon_jax.outcomes import Outcomes
from agon_jax.policies import Policy
from agon_jax.sampler import Completion
from agon_jax.verifiers.pool import VerifierPool
from agon_jax.verifiers.verdict import Verdict

Weights = Sequence[PyTree]  # by stack: the trainable trees, leaves [policy, ...]


class Rollout(NamedTuple):
    """One completion and what was read out of it."""

    prompt_tokens: np.ndarray  # int32 [prompt]
    completion: Completion
    sections: words.Sections
    answer: str | None
    summary: str  # with the answer withheld; what a rival may read


class Request(NamedTuple):
    """One prompt and who asks: rollouts [problem, rollouts] share its prefill."""

    problem: int
    rollouts: range
    prompt: np.ndarray  # int32 [prompt]
    keys: np.ndarray  # uint32 [rollout, 2]


class Stage(NamedTuple):
    """All rollouts of one stage, [problem][rollout], and what came of them."""

    rollouts: list[list[Rollout]]
    outcomes: Outcomes
    prefilled_tokens: int  # prompt tokens that went through the model; a shared prompt counts once
    verify_seconds: float  # waited for verdicts after the last completion was back


def request_keys(
    seed: int, stage: str, step: int, problems: Sequence[Problem], count: int
) -> np.ndarray:
    """uint32 [problem, count, 2]: a sampling key for each request, from what it is and not where.

    Equal arguments give equal keys on any host, in any batch and in any version of this library.
    """
    stage_code = zlib.crc32(stage.encode())
    keys = [
        [
            np.random.SeedSequence((seed, stage_code, step, problem_code, j)).generate_state(2)
            for j in range(count)
        ]
        for problem_code in (zlib.crc32(problem.id.encode()) for problem in problems)
    ]
    return np.array(keys, np.uint32)


def draft(
    policy: Policy,
    weights: Weights,
    problems: Sequence[Problem],
    run: RunConfig,
    pool: VerifierPool,
    *,
    count: int,
    step: int,
    stage: str = "draft",
) -> Stage:
    """`count` drafts of every problem from its plain prompt, prefilled once a problem."""
    keys = request_keys(run.seed, stage, step, problems, count)
    requests = [
        Request(i, range(count), draft_prompt_tokens(policy, problem, run), keys[i])
        for i, problem in enumerate(problems)
    ]
    return _roll(
        policy, weights, problems, requests, run.sampling.max_draft_prompt_tokens, run, pool
    )


def challenge(
    policy: Policy,
    weights: Weights,
    problems: Sequence[Problem],
    drafts: Stage,
    run: RunConfig,
    pool: VerifierPool,
    *,
    step: int,
    stage: str = "challenge",
) -> Stage:
    """One challenge for every draft [i, j], which read that draft's summary; or draft [i, 0]'s when
    the rival is shared."""
    count = len(drafts.rollouts[0])
    keys = request_keys(run.seed, stage, step, problems, count)
    readers = (
        [range(count)] if run.method.rival == "shared" else [range(j, j + 1) for j in range(count)]
    )
    requests = [
        Request(
            i,
            js,
            challenge_prompt_tokens(policy, problem, drafts.rollouts[i][js[0]].summary, run),
            keys[i, js],
        )
        for i, problem in enumerate(problems)
        for js in readers
    ]
    return _roll(
        policy, weights, problems, requests, run.sampling.max_challenge_prompt_tokens, run, pool
    )


def rivals(drafts: Stage, run: RunConfig) -> Outcomes:
    """The outcomes of the draft that each challenge read, aligned with the challenges."""
    if run.method.rival == "own":
        return drafts.outcomes
    first = (np.broadcast_to(array[:, :1], array.shape) for array in drafts.outcomes)
    return Outcomes(*first)


def draft_prompt_tokens(policy: Policy, problem: Problem, run: RunConfig) -> np.ndarray:
    """The drafter's prompt, int32 [prompt]."""
    return policy.tokenizer.render(
        words.draft_prompt(problem.question, run.prompts), run.prompts.system
    )


def challenge_prompt_tokens(
    policy: Policy, problem: Problem, summary: str, run: RunConfig
) -> np.ndarray:
    """The challenger's prompt about a rival's summary, int32 [prompt]."""
    return policy.tokenizer.render(
        words.challenge_prompt(problem.question, summary, run.prompts), run.prompts.system
    )


def _roll(
    policy: Policy,
    weights: Weights,
    problems: Sequence[Problem],
    requests: list[Request],
    max_prompt_tokens: int,
    run: RunConfig,
    pool: VerifierPool,
) -> Stage:
    fitting = [r for r in requests if len(r.prompt) <= max_prompt_tokens]
    if len(fitting) < len(requests) and run.sampling.overlong_prompt == "error":
        worst = max(requests, key=lambda r: len(r.prompt))
        raise ValueError(
            f"the prompt of problem {problems[worst.problem].id!r} has {len(worst.prompt)} tokens, "
            f"the cap is {max_prompt_tokens}: raise sampling.max_draft_prompt_tokens or "
            "sampling.max_challenge_prompt_tokens, or set sampling.overlong_prompt = 'drop'"
        )
    count = max(j + 1 for r in requests for j in r.rollouts)
    rolled = {(r.problem, j): _dropped(r.prompt) for r in requests for j in r.rollouts}
    verdicts = {}
    prompts, keys = [r.prompt for r in fitting], np.array([r.keys for r in fitting], np.uint32)
    for k, completions in policy.sample(weights[policy.stack], prompts, keys) if fitting else ():
        request = fitting[k]
        for j, completion in zip(request.rollouts, completions, strict=True):
            place = (request.problem, j)
            rolled[place] = _read(policy, request.prompt, completion, run)
            verdicts[place] = pool.submit(problems[request.problem], rolled[place].answer)
    rollouts = [[rolled[i, j] for j in range(count)] for i in range(len(problems))]
    sampled_at = time.perf_counter()
    judged = {place: future.result() for place, future in verdicts.items()}
    waited = time.perf_counter() - sampled_at
    prefilled = sum(len(r.prompt) for r in fitting)
    return Stage(rollouts, _outcomes(rollouts, judged), prefilled, waited)


def _read(policy: Policy, prompt: np.ndarray, completion: Completion, run: RunConfig) -> Rollout:
    sections = policy.tokenizer.sections(prompt, completion.tokens)
    answer = words.parse_answer(sections.after)
    return Rollout(prompt, completion, sections, answer, words.summary(sections, run.prompts))


def _dropped(prompt: np.ndarray) -> Rollout:
    """The place of a request whose prompt is beyond its cap: no tokens, no answer, no gradient."""
    nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), False)
    return Rollout(prompt, nothing, words.Sections(False, False, "", ""), None, "")


def _outcomes(rollouts: list[list[Rollout]], judged: dict[tuple[int, int], Verdict]) -> Outcomes:
    dropped = Verdict(False, "dropped")
    verdicts = [
        [judged.get((i, j), dropped) for j in range(len(row))] for i, row in enumerate(rollouts)
    ]

    def table(read, dtype):
        return np.array([[read(rollout) for rollout in row] for row in rollouts], dtype)

    return Outcomes(
        correct=np.array([[verdict.correct for verdict in row] for row in verdicts], bool),
        format_ok=table(lambda r: words.format_reward(r.sections), bool),
        lengths=table(lambda r: len(r.completion.tokens), np.int64),
        prompt_lengths=table(lambda r: len(r.prompt_tokens), np.int64),
        truncated=table(lambda r: len(r.completion.tokens) > 0 and not r.completion.stopped, bool),
        answers=table(lambda r: r.answer, object),
        reasons=np.array([[verdict.reason for verdict in row] for row in verdicts], object),
    )
