"""Toy languages small enough to enumerate: every text, every noisy state, every sampling step.

Shapes: X texts, S states, L tokens, V symbols with the mask last.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from adlm.diffusion.masking import posterior
from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.sampling.frame import NoisyRows


def batch_rng(seed: int = 0, rows: BatchSlice | None = None) -> BatchRng:
    return BatchRng(seeded(seed), rows)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def real(value: float | list[float]) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(value, dtype=torch.float64)


def randomized(network: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """Random weights everywhere, heads and modulations too: a freshly built network predicts the same for any input."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


class World:
    """A language over `words` words and a mask, `length` tokens a text, with a probability for each text."""

    def __init__(self, words: int, length: int, probabilities: Tensor):
        self.mask_id, self.num_symbols, self.length = words, words + 1, length
        self.texts = torch.tensor(list(itertools.product(range(words), repeat=length)))
        self.states = torch.tensor(list(itertools.product(range(words + 1), repeat=length)))
        self.probabilities = probabilities

    @classmethod
    def random(cls, words: int = 2, length: int = 3, seed: int = 0) -> "World":
        weights = torch.rand(words**length, generator=seeded(seed), dtype=torch.float64) + 0.05
        return cls(words, length, weights / weights.sum())

    def forward_probabilities(self, alpha: Tensor) -> Tensor:
        """q(z | x) for every text and state, (X, S)."""
        masked = self.states == self.mask_id
        agrees = self.states[None] == self.texts[:, None]
        factor = torch.where(masked, 1 - alpha, torch.where(agrees, alpha, 0.0))
        return factor.prod(dim=-1)

    def exact_beliefs(self) -> Tensor:
        """p(x_l = v | z) at every state, (S, L, V): the beliefs of a perfect network."""
        fits = ((self.states[:, None] == self.texts) | (self.states[:, None] == self.mask_id)).all(dim=-1)
        joint = fits * self.probabilities
        one_hot = torch.nn.functional.one_hot(self.texts, self.num_symbols).double()
        beliefs = torch.einsum("sx,xlv->slv", joint, one_hot)
        return beliefs / joint.sum(dim=1)[:, None, None]

    def random_beliefs(self, seed: int = 0) -> Tensor:
        """Random SUBS beliefs, (S, L, V)."""
        guess = torch.rand(len(self.states), self.length, self.num_symbols, generator=seeded(seed)).double() + 0.02
        guess[..., self.mask_id] = 0
        guess = guess / guess.sum(dim=-1, keepdim=True)
        copied = torch.nn.functional.one_hot(self.states, self.num_symbols).double()
        return torch.where((self.states == self.mask_id)[..., None], guess, copied)

    def step(self, beliefs: Tensor, alpha_s: Tensor, alpha_t: Tensor, sigma: Tensor | float = 0.0) -> Tensor:
        """P(z_s | z_t) for every pair of states, (S from, S to)."""
        return self.between(posterior(self.states, beliefs, alpha_s, alpha_t, self.mask_id, sigma))

    def between(self, each: Tensor) -> Tensor:
        """P(z_s | z_t) for every pair of states, from the categorical distributions (S, L, V) of all positions."""
        everywhere = each[:, None].expand(-1, len(self.states), -1, -1)
        return everywhere.gather(-1, self.states[None, :, :, None].expand(len(self.states), -1, -1, 1))[..., 0].prod(-1)

    def prior(self, alpha_1: Tensor) -> Tensor:
        """The distribution of the start state, (S,): masks, or with probability alpha_1 a uniform word."""
        factor = torch.where(self.states == self.mask_id, 1 - alpha_1, alpha_1 / self.mask_id)
        return factor.prod(dim=-1)

    def final_reveal(self, beliefs: Tensor) -> Tensor:
        """P(x | z_0): what is still masked is drawn from the beliefs, (S, X)."""
        picked = beliefs[:, None].expand(-1, len(self.texts), -1, -1)
        return picked.gather(-1, self.texts[None, :, :, None].expand(len(self.states), -1, -1, 1))[..., 0].prod(-1)

    def nats(self, beliefs: Tensor) -> Tensor:
        """Sum over masked l of -log p(x_l | z) for every text and state, (X, S); 0 where z cannot come from x."""
        picked = beliefs[None].expand(len(self.texts), -1, -1, -1)
        right = picked.gather(-1, self.texts[:, None, :, None].expand(-1, len(self.states), -1, 1))[..., 0]
        masked = self.states == self.mask_id
        possible = ((self.states[None] == self.texts[:, None]) | masked).all(dim=-1)
        return torch.where(masked & possible[..., None], -right.clamp(min=1e-300).log(), 0.0).sum(dim=-1)


def quadrature(num: int = 400) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre uniforms and weights on (0, 1), in double precision."""
    k = torch.arange(1, num, dtype=torch.float64)
    beta = k / torch.sqrt(4 * k**2 - 1)
    values, vectors = torch.linalg.eigh(torch.diag(beta, 1) + torch.diag(beta, -1))
    return (values + 1) / 2, vectors[0] ** 2


class Table:
    """A denoiser that looks its log beliefs up in a table (S, L, V)."""

    def __init__(self, world: World, beliefs: Tensor, anchor_beliefs: Tensor | None = None):
        self.position_values = world.num_symbols ** torch.arange(world.length - 1, -1, -1)
        self.log_beliefs, self.calls = beliefs.log(), 0
        self.anchor = self.log_beliefs if anchor_beliefs is None else anchor_beliefs.log()

    def __call__(self, noisy: NoisyRows) -> "TableOutput":
        self.calls += 1
        states = (noisy.z * self.position_values).sum(dim=1)
        return TableOutput(self.log_beliefs[states].flatten(0, 1), self.anchor[states].flatten(0, 1))


class TableOutput:
    def __init__(self, log_beliefs: Tensor, anchor_log_beliefs: Tensor):
        self._log_beliefs, self._anchor = log_beliefs, anchor_log_beliefs

    def log_beliefs(self, positions: Tensor) -> Tensor:
        return self._log_beliefs[positions]

    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        return self._anchor[positions]


def quarters(world: World, seed: int = 0) -> Tensor:
    """SUBS beliefs (S, L, V) over two words, all multiples of 1/4: four equally likely uniforms draw tokens exactly."""
    assert world.mask_id == 2
    first = torch.randint(1, 4, (len(world.states), world.length), generator=seeded(seed)).double() / 4
    guess = torch.stack([first, 1 - first, torch.zeros_like(first)], dim=-1)
    copied = torch.nn.functional.one_hot(world.states, world.num_symbols).double()
    return torch.where((world.states == world.mask_id)[..., None], guess, copied)


class FixedRng:
    """A RowRng with given numbers, row by row: for positions and for tokens."""

    def __init__(self, positions: list[list[float]], tokens: list[list[float]]):
        self._positions, self._tokens = [iter(row) for row in positions], [iter(row) for row in tokens]

    def __len__(self) -> int:
        return len(self._tokens)

    def for_positions(self, row: int, num: int) -> np.ndarray:
        return np.array([next(self._positions[row]) for _ in range(num)])

    def for_tokens(self, row: int, num: int) -> np.ndarray:
        return np.array([next(self._tokens[row]) for _ in range(num)])

    def at_tokens(self, where: Tensor) -> Tensor:
        return torch.from_numpy(np.concatenate([self.for_tokens(r, n) for r, n in enumerate(where.sum(1).tolist())]))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The chi-square statistic of counts; an outcome of expectation 0 must have count 0."""
    assert (counts[expected <= 0] == 0).all()
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
