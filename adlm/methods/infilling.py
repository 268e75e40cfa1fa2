"""Canvases with text after a hole, for models that write from left to right and were trained to infill.

The canvas is rearranged as in `data/rows/holes.py`: the text with hole ids in its holes, eos, and then the holes, each
of known length and ended by eos. What the model writes there is put back. So the network reads the text on both sides
of a hole before it fills it.

Shapes: B rows of L tokens; A tokens after rearrangement.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adlm.errors import UserError
from adlm.methods.inputs import not_pad
from adlm.sampling.frame import Frame, first_frame

Generate = Callable[[Tensor, Tensor | None], Iterator[Frame]]
"""(canvas (B, A), a prompt and then masks in every row, pad) -> its frames."""


@dataclass(frozen=True)
class ArrangedRow:
    """A rearranged row; one without text after a hole stays as it is."""

    ids: list[int]
    place: list[int]
    """The position in `ids` of each token of the row."""
    ends: list[int]
    """The position after each hole in `ids`; there is always one."""


def arrange_row(row: list[int], mask_id: int, hole_id: int, eos_id: int) -> ArrangedRow:
    first = row.index(mask_id)
    if all(index == mask_id for index in row[first:]):
        return ArrangedRow(row, list(range(len(row))), [len(row)])
    ids, place, ends = [hole_id if index == mask_id else index for index in row], list(range(len(row))), []
    for position, index in enumerate(row):
        if index != mask_id:
            continue
        if row[position - 1] != mask_id or position == 0:
            ids.append(eos_id)
        place[position] = len(ids)
        ids.append(mask_id)
        if position + 1 == len(row) or row[position + 1] != mask_id:
            ends.append(len(ids))
    return ArrangedRow([*ids, eos_id], place, ends)


def check_room(canvas: Tensor, mask_id: int, pad: Tensor | None, length: int) -> None:
    """A user error if a rearranged row is longer than the model's rows."""
    for number, row in enumerate(_texts(canvas, pad)):
        needed = len(arrange_row(row, mask_id, mask_id, mask_id).ids)
        if needed > length:
            raise UserError(
                f"row {number} of the canvas takes {needed} tokens, with its holes filled in after it, and the model "
                f"was made for length {length}; shorten it"
            )


def generate_arranged(
    generate: Generate, canvas: Tensor, mask_id: int, hole_id: int, eos_id: int, pad: Tensor | None
) -> Iterator[Frame]:
    """The frames of the canvas (B, L), hole after hole, from those of the rearranged one."""
    frame = first_frame(canvas, mask_id)
    yield frame
    rows = [arrange_row(row, mask_id, hole_id, eos_id) for row in _texts(canvas, pad)]
    ids = torch.full((len(rows), max(len(row.ids) for row in rows)), eos_id)
    place = torch.arange(canvas.shape[1]).repeat(len(rows), 1)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        place[number, : len(row.place)] = torch.tensor(row.place)
    ids, place, masked = ids.to(canvas.device), place.to(canvas.device), canvas == mask_id
    for hole in range(max(len(row.ends) for row in rows)):
        ends = torch.tensor([row.ends[min(hole, len(row.ends) - 1)] for row in rows], device=canvas.device)
        part = ids[:, : int(ends.max())]
        after = torch.arange(part.shape[1], device=canvas.device) >= ends[:, None]
        here = masked & (place < ends[:, None])
        frames = generate(part.masked_fill(after, eos_id), after if after.any() else None)
        next(frames)  # the hole before any step
        before = frame
        for arranged in frames:
            frame = _at_canvas(before, arranged, here, place)
            yield frame
        ids[here.nonzero()[:, 0], place[here]] = frame.ids[here]


def _at_canvas(before: Frame, arranged: Frame, here: Tensor, place: Tensor) -> Frame:
    """The frame of the canvas: that before the hole, with the tokens `here` (B, L) taken from the rearranged one."""
    index = place.clamp(max=arranged.ids.shape[1] - 1)

    def take(values: Tensor, elsewhere: Tensor) -> Tensor:
        return torch.where(here, values.gather(1, index), elsewhere)

    nowhere = torch.zeros_like(here)
    return replace(
        arranged,
        ids=take(arranged.ids, before.ids),
        revealed=take(arranged.revealed, nowhere),
        remasked=take(arranged.remasked, nowhere),
        chance=take(arranged.chance, before.chance),
        read=take(arranged.read, before.ids),
    )


def _texts(canvas: Tensor, pad: Tensor | None) -> list[list[int]]:
    ends = not_pad(canvas, pad).sum(dim=1).tolist()
    return [row[:end] for row, end in zip(canvas.tolist(), ends, strict=True)]
