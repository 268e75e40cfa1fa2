"""Exact categorical draws, and the per-row random streams behind them. Does not depend on what is drawn.

Shapes: B sequences, L tokens, N of them to draw, V symbols last.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.errors import UserError
from adlm.models.heads import why_no_triton

GROUP = 2048
"""Symbols that a program of the kernels adds."""


class RowRng:
    """Uniform numbers from [0, 1), 53 bits each, from streams keyed by (seed, row).

    What a row draws depends neither on the other rows of the batch nor on padding. Each row has two streams: one for
    the positions that change and one for the tokens drawn there. `rows` are the row numbers of the keys; `seed` is one
    for all of them, or one for each. The methods here count rows from 0.
    """

    def __init__(self, seed: int | Sequence[int], rows: Sequence[int]):
        seeds = [seed] if isinstance(seed, int) else seed
        for each in seeds:
            if each < 0:
                raise UserError(f"seed {each} must be 0 or more", "seed")
        self.seed, self.rows = seed, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> "RowRng":
        """The streams of some of the rows, from their beginning."""
        return RowRng(self.seed if isinstance(self.seed, int) else self.seed[rows], self.rows[rows])

    def candidates(self, num: int) -> "RowRng":
        """`num` rows for each one, with streams of their own; those of the first are the row's."""
        rows = [row + (number << 32) for row in self.rows for number in range(num)]
        return RowRng(self.seed if isinstance(self.seed, int) else [s for s in self.seed for _ in range(num)], rows)

    @cached_property
    def _streams(self) -> list[tuple[np.random.Generator, np.random.Generator]]:
        """Of each row, the streams for positions and for tokens."""
        seeds = [self.seed] * len(self.rows) if isinstance(self.seed, int) else self.seed
        return [(_stream(*key, 0), _stream(*key, 1)) for key in zip(seeds, self.rows, strict=True)]

    def for_lengths(self, row: int, num: int) -> list[float]:
        """`num` numbers that choose the lengths of holes, the same at every call."""
        seed = self.seed if isinstance(self.seed, int) else self.seed[row]
        return _stream(seed, self.rows[row], 2).random(num).tolist()  # type: ignore[no-any-return]

    def for_positions(self, row: int, num: int) -> NDArray[np.float64]:
        """The next `num` numbers of the row's position stream."""
        return self._streams[row][0].random(num)

    def for_tokens(self, row: int, num: int) -> NDArray[np.float64]:
        """The next `num` numbers of the row's token stream."""
        return self._streams[row][1].random(num)

    def at_positions(self, where: Tensor) -> Tensor:
        """(B, L), the next numbers of the position streams where True, in order; 1 elsewhere, below no probability."""
        flags = where.cpu().numpy()
        uniforms = np.ones(flags.shape)
        for row, row_flags in enumerate(flags):
            uniforms[row, row_flags] = self.for_positions(row, int(row_flags.sum()))
        return torch.from_numpy(uniforms).to(where.device)

    def at_tokens(self, where: Tensor) -> Tensor:
        """(N,), the next numbers of the token streams, one for each True, row by row."""
        counts = where.sum(dim=1).tolist()
        uniforms = [self.for_tokens(row, count) for row, count in enumerate(counts)]
        return torch.from_numpy(np.concatenate(uniforms)).to(where.device)


def _stream(seed: int, row: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(row, number))))


def categorical(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first symbol (...) whose cumulative weight exceeds uniform * total, for weights (..., V); in float64.

    Each symbol has exactly its probability, and one of probability zero is never drawn. The usual Gumbel noise in
    float32 cannot reach the tail of its distribution, which lowers the temperature a little; 53-bit uniforms do not.
    Symbols are searched in two levels, groups of about sqrt(V) and then symbols within the group, because a cumulative
    sum over 50,000 symbols is slow on a GPU.
    """
    if has_kernels(weights):
        return _fused_categorical(weights, uniforms)
    return plain_categorical(weights, uniforms)


def has_kernels(tensor: Tensor) -> bool:
    """Whether the kernels in draw_kernels.py can run on a tensor."""
    return tensor.is_cuda and tensor.dtype in (torch.float32, torch.float64) and not why_no_triton()


def _fused_categorical(weights: Tensor, uniforms: Tensor) -> Tensor:
    from adlm.sampling.draw_kernels import choose_symbol_kernel, group_sums_kernel  # imported only where it is used

    num_symbols, weights = weights.shape[-1], weights.contiguous()
    num_groups, num_rows = -(-num_symbols // GROUP), weights.numel() // num_symbols
    sums = torch.empty(num_rows, num_groups, dtype=torch.float64, device=weights.device)
    chosen = torch.empty(weights.shape[:-1], dtype=torch.int64, device=weights.device)
    if num_rows == 0:
        return chosen
    with torch.cuda.device(weights.device):
        group_sums_kernel[(num_rows, num_groups)](weights, sums, num_symbols, GROUP)
        choose_symbol_kernel[(num_rows,)](
            weights,
            sums,
            uniforms.to(weights.device, torch.float64).contiguous(),
            chosen,
            num_symbols,
            num_groups,
            GROUP,
            1 << (num_groups - 1).bit_length(),
        )
    return chosen


def plain_categorical(weights: Tensor, uniforms: Tensor) -> Tensor:
    width = math.isqrt(weights.shape[-1] - 1) + 1
    groups = torch.unflatten(F.pad(weights, (0, -weights.shape[-1] % width)), -1, (-1, width))
    sums = groups.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    target = uniforms.to(ends)[..., None] * ends[..., -1:]
    group = _first_above(ends, target)
    before = (ends - sums).gather(-1, group)
    chosen = groups.gather(-2, group[..., None].expand(*group.shape, width))[..., 0, :]
    inside = chosen.cumsum(dim=-1, dtype=torch.float64)
    return (group * width + _first_above(inside, (target - before).clamp(min=0)))[..., 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds the target; if rounding leaves none, that of the last increase."""
    last_increase = (cumulative < cumulative[..., -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last_increase)
