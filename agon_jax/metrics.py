"""What a step is measured by, and where it is written: metrics.jsonl and TensorBoard events.

step_metrics reads the Outcomes of both stages on the host; the trainer adds what the update and
its clock know (log-prob gap, entropy, gradient norms, seconds, tokens a second) to the same dict.
MetricsWriter keeps one row a step over stops and resumes; read_metrics gives the rows back.
"""

import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agon_jax import complement
from agon_jax.outcomes import Outcomes

FILE = "metrics.jsonl"
# Every stage reports each of these, seen or not, so that a curve has no holes.
REASONS = (
    *("right", "wrong", "no_answer", "too_long", "unparsable", "bad_gold"),
    *("timeout", "memory", "crash"),
)


def step_metrics(
    drafts: Outcomes,
    challenges: Outcomes | None = None,
    rivals: Outcomes | None = None,
    *,
    policies: Sequence[str],
    rewards: Sequence[np.ndarray],
    live: Sequence[np.ndarray],
) -> dict[str, float]:
    """Figures of one step, by stage (draft/, challenge/), by policy (policy_A/) and of the pair.

    rivals are the drafts that the challenges read, one to one. policies names who wrote each stage,
    rewards [problem, rollout] and live [problem] are the stages' own: the draft's, then the
    challenge's if there is one. A mean of nothing is NaN.
    """
    stages = [("draft", drafts)]
    if challenges is not None:
        stages.append(("challenge", challenges))
    figures: dict[str, float] = {}
    by_policy: dict[str, list[int]] = {}
    for i, (name, outcomes) in enumerate(stages):
        of_stage = stage_metrics(outcomes, rewards[i], live[i])
        figures |= {f"{name}/{key}": value for key, value in of_stage.items()}
        by_policy.setdefault(policies[i], []).append(i)
    for policy, written in by_policy.items():
        figures[f"policy_{policy}/reward"] = _mean(np.hstack([rewards[i] for i in written]))
        figures[f"policy_{policy}/pass_rate"] = _mean(
            np.hstack([stages[i][1].correct for i in written])
        )
    figures["live_groups"] = _mean(np.concatenate([np.ravel(flags) for flags in live]))
    if challenges is not None and rivals is not None:
        figures |= pair_metrics(challenges, rivals)
        if policies[0] != policies[1]:
            sides = dict(zip(policies, (rivals.correct, challenges.correct), strict=False))
            overlap = complement.error_overlap(*(sides[policy] for policy in sorted(sides)))
            figures |= {f"errors/{key}": value for key, value in overlap.items()}
    return figures


def stage_metrics(outcomes: Outcomes, rewards: np.ndarray, live: np.ndarray) -> dict[str, float]:
    """Figures of one stage; lengths are of all rollouts, whatever the loss leaves out of them."""
    figures = {
        "reward": _mean(rewards),
        "pass_rate": _mean(outcomes.correct),
        "format_rate": _mean(outcomes.format_ok),
        "truncated": _mean(outcomes.truncated),
        "length": _mean(outcomes.lengths),
        "prompt_length": _mean(outcomes.prompt_lengths),
        "generated_tokens": float(outcomes.lengths.sum()),
        "dead_groups": _mean(~np.asarray(live, bool)),
    }
    seen = [str(reason) for reason in outcomes.reasons.flat]
    for reason in sorted({*REASONS, *seen}):
        figures[f"verdicts/{reason}"] = float(seen.count(reason))
    return figures


def pair_metrics(challenges: Outcomes, rivals: Outcomes) -> dict[str, float]:
    """What the challenger made of its rival: conversions, losses, copying, and its length there."""
    converted = complement.conversions(challenges.correct, rivals.correct)
    copied = complement.copying(
        challenges.answers, rivals.answers, challenges.correct, rivals.correct
    )
    met_right = _mean(challenges.lengths[rivals.correct.astype(bool)])
    mean = _mean(challenges.lengths)
    return {
        "challenge/conversions": converted["repairs"],
        "challenge/losses": converted["harms"],
        "challenge/conversion_rate": converted["repair_rate"],
        "challenge/loss_rate": converted["harm_rate"],
        **{f"challenge/{key}": value for key, value in copied.items()},
        "challenge/length_rival_right": met_right,
        "challenge/length_rival_right_to_mean": met_right / mean if mean else math.nan,
    }


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if np.size(values) else math.nan


class MetricsWriter:
    """Appends a row a step to metrics.jsonl, and its numbers to TensorBoard events.

    On opening, rows at or beyond resume_step are dropped in one atomic replacement: the resumed run
    writes them again. So a row is to be written before the checkpoint that follows it is saved.
    One process of a run writes.
    """

    def __init__(self, workdir: Path, resume_step: int = 0):
        from tensorboardX import SummaryWriter  # slow to import, and only writers need it

        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / FILE
        self._last = _truncate(self._path, resume_step)
        self._rows = self._path.open("a", encoding="utf-8")
        self._events = SummaryWriter(
            logdir=str(workdir / "tensorboard"), purge_step=resume_step or None, flush_secs=10
        )

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """One row {"kind": ..., "step": ..., **metrics}; a number that is not finite is null.

        Values are numbers, text, None, and mappings and lists of them. Steps of one kind rise.
        """
        if reserved := metrics.keys() & {"kind", "step"}:
            raise ValueError(f"a metric may not be named {', '.join(sorted(reserved))}")
        if step <= self._last.get(kind, -1):
            raise ValueError(
                f"{self._path}: step {step} of kind {kind!r} comes after {self._last[kind]}"
            )
        self._last[kind] = step
        row = {"kind": kind, "step": step, **_jsonable(metrics)}
        self._rows.write(json.dumps(row, allow_nan=False) + "\n")
        self._rows.flush()
        for tag, value in _scalars(row, kind):
            self._events.add_scalar(tag, value, step)

    def close(self) -> None:
        self._rows.close()
        self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(workdir: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind, "train" or "eval", in the order of their steps."""
    return [row for _, row in _lines(workdir / FILE) if row["kind"] == kind]


def _truncate(path: Path, resume_step: int) -> dict[str, int]:
    """Drops the rows at or beyond a step; returns the last step left of each kind."""
    if not path.exists():
        return {}
    kept = [(line, row) for line, row in _lines(path) if row["step"] < resume_step]
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(line for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return {row["kind"]: row["step"] for _, row in kept}


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line and its row. A last line without its end was being written when the run died."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            _ = row["kind"], row["step"] + 0
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a row of metrics: {line[:80]!r}") from error
        yield line, row


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _scalars(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        tag = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _scalars(value, tag)
        elif isinstance(value, int | float) and key not in ("kind", "step"):
            yield tag, value
