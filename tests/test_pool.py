"""Verdicts from worker processes: hostile answers cost one verdict each, and the pool goes on."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from agon_jax.config import VerifierConfig
from agon_jax.data.problem import Problem
from agon_jax.verifiers import pool as pools
from agon_jax.verifiers.pool import VerifierPool
from agon_jax.verifiers.verdict import Verdict


class hostile:
    """A verifier whose answers say what they do to the worker."""

    @staticmethod
    def verify(gold: str, answer: str) -> Verdict:
        if answer == "hang":
            time.sleep(60)
        if answer.startswith("exit"):
            os._exit(int(answer[-1]))
        if answer == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if answer == "memory":
            bytearray(1 << 40)
        if answer == "raise":
            raise RuntimeError("out of an answer")
        if answer == "jax":
            return Verdict("jax" not in sys.modules, "right")
        return Verdict(answer == gold, "right" if answer == gold else "wrong")


@pytest.fixture(scope="module")
def pool():
    pools.VERIFIERS["hostile"] = hostile
    with VerifierPool(VerifierConfig(workers=1, timeout_s=2)) as pool:
        yield pool
    del pools.VERIFIERS["hostile"]


def judge(pool, gold: str, answer: str | None, kind: str = "math") -> Verdict:
    return pool.submit(Problem("p", "q", gold, kind), answer).result(timeout=60)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("exit 3", "crash"),
        ("exit 0", "timeout"),  # looks like a worker that has not answered yet
        ("killed", "crash"),
        ("memory", "memory"),
        ("raise", "crash"),
    ],
)
def test_a_hostile_answer_is_one_wrong_verdict_and_the_next_is_judged(pool, answer, reason):
    before = pool.counts[reason]
    assert judge(pool, "x", answer, "hostile") == (False, reason)
    assert judge(pool, "x", "x", "hostile") == (True, "right")
    assert pool.counts[reason] == before + 1


def test_a_hang_ends_at_the_limit(pool):
    began = time.monotonic()
    assert judge(pool, "x", "hang", "hostile") == (False, "timeout")
    assert time.monotonic() - began < 30
    assert judge(pool, "x/1", "x/1", "hostile").correct


def test_workers_have_no_jax(pool):
    assert judge(pool, "x", "jax", "hostile").correct


def test_equivalent_answers(pool):
    assert judge(pool, r"\frac{1}{2}", "0.5") == (True, "right")
    assert judge(pool, r"\frac{1}{2}", "2") == (False, "wrong")


def test_from_a_thread(pool):
    got = []
    thread = threading.Thread(target=lambda: got.append(judge(pool, "3/4", r"\frac{3}{4}")))
    thread.start()
    thread.join(60)
    assert got == [(True, "right")]


@pytest.mark.parametrize(
    ("answer", "reason"), [(None, "no_answer"), (" ", "no_answer"), ("1" * 1001, "too_long")]
)
def test_what_needs_no_worker(pool, answer, reason):
    assert judge(pool, "1", answer) == (False, reason)


def test_an_unknown_kind_is_refused(pool):
    with pytest.raises(ValueError, match="kind 'poem': must be one of math"):
        pool.submit(Problem("p", "q", "1", "poem"), "1")


def test_closing_leaves_no_process():
    before = set(psutil.Process().children())
    with VerifierPool(VerifierConfig(workers=1)) as pool:
        judge(pool, "1/3", r"\frac{1}{3}")
        workers = [
            child
            for child in set(psutil.Process().children()) - before
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
        assert workers
    assert not psutil.wait_procs(workers, 10)[1]
