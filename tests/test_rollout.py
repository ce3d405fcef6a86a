"""Who reads what: drafts paired with challenges, keys, shared rivals, prompts beyond their cap."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from agon_jax.config import MethodConfig, PromptConfig, RunConfig, SamplingConfig
from agon_jax.data.problem import Problem
from agon_jax.policies import Policy
from agon_jax.prompts import Sections
from agon_jax.rollout import challenge, draft, request_keys, rivals
from agon_jax.sampler import Completion
from agon_jax.verifiers.pool import VerifierPool
from agon_jax.verifiers.verdict import Verdict

PROBLEMS = [Problem("p0", "2+3", "5"), Problem("p1", "40+2", "42")]
RUN = RunConfig(
    prompts=PromptConfig(draft="{question}=", challenge="{question}|{summary}="),
    method=MethodConfig(group_size=2),
)


class Characters:
    """A tokenizer of code points; a completion is reasoning, '#', and what follows the block."""

    def render(self, text: str, system: str = "") -> np.ndarray:
        return np.array([ord(c) for c in system + text], np.int32)

    def sections(self, prompt, completion) -> Sections:
        reasoning, closed, after = "".join(map(chr, completion)).partition("#")
        return Sections(bool(closed), bool(closed), reasoning, after)


class Pool(VerifierPool):
    """Judges at once, by equality."""

    def __init__(self):
        pass

    def submit(self, problem: Problem, answer: str | None) -> Future:
        future: Future = Future()
        right = answer == problem.answer
        future.set_result(Verdict(right, "right" if right else "wrong"))
        return future


def policy(script, calls: list) -> Policy:
    """Writes script(prompt text, rollout index) and remembers what it was asked."""

    def sample(weights, prompts, keys):
        calls.append((weights, prompts, keys))
        for index in reversed(range(len(prompts))):  # rounds may come in any order
            text = "".join(map(chr, prompts[index]))
            tokens = [script(text, j) for j in range(keys.shape[1])]
            yield (
                index,
                [
                    Completion(
                        np.array([ord(c) for c in t], np.int32), np.zeros(len(t), np.float32), True
                    )
                    for t in tokens
                ],
            )

    return Policy("A", 0, 0, 0, Characters(), sample)


def first_right(prompt: str, j: int) -> str:
    answer = {"2": "5", "4": "42"}[prompt[0]] if j == 0 else "9"
    return f"r{j}#way {j} of {prompt}<answer>{answer}</answer>"


def test_drafts_share_one_prompt_a_problem_and_land_in_their_places():
    calls: list = []
    stage = draft(policy(first_right, calls), ["w"], PROBLEMS, RUN, Pool(), count=3, step=4)
    (weights, prompts, keys), *more = calls
    assert not more
    assert weights == "w"
    assert ["".join(map(chr, p)) for p in prompts] == ["2+3=", "40+2="]
    assert keys.shape == (2, 3, 2)
    assert stage.outcomes.correct.tolist() == [[True, False, False]] * 2
    assert stage.outcomes.answers.tolist() == [["5", "9", "9"], ["42", "9", "9"]]
    assert stage.prefilled_tokens == 4 + 5
    assert stage.outcomes.lengths[0, 0] == len(stage.rollouts[0][0].completion.tokens)


def test_each_challenge_reads_the_summary_of_its_own_draft():
    drafts = draft(policy(first_right, []), ["w"], PROBLEMS, RUN, Pool(), count=2, step=0)
    calls: list = []
    challenge(policy(first_right, calls), ["w"], PROBLEMS, drafts, RUN, Pool(), step=0)
    texts = ["".join(map(chr, p)) for p in calls[0][1]]
    assert [text.startswith(q) for text, q in zip(texts, "2244", strict=True)] == [True] * 4
    assert ["way 0" in text for text in texts] == [True, False, True, False]
    assert ["way 1" in text for text in texts] == [False, True, False, True]
    assert not any("answer>" in text or "42</" in text for text in texts)
    assert calls[0][2].shape == (4, 1, 2)


def test_a_shared_rival_is_the_first_draft_for_the_whole_group():
    run = replace(RUN, method=replace(RUN.method, rival="shared"))
    drafts = draft(policy(first_right, []), ["w"], PROBLEMS, run, Pool(), count=2, step=0)
    calls: list = []
    stage = challenge(policy(first_right, calls), ["w"], PROBLEMS, drafts, run, Pool(), step=0)
    texts = ["".join(map(chr, p)) for p in calls[0][1]]
    assert ["way 0" in text for text in texts] == [True, True]
    assert calls[0][2].shape == (2, 2, 2)
    assert stage.outcomes.correct.shape == (2, 2)
    assert rivals(drafts, run).correct.tolist() == [[True, True], [True, True]]
    assert rivals(drafts, RUN).correct.tolist() == [[True, False], [True, False]]


def test_keys_name_the_request_and_not_its_place():
    keys = request_keys(3, "draft", 7, PROBLEMS, 2)
    assert np.array_equal(request_keys(3, "draft", 7, PROBLEMS[::-1], 2), keys[::-1])
    assert np.array_equal(request_keys(3, "draft", 7, PROBLEMS, 1), keys[:, :1])
    others = [
        request_keys(4, "draft", 7, PROBLEMS, 2),
        request_keys(3, "challenge", 7, PROBLEMS, 2),
        request_keys(3, "draft", 8, PROBLEMS, 2),
    ]
    every = np.concatenate([keys, *others]).reshape(-1, 2)
    assert len({tuple(key) for key in every}) == len(every)


def test_a_prompt_beyond_its_cap_is_an_error_by_default():
    run = replace(RUN, sampling=SamplingConfig(max_draft_prompt_tokens=4))
    with pytest.raises(ValueError, match="'p1' has 5 tokens, the cap is 4: raise sampling"):
        draft(policy(first_right, []), ["w"], PROBLEMS, run, Pool(), count=2, step=0)


@pytest.mark.parametrize(("cap", "dropped"), [(5, 0), (4, 2), (3, 4)])
def test_or_is_dropped_and_counted(cap, dropped):
    sampling = SamplingConfig(max_draft_prompt_tokens=cap, overlong_prompt="drop")
    stage = draft(
        *(policy(first_right, []), ["w"], PROBLEMS, replace(RUN, sampling=sampling), Pool()),
        count=2,
        step=0,
    )
    assert (stage.outcomes.reasons == "dropped").sum() == dropped
    assert (stage.outcomes.lengths == 0).sum() == dropped
    assert not stage.outcomes.truncated.any()
