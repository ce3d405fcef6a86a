"""What came of one stage, as arrays: what rewards, metrics and evaluation read on the host.

A stage is every draft or every challenge of a batch: `problem` rows, `rollout` columns, so that a
GRPO group is a row. Challenge [i, j] read the draft [i, j] (or [i, 0] with a shared rival).
"""

from typing import NamedTuple

import numpy as np


class Outcomes(NamedTuple):
    """One stage of a batch; every array is [problem, rollout]."""

    correct: np.ndarray  # bool: the verifier's verdict, c in the paper
    format_ok: np.ndarray  # bool: a closed reasoning block, then an answer block; phi in the paper
    lengths: np.ndarray  # int: tokens generated, the stop token included
    prompt_lengths: np.ndarray  # int: tokens of the prompt
    truncated: np.ndarray  # bool: ended at the length cap, without a stop token
    answers: np.ndarray  # object: the parsed answer as text, or None
    reasons: np.ndarray  # object: Verdict.reason
