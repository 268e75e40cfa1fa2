"""A pseudorandom permutation of 0 ... n - 1 for each epoch, computed without storing it. Independent of rows.

A Feistel network of six rounds permutes the numbers below a power of four; a result outside 0 ... n - 1 is permuted
again until it is inside (cycle walking) [Black and Rogaway, 2002]. So an epoch of a billion rows needs no memory.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
Numbers = NDArray[np.uint64]


def shuffle(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The rows at these positions of the epoch."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _mixed(np.arange(ROUNDS, dtype=np.uint64) + _mixed(_key(seed) ^ _mixed(_key(epoch) + np.uint64(1))))
    numbers = _network(positions.astype(np.uint64), half, keys)
    outside = np.flatnonzero(numbers >= size)
    while len(outside):
        numbers[outside] = _network(numbers[outside], half, keys)
        outside = outside[numbers[outside] >= size]
    return numbers.astype(np.int64)


def uniform(positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.float64]:
    """A pseudorandom number from [0, 1) for each position of the epoch."""
    mixed = _mixed(positions.astype(np.uint64) + _mixed(_key(seed) + _mixed(~_key(epoch))))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(number: int) -> Numbers:
    return np.array([number % 2**64], dtype=np.uint64)


def _network(numbers: Numbers, half: np.uint64, keys: Numbers) -> Numbers:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & low)
    return (left << half) | right


def _mixed(numbers: Numbers) -> Numbers:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the number."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
