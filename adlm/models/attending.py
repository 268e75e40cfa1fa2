"""Attention of frozen networks: over a whole sequence, or of the next tokens over those kept in a cache.

Knows nothing of weights.

Shapes: B sequences, L tokens, H heads of w each, C places in the cache, n tokens read at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.models.fused import turn_
from adlm.models.layers import rotary_angles
from adlm.models.transformer import attendable


class Turns:
    """Position -> one complex number of length 1 for every pair of a head's coordinates, (L, w / 2).

    Tables are as long as a power of two and stay where they are: a recorded CUDA graph may read one.
    """

    def __init__(self, head_width: int, like: Tensor):
        self.head_width, self.like, self.tables = head_width, like, dict[int, Tensor]()

    def __call__(self, length: int) -> Tensor:
        size = 1 << (length - 1).bit_length()
        if size not in self.tables:
            self.tables[size] = torch.complex(*rotary_angles(size, self.head_width, self.like))
        return self.tables[size][:length]


def visible_to(pad: Tensor, causal: bool) -> Tensor:
    """Which tokens each may attend to, by padding pad (B, L) and order: (B, 1, L or 1, L)."""
    if not causal:
        return attendable(pad)
    return attendable(pad) & torch.ones(pad.shape[1], pad.shape[1], dtype=torch.bool, device=pad.device).tril()


def attend_all(qkv: Tensor, turns: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """Every token (of qkv (B, L, 3, H, w)) to every token, or every earlier one, that is visible: (B, L, H w)."""
    turn_(qkv[:, :, :2], turns)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal and visible is None)
    return mixed.transpose(1, 2).flatten(-2)


class Cache:
    """The keys and values of what every row has read so far, C places for each block. All rows are equally far."""

    def __init__(self, blocks: int, batch: int, heads: int, length: int, head_width: int, like: Tensor):
        self.length, self.filled = length, 0
        self.keys, self.values = (like.new_zeros(blocks, batch, heads, length, head_width) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        """`filled`, where the device can read it."""

    def advance(self, num: int) -> None:
        self.filled += num
        self.position.fill_(self.filled)

    def room_for(self, num: int) -> None:
        if self.filled + num > self.length:
            raise ValueError(
                f"the cache has {self.length} places, {self.filled} are filled, and {num} more tokens were given; "
                "ask for a longer one"
            )


def attend_cached(number: int, qkv: Tensor, turns: Tensor, cache: Cache) -> Tensor:
    """The next n tokens (of qkv (B, n, 3, H, w)) to all before them and to themselves; their keys and values are kept.

    Where the first of them stands is read from the device. turns (C, w / 2) are those of all places.
    """
    keys, values = cache.keys[number], cache.values[number]
    places = cache.position + torch.arange(qkv.shape[1], device=qkv.device)
    turn_(qkv[:, :, :2], turns[places])
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
    keys.index_copy_(2, places, k)
    values.index_copy_(2, places, v)
    earlier = torch.arange(cache.length, device=qkv.device) <= places[:, None]
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=earlier)
    return mixed.transpose(1, 2).flatten(-2)
