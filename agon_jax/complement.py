"""How two policies complement each other: shared errors, repairs and harms, copying.

Reads verdicts and answers of paired rollouts, arrays of one shape: entry by entry the same problem,
and in conversions and copying a final stage beside the draft it read. Used by the training metrics
and by evaluation. A share of nothing is NaN.
"""

import numpy as np


def error_overlap(correct_a: np.ndarray, correct_b: np.ndarray) -> dict[str, float]:
    """Jaccard index of the two error sets, and the shares of all pairs by who was right."""
    a, b = _paired(correct_a, correct_b)
    return {
        "jaccard": share(~a & ~b, of=~a | ~b),
        "both_right": share(a & b),
        "only_a_right": share(a & ~b),
        "only_b_right": share(b & ~a),
        "both_wrong": share(~a & ~b),
    }


def conversions(final: np.ndarray, rival: np.ndarray) -> dict[str, float]:
    """What the final stage repairs and harms: of all pairs, and of those the rival left to it."""
    final, rival = _paired(final, rival)
    return {
        "repairs": share(final & ~rival),
        "harms": share(~final & rival),
        "repair_rate": share(final, of=~rival),
        "harm_rate": share(~final, of=rival),
    }


def copying(
    answers: np.ndarray, rival_answers: np.ndarray, correct: np.ndarray, rival_correct: np.ndarray
) -> dict[str, float]:
    """How often an answer repeats the rival's, white space aside: of all, right and wrong answers.

    Repeating a right answer may be solving the problem; repeating a wrong one is the tell. Pairs in
    which the rival gave no answer are left out. Answers are text or None.
    """
    correct, rival_correct = _paired(correct, rival_correct)
    answers, rival_answers = np.asarray(answers, object), np.asarray(rival_answers, object)
    if answers.shape != correct.shape or rival_answers.shape != correct.shape:
        raise ValueError(
            f"answers {answers.shape} and {rival_answers.shape} must pair with verdicts"
            f" {correct.shape}"
        )
    given = np.array([rival is not None for rival in rival_answers.flat], bool)
    repeated = np.array(
        [
            None not in (own, rival) and "".join(own.split()) == "".join(rival.split())
            for own, rival in zip(answers.flat, rival_answers.flat, strict=True)
        ],
        bool,
    )
    right, rival_right = correct.ravel(), rival_correct.ravel()
    return {
        "copied": share(repeated, of=given),
        "copied_right": share(repeated & right, of=given & rival_right),
        "copied_wrong": share(repeated & ~right, of=given & ~rival_right),
    }


def share(mask: np.ndarray, of: np.ndarray | None = None) -> float:
    """Share of `of` (default: all) in which mask holds; NaN where there is nothing to share."""
    total = mask.size if of is None else int(of.sum())
    hits = mask if of is None else mask & of
    return float(hits.sum()) / total if total else float("nan")


def _paired(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    if first.shape != second.shape:
        raise ValueError(f"verdicts {first.shape} and {second.shape} must pair one to one")
    return first, second
