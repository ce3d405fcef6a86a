"""The one record every data source makes and every stage reads."""

from typing import NamedTuple


class Problem(NamedTuple):
    """A question with a verifiable answer."""

    id: str  # unique in its source and stable over runs: sampling keys and records refer to it
    question: str
    answer: str  # the gold; never empty
    kind: str = "math"  # names the verifier
