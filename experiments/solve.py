"""Lets a pair solve a problem of yours: one policy drafts, the rival reads its summary and answers.

    python experiments/solve.py --workdir runs/agon --problem '23+45+91+77'
    python experiments/solve.py --workdir runs/agon --file questions.jsonl > answers.jsonl
    echo '23+45+91+77' | python experiments/solve.py --config models/embedded.gin

--file prints a JSON object for each line of the file; without it and --problem the problem is read
from the standard input. With --config the pair is untrained.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from agon_jax import prompts as words
from agon_jax.config import RunConfig, SettingError
from agon_jax.data.jsonl import DataError
from agon_jax.data.problem import Problem
from agon_jax.policies import Pair, Policy
from agon_jax.rollout import Weights, challenge_prompt_tokens, draft_prompt_tokens, request_keys
from experiments.evaluate import add_pair_arguments, load_players, run_of
from experiments.settings import refusing


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--problem", metavar="TEXT")
    source.add_argument(
        "--file", type=Path, metavar="FILE.jsonl", help="questions, in data.question_field"
    )
    parser.add_argument("--first", choices=("A", "B"), default="A", help="who drafts (default: A)")
    args = parser.parse_args(arguments)
    run = run_of(args)
    if args.file:
        questions = read_questions(args.file, run.data.question_field)
    else:
        questions = [sys.stdin.read() if args.problem is None else args.problem]
        if not questions[0].strip():
            parser.error("the problem is empty")
    pair, weights = load_players(run, args.workdir)
    for exchange in solve(pair, weights, questions, run, args.first):
        print(json.dumps(exchange._asdict()) if args.file else as_text(exchange), flush=True)
    return 0


class Exchange(NamedTuple):
    """The whole way from a problem to the pair's answer."""

    question: str
    draft: str  # the drafter's reasoning and what it wrote after it
    summary: str  # what the challenger read of it, the answer withheld
    challenge: str
    draft_answer: str | None
    answer: str | None  # the challenger's; None where it gave none


def solve(
    pair: Pair, weights: Weights, questions: Sequence[str], run: RunConfig, first: str = "A"
) -> Iterator[Exchange]:
    """The cascade on each question, in order, as many at once as the devices decode at once."""
    drafter, challenger = pair.policies[0], pair.policies[-1]
    if first == "B":
        drafter, challenger = challenger, drafter
    problems = [Problem(f"typed:{i}", text.strip(), "?") for i, text in enumerate(questions)]
    at_once = run.sampling.rows_per_device * jax.local_device_count()
    for start in range(0, len(problems), at_once):
        some = problems[start : start + at_once]
        drafts = write(
            drafter,
            weights,
            [draft_prompt_tokens(drafter, problem, run) for problem in some],
            request_keys(run.seed, "solve draft", 0, some, 1),
            run.sampling.max_draft_prompt_tokens,
        )
        summaries = [words.summary(sections, run.prompts) for sections in drafts]
        challenges = write(
            challenger,
            weights,
            [
                challenge_prompt_tokens(challenger, problem, summary, run)
                for problem, summary in zip(some, summaries, strict=True)
            ],
            request_keys(run.seed, "solve challenge", 0, some, 1),
            run.sampling.max_challenge_prompt_tokens,
        )
        for problem, draft, summary, challenge in zip(
            some, drafts, summaries, challenges, strict=True
        ):
            yield Exchange(
                problem.question,
                whole(draft),
                summary,
                whole(challenge),
                words.parse_answer(draft.after),
                words.parse_answer(challenge.after),
            )


def write(
    policy: Policy,
    weights: Weights,
    prompts: Sequence[np.ndarray],
    keys: np.ndarray,
    cap: int,
) -> list[words.Sections]:
    """One completion of each prompt, read into its parts."""
    longest = max(len(prompt) for prompt in prompts)
    if longest > cap:
        raise SettingError(
            f"a prompt of {longest} tokens is beyond its cap of {cap}: raise"
            " sampling.max_draft_prompt_tokens or sampling.max_challenge_prompt_tokens with --set"
        )
    read = {
        i: policy.tokenizer.sections(prompts[i], completion.tokens)
        for i, (completion,) in policy.sample(weights[policy.stack], prompts, keys)
    }
    return [read[i] for i in range(len(prompts))]


def whole(sections: words.Sections) -> str:
    """A completion for a person: the reasoning, then what followed it."""
    if not sections.closed:
        return f"{sections.reasoning}\n[no end to the reasoning within sampling.max_new_tokens]"
    return f"{sections.reasoning}\n--\n{sections.after}"


def as_text(exchange: Exchange) -> str:
    parts = {
        "Problem": exchange.question,
        "Draft": exchange.draft,
        "Summary the rival reads": exchange.summary or "(none)",
        "Challenge": exchange.challenge,
        "Answer": exchange.answer or "(none)",
    }
    return "\n\n".join(f"== {name}\n{text}" for name, text in parts.items())


def read_questions(path: Path, field: str) -> list[str]:
    """The questions of a JSONL file, which needs no answers; raises DataError with the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                question = json.loads(line)[field]
            except (ValueError, KeyError, TypeError):
                question = None
            if not isinstance(question, str) or not question.strip():
                raise DataError(
                    f"{path}:{number}: no JSON object with text in {field!r} (data.question_field)"
                )
            questions.append(question)
    if not questions:
        raise DataError(f"{path}: no questions in it: expected one JSON object a line")
    return questions


if __name__ == "__main__":
    sys.exit(main())
