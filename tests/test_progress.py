import io
import math
import re
import threading

import pytest

from agon_jax import progress
from agon_jax.progress import Progress, duration, live_warning, step_line

METRICS = {
    "draft/reward": 1.23456789,
    "draft/pass_rate": 0.4125,
    "challenge/reward": 2.0,
    "challenge/pass_rate": 0.5,
    "live_groups": 0.875,
    "policy_A/grad_norm": 0.000123456,
    "policy_B/grad_norm": 3.0,
    "policy_A/kl": 0.01,
}


class Log(io.StringIO):
    """A log file: no terminal; tells when a line with some text was written."""

    def __init__(self, wanted=""):
        super().__init__()
        self.wanted, self.seen = wanted, threading.Event()

    def write(self, text):
        if self.wanted and self.wanted in text:
            self.seen.set()
        return super().write(text)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_step_is_one_line():
    assert step_line(METRICS, seconds=5.25, steps_left=175) == (
        "reward draft 1.23457, challenge 2 | pass draft 41.2%, challenge 50.0% | live 88%"
        " | grad norm A 0.000123456, B 3 | KL A 0.01 | 5.25 s/step | ETA 15m 19s"
    )
    alone = {"draft/reward": 1.0, "draft/pass_rate": 0.0, "live_groups": 1.0}
    assert step_line(alone, 1.0, 0) == (
        "reward draft 1 | pass draft 0.0% | live 100% | 1 s/step | ETA 0s"
    )


@pytest.mark.parametrize(
    "seconds, text",
    [(0.0, "0s"), (59.6, "1m 00s"), (200.0, "3m 20s"), (3725.0, "1h 02m"), (math.inf, "?")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_a_stall_still_prints(monkeypatch):
    monkeypatch.setattr(progress, "SILENCE_S", 0.02)
    log = Log("2/9 steps | now: drafts 3/16, ")
    with Progress(9, group_size=8, start_step=2, stream=log) as shown:
        shown.phase("drafts 3/16")
        assert log.seen.wait(60)  # nothing else happens: the rollout is long
        names = [thread.name for thread in threading.enumerate()]
    assert "progress" in names
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_no_line_is_due_before_the_silence_is_over():
    assert progress.SILENCE_S < 30
    log = Log()
    with Progress(9, group_size=8, stream=log):
        pass
    assert log.getvalue() == progress.LEGEND + "\n"


def test_without_a_terminal_first_and_last_step_print_and_fast_ones_share_a_line():
    log = Log()
    with Progress(4, group_size=8, stream=log) as shown:
        for step in range(4):
            shown.step(step, METRICS)
    lines = log.getvalue().splitlines()[1:]
    assert [line.split(" | ")[0] for line in lines] == ["1/4 steps", "4/4 steps"]


def test_seconds_a_step_leave_out_the_first_which_compiles(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress.Progress, "_watch", lambda self: None)  # no second clock reader
    log = Log()
    with Progress(100, group_size=8, stream=log) as shown:
        for step, at in enumerate([60.0, 66.0, 72.0]):
            clock[0] = at
            shown.step(step, METRICS)
    first, _, third = log.getvalue().splitlines()[1:]
    assert "60 s with compilation" in first and "ETA" not in first
    assert "6 s/step | ETA 9m 42s" in third


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    with Progress(3, group_size=8, stream=terminal) as shown:
        shown.phase("challenges [2/4]")  # brackets are text, not markup
        shown.step(0, METRICS)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())  # without the colours
    assert "1/3 steps | reward draft 1.23457" in shown
    assert re.search(r"challenges \[2/4\] \S+ 1/3 0:00", shown)
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_dead_groups_are_warned_of_once_with_the_figure_to_expect():
    """U05: N = 2 at p = 0.1819 leaves 29.8% of the groups live."""
    assert "29.8%" in live_warning(0.25, 0.1819, 2)
    log = Log()
    dead = METRICS | {"live_groups": 0.29, "draft/pass_rate": 0.1819}
    alive = METRICS | {"live_groups": 1.0}
    with Progress(60, group_size=2, stream=log) as shown:
        for step in range(60):
            shown.step(step, dead if step < 20 or step >= 40 else alive)
    warnings = [line for line in log.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == 2 and "29%" in warnings[0] and "29.8%" in warnings[0]
    log = Log()
    with Progress(60, group_size=2, stream=log) as shown:
        shown.step(0, METRICS | {"live_groups": 0.3})
    assert "warning" not in log.getvalue()
