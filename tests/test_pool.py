"""Verdicts from worker processes: hostile answers cost one verdict each, and the pool goes on."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import psutil
import pytest

from agon_jax.config import VerifierConfig
from agon_jax.data.problem import Problem
from agon_jax.verifiers.pool import Verifier, VerifierPool
from agon_jax.verifiers.verdict import Verdict

PATHS = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
PATIENCE = 60  # seconds, on a busy machine


HOSTILE = {"hostile": Verifier(hostile.judge)}


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(VerifierConfig(workers=1, timeout_s=1), HOSTILE) as pool:
        yield pool


@pytest.fixture(scope="module")
def math_pool():
    with VerifierPool(VerifierConfig(workers=1, timeout_s=3)) as pool:
        yield pool


def judge(pool, gold: str, answer: str | None, kind: str = "hostile") -> Verdict:
    return pool.submit(Problem("p", "q", gold, kind), answer).result(timeout=PATIENCE)


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(None, "no_answer"), (" ", "no_answer"), ("1" * 1001, "too_long"), ("+1", "right"),
     ("2", "wrong")],
)  # fmt: skip
def test_what_needs_no_worker(answer, reason):
    with VerifierPool(VerifierConfig()) as pool:
        assert judge(pool, "1", answer, "math") == (reason == "right", reason)
        assert pool.counts == {reason: 1}
        assert not workers()


def test_an_unknown_kind_is_refused(pool):
    with pytest.raises(ValueError, match="'p' is of kind 'poem': know hostile"):
        pool.submit(Problem("p", "q", "1", "poem"), "1")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("exit 3", "crash"),
        ("exit 0", "timeout"),  # looks like a worker that has not answered yet
        ("die", "crash"),
        ("hoard", "memory"),
        ("hang", "timeout"),
        ("spin", "timeout"),
    ],
)
def test_a_hostile_answer_is_one_wrong_verdict_and_the_next_is_judged(pool, answer, reason):
    before = pool.counts[reason]
    assert judge(pool, "x", answer) == (False, reason)
    assert pool.counts[reason] == before + 1
    assert judge(pool, answer, "x") == (False, "wrong")


def test_a_verifier_that_raises_is_a_crash_and_is_heard_of(pool, caplog):
    with caplog.at_level(logging.ERROR, logger="agon_jax.verifiers.pool"):
        assert judge(pool, "x", "raise") == (False, "crash")
    assert "out of an answer" in caplog.text


def test_a_worker_that_dies_idle_is_replaced(pool):
    assert judge(pool, "idle", "idle").correct
    time.sleep(0.5)  # it lets go of its pipe
    for worker in workers():
        worker.kill()
    assert judge(pool, "again", "again") == (True, "right")


def test_workers_that_cannot_start_are_an_error_and_no_verdict():
    failing = {"hostile": Verifier(hostile.judge, hostile.fail)}
    with VerifierPool(VerifierConfig(workers=1), failing) as pool:
        future = pool.submit(Problem("p", "q", "x", "hostile"), "x")
        with pytest.raises(RuntimeError, match="workers broke 3 times"):
            future.result(timeout=PATIENCE)
        assert not pool.counts


def test_equal_answers_are_judged_once_and_a_time_out_again(pool):
    problem = Problem("p", "q", "x", "hostile")
    first = pool.submit(problem, "0.25")
    assert pool.submit(problem._replace(id="r"), "0.25") is first
    before = pool.counts["wrong"]
    assert first.result(PATIENCE) == (False, "wrong")
    assert pool.submit(problem, "0.25") is first
    assert pool.counts["wrong"] >= before + 1
    timed_out = pool.submit(problem, "exit 0")
    assert timed_out.result(PATIENCE).reason == "timeout"
    assert pool.submit(problem, "exit 0") is not timed_out


def test_hostile_mathematics_from_many_threads(math_pool):
    """math-verify's own alarms work in no thread but the main one; a worker has a main thread."""
    wrong = ["\\frac{", "}{", "9" * 900 + "x", "\\boxed{" * 100, "x" * 999, "\\left(" * 150,
             "{" * 900, "\\sqrt{" * 50 + "2" + "}" * 50, "(" * 400, "1,2,3", "\\text{8/7}", "\\",
             "7/8/1/2", "\0", "7/8 7/8", "=", "7/8=9/8"]  # fmt: skip
    slow = [r"9^{9^{9^{9}}}", r"\binom{10^7}{5\cdot10^6}"]
    answers = [*wrong, *slow, *(f"{answer} " * n for n in range(2, 5) for answer in wrong)]
    answers += [r"\frac{7}{8}", "0.875"] * 65
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(
            threads.map(lambda answer: judge(math_pool, "7/8", answer, "math"), answers)
        )
    right = [a for a, verdict in zip(answers, verdicts, strict=True) if verdict.correct]
    assert set(right) == {r"\frac{7}{8}", "0.875"}
    assert len(right) == 130
    assert {verdict.reason for verdict in verdicts} <= {
        "right", "wrong", "unparsable", "too_long", "timeout", "memory",
    }  # fmt: skip


def test_a_gold_that_means_nothing_is_told_once(math_pool, caplog):
    with caplog.at_level(logging.WARNING, logger="agon_jax.verifiers.pool"):
        verdicts = [judge(math_pool, r"\}\{", answer, "math") for answer in ("1", "2", r"\}\{")]
    assert [verdict.reason for verdict in verdicts] == ["bad_gold", "bad_gold", "right"]
    (record,) = caplog.records
    assert "of problem 'p' parses to nothing" in record.message


def test_closing_ends_every_worker_and_what_waits_for_one():
    before = set(workers())
    with VerifierPool(VerifierConfig(workers=1), HOSTILE) as pool:
        assert judge(pool, "x", "x").correct
        waiting = [pool.submit(Problem("p", "q", "x", "hostile"), a) for a in ("hang", "y")]
        ours = set(workers()) - before
        assert ours
    assert not psutil.wait_procs(ours, PATIENCE)[1]
    for future in waiting:
        with pytest.raises(RuntimeError, match="closed before this verdict"):
            future.result(timeout=PATIENCE)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.submit(Problem("p", "q", "x", "hostile"), "z")
    pool.close()


SCRIPT = """
import jax, sys  # and no main guard
import hostile
from agon_jax.config import VerifierConfig
from agon_jax.data.problem import Problem
from agon_jax.verifiers.pool import Verifier, VerifierPool

problem = Problem("p", "q", "x", "hostile")
verifiers = {"hostile": Verifier(hostile.judge)}
with VerifierPool(VerifierConfig(workers=1, timeout_s=60), verifiers) as pool:
    print(pool.submit(problem, "modules").result(), flush=True)
    if len(sys.argv) > 1:
        print(pool.submit(problem, "hang").result(), flush=True)
print(__file__, __spec__)
"""


def test_workers_run_neither_jax_nor_the_main_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "Verdict(correct=True, reason='right')",
        f"{script} None",
    ]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_run(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, script, "hang"],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    killer = threading.Timer(PATIENCE, run.kill)  # only should all below fail
    killer.start()
    try:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("Verdict(correct=True")
        ours = psutil.Process(run.pid).children(recursive=True)
        if end == signal.SIGINT:
            os.killpg(run.pid, end)  # a terminal sends it to the whole group
        else:
            run.send_signal(end)
        run.wait()
        assert not psutil.wait_procs(ours, PATIENCE)[1]
        errors = run.communicate()[1]
    finally:
        killer.cancel()
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == (end == signal.SIGINT)
