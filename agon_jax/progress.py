"""What a waiting user sees: a line of figures a step, above a live bar where there is a terminal.

The trainer says what it is doing (`phase`) and what a step gave (`step`). Without a terminal a
thread prints a line whenever nothing was printed for a while, so that a long rollout or a stall is
seen in a log file too.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from agon_jax.rewards import expected_live_share

SILENCE_S = 25.0  # without a terminal nothing stays unsaid for longer
BETWEEN_STEPS_S = 5.0  # steps that follow faster share a line
LIVE_ENOUGH = 0.3  # share of live groups below which most of the sampling is in vain
LIVE_WINDOW = 10  # steps it is averaged over

LEGEND = (
    "reward: mean of 2 c + bonus + lambda phi | pass: right answers | live: groups whose rewards"
    " differ, the only ones with a gradient | a loss near 0 is no fault: the advantages of a group"
    " sum to 0, so watch reward and grad norm"
)


class Progress:
    """Live progress of a run of total_steps, in a `with` block.

    group_size is the number of drafts a problem; stream is a text file, standard error by default.
    """

    def __init__(self, total_steps: int, group_size: int, start_step: int = 0, stream: Any = None):
        self._total, self._group_size, self._done = total_steps, group_size, start_step
        self._stream = sys.stderr if stream is None else stream
        self._phase = "starting"
        self._live: deque[float] = deque(maxlen=LIVE_WINDOW)
        self._warned = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._began = self._said = time.monotonic()
        self._marks = deque([self._began], maxlen=20)  # ends of the latest steps
        self._watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._bar = None
        if self._stream.isatty():
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(self._phase, total=total_steps, completed=start_step)

    def __enter__(self) -> "Progress":
        self._said = time.monotonic()
        if self._bar:
            self._bar.start()
        else:
            self._watcher.start()
        self._say(LEGEND)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        if self._bar:
            self._bar.stop()
        else:
            self._watcher.join()

    def phase(self, what: str) -> None:
        """What is being done now, such as "drafts 3/16"; cheap, to be called often."""
        self._phase = what
        if self._bar:
            self._bar.update(self._task, description=what)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a finished step, numbered from 0."""
        now = time.monotonic()
        self._marks.append(now)
        first = len(self._marks) == 2 and self._marks[0] == self._began
        if not first and self._marks[0] == self._began:
            self._marks.popleft()  # the first step compiles: it says nothing about the others
        seconds = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        self._done = step + 1
        figures = step_line(metrics, seconds, None if first else self._total - self._done)
        if self._bar:
            self._bar.update(self._task, completed=self._done)
        if now - self._said >= BETWEEN_STEPS_S or step == 0 or self._done == self._total:
            self._say(f"{self._done}/{self._total} steps | {figures}")
        self._warn_of_dead_groups(metrics)

    def _warn_of_dead_groups(self, metrics: Mapping[str, float]) -> None:
        self._live.append(metrics["live_groups"])
        share = sum(self._live) / len(self._live)
        if share >= LIVE_ENOUGH:
            self._warned = False
        elif not self._warned:
            self._warned = True
            self._say(live_warning(share, metrics["draft/pass_rate"], self._group_size))

    def _say(self, line: str) -> None:
        with self._lock:
            self._said = time.monotonic()
            if self._bar:
                self._bar.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=self._stream, flush=True)

    def _watch(self) -> None:
        while not self._closing.wait(max(self._said + SILENCE_S - time.monotonic(), 0.01)):
            if time.monotonic() - self._said >= SILENCE_S:
                running = duration(time.monotonic() - self._marks[-1])
                self._say(
                    f"{self._done}/{self._total} steps | now: {self._phase}, {running} since the"
                    " last step"
                )


def step_line(metrics: Mapping[str, float], seconds: float, steps_left: int | None) -> str:
    """A step in one line; seconds are those of a step, and steps_left is None where they tell
    nothing of the next one. A figure that is not there is left out."""
    stages = [name for name in ("draft", "challenge") if f"{name}/reward" in metrics]
    parts = [
        "reward " + ", ".join(f"{name} {metrics[f'{name}/reward']:.6g}" for name in stages),
        "pass " + ", ".join(f"{name} {metrics[f'{name}/pass_rate']:.1%}" for name in stages),
        f"live {metrics['live_groups']:.0%}",
    ]
    for key, label in (("grad_norm", "grad norm"), ("kl", "KL")):
        values = [
            f"{name.removeprefix('policy_').removesuffix('/' + key)} {value:.6g}"
            for name, value in metrics.items()
            if name.startswith("policy_") and name.endswith("/" + key)
        ]
        if values:
            parts.append(f"{label} {', '.join(values)}")
    if steps_left is None:
        parts.append(f"{seconds:.3g} s with compilation")
    else:
        parts += [f"{seconds:.3g} s/step", f"ETA {duration(seconds * steps_left)}"]
    return " | ".join(parts)


def live_warning(share: float, pass_rate: float, group_size: int) -> str:
    """What a small share of live groups means, beside the share to expect at this pass rate."""
    expected = expected_live_share(pass_rate, group_size)
    return (
        f"warning: only {share:.0%} of the groups are live, so most rollouts give no gradient;"
        f" at pass rate p = {pass_rate:.3g} and N = {group_size}, 1 - (p^N + (1-p)^N) ="
        f" {expected:.1%} of equally hard problems would be. Raise method.group_size, or choose"
        " problems nearer to an even chance"
    )


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m 20s or 1h 02m."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes_left:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
