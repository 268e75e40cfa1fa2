"""Text with holes -> ids with masks: prompts, suffixes, infilling. Knows no networks.

`[MASK]` is one masked token, `[MASK*12]` twelve; everything around them is given.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.errors import UserError
from adlm.tokens import Tokenizer

HOLE = re.compile(r"\[MASK(?:\*(\d+))?\]")


@dataclass(frozen=True)
class Canvas:
    """Rows of unequal lengths, side by side."""

    ids: Tensor
    """(B, L), the mask id where text is wanted."""
    pad: Tensor | None
    """(B, L), True past the end of a row; None where all rows are as long."""

    @property
    def lengths(self) -> list[int]:
        width = self.ids.shape[1]
        return [width] * len(self.ids) if self.pad is None else (~self.pad).sum(dim=1).tolist()


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text, masks for its holes.

    Where a tokenizer writes a word and the space before it as one token, a space before a hole belongs to the hole.
    """
    ids: list[int] = []
    start = 0
    for hole in HOLE.finditer(text):
        before, num = text[start : hole.start()], int(hole[1] or 1)
        if num < 1:
            raise UserError(f"{hole[0]} has no masks; write [MASK*N] with N from 1 on")
        ids += tokenizer.encode(before.removesuffix(" ") if tokenizer.joins_spaces else before) if before else []
        ids += [tokenizer.vocabulary.mask_id] * num
        start = hole.end()
    rest = text[start:]
    return ids + (tokenizer.encode(rest) if rest else [])


def canvas_of(rows: Sequence[Sequence[int]], filling: int) -> Canvas:
    """Rows of ids, those that are shorter filled up at the end and marked as padding there."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), filling)
    pad = torch.ones(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        pad[number, : len(row)] = False
    return Canvas(ids, pad if pad.any() else None)
