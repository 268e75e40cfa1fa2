"""Every choice that a draw can make, one after the other, with its probability."""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

Choose = Callable[[Any], int]
"""Weights -> the index that is chosen."""


def every_outcome(draw: Callable[[Choose], T]) -> Iterator[tuple[T, float]]:
    """What `draw` returns for every sequence of its choices, and the probability of these."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script, taken, chances = scripts.pop(), list[int](), list[float]()

        def choose(weights: Any) -> int:
            options = [index for index, weight in enumerate(weights.tolist()) if weight]
            if len(taken) < len(script):  # noqa: B023
                index = script[len(taken)]  # noqa: B023
            else:
                index = options[0]
                scripts.extend((*taken, other) for other in options[1:])  # noqa: B023
            taken.append(index)  # noqa: B023
            chances.append(float(weights[index] / weights.sum()))  # noqa: B023
            return index

        outcome = draw(choose)
        yield outcome, math.prod(chances)
