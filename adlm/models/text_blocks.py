"""Block-causal attention: a row of text cut into blocks, each denoised from the clean text before it.

The network reads a row twice in one pass. The clean copy is causal: every token attends to those before it, as in an
autoregressive network. The noisy copy has one group of places for each block,

    [x_(s-1), z_s, ..., z_e]

which attend to each other and to the clean tokens before x_(s-1), and so not to any later block. The output at a place
predicts the next token, in both copies: a pretrained causal head keeps its meaning. The first token of a row is given.
With blocks of one token and masked places hidden, the noisy copy computes what the clean one does.

Shapes: B rows of L tokens, P places that the network reads, n blocks of at most b tokens, d wide. A text block has
nothing to do with a block of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.times import BatchRng, BatchSlice

PLACES_MULTIPLE = 16  # rows of a mask are aligned, and the shape is the same for any first block


@dataclass(frozen=True)
class BlockCut:
    """Tokens 1 to L - 1 of a row as n blocks: the first of `first` tokens, the others of `block_length`, the last of
    what is left."""

    length: int
    block_length: int
    first: int

    @property
    def starts(self) -> range:
        """The first token of every block but the first, which begins at token 1."""
        return range(1 + self.first, self.length, self.block_length)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(first token, token after the last) of every block."""
        starts = [1, *self.starts]
        return list(zip(starts, [*starts[1:], self.length], strict=True))

    @property
    def index(self) -> Tensor:
        """(n, b), the token at each position of each block; 0, which is in no block, after the end of shorter ones."""
        width = max(self.block_length, self.first)
        rows = [F.pad(torch.arange(start, stop), (0, width - (stop - start))) for start, stop in self.bounds]
        return torch.stack(rows)

    def split(self, x: Tensor) -> Tensor:
        """(B n, b): the blocks of x (B, L) as rows of their own."""
        return x[:, self.index.to(x.device)].flatten(0, 1)

    def split_pad(self, x: Tensor, pad: Tensor | None) -> Tensor:
        """(B n, b), True at padding of the row, and after the end of shorter blocks."""
        after_end = (self.index == 0).to(x.device).expand(len(x), -1, -1).flatten(0, 1)
        return after_end if pad is None else after_end | self.split(pad)

    def join(self, blocks: Tensor, like: Tensor) -> Tensor:
        """`like` (B, L) with the tokens of all blocks replaced by those of `blocks` (B n, b)."""
        index = self.index.flatten()
        inside = index > 0
        values = blocks.reshape(len(like), -1)[:, inside.to(blocks.device)]
        return like.index_copy(1, index[inside].to(like.device), values)

    def rng(self, rng: BatchRng) -> BatchRng:
        """The same numbers for the blocks of rows as rows, whatever part of a larger batch they are."""
        num = len(self.bounds)
        rows = None if rng.rows is None else BatchSlice(rng.rows.first * num, rng.rows.total * num)
        return BatchRng(rng.generator, rows)


@dataclass(frozen=True)
class Layout:
    """The positions of the places that a network reads, and which of them each attends to."""

    positions: Tensor
    """(P,)"""
    visible: Tensor
    """(1, 1, P, P) or (B, 1, P, P), True where the place of a row attends to that of a column."""


@dataclass(frozen=True)
class Places:
    """A row of text as the network reads it."""

    cut: BlockCut
    ids: Tensor
    """(B, P)"""
    layout: Layout
    outputs: Tensor
    """(L - 1,), the places whose outputs predict tokens 1 to L - 1 of the noisy copy."""
    clean_outputs: Tensor
    """(L - 1,), the same in the clean copy."""

    def noisy(self, hidden: Tensor) -> Tensor:
        """(B, L, d), the hidden states (B, P, d) that predict each token of the noisy copy; 0 for the first."""
        return F.pad(hidden.index_select(1, self.outputs), (0, 0, 1, 0))

    def clean(self, hidden: Tensor) -> Tensor:
        """(B, L, d), those of the clean copy, which predict each token from the clean text before it."""
        return F.pad(hidden.index_select(1, self.clean_outputs), (0, 0, 1, 0))

    def misalignment(self, states: Sequence[Tensor], weight: Tensor) -> Tensor:
        """sum over tokens of weight (B, L) * the mean over `states`, each (B, P, d), of 1 - cos(noisy, clean).

        Of both copies these are the hidden states that predict the token. The clean one is a target without gradient.
        """
        total = weight.new_zeros(())
        for hidden in states:
            noisy, clean = hidden.index_select(1, self.outputs), hidden.detach().index_select(1, self.clean_outputs)
            if hidden.dtype != torch.float64:
                noisy, clean = noisy.float(), clean.float()
            total = total + (weight[:, 1:] * (1 - F.cosine_similarity(noisy, clean, dim=-1))).sum()
        return total / len(states)


@dataclass(frozen=True)
class TextBlocks:
    """How a block-causal network reads rows."""

    block_length: int
    hidden_id: int | None = None
    """The id that no other place attends to: the mask, or None if masked places are visible."""

    def cut(self, length: int, first: int | None = None) -> BlockCut:
        """The blocks of a row; the first has `first` tokens, by default as many as the others."""
        return BlockCut(length, self.block_length, min(first or self.block_length, length - 1))

    def places(self, x: Tensor, z: Tensor, pad: Tensor | None = None, first: int | None = None) -> Places:
        """A clean row x and its noisy version z, both (B, L); padding is at the end of rows."""
        cut = self.cut(x.shape[1], first)
        plan = _plan(cut, x.device)
        ids = torch.cat([x, z], dim=1)[:, plan.source]
        visible = plan.visible[None, None]
        if pad is not None or self.hidden_id is not None:
            unseen = torch.zeros_like(ids, dtype=torch.bool)
            if pad is not None:
                unseen = torch.cat([pad, pad], dim=1)[:, plan.source]
            if self.hidden_id is not None:
                unseen = unseen | (ids == self.hidden_id)
            itself = torch.eye(len(plan.source), dtype=torch.bool, device=x.device)
            visible = visible & ~unseen[:, None, None] | itself
        return Places(cut, ids, Layout(plan.positions, visible), plan.outputs, plan.clean_outputs)


@dataclass(frozen=True)
class _Plan:
    """What is the same for all rows of one length."""

    source: Tensor
    """(P,), which token of [x, z] (B, 2 L) stands at each place."""
    positions: Tensor
    visible: Tensor
    outputs: Tensor
    clean_outputs: Tensor


@lru_cache(maxsize=64)
def _plan(cut: BlockCut, device: torch.device) -> _Plan:
    length = cut.length
    token = [place for start, stop in cut.bounds for place in range(start - 1, stop)]
    begins = [start for start, stop in cut.bounds for _ in range(start - 1, stop)]
    num_noisy, num_clean = len(token), length - 1
    num = num_noisy + num_clean
    padding = -(length - 1 + length + length // cut.block_length + 2) % PLACES_MULTIPLE
    num_places = length - 1 + length + length // cut.block_length + 2 + padding  # for any length of the first block
    clean = torch.arange(num_clean)
    noisy, begin = torch.tensor(token), torch.tensor(begins)
    is_first = noisy == begin - 1
    rest = torch.zeros(num_places - num, dtype=torch.int64)
    visible = torch.eye(num_places, dtype=torch.bool)
    visible[:num_noisy, :num_noisy] = begin[:, None] == begin[None]
    visible[:num_noisy, num_noisy:num] = clean[None] < begin[:, None] - 1
    visible[num_noisy:num, num_noisy:num] = clean[None] <= clean[:, None]
    source = torch.cat([torch.where(is_first, noisy, noisy + length), clean, rest])
    outputs = torch.cat([torch.arange(num_noisy)[begin == start][:-1] for start, _ in cut.bounds])
    parts = (source, torch.cat([noisy, clean, rest]), visible, outputs, num_noisy + clean)
    return _Plan(*(part.to(device) for part in parts))
