"""The embedded task: sums of four two-digit numbers, made from a seed, without any file.

Which side of the split a sum is on is a property of its numbers, not of the seed: what one seed
holds out, no other seed trains on, nor does the warm-up of the embedded model.
"""

import random
import zlib
from collections.abc import Iterator

from agon_jax.data.problem import Problem

TERMS = 4
LOWEST, HIGHEST = 10, 99
LARGEST_SPLIT = 100_000  # problems on either side: drawing stays fast far below the 2.9 M sums
HELDOUT_SHARE = 8  # one sum in so many is held out


def load(train_size: int, heldout_size: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, held-out) problems: distinct up to the order of their terms, the same every time.

    A longer list of the same seed begins with the shorter one.
    """
    splits = []
    for heldout, size in ((False, train_size), (True, heldout_size)):
        if not 0 <= size <= LARGEST_SPLIT:
            side = "data.heldout_size" if heldout else "data.train_size"
            raise ValueError(f"{side} = {size}: the sums give from 0 to {LARGEST_SPLIT} problems")
        stream = draw_terms(random.Random(f"sums {heldout} {seed}"), heldout)
        distinct: dict[tuple[int, ...], Problem] = {}
        while len(distinct) < size:
            terms = next(stream)
            distinct.setdefault(tuple(sorted(terms)), as_problem(terms))
        splits.append(list(distinct.values()))
    return splits[0], splits[1]


def draw_terms(rng: random.Random, heldout: bool) -> Iterator[tuple[int, ...]]:
    """Endless sums of one side of the split, as their terms; a sum may come again."""
    while True:
        terms = tuple(rng.randint(LOWEST, HIGHEST) for _ in range(TERMS))
        if is_heldout(terms) == heldout:
            yield terms


def is_heldout(terms: tuple[int, ...]) -> bool:
    """Whether a sum may only be tested on; the order of its terms does not matter."""
    return zlib.crc32(bytes(sorted(terms))) % HELDOUT_SHARE == 0


def as_problem(terms: tuple[int, ...]) -> Problem:
    question = "+".join(map(str, terms))
    return Problem(id=question, question=question, answer=str(sum(terms)))
