"""Canvases with text after a hole, for models that write from left to right and were trained to infill.

The canvas is rearranged as in `data/rows/holes.py`: first the outline, which is the text from the first hole on with
hole ids in its holes, and then the text from its beginning up to the hole that is being filled, which a hole id begins.
What the model writes there is put back. So the network reads the text on both sides of a hole before it fills it.

A hole of unknown length is one hole id and an eos in the outline, and as many masks as it may have tokens on the
canvas. The first eos drawn in it ends it, and also fills the masks that are left (`end_texts`). One eos stays before
the text that follows. So what is in the hole has the probability p(tokens, eos | what was read) of the rearranged row.
The number of masks cuts longer ones off: tokens that fill all masks have the probability of all that begin with them.
Nothing is renormalised.

With `Candidates`, several fills of a hole are drawn so, from q, and one is kept with a probability in proportion to
p / q, where p is the probability that the model gives the plain text: the fill and what follows it up to the next hole,
after all before it. The more candidates, the closer is the fill to p(fill | text on both sides), whatever q is
(importance resampling), if q can draw every fill.

Shapes: B rows of L tokens; A tokens after rearrangement; K candidates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

import numpy as np
import torch
from torch import Tensor

from adlm.constraints.holes import ConstrainedHole
from adlm.data.rows.holes import RowHole, before_first_hole
from adlm.errors import UserError
from adlm.methods.inputs import has_text_after_hole, not_pad, text_of_row
from adlm.sampling.frame import Ending, Frame, first_frame, last_frame
from adlm.sampling.rng import RowRng, categorical
from adlm.sampling.samplers import WriteText


@dataclass(frozen=True)
class ArrangedRow:
    """A row whose holes are written one after the other, with the text between them."""

    ids: list[int]
    """What comes before the first one: `before_first_hole`; of a prompt, the prompt."""
    holes: list[RowHole]


@dataclass(frozen=True)
class Sides:
    """The text before a hole, and that after it up to the next one."""

    before: list[int]
    after: list[int]
    eos_id: int | None
    """Of a hole of unknown length, what ends the fill; None for others."""

    def around(self, tokens: list[int]) -> list[int]:
        """The text with a fill, without what ends it."""
        return [*self.before, *takewhile(lambda index: index != self.eos_id, tokens), *self.after]


@dataclass(frozen=True)
class Candidates:
    """How one of several fills of a hole is chosen."""

    num: int
    log_p: Callable[[list[list[int]], list[int]], Tensor]
    """Texts, and where to begin in each -> (N,), the log probabilities of what they have from there on."""
    rng: RowRng

    def frames(
        self,
        write: WriteText,
        part: Tensor,
        ending: Ending | None,
        pad: Tensor | None,
        holes: Sequence[ConstrainedHole],
        sides: list[Sides],
        mask_id: int,
    ) -> Iterator[Frame]:
        """The rearranged rows (B, A) before any step, and with the fills that were chosen for their holes.

        `write` is given K rows for each one. `sides` is the text around the hole of each row.
        """
        first = first_frame(part, mask_id)
        yield first
        many, masked = part.repeat_interleave(self.num, dim=0), (part == mask_id).repeat_interleave(self.num, dim=0)
        if ending is not None:
            ending = Ending(ending.eos_id, ending.where.repeat_interleave(self.num, dim=0))
        many_pad = None if pad is None else pad.repeat_interleave(self.num, dim=0)
        many_holes = [replace(hole, row=hole.row * self.num + k) for hole in holes for k in range(self.num)]
        last = last_frame(write(many, ending, many_pad, many_holes))
        log_q = last.chance.double().log().masked_fill(~masked, 0.0).sum(dim=1)
        texts = [
            sides[number // self.num].around([token for token, new in zip(*row, strict=True) if new])
            for number, row in enumerate(zip(last.ids.tolist(), masked.tolist(), strict=True))
        ]
        starts = [len(sides[number // self.num].before) for number in range(len(texts))]
        weights = (self.log_p(texts, starts).to(log_q) - log_q).view(-1, self.num).softmax(dim=1)
        uniforms = torch.tensor([self.rng.for_positions(row, 1)[0] for row in range(len(part))], dtype=torch.float64)
        kept = categorical(weights, uniforms.to(weights.device))
        kept = kept + self.num * torch.arange(len(part), device=kept.device)
        yield replace(
            first,
            ids=last.ids[kept],
            t=torch.zeros_like(first.t),
            revealed=part == mask_id,
            chance=last.chance[kept],
        )


def arrange_row(row: list[int], may_end: list[bool], mask_id: int, hole_id: int, eos_id: int) -> ArrangedRow:
    """`may_end` is True in holes of unknown length."""
    first = len(row) - row.count(mask_id)
    if mask_id not in row[:first]:
        return ArrangedRow(row[:first], [RowHole(first, len(row), True)])
    holes, start = [], 0
    masked = [index == mask_id for index in row]
    for (is_hole, is_open), run in groupby(zip(masked, may_end, strict=True)):
        stop = start + len(list(run))
        if is_hole:
            holes.append(RowHole(start, stop, not is_open))
        start = stop
    return ArrangedRow(before_first_hole(np.array(row), holes, hole_id, eos_id).tolist(), holes)


def check_room(canvas: Tensor, may_end: Tensor, mask_id: int, pad: Tensor | None, length: int) -> None:
    """A user error if a rearranged row is longer than the model's rows."""
    later = has_text_after_hole(canvas, mask_id, pad)
    if not later.any():
        return
    rows = _arranged(canvas, may_end, mask_id, mask_id, mask_id, pad)
    for number in later.nonzero().flatten().tolist():
        ids, holes = rows[number].ids, rows[number].holes
        num_ends = 1 + sum(not hole.is_known for hole in holes[:-1])
        needed = len(ids) + holes[-1].stop - holes[0].start + num_ends + len(holes) - 1
        if needed > length:
            raise UserError(
                f"{text_of_row(canvas, number)} takes {needed} tokens, with its holes filled in after it, and the "
                f"model was made for length {length}; shorten it"
            )


def generate_arranged(
    write: WriteText,
    canvas: Tensor,
    may_end: Tensor,
    mask_id: int,
    hole_id: int,
    eos_id: int,
    pad: Tensor | None,
    candidates: Candidates | None = None,
    constrained: Sequence[ConstrainedHole] = (),
) -> Iterator[Frame]:
    """The frames of the canvas (B, L), hole after hole, from those of the rearranged one.

    Of constrained holes with the same tokens, the first one is written, and the others are copies.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    rows, may_end = _arranged(canvas, may_end, mask_id, hole_id, eos_id, pad), may_end.cpu()
    of_row: dict[int, list[ConstrainedHole]] = {row: [] for row in range(len(rows))}
    for each in constrained:
        of_row[each.row].append(each)
    written, lengths = [row.ids for row in rows], not_pad(canvas, pad).sum(dim=1).tolist()
    texts = [ids[: row.holes[0].start] for ids, row in zip(canvas.tolist(), rows, strict=True)]
    for number in range(max(len(row.holes) for row in rows)):
        holes = [row.holes[number] if number < len(row.holes) else RowHole(0, 0, True) for row in rows]
        ends = torch.tensor([len(ids) + hole.stop - hole.start for ids, hole in zip(written, holes, strict=True)])
        part = torch.full((len(rows), int(ends.max())), eos_id)
        part_may_end = torch.zeros_like(part, dtype=torch.bool)
        here, place = torch.zeros(canvas.shape, dtype=torch.bool), torch.zeros(canvas.shape, dtype=torch.int64)
        part_holes, copies = [], frame.ids.clone()
        for row, (ids, hole, end) in enumerate(zip(written, holes, ends.tolist(), strict=True)):
            part[row, : len(ids)], part[row, len(ids) : end] = torch.tensor(ids), mask_id
            part_may_end[row, len(ids) : end] = may_end[row, hole.start : hole.stop]
            for each in of_row[row]:
                first = next((start for start in each.starts if hole.start <= start < hole.stop), None)
                if first is None:
                    continue
                start = len(ids) + first - hole.start
                if first == each.starts[0]:
                    part_holes.append(replace(each, starts=(start,)))
                else:
                    copied = frame.ids[row, each.starts[0] : each.starts[0] + each.automaton.num_places]
                    part[row, start : start + len(copied)] = copied.cpu()
                    copies[row, first : first + len(copied)] = copied
            here[row, hole.start : hole.stop], place[row, hole.start : hole.stop] = True, torch.arange(len(ids), end)
        after = (torch.arange(part.shape[1]) >= ends[:, None]).to(canvas.device)
        here, place = here.to(canvas.device), place.to(canvas.device)
        ending = Ending(eos_id, part_may_end.to(canvas.device)) if part_may_end.any() else None
        sides = [
            Sides(text, ids[hole.stop : stop], None if hole.is_known else eos_id)
            for text, ids, hole, stop in zip(texts, canvas.tolist(), holes, _stops(rows, number, lengths), strict=True)
        ]
        inputs = (part.to(canvas.device), ending, after if after.any() else None, part_holes)
        frames = write(*inputs) if candidates is None else candidates.frames(write, *inputs, sides, mask_id)
        next(frames)  # the hole before any step
        if (copied_here := copies != frame.ids).any():
            chance = frame.chance.masked_fill(copied_here, 1.0)
            frame = replace(frame, ids=copies, revealed=copied_here, chance=chance, read=frame.ids)
            yield frame
        before = frame
        for arranged in frames:
            frame = _at_canvas(before, arranged, here, place)
            yield frame
        for row, (hole, filled) in enumerate(zip(holes, frame.ids.tolist(), strict=True)):
            tokens, following = filled[hole.start : hole.stop], rows[row].holes[number + 1 : number + 2]
            texts[row] = sides[row].around(tokens)
            if not hole.is_known:
                tokens = [*takewhile(lambda index: index != eos_id, tokens), eos_id]
            written[row] = [
                *written[row],
                *tokens,
                *([*filled[hole.stop : following[0].start], hole_id] if following else []),
            ]


def _stops(rows: list[ArrangedRow], number: int, lengths: list[int]) -> list[int]:
    """Where the text after a hole of each row ends: at the next hole, or with the row; 0 for rows without that hole."""
    return [
        row.holes[number + 1].start if number + 1 < len(row.holes) else length * (number < len(row.holes))
        for row, length in zip(rows, lengths, strict=True)
    ]


def _at_canvas(before: Frame, arranged: Frame, here: Tensor, place: Tensor) -> Frame:
    """The frame of the canvas: that before the hole, with the tokens `here` (B, L) taken from the rearranged one."""

    def take(values: Tensor, elsewhere: Tensor) -> Tensor:
        return torch.where(here, values.gather(1, place), elsewhere)

    nowhere = torch.zeros_like(here)
    return replace(
        arranged,
        ids=take(arranged.ids, before.ids),
        revealed=take(arranged.revealed, nowhere),
        remasked=take(arranged.remasked, nowhere),
        chance=take(arranged.chance, before.chance),
        read=take(arranged.read, before.ids),
        arranged=arranged.read,
        place=place.masked_fill(~here, -1),
    )


def _arranged(
    canvas: Tensor, may_end: Tensor, mask_id: int, hole_id: int, eos_id: int, pad: Tensor | None
) -> list[ArrangedRow]:
    lengths = not_pad(canvas, pad).sum(dim=1).tolist()
    return [
        arrange_row(row[:length], ends[:length], mask_id, hole_id, eos_id)
        for row, ends, length in zip(canvas.tolist(), may_end.tolist(), lengths, strict=True)
    ]
