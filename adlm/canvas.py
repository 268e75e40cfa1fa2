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
MAX_HOLE = 1_000_000  # masks of one hole: beyond it, a slip of the finger


@dataclass(frozen=True)
class Canvas:
    """Rows of unequal lengths, side by side."""

    ids: Tensor
    """(B, L), the mask id where text is wanted."""
    pad: Tensor | None = None
    """(B, L), True past the end of a row; None where all rows are as long."""
    starts: tuple[int, ...] = ()
    """Where the text of each row begins: what stands before it, bos, is read and not told; () is 0 everywhere."""

    def texts(self, ids: Tensor) -> list[list[int]]:
        """What ids (B, L) on this canvas say, row by row: without what stands before a text, and without padding."""
        width, starts = ids.shape[1], self.starts or (0,) * len(ids)
        ends = [width] * len(ids) if self.pad is None else (~self.pad).sum(dim=1).tolist()
        return [row[start:end] for row, start, end in zip(ids.tolist(), starts, ends, strict=True)]


def encode_canvas(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text, masks for its holes.

    Where a tokenizer writes a word and the space before it as one token, a space before a hole belongs to the hole.
    """
    ids: list[int] = []
    start = 0
    for hole in HOLE.finditer(text):
        before, num = text[start : hole.start()], _number(hole)
        if num < 1:
            raise UserError(f"{hole[0]} has no masks; write [MASK*N] with N from 1 on")
        if num > MAX_HOLE:
            raise UserError(f"{hole[0][:20]}... asks for more than {MAX_HOLE:,} masks; write [MASK*N] with a smaller N")
        ids += _known(before.removesuffix(" ") if tokenizer.joins_spaces else before, tokenizer)
        ids += [tokenizer.vocabulary.mask_id] * num
        start = hole.end()
    return ids + _known(text[start:], tokenizer)


def _number(hole: re.Match[str]) -> int:
    """Of masks in a hole; a number of more digits than any text has tokens is only known to be too large."""
    digits = hole[1] or "1"
    return int(digits) if len(digits) < 10 else MAX_HOLE + 1


def _known(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text, every word of which has one."""
    ids = tokenizer.encode(text) if text else []
    unknown = tokenizer.unknown(text) if ids else []
    if unknown:
        words = ", ".join(map(repr, dict.fromkeys(unknown)))
        raise UserError(f"tokenizer {tokenizer.name} has no id for {words}; write something else there")
    return ids


def hole_between(prompt: str, suffix: str, length: int, tokenizer: Tokenizer) -> str:
    """A text with one hole between what is given, as long as makes `length` tokens of it all."""
    for name, given in (("prompt", prompt), ("suffix", suffix)):
        if HOLE.search(given):
            raise UserError(f"{name} {given!r} has a hole of its own; give the whole text, with its holes, to fill")
    num = length - len(encode_canvas(f"{prompt}[MASK]{suffix}", tokenizer)) + 1
    if num < 1:
        raise UserError(
            f"length {length} leaves no room: what is given is {length - num} tokens long; give a longer one"
        )
    return f"{prompt}[MASK*{num}]{suffix}"


def make_canvas(rows: Sequence[Sequence[int]], filling: int, starts: Sequence[int] = ()) -> Canvas:
    """Rows of ids, those that are shorter filled up at the end and marked as padding there."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), filling)
    pad = torch.ones(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        pad[number, : len(row)] = False
    return Canvas(ids, pad if pad.any() else None, tuple(starts))
