"""The problems of a run and the order in which they are trained on.

load_problems reads a source and keeps the held-out problems out of training, as texts;
make_batches gives each step its problems, the same ones for the same seed on any number of hosts,
from any step on.
"""

import hashlib
import logging
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from agon_jax.config import DataConfig
from agon_jax.data import arithmetic
from agon_jax.data.jsonl import DataError, read_jsonl
from agon_jax.data.problem import Problem

_log = logging.getLogger(__name__)


def load_problems(data: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """(train, heldout): of exactly the sizes asked for, no question in both, none twice in either.

    Which problems of a file are taken, and which are held out, depends on the seed and on their
    texts alone, not on their order or on train_size. A file too small for what is asked is refused.
    """
    if data.source == "arithmetic":
        return arithmetic.load(data.train_size, data.heldout_size, data.seed)
    fields = data.question_field, data.answer_field, data.id_field
    pool = _distinct(read_jsonl(data.path, *fields), data.path)
    if data.heldout_path:
        candidates = _distinct(read_jsonl(data.heldout_path, *fields), data.heldout_path)
    else:
        candidates = pool
    heldout = _choose(candidates, data, "heldout_size", data.heldout_path or data.path)
    # All of a held-out file stays out of training, also what heldout_size leaves of it.
    kept_out = {_normalised(p.question) for p in (candidates if data.heldout_path else heldout)}
    rest = [problem for problem in pool if _normalised(problem.question) not in kept_out]
    if data.heldout_path and len(rest) < len(pool):
        _log.warning(
            "%s: %d problems kept out of training: they stand in %s too",
            *(data.path, len(pool) - len(rest), data.heldout_path),
        )
    return _choose(rest, data, "train_size", data.path), heldout


def host_share(
    problems: Sequence[Problem], process_index: int = 0, process_count: int = 1
) -> list[Problem]:
    """One host's share of problems that are each to be seen once, as in an evaluation.

    Shares differ by one problem at most and together are the whole.
    """
    return list(problems[process_index::process_count])


class Batches:
    """Endless steps of problems, as make_batches orders them; the state is JSON-able."""

    def __init__(self, problems: Sequence[Problem], indices: Any, order: dict[str, int | str]):
        self._problems = problems
        self._indices = indices  # a grain DatasetIterator: the indices of each batch
        self._order = order  # what decides which problems a step has

    def __iter__(self) -> Iterator[list[Problem]]:
        return self

    def __next__(self) -> list[Problem]:
        """This host's problems of the next step."""
        return [self._problems[index] for index in next(self._indices)]

    def get_state(self) -> dict[str, int | str]:
        """Where the next step begins, and in which order; the same on every host."""
        return {"next_step": self._indices.get_state()["next_index"], **self._order}

    def set_state(self, state: dict[str, int | str]) -> None:
        """Goes on from a state; one of another order of problems is refused."""
        for name, value in self._order.items():
            if state.get(name) != value:
                raise DataError(
                    f"the run's data position belongs to {name} = {state.get(name)!r}, but now it"
                    f" is {value!r}: resume with the settings and problems the run began with"
                )
        self._indices.set_state({"next_index": state["next_step"]})


def make_batches(
    problems: Sequence[Problem],
    problems_per_step: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Batches:
    """A fresh order of the problems each pass, cut into batches that are all full.

    problems_per_step counts those of all hosts together; each host gets its consecutive part of
    every batch, so all make the same steps, and the union does not depend on the number of hosts.
    What a pass leaves over, len(problems) % problems_per_step and other problems each time, is
    not trained on in that pass.
    """
    import grain  # imports jax, which no importer of this layer is to be made to load

    if problems_per_step > len(problems):
        raise DataError(
            f"run.problems_per_step = {problems_per_step}: must be at most the number of training"
            f" problems, {len(problems)}"
        )
    if problems_per_step % process_count:
        raise DataError(
            f"run.problems_per_step = {problems_per_step}: must be a multiple of the number of"
            f" hosts, {process_count}"
        )
    share = problems_per_step // process_count
    mine = slice(process_index * share, (process_index + 1) * share)
    indices = (
        grain.MapDataset.range(len(problems))
        # grain adds the pass to the seed: hashed, neighbouring seeds share no pass.
        .shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        .batch(problems_per_step, drop_remainder=True, batch_fn=list)
        .map(lambda batch: batch[mine])
        .repeat()
    )
    # The problems are in memory: reading threads would only contend for the interpreter.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    order = {
        "seed": seed,
        "problems_per_step": problems_per_step,
        "problems": _fingerprint(problems),
    }
    return Batches(problems, iter(indices.to_iter_dataset(options)), order)


def _distinct(problems: list[Problem], path: str) -> list[Problem]:
    """The first of each question; the others are counted and said."""
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(_normalised(problem.question), problem)
    if len(first) < len(problems):
        contradicting = sum(
            first[_normalised(problem.question)].answer != problem.answer for problem in problems
        )
        _log.warning(
            "%s: %d repeated questions dropped, the first of each kept; %d had another answer",
            *(path, len(problems) - len(first), contradicting),
        )
    return list(first.values())


def _normalised(question: str) -> str:
    """The text by which two questions are the same: case and white space aside.

    Composed forms (NFC) only: the compatibility forms would make 3\N{SUPERSCRIPT TWO} and 32 one.
    """
    return " ".join(unicodedata.normalize("NFC", question).casefold().split())


def _choose(problems: list[Problem], data: DataConfig, setting: str, path: str) -> list[Problem]:
    """As many as asked, by a hash of seed and text: rows added later displace few of them."""
    size = getattr(data, setting)
    if size > len(problems):
        raise DataError(
            f"data.{setting} = {size}: {path} has only {len(problems)} problems for it; set it to"
            f" at most {len(problems)}"
        )

    def rank(problem: Problem) -> bytes:
        return hashlib.sha256(f"{data.seed} {_normalised(problem.question)}".encode()).digest()

    return sorted(problems, key=rank)[:size]


def _fingerprint(problems: Iterable[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr(tuple(problem)).encode())
    return digest.hexdigest()[:16]
