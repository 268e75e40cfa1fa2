"""How far from its language a sampler with exact beliefs stays as its number of steps T grows.

The language has two texts of two tokens, 00 and 11, with probability 1/2 each. A sampler is a Markov chain over the
nine states of two positions (0, 1 or masked), so its distribution over texts is a product of transition matrices, here
in float64. Printed is its total variation distance from the language.

python experiments/sampler_limits/run.py
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from adlm.config.schema import Sampling
from adlm.diffusion.schedules import LogLinear
from adlm.sampling.samplers import steps_of

MASK = 2
STATES = list(itertools.product((0, 1, MASK), repeat=2))
STEPS = (64, 512, 4_096, 32_768)
SAMPLERS: dict[str, list[Sampling]] = {
    "`ancestral`": [Sampling("ancestral", steps=steps) for steps in STEPS],
    "`remdm-cap`, eta 0.04": [Sampling("remdm-cap", steps=steps) for steps in STEPS],
    "`remdm-rescale`, eta 0.05": [Sampling("remdm-rescale", steps=steps) for steps in STEPS],
    "`remdm-loop`, eta 0.02": [Sampling("remdm-loop", steps=steps) for steps in STEPS],
    "`remdm-loop`, eta 0.1": [Sampling("remdm-loop", steps=steps, eta=0.1) for steps in STEPS],
    "`remdm-loop`, eta 0.8 / T": [Sampling("remdm-loop", steps=steps, eta=0.8 / steps) for steps in STEPS],
    "`forward-backward`": [Sampling("forward-backward", steps=steps) for steps in STEPS],
    "`dfm`": [Sampling("dfm", steps=steps) for steps in STEPS],
}


def exact_beliefs(state: tuple[int, ...], position: int) -> NDArray[np.float64]:
    """(3,), of 0, 1 and the mask at a masked position: the other token, or either where that is masked too."""
    other = state[1 - position]
    return np.array([0.5, 0.5, 0.0]) if other == MASK else np.eye(3)[other]


def matrices(reveal: NDArray[np.float64], remask: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K, 9, 9), P(state after step k | state before it); what happens to two positions in a step is independent."""
    found = np.ones((len(reveal), len(STATES), len(STATES)))
    for (row, before), (column, after) in itertools.product(enumerate(STATES), repeat=2):
        for position in (0, 1):
            if before[position] == MASK:
                stays = 1 - reveal
                chance = reveal * exact_beliefs(before, position)[after[position]]
            else:
                stays = 1 - remask
                chance = remask * (after[position] == MASK)
            found[:, row, column] *= stays * (after[position] == before[position]) + chance
    return found


def distance(sampling: Sampling) -> float:
    """Total variation between the sampler's texts and the language: the probability of 01 and 10."""
    steps = steps_of(LogLinear(), sampling)
    state = np.array([float(each == (MASK, MASK)) for each in STATES])
    for matrix in matrices(steps.reveal.numpy(), steps.remask.numpy()):
        state = state @ matrix
    found = dict(zip(STATES, state, strict=True))
    both = found[MASK, MASK]  # still masked: each position takes the likeliest token, and both the same
    texts = np.array([found[0, 0] + found[0, MASK] + found[MASK, 0] + both, found[0, 1], found[1, 0]])
    texts = np.append(texts, 1 - texts.sum())
    return float(np.abs(texts - (0.5, 0.0, 0.0, 0.5)).sum() / 2)


def main() -> None:
    print("| T | " + " | ".join(f"{steps:,}" for steps in STEPS) + " |")
    print("|---|" + "---|" * len(STEPS))
    for name, samplings in SAMPLERS.items():
        print(f"| {name} | " + " | ".join(f"{distance(sampling):.5f}" for sampling in samplings) + " |", flush=True)


if __name__ == "__main__":
    main()
