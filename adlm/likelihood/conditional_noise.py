"""The noise of conditional bounds: versions of a continuation with masks and weights. No texts, no batches.

Only the continuation is masked; the context is visible at all times. So the bound is that of the process that samples
the continuation after the context as a prompt. The noise depends on the seed and on the number of tokens of the
continuation alone (and on how many versions there are): continuations of one length are compared on the same masks.
Of block-causal methods it also depends on where the continuation begins.

Shapes: R noisy versions of a continuation of n tokens; B rows of L tokens.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc, comb, xlog1py, xlogy
from torch import Tensor

from adlm.diffusion.objectives import prior_nats
from adlm.diffusion.times import BatchRng, draw_times, keyed_generator
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import BoundNoise, MaskedDiffusion, NoisedBatch, per_token
from adlm.methods.method import Method


@dataclass(frozen=True)
class Noise:
    """R noisy versions of a continuation of n tokens. The mean of their nats estimates the bound."""

    masked: Tensor
    """(R, n), True at masks. Unless `enumerated`, versions 2i and 2i + 1 are independent and from one stratum."""
    t: Tensor
    """(R,)"""
    s: Tensor | None
    """(R,), the ends of the steps in discrete time."""
    weight: Tensor
    """(R,), or (R, n) with one for each token, in double precision."""
    start: Tensor | None = None
    """(R, n), True at masks at t = 0."""
    enumerated: bool = False
    """Whether these are all masks, so that the mean is the bound itself."""

    def versions(self, start: int, stop: int) -> "Noise":
        """Some of the versions, to be scored in one batch."""
        s, at_start = self.s, self.start
        return replace(
            self,
            masked=self.masked[start:stop],
            t=self.t[start:stop],
            s=None if s is None else s[start:stop],
            weight=self.weight[start:stop],
            start=None if at_start is None else at_start[start:stop],
        )

    def estimate(self, nats: Tensor) -> tuple[float, tuple[float, ...]]:
        """The mean of nats (R,), and its errors by stratum: the root of the sum of their squares is its standard error.

        S strata with two independent draws each: SE^2 = sum over strata of (difference / 2)^2 / S^2, and R = 2 S.
        """
        errors = () if self.enumerated else ((nats[0::2] - nats[1::2]) / len(nats)).tolist()
        return float(nats.mean()), tuple(errors)


@dataclass(frozen=True)
class MaskNoise:
    """Draws how many tokens are masked, then which; if there are no more masks than samples, enumerates them.

    Valid where the time matters only through the masks: continuous time, no time conditioning. The bound's integral
    over the mask probability p, from p_0 to p_1, can then be done for each number of masks k,

        sum_k C(n, k) [integral of p^(k-1) (1-p)^(n-k) dp + p_0^k (1-p_0)^(n-k)] E_k,

    with E_k the mean over the masks of k tokens of the nats of the masked ones. The second term is that of t = 0. From
    p_0 = 0 to p_1 = 1, the bracket times C(n, k) is 1/k.
    """

    method: MaskedDiffusion

    def draw(self, start: int, num_tokens: int, samples: int, seed: int) -> Noise:
        return self.draw_part(num_tokens, samples, seed, n_is_few(num_tokens, samples))

    def draw_part(self, num_tokens: int, samples: int, seed: int, enumerated: bool, *key: int) -> Noise:
        """`key` distinguishes the random numbers of several parts of a continuation."""
        n, totals = num_tokens, torch.from_numpy(self._totals(num_tokens))
        if enumerated:
            masked = torch.tensor(list(product((False, True), repeat=n))[1:])
            masks = masked.sum(dim=1)
            weight = len(masked) * totals[masks - 1] / torch.from_numpy(comb(n, masks.numpy()))
            return Noise(masked, masks.double() / n, None, weight, enumerated=True)
        draws = []
        for replicate in range(2):
            rng = BatchRng(keyed_generator(seed, n, samples, replicate, *key))
            share = draw_times(samples // 2, rng).sort().values
            masks = torch.ceil(share * n).long().clamp(min=1)
            order = rng.uniform((samples // 2, n), torch.device("cpu"))
            masked = order.argsort(dim=1).argsort(dim=1) < masks[:, None]
            draws.append((masked, share, n * totals[masks - 1]))
        masked, t, weight = (_interleave(*parts) for parts in zip(*draws, strict=True))
        return Noise(masked, t, None, weight)

    def _totals(self, n: int) -> NDArray[np.float64]:
        """(n,), the weights of k = 1 to n masks: C(n, k) times the bracket."""
        ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
        p0, p1 = self.method.schedule.mask_chance(ends).tolist()
        k = np.arange(1, n + 1, dtype=np.float64)
        log_comb = np.cumsum(np.log((n - k + 1) / k))
        at_start = np.exp(log_comb + xlogy(k, p0) + xlog1py(n - k, -p0))
        return np.asarray((betainc(k, n - k + 1, p1) - betainc(k, n - k + 1, p0)) / k + at_start)

    def nats(self, network: Any, x: Tensor, noise: BoundNoise, pad: Tensor | None) -> Tensor:
        """(B, L), to be summed over the continuation; `noise.importance` has the weights."""
        method = self.method
        nats = method.masked_nats(network, x, noise.noised, pad) * per_token(noise.importance.to(x.device))
        return nats + prior_nats(method.schedule, vocabulary_of(method.config).num_clean)


@dataclass(frozen=True)
class BlockMaskNoise(MaskNoise):
    """`MaskNoise` of every text block by itself, in the same versions: the nats of a block depend on its own masks."""

    block_length: int

    def draw(self, start: int, num_tokens: int, samples: int, seed: int) -> Noise:
        """The tokens are those from `start` on; token 1 begins the first block."""
        block = torch.div(torch.arange(start, start + num_tokens) - 1, self.block_length, rounding_mode="floor")
        sizes = torch.bincount(block - block[0]).tolist()
        enumerated = n_is_few(max(sizes), samples)
        parts = [self.draw_part(size, samples, seed, enumerated, number) for number, size in enumerate(sizes)]
        num = max(len(part.masked) for part in parts)
        masked, weight = torch.zeros(num, num_tokens, dtype=torch.bool), torch.zeros(num, num_tokens).double()
        for part, first in zip(parts, np.cumsum([0, *sizes[:-1]]), strict=True):
            versions, size = part.masked.shape
            masked[:versions, first : first + size] = part.masked
            weight[:versions, first : first + size] = part.weight[:, None] * num / versions  # the mean is over `num`
        return Noise(masked, torch.ones(num, dtype=torch.float64), None, weight, enumerated=enumerated)


def n_is_few(num_tokens: int, samples: int) -> bool:
    """Whether there are no more masks of so many tokens than samples."""
    return num_tokens < 63 and 2**num_tokens - 1 <= samples


@dataclass(frozen=True)
class TimeNoise:
    """Draws times, and masks at these times: the estimator of the method's own `bound`."""

    method: MaskedDiffusion

    def draw(self, start: int, num_tokens: int, samples: int, seed: int) -> Noise:
        clean = torch.full((samples // 2, num_tokens), vocabulary_of(self.method.config).padding_id)
        draws: list[BoundNoise] = []
        for replicate in range(2):
            noise = self.method.noise_for_bound(
                clean, None, BatchRng(keyed_generator(seed, num_tokens, samples, replicate))
            )
            draws.append(_rows_of(noise, noise.noised.t.argsort(stable=True)))  # rows at equal times are exchangeable
        first, second = draws
        mask_id = self.method.mask_id
        steps, starts = (first.noised.s, second.noised.s), (first.start, second.start)
        return Noise(
            _interleave(first.noised.z, second.noised.z) == mask_id,
            _interleave(first.noised.t, second.noised.t),
            None if steps[0] is None or steps[1] is None else _interleave(steps[0], steps[1]),
            _interleave(first.importance, second.importance).double(),
            None if starts[0] is None or starts[1] is None else _interleave(starts[0], starts[1]) == mask_id,
        )

    def nats(self, network: Any, x: Tensor, noise: BoundNoise, pad: Tensor | None) -> Tensor:
        return self.method.bound_at(network, x, noise, pad).double()


def noise_model(method: Method) -> MaskNoise | TimeNoise:
    """Noises a continuation by masks where that is valid, else by times: the same bound."""
    config, masked_diffusion = method.config, cast(MaskedDiffusion, method)
    if config.model.block_length:
        return BlockMaskNoise(masked_diffusion, config.model.block_length)
    depends_on_time = config.model.time_conditioning or config.time.steps or config.time.sigma
    return MaskNoise(masked_diffusion) if method.any_order and not depends_on_time else TimeNoise(masked_diffusion)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """The rows of both in turn."""
    return torch.stack([first, second], dim=1).flatten(0, 1)


def _rows_of(noise: BoundNoise, index: Tensor) -> BoundNoise:
    noised = noise.noised
    return BoundNoise(
        NoisedBatch(noised.z[index], noised.t[index], None if noised.s is None else noised.s[index]),
        noise.importance[index],
        None if noise.start is None else noise.start[index],
    )
