"""Worker processes that judge answers, so that no answer can stop a run.

A hang, a crash or a memory hog is a wrong answer with its reason, counted; its worker is replaced
and the others go on. Workers hold no jax and know nothing of the parent's main module.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from agon_jax.config import VerifierConfig
from agon_jax.data.problem import Problem
from agon_jax.verifiers.math import exact_integer, verify, warm_up
from agon_jax.verifiers.verdict import Verdict

logger = logging.getLogger(__name__)


class Verifier(NamedTuple):
    """How a kind of problem is judged; both run in workers, in their main thread."""

    judge: Callable[[str, str, int], Verdict]  # (gold, answer, seconds for one of STEPS)
    warm_up: Callable[[], None] | None = None  # once in every worker, before its first answer


VERIFIERS: Mapping[str, Verifier] = {"math": Verifier(verify, warm_up)}  # by Problem.kind

MEMORY_LIMIT = 2 * 2**30  # bytes of address space; math-verify's worst known answer takes 0.4 GB
TASKS_PER_WORKER = 5000  # then it is replaced: what sympy keeps cached stays bounded
STEPS = 3  # of a math verdict, each with its own limit: parse the gold, parse the answer, compare
ATTEMPTS = 3  # a job is given to as many pools, should they break
CACHED = 2**16  # verdicts
PASSING = ("timeout", "memory", "crash")  # may be the machine's doing: judged anew the next time


class Job(NamedTuple):
    """What a verdict depends on."""

    kind: str
    gold: str
    answer: str


class VerifierPool:
    """Verdicts as futures, from any thread. A context manager; workers start at the first need."""

    def __init__(
        self, config: VerifierConfig, verifiers: Mapping[str, Verifier] = VERIFIERS
    ) -> None:
        self.counts: Counter[str] = Counter()  # verdicts given, by reason
        self._config = config
        self._verifiers = verifiers
        self._lock = threading.RLock()
        self._futures: OrderedDict[Job, Future[Verdict]] = OrderedDict()
        self._pending: set[Future[Verdict]] = set()
        self._bad_golds: set[str] = set()
        self._closed = False
        self._workers = self._new_workers()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, problem: Problem, answer: str | None) -> Future[Verdict]:
        """The verdict to come. Equal answers to equal golds are judged once.

        Its result() raises RuntimeError when the pool was closed before, or no worker can start.
        """
        if problem.kind not in self._verifiers:
            known = ", ".join(sorted(self._verifiers))
            raise ValueError(f"problem {problem.id!r} is of kind {problem.kind!r}: know {known}")
        future = self._judge(problem, answer)
        future.add_done_callback(partial(self._count, problem))
        return future

    def close(self) -> None:
        """Ends all workers, also busy ones; verdicts still to come raise RuntimeError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _end(self._workers)
        for future in list(self._pending):
            self._settle(future, RuntimeError("the verifier pool was closed before this verdict"))

    def _judge(self, problem: Problem, answer: str | None) -> Future[Verdict]:
        if answer is None or not answer.strip():
            return _settled(Verdict(False, "no_answer"))
        if len(answer) > self._config.max_answer_chars:
            return _settled(Verdict(False, "too_long"))
        if problem.kind == "math" and (verdict := exact_integer(problem.answer, answer)):
            return _settled(verdict)
        job = Job(problem.kind, problem.answer, answer)
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            if job in self._futures:
                self._futures.move_to_end(job)
                return self._futures[job]
            future: Future[Verdict] = Future()
            future.set_running_or_notify_cancel()  # others may wait for it: nobody cancels it
            self._futures[job] = future
            self._pending.add(future)
            while len(self._futures) > CACHED:
                self._futures.popitem(last=False)
            self._schedule(job, future, attempt=1)
        return future

    def _schedule(self, job: Job, future: Future[Verdict], attempt: int) -> None:
        seconds = self._config.timeout_s
        workers = self._workers
        limit_s = max(1, seconds // STEPS)  # whole: a fraction is no limit to math-verify
        try:
            inner = workers.schedule(
                self._verifiers[job.kind].judge,
                args=(job.gold, job.answer, limit_s),
                timeout=seconds,
            )
        except RuntimeError as error:  # broken while idle
            self._try_again(job, future, workers, attempt, error)
            return
        inner.add_done_callback(partial(self._receive, job, future, workers, attempt))

    def _receive(
        self,
        job: Job,
        future: Future[Verdict],
        workers: ProcessPool,
        attempt: int,
        inner: Future[Verdict],
    ) -> None:
        """Turns what became of a job into its verdict; runs in a thread of the workers' pool."""
        error = inner.exception()
        if error is None:
            self._settle(future, inner.result(), job)
        elif isinstance(error, TimeoutError):
            self._settle(future, Verdict(False, "timeout"), job)
        elif isinstance(error, MemoryError):
            self._settle(future, Verdict(False, "memory"), job)
        elif isinstance(error, BrokenProcessPool):
            self._try_again(job, future, workers, attempt, error)
        else:
            if not isinstance(error, ProcessExpired):  # the verifier's own fault: not in silence
                logger.error("the verifier of %r raised on %s", job.kind, job, exc_info=error)
            self._settle(future, Verdict(False, "crash"), job)

    def _try_again(
        self,
        job: Job,
        future: Future[Verdict],
        broken: ProcessPool,
        attempt: int,
        error: BaseException,
    ) -> None:
        """A worker died outside any job that pebble knew of, and it gives up on all jobs."""
        with self._lock:
            if self._closed:
                return
            if self._workers is broken:
                logger.warning("the verifier's workers broke and are replaced: %s", error)
                self._workers = self._new_workers()
                threading.Thread(target=_end, args=(broken,), daemon=True).start()
            if attempt < ATTEMPTS:
                self._schedule(job, future, attempt + 1)
                return
        broke = RuntimeError(f"no verdict: the verifier's workers broke {ATTEMPTS} times: {error}")
        self._settle(future, broke, job)

    def _settle(
        self, future: Future[Verdict], outcome: Verdict | BaseException, job: Job | None = None
    ) -> None:
        with self._lock:
            if future not in self._pending:
                return
            self._pending.discard(future)
            passing = isinstance(outcome, BaseException) or outcome.reason in PASSING
            if job is not None and passing:
                self._futures.pop(job, None)
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _count(self, problem: Problem, future: Future[Verdict]) -> None:
        if future.exception() is not None:
            return
        reason = future.result().reason
        with self._lock:
            self.counts[reason] += 1
            first = reason == "bad_gold" and problem.answer not in self._bad_golds
            if first:
                self._bad_golds.add(problem.answer)
        if first:
            logger.warning(
                "the gold answer %r of problem %r parses to nothing, so that only its own text is "
                "right: mend it in the data",
                problem.answer,
                problem.id,
            )

    def _new_workers(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._config.workers or _cores(),
            max_tasks=TASKS_PER_WORKER,
            initializer=_start_worker,
            initargs=(MEMORY_LIMIT, [each.warm_up for each in self._verifiers.values()]),
            context=_Context(),
        )


def _settled(verdict: Verdict) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux alone
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _end(workers: ProcessPool) -> None:
    workers.stop()
    workers.join()


def _start_worker(memory_limit: int, warm_ups: Sequence[Callable[[], None] | None]) -> None:
    import resource  # of POSIX alone

    with suppress(ValueError, OSError):  # macOS refuses; the time limit holds there too
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for warm_up_kind in warm_ups:
        if warm_up_kind is not None:
            warm_up_kind()


def _end_with(parent: int) -> None:
    """Ends a worker that is still busy when its parent was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class _Process(SpawnProcess):
    """A process that neither runs the parent's main module again nor hears the user's Ctrl-C.

    Running it would import jax in every worker, and start the whole run again where a script has no
    main guard. The parent ends its workers itself.
    """

    _starting = threading.Lock()

    def start(self) -> None:
        main = vars(sys.modules["__main__"])
        with self._starting:
            hidden = {name: main[name] for name in ("__spec__", "__file__") if name in main}
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
            main["__spec__"] = main["__file__"] = None
            try:
                super().start()
            finally:
                del main["__spec__"], main["__file__"]
                main.update(hidden)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Context(SpawnContext):
    Process = _Process
