"""Answers judged in worker processes: what hangs, crashes or eats memory costs one wrong verdict.

Rollouts submit while the device samples on and collect the verdicts afterwards. Workers start once,
warm, and are replaced when they had to be killed. They never import jax.
"""

import collections
import os
import resource
import sys
import threading
import types
from concurrent.futures import Future, TimeoutError
from multiprocessing.context import SpawnContext, SpawnProcess

import pebble

from agon_jax.config import VerifierConfig
from agon_jax.data.problem import Problem
from agon_jax.verifiers import math
from agon_jax.verifiers.verdict import Verdict

WORKER_BYTES = 4 << 30  # address space of a worker; a warm one takes a tenth of it
CACHED = 100_000  # verdicts remembered
VERIFIERS = {"math": math}


class VerifierPool:
    """Use in a `with` block. `counts` holds the verdicts given so far, by reason."""

    def __init__(self, config: VerifierConfig):
        self.counts: collections.Counter[str] = collections.Counter()
        self._config = config
        self._cache: collections.OrderedDict[tuple[str, str, str], Verdict] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()
        self._pool = pebble.ProcessPool(
            max_workers=config.workers or os.cpu_count() or 1,
            initializer=_warm_up,
            context=_Context(),
        )

    def submit(self, problem: Problem, answer: str | None) -> "Future[Verdict]":
        """A future that always holds a Verdict, whatever the answer does to its worker."""
        given: Future[Verdict] = Future()
        verdict = self._at_once(problem, answer)
        if verdict is not None:
            self._give(given, verdict)
            return given
        assert answer is not None
        task = self._pool.schedule(
            VERIFIERS[problem.kind].verify,
            args=(problem.answer, answer),
            timeout=self._config.timeout_s,
        )

        def judged(task: Future) -> None:
            verdict = _outcome(task)
            if verdict.reason in ("right", "wrong"):  # others may be the machine's doing
                self._remember(_key(problem, answer), verdict)
            self._give(given, verdict)

        task.add_done_callback(judged)
        return given

    def _at_once(self, problem: Problem, answer: str | None) -> Verdict | None:
        """The verdict, where no worker is needed for it."""
        if problem.kind not in VERIFIERS:
            raise ValueError(
                f"problem {problem.id!r} is of kind {problem.kind!r}: must be one of "
                f"{', '.join(VERIFIERS)}"
            )
        if answer is None or not answer.strip():
            return Verdict(False, "no_answer")
        if len(answer) > self._config.max_answer_chars:
            return Verdict(False, "too_long")
        with self._lock:
            cached = self._cache.get(_key(problem, answer))
        return cached or math.exact_integer(problem.answer, answer)

    def _remember(self, key: tuple[str, str, str], verdict: Verdict) -> None:
        with self._lock:
            self._cache[key] = verdict
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)

    def _give(self, future: "Future[Verdict]", verdict: Verdict) -> None:
        with self._lock:
            self.counts[verdict.reason] += 1
        future.set_result(verdict)

    def close(self) -> None:
        """Ends the workers at once; what is still being judged becomes a crash."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(problem: Problem, answer: str) -> tuple[str, str, str]:
    return problem.kind, problem.answer, answer


def _outcome(task: Future) -> Verdict:
    try:
        return task.result()
    except TimeoutError:
        return Verdict(False, "timeout")
    except MemoryError:
        return Verdict(False, "memory")
    except BaseException:  # of whatever kind, cancelled by close() too: the run goes on
        return Verdict(False, "crash")


def _warm_up() -> None:
    """In a new worker: a bound on its memory, and the imports, before the first answer comes."""
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    math.verify("1/2", "0.5")


class _Process(SpawnProcess):
    """A worker that does not run the program's main module again, which would import jax."""

    _starting = threading.Lock()

    @staticmethod
    def _Popen(process_obj):
        with _Process._starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process
