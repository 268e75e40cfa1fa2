"""A chain: the tokens of a text block one after the other, from a single network call. Independent of the trunk.

A block-causal network that reads a block of masks predicts each of its tokens by itself. The chain makes them depend on
each other: the state that predicts a token is changed by the token before it and by the state that predicted that one,

    u_1 = h_1,    u_j = h_j + f(h_j, u_(j-1), embedding of x_(j-1)),

where h_j is the network's state and f is a small MLP, 0 at first. So the tokens of a block have a joint distribution
that is known exactly, and drawing one more of them costs an MLP and a head, not a network.

Shapes: B rows of L tokens, n blocks of at most b tokens, d wide, N states.
"""

import itertools
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.models.text_blocks import BlockCut


class Chain(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.widen = nn.Linear(3 * hidden, 2 * width, bias=False)
        self.narrow = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, state: Tensor, before: Tensor, token: Tensor) -> Tensor:
        """u_j (N, d) from the network's state h_j, from u_(j-1), and from the embedded token before."""
        parts = torch.stack([state, before.to(state.dtype), token.to(state.dtype)], dim=-2)
        gate, inner = self.widen(F.rms_norm(parts, parts.shape[-1:]).flatten(-2)).chunk(2, dim=-1)
        return state + self.narrow(F.silu(gate) * inner)  # type: ignore[no-any-return]

    def states(self, hidden: Tensor, embedded: Tensor, cut: BlockCut) -> Tensor:
        """(B, L, d), the states u of all blocks of text whose tokens are known, from the network's hidden (B, L, d).

        `embedded` (B, L, d) are the tokens.
        """
        index, source = _places(cut, hidden.device)
        states = [hidden[:, index[0]]]
        for before, here in itertools.pairwise(index):
            states.append(self(hidden[:, here], states[-1], embedded[:, before]))
        return torch.stack(states, dim=1).flatten(1, 2)[:, source]


def chained_tokens(masked: Tensor, cut: BlockCut) -> Tensor:
    """(B, L), True at all tokens but the first of blocks that are masked (B, L) as a whole."""
    index, source = _places(cut, masked.device)
    whole = (masked[:, index] | (index == 0)).all(dim=1, keepdim=True)  # (B, 1, n)
    later = F.pad(whole.expand(-1, len(index) - 1, -1), (0, 0, 1, 0))
    return later.flatten(1, 2)[:, source] & masked


@lru_cache(maxsize=64)
def _places(cut: BlockCut, device: torch.device) -> tuple[Tensor, Tensor]:
    """(b, n), the j-th tokens of all blocks; and (L,), where each token stands in the flattened index."""
    index = cut.index.T.contiguous()
    source = torch.zeros(cut.length, dtype=torch.int64)
    source[index.flatten()] = torch.arange(index.numel())
    return index.to(device), source.to(device)
