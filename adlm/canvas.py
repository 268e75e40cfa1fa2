"""Canvases: text with masks -> ids, for prompts, suffixes and infilling. Independent of networks.

In a text, `[MASK]` is one masked token and `[MASK*12]` a hole of twelve; `[MASK*..12]` is a hole of at most twelve,
`[MASK*3..12]` of at least three too, and `[MASK*]` one of any length. A hole may have a name, `[MASK*12:name]`; with a
name and no number, `[MASK:name]`, it may have any length. The rest of the text is fixed. Texts are checked and encoded
without PyTorch, which is imported when a canvas is made.

Shapes: B rows, L tokens.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adlm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from adlm.tokens import Tokenizer

HOLE = re.compile(r"\[MASK(?:\*((?:\d*\.\.)?\d+|))?(?::([A-Za-z_][A-Za-z0-9_]{0,31}))?\]")
"""Its groups are the number of tokens, `12`, `3..12`, `..12` for at most twelve, empty for any number, None for one or,
with a name, any; and the name, of at most 32 characters."""
LIKE_A_HOLE = re.compile(  # possessive: linear in the length of the text
    r"(?i:\[\s*+mask\s*+(\*?+\s*+-?\d*+\s*+\]|\*\s*+-?\d++|\*\s*+\.\.++(?:\s*+\d++)?+(?:\s*+\])?+))"
    r"|\[\s*+MASK(?![A-Za-z])(\s*+\*?+\s*+-?\d++)?"
)
UP_TO_BRACKET = re.compile(r"\[[^\[\]\n]{0,40}\]")
MAX_HOLE = 1_000_000  # masks in one hole; a larger number is probably a typing error


@dataclass(frozen=True)
class Hole:
    """A hole of a text, in its ids."""

    name: str
    """Empty if it has none."""
    start: int
    """The position of its first mask."""
    num: int
    """How many masks it has."""
    after_space: bool
    """Whether a space before it belongs to its tokens."""
    is_open: bool = False
    """Whether its length is unknown; it then has as many masks as it may have tokens."""
    least: int = 0
    """Of a hole of unknown length, the fewest tokens."""
    end_id: int | None = None
    """The token that ends a hole of unknown length; None is eos."""


@dataclass(frozen=True)
class Canvas:
    """A batch of rows, padded to the same length."""

    ids: "Tensor"
    """(B, L), with the mask id at the positions to fill; in holes of unknown length, as often as they may have tokens,
    the `open_id` of `encode_canvas`."""
    pad: "Tensor | None" = None
    """(B, L), True at padding; None if all rows have the same length."""
    starts: tuple[int, ...] = ()
    """First position of each row's text: a bos token before it is an input but not part of the text; () means all 0."""

    def texts(self, ids: "Tensor") -> list[list[int]]:
        """The ids of each row's text, for ids (B, L) on this canvas: without leading bos and without padding."""
        width, starts = ids.shape[1], self.starts or (0,) * len(ids)
        ends = [width] * len(ids) if self.pad is None else (~self.pad).sum(dim=1).tolist()
        return [row[start:end] for row, start, end in zip(ids.tolist(), starts, ends, strict=True)]

    def take(self, rows: Sequence[int]) -> "Canvas":
        """A canvas of some of the rows, each as often as it is named; no wider than the longest of them."""
        index, starts = list(rows), tuple(self.starts[row] for row in rows) if self.starts else ()
        if self.pad is None:
            return Canvas(self.ids[index], None, starts)
        pad = self.pad[index]
        width = int((~pad).sum(dim=1).max())
        pad = pad[:, :width]
        return Canvas(self.ids[index, :width], pad if pad.any() else None, starts)


def make_canvas(rows: Sequence[Sequence[int]], filling: int, starts: Sequence[int] = ()) -> Canvas:
    """Rows of ids as a canvas; shorter rows are padded at the end with `filling`."""
    import torch

    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), filling)
    pad = torch.ones(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        pad[number, : len(row)] = False
    return Canvas(ids, pad if pad.any() else None, tuple(starts))


def encode_canvas(text: str, tokenizer: "Tokenizer", open_id: int | None = None, length: int = 0) -> list[int]:
    """The ids of a text, with the mask id in its holes, and `open_id` in those of unknown length, up to the longest.

    `[MASK*]` has at most a quarter of the model's `length`, and no more than is left of it. Without an `open_id`, holes
    of unknown length are a user error. If the tokenizer encodes a word and the space before it as one token, a space
    before a hole belongs to the hole.
    """
    return encode_holes(text, tokenizer, open_id, length)[0]


def encode_holes(
    text: str, tokenizer: "Tokenizer", open_id: int | None = None, length: int = 0
) -> tuple[list[int], list[Hole]]:
    """The ids of `encode_canvas`, and the holes, in order."""
    if open_id is None:
        refuse_open_holes(text)
    ids: list[int] = []
    found: list[Hole] = []
    start, num_between, marks = 0, 0, list(HOLE.finditer(text))
    for mark in marks:
        before = text[start : mark.start()]
        after_space = tokenizer.joins_spaces and before.endswith(" ")
        known = _encode_known(before[:-1] if after_space else before, tokenizer)
        ids += known
        num_between += len(known) if start else 0
        num, is_open = _checked_num_masks(mark), has_unknown_length(mark)
        has_most = mark[1] not in ("", None) or not is_open
        found.append(Hole(mark[2] or "", len(ids), num if has_most else 0, after_space, is_open, least_tokens(mark)))
        ids += [tokenizer.vocabulary.mask_id if open_id is None or not is_open else open_id] * found[-1].num
        start = mark.end()
    ids += _encode_known(text[start:], tokenizer)
    # rearranged as in methods/infilling.py: holes of given length and the text between holes count twice, and bos, eos,
    # four more ids a hole
    left = length - len(ids) - ids.count(tokenizer.vocabulary.mask_id) - num_between - 2 - 4 * len(marks)
    num_any = sum(hole.num == 0 for hole in found)
    num_inserted = 0
    for number, hole in enumerate(found):
        num = hole.num or max(1, min(length // 4, left // num_any))
        found[number] = replace(hole, start=hole.start + num_inserted, num=num)
        if hole.num == 0:
            assert open_id is not None
            start = hole.start + num_inserted
            ids[start:start] = [open_id] * num
            num_inserted += num
    return ids, found


def refuse_open_holes(text: str, allowed: Container[str] = ()) -> None:
    """A user error if there is a hole of unknown length whose name is not allowed."""
    for mark in HOLE.finditer(text):
        name = hole_name(mark)
        if not has_unknown_length(mark) or name in allowed:
            continue
        needed, sized = "a name and a constraint", "[MASK*12]"
        if name:
            needed = f"a constraint, --constrain '{name}=...' (Python: constraints={{'{name}': ...}})"
            sized = f"[MASK*12:{name}]"
        raise UserError(
            f"{mark[0]} is a hole of unknown length, which needs {needed}, or a block-causal model trained with "
            f"train.infill, such as smollm2; or give its length, such as {sized}",
            "texts",
        )


def check_holes(text: str, option: str = "texts") -> None:
    """UserError for an empty or too large hole, and for what looks like one and is none, such as `[MASK*4 was`."""
    for hole in HOLE.finditer(text):
        _checked_num_masks(hole, option)
    for found in LIKE_A_HOLE.finditer(text):
        if not HOLE.match(text, found.start()):
            whole = UP_TO_BRACKET.match(text, found.start()) or found
            raise UserError(
                f"{whole[0]} is not a hole; write [MASK] for one token, [MASK*12] for twelve, [MASK*12:name] with a "
                "name of letters, digits and _",
                option,
            )


def hole_name(hole: re.Match[str]) -> str:
    """The name of a match of HOLE, empty if it has none."""
    return hole[2] or ""


def has_unknown_length(hole: re.Match[str]) -> bool:
    """Whether the number of tokens of a match of HOLE is not given."""
    return not hole[1].isdecimal() if hole[1] is not None else hole[2] is not None


def open_hole_names(text: str) -> list[str]:
    """The names of the holes of unknown length in a text, in order."""
    return [hole_name(mark) for mark in HOLE.finditer(text) if has_unknown_length(mark)]


def most_tokens(hole: re.Match[str], length: int) -> int:
    """The most tokens of a hole, of any length a quarter of the model's `length`."""
    has_number = hole[1] if hole[1] is not None else not hole[2]
    return _num_masks(hole) if has_number else max(1, length // 4)


def least_tokens(hole: re.Match[str]) -> int:
    """The fewest tokens of a hole of unknown length."""
    least = (hole[1] or "").rpartition("..")[0]
    return min(int(least), MAX_HOLE + 1) if least and len(least) < 10 else 0


def has_constrained_hole(text: str) -> bool:
    """Whether holes must satisfy something by themselves: those of one name have the same text, some a least length."""
    return any(hole_name(mark) or least_tokens(mark) for mark in HOLE.finditer(text))


def num_masks(text: str) -> int:
    """Number of masks in the holes of a text, counted without encoding it; `[MASK*]` has at least one."""
    return sum(_num_masks(hole) for hole in HOLE.finditer(text))


def _num_masks(hole: re.Match[str]) -> int:
    """Number of masks in a hole; MAX_HOLE + 1 for a number of ten or more digits, which is not parsed."""
    digits = (hole[1] or "").rpartition("..")[2] or "1"
    return int(digits) if len(digits) < 10 else MAX_HOLE + 1


def _checked_num_masks(hole: re.Match[str], option: str = "texts") -> int:
    """Number of masks in a hole, from 1 to MAX_HOLE."""
    num = _num_masks(hole)
    if num < 1:
        raise UserError(f"{hole[0]} has no masks; write [MASK*N] with N at least 1", option)
    if num < least_tokens(hole):
        raise UserError(f"{hole[0]} has at least {least_tokens(hole)} and at most {num} tokens; exchange them", option)
    if num > MAX_HOLE:
        raise UserError(
            f"{hole[0][:20]}... asks for more than {MAX_HOLE:,} masks; write [MASK*N] with a smaller N", option
        )
    return num


def _encode_known(text: str, tokenizer: "Tokenizer") -> list[int]:
    """The ids of a text; words that the tokenizer cannot represent are a user error."""
    ids = tokenizer.encode(text) if text else []
    unknown = tokenizer.unknown_words(text) if ids else []
    if unknown:
        words = ", ".join(map(repr, dict.fromkeys(unknown)))
        raise UserError(f"tokenizer {tokenizer.name} has no id for {words}; write something else there", "texts")
    return ids


def hole_between(prompt: str, suffix: str, length: int, tokenizer: "Tokenizer") -> str:
    """The text prompt + hole + suffix, with the hole sized so that it has `length` tokens in total."""
    num = length - len(encode_canvas(f"{prompt}[MASK]{suffix}", tokenizer)) + 1
    if num < 1:
        raise UserError(
            f"length {length} leaves no room: prompt and suffix have {length - num} tokens; use a larger length",
            "length",
        )
    return f"{prompt}[MASK*{num}]{suffix}"
