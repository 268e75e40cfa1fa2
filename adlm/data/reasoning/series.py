"""An endless list of drawn problems, and parts of it: problem i depends only on (seed, i). Knows no kind of problem."""

import random
from collections.abc import Callable, Iterator

from adlm.data.reasoning.forbidden import Forbidden
from adlm.data.reasoning.problem import Problem
from adlm.errors import UserError

MOST_DRAWS = 10_000


def series(
    task: str,
    draw: Callable[[random.Random], Problem],
    num: int,
    seed: int,
    start: int,
    forbidden: Forbidden | None,
) -> Iterator[Problem]:
    """Problems start to start + num - 1: each the first draw of its own stream that is not forbidden."""
    if num < 0 or start < 0:
        raise UserError(f"num {num} and start {start} count problems; give 0 or more")

    def problem(index: int) -> Problem:
        rng = random.Random(f"{task} {seed} {index}")
        for _ in range(MOST_DRAWS):
            drawn = draw(rng)
            if forbidden is None or drawn not in forbidden:
                return drawn
        raise UserError(f"all {MOST_DRAWS} draws for problem {index} are forbidden; forbid less")

    return map(problem, range(start, start + num))
