"""How far is constrained sampling from p(x | constraint)? By enumeration, for perfect models of tiny languages.

    python experiments/constraints/gap.py              # the tables of gap.md
    python experiments/constraints/gap.py --check 4000  # also draws samples with the package, for a chi-square test

The denoiser of a Markov chain over `abc` knows p(x_l | visible tokens) exactly. A step of a constrained sampler at the
state z reveals the places R: it draws their tokens from the marginal at R of

    q(x | z) = 1[x satisfies the constraint and has the visible tokens of z] prod_{masked l} p(x_l | z) / mass(z).

Shapes: X texts, S states (texts with masks), L places.
"""

import argparse
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

WORDS, LENGTH = "abc", 5
MASK = len(WORDS)
TEXTS = list(itertools.product(range(MASK), repeat=LENGTH))
CONSTRAINTS = {
    "none": ".*",
    "one of four texts": "aabca|bbbbb|caacc|cccab",
    "(ab or c)*": "(ab|c)*",
    "exactly one c": "[ab]*c[ab]*",
    "ends as it begins": "a.*a|b.*b|c.*c",
}
STEPS = (1, 2, 4, 16, 64)
State = tuple[int, ...]
Distribution = dict[State, float]


def chain(kind: str) -> Distribution:
    """p(x) of a Markov chain: `random` transitions, or `sticky` ones that stay with probability 0.8."""
    rng = np.random.default_rng(0)
    first, move = rng.dirichlet(np.ones(MASK)), rng.dirichlet(np.ones(MASK), size=MASK)
    if kind == "sticky":
        first, move = np.full(MASK, 1 / MASK), np.full((MASK, MASK), 0.1) + 0.7 * np.eye(MASK)
    return {x: float(first[x[0]] * math.prod(move[i, j] for i, j in itertools.pairwise(x))) for x in TEXTS}


class Sampler:
    """The final texts of samplers with exact beliefs, of which those that satisfy a constraint are possible."""

    def __init__(self, p: Distribution, pattern: str):
        self.allowed = [x for x in TEXTS if re.fullmatch(pattern, "".join(WORDS[i] for i in x))]
        self.p, self._drawn, self._beliefs = p, dict[State, Distribution](), dict[State, np.ndarray]()

    @property
    def target(self) -> Distribution:
        """p(x | constraint)."""
        return normalised({x: self.p[x] for x in self.allowed})

    def beliefs(self, z: State) -> np.ndarray:
        """(L, words): p(x_l | visible tokens)."""
        if z not in self._beliefs:
            found = np.zeros((LENGTH, MASK))
            for x in filter(lambda x: agrees(z, x), TEXTS):
                found[range(LENGTH), x] += self.p[x]
            self._beliefs[z] = found / found.sum(axis=1, keepdims=True)
        return self._beliefs[z]

    def drawn(self, z: State) -> Distribution:
        """q(x | z): the product of beliefs given the constraint."""
        if z not in self._drawn:
            beliefs = self.beliefs(z)
            product = {
                x: math.prod(beliefs[place, x[place]] for place in range(LENGTH) if z[place] == MASK)
                for x in self.allowed
                if agrees(z, x)
            }
            self._drawn[z] = normalised(product)
        return self._drawn[z]

    def reveal(self, z: State, places: tuple[int, ...]) -> Distribution:
        """The state after these places are revealed."""
        after: Distribution = defaultdict(float)
        for x, share in self.drawn(z).items():
            after[tuple(x[place] if place in places else token for place, token in enumerate(z))] += share
        return after

    def ancestral(self, steps: int) -> Distribution:
        """T steps: with i of them left, each mask is revealed with probability 1 / i (log-linear schedule)."""
        states: Distribution = {(MASK,) * LENGTH: 1.0}
        kernels: dict[State, list[tuple[int, int, Distribution]]] = {}
        for left in range(steps, 0, -1):
            after: Distribution = defaultdict(float)
            for z, weight in states.items():
                if z not in kernels:
                    masks = [place for place in range(LENGTH) if z[place] == MASK]
                    subsets = itertools.chain(*(itertools.combinations(masks, n) for n in range(len(masks) + 1)))
                    kernels[z] = [(len(places), len(masks), self.reveal(z, places)) for places in subsets]
                for num, num_masks, revealed in kernels[z]:
                    if chance := weight * (1 / left) ** num * (1 - 1 / left) ** (num_masks - num):
                        for state, share in revealed.items():
                            after[state] += chance * share
            states = after
        return states

    def left_to_right(self) -> Distribution:
        """One token a step, from the left."""
        states: Distribution = {(MASK,) * LENGTH: 1.0}
        for place in range(LENGTH):
            after: Distribution = defaultdict(float)
            for z, weight in states.items():
                for state, share in self.reveal(z, (place,)).items():
                    after[state] += weight * share
            states = after
        return states

    def confidence(self) -> Distribution:
        """One token a step: all masks are drawn jointly, and the token with the largest marginal is revealed."""
        states: Distribution = {(MASK,) * LENGTH: 1.0}
        for _ in range(LENGTH):
            after: Distribution = defaultdict(float)
            for z, weight in states.items():
                marginals = np.zeros((LENGTH, MASK))
                for x, share in self.drawn(z).items():
                    marginals[range(LENGTH), x] += share
                masks = [place for place in range(LENGTH) if z[place] == MASK]
                for x, share in self.drawn(z).items():
                    best = min(masks, key=lambda place: (-round(marginals[place, x[place]], 6), place))
                    after[(*z[:best], x[best], *z[best + 1 :])] += weight * share
            states = after
        return states

    def all(self) -> Iterator[tuple[str, Distribution]]:
        for steps in STEPS:
            yield f"ancestral T={steps}", self.ancestral(steps)
        yield "left-to-right", self.left_to_right()
        yield "confidence", self.confidence()


def agrees(z: State, x: State) -> bool:
    return all(token in (MASK, word) for token, word in zip(z, x, strict=True))


def normalised(weights: Distribution) -> Distribution:
    total = sum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


def total_variation(found: Distribution, target: Distribution) -> float:
    return 0.5 * sum(abs(found.get(x, 0.0) - target.get(x, 0.0)) for x in {*found, *target})


def kl(target: Distribution, found: Distribution) -> float:
    """KL(target || found) in nats."""
    return abs(sum(share * math.log(share / found[x]) for x, share in target.items()))  # abs: 0 may be rounded to -0


def resampled(sampler: Sampler, num: int, draws: int = 200_000) -> Distribution:
    """One of `num` left-to-right texts, drawn with weight p(x) / s(x): the mean over `draws` sets of candidates.

    s(x), what left-to-right draws x with, is the product of its steps' probabilities; p(x) that of the beliefs.
    """
    drawn = sampler.left_to_right()
    texts, shares = list(drawn), np.array(list(drawn.values()))
    weights = np.array([sampler.p[x] for x in texts]) / shares
    chosen = np.random.default_rng(num).choice(len(texts), size=(draws, num), p=shares / shares.sum())
    kept = weights[chosen] / weights[chosen].sum(axis=1, keepdims=True)
    return dict(zip(texts, np.bincount(chosen.ravel(), kept.ravel(), len(texts)) / draws, strict=True))


def print_tables(kind: str) -> None:
    p = chain(kind)
    samplers = {name: Sampler(p, pattern) for name, pattern in CONSTRAINTS.items()}
    unconstrained = dict(samplers["none"].all())
    rows: dict[str, dict[str, Distribution]] = {name: dict(each.all()) for name, each in samplers.items()}
    columns = list(unconstrained)
    for title, measure in (("Total variation", total_variation), ("KL, nats", lambda found, target: kl(target, found))):
        print(f"\n{title}, {kind} chain\n\n| constraint | p(C) | {' | '.join(columns)} |")
        print(f"|---|---|{'---|' * len(columns)}")
        for name, found in rows.items():
            target = samplers[name].target
            mass = sum(p[x] for x in samplers[name].allowed)
            print(f"| {name} | {mass:.3f} | {' | '.join(f'{measure(found[c], target):.4f}' for c in columns)} |")
    print(f"\nRejection of unconstrained texts, total variation (share accepted), {kind} chain\n")
    print(f"| constraint | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, sampler in samplers.items():
        cells = []
        for column in columns:
            accepted = {x: unconstrained[column].get(x, 0.0) for x in sampler.allowed}
            variation = total_variation(normalised(accepted), sampler.target)
            cells.append(f"{variation:.4f} ({sum(accepted.values()):.3f})")
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nLeft-to-right, one of K candidates kept by weight, total variation, {kind} chain\n")
    numbers = (1, 2, 4, 8, 16, 32)
    print(f"| constraint | {' | '.join(f'K={num}' for num in numbers)} |\n|---|{'---|' * len(numbers)}")
    for name, sampler in samplers.items():
        cells = [f"{total_variation(resampled(sampler, num), sampler.target):.3f}" for num in numbers]
        print(f"| {name} | {' | '.join(cells)} |")


def check(kind: str, num: int) -> None:
    """Samples of the package against the enumeration."""
    import torch
    from scipy.stats import chi2

    from adlm.config.schema import Sampling
    from adlm.constraints.automaton import compile_tokens, pieces_of
    from adlm.constraints.holes import ConstrainedHole, fitted
    from adlm.constraints.patterns import byte_automaton
    from adlm.diffusion.schedules import LogLinear
    from adlm.sampling.frame import Row, SamplingRun, last_frame
    from adlm.sampling.rng import RowRng
    from adlm.sampling.samplers import sampler_of, steps_of

    class Output:
        def __init__(self, z: torch.Tensor):
            of_words = np.stack([sampler.beliefs(tuple(row)) for row in z.tolist()])
            logs = torch.from_numpy(np.pad(of_words, ((0, 0), (0, 0), (0, 1)))).log()
            self.all = logs.flatten(0, 1)

        def log_beliefs(self, positions: torch.Tensor) -> torch.Tensor:
            return self.all[positions]

    pieces = pieces_of({index: word.encode() for index, word in enumerate(WORDS)})
    pattern = CONSTRAINTS["exactly one c"]
    sampler = Sampler(chain(kind), pattern)
    automaton = fitted(compile_tokens(byte_automaton(pattern), pieces, pattern), LENGTH)
    assert automaton is not None
    settings = {
        "ancestral T=4": Sampling("ancestral", steps=4, final="draw"),
        "left-to-right": Sampling("left-to-right", steps=LENGTH),
        "confidence": Sampling("confidence", steps=LENGTH),
    }
    expected = dict(sampler.all())
    for name, sampling in settings.items():
        run = SamplingRun(
            lambda z, *_: Output(z),  # type: ignore[arg-type,return-value]
            torch.full((num, LENGTH), MASK),
            MASK,
            steps_of(LogLinear(), sampling),
            sampling,
            RowRng(0, range(num)),
            row=Row(LENGTH),
            holes=tuple(ConstrainedHole(row, (0,), automaton) for row in range(num)),
        )
        drawn = last_frame(sampler_of(sampling).sample(run)).ids.tolist()
        counts = defaultdict(int)
        for row in drawn:
            counts[tuple(row)] += 1
        assert set(counts) <= set(expected[name])
        cells: dict[State, list[float]] = defaultdict(lambda: [0.0, 0.0])  # rare texts share one
        for x, share in expected[name].items():
            cell = cells[x if num * share >= 5 else ()]
            cell[0], cell[1] = cell[0] + counts[x], cell[1] + num * share
        statistic = sum((count - mean) ** 2 / mean for count, mean in cells.values())
        tail = chi2.sf(statistic, len(cells) - 1)
        print(f"{name}: chi-square {statistic:.1f} with {len(cells) - 1} degrees of freedom, p = {tail:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=int, default=0, metavar="N", help="draw N samples with the package")
    arguments = parser.parse_args()
    for each in ("random", "sticky"):
        print_tables(each)
    if arguments.check:
        print(f"\nSamples of the package against the enumeration, exactly one c, N = {arguments.check}\n")
        check("random", arguments.check)
