"""Positions-first sampling of rows that join and leave between network calls. Does not depend on queues or requests.

Each row has its own steps, options and RNG; one network call serves the next reveals of some of them, and the others
wait. The plain form is `sample_positions_first` of each row alone: with a network of fixed batch (`FrozenNetwork`) both
give the same bits.

Shapes: S slots, B rows of a call, L positions, N revealed in one call, V symbols. Positions are flat: row * L +
position, or slot * L + position.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.events import NetworkCall, plan_events
from adlm.sampling.frame import SamplingRun
from adlm.sampling.shaping import DrawnTokens, draw_tokens


@dataclass(eq=False)
class JoinedRow:
    """A row among others."""

    slot: int
    sampling: Sampling
    calls: Iterator[NetworkCall]
    """The network calls still to make, planned for this row alone."""
    num_calls: int
    """How many they are."""


class JoinedRows:
    """Rows of the length, denoiser and mask of the run `like`."""

    def __init__(self, like: SamplingRun):
        self._denoiser, self._mask_id = like.denoiser, like.mask_id
        self._ids = like.canvas[:0]
        self._pad = torch.zeros_like(self._ids, dtype=torch.bool)
        self._chance = torch.zeros_like(self._ids, dtype=torch.float32)
        self._free: list[int] = []

    def join(self, run: SamplingRun) -> JoinedRow:
        """Add the row of a run (1, L)."""
        if not self._free:
            self._add_slots(max(1, len(self._ids)))
        [canvas], to_fill = run.canvas, (run.canvas == run.mask_id).cpu()
        plan = plan_events(run.steps, to_fill, run.rng)
        row = JoinedRow(self._free.pop(), run.sampling, plan.calls, plan.num_calls)
        self._ids[row.slot], self._chance[row.slot] = canvas, (canvas != run.mask_id).float()
        self._pad[row.slot] = False if run.pad is None else run.pad[0]
        return row

    def leave(self, row: JoinedRow) -> None:
        """Free the slot of a row, complete or not."""
        self._free.append(row.slot)

    def step(self, rows: Sequence[JoinedRow]) -> tuple[Tensor, Tensor]:
        """One network call for these rows, each of which has calls left.

        The result, on the CPU, is (B, L) each: ids, with masks where nothing is revealed, and the probabilities of
        tokens when they were drawn. It is of all rows at once, because every copy from a GPU waits for it.
        """
        calls = []
        for row in rows:
            calls.append(next(row.calls))
            row.num_calls -= 1
        length, device, numbers = self._ids.shape[1], self._ids.device, [row.slot for row in rows]
        slots = torch.tensor(numbers, device=device)

        def flat(firsts: Iterable[int], positions: Iterable[Tensor]) -> Tensor:
            return torch.cat([first * length + own for first, own in zip(firsts, positions, strict=True)]).to(device)

        self._ids.view(-1).index_fill_(0, flat(numbers, (call.remasked for call in calls)), self._mask_id)
        z, pad = self._ids[slots], self._pad[slots]
        revealed = flat(numbers, (call.revealed for call in calls))
        revealed_in_z = flat(range(len(rows)), (call.revealed for call in calls))
        log_beliefs = self._denoiser(z, torch.cat([call.alpha for call in calls]), pad).log_beliefs(revealed_in_z)
        drawn = _draw(log_beliefs, z, pad, revealed_in_z, [row.sampling for row in rows], calls)
        self._ids.view(-1).index_copy_(0, revealed, drawn.tokens)
        self._chance.view(-1).index_copy_(0, revealed, drawn.chance)
        return self._ids[slots].cpu(), self._chance[slots].cpu()

    def _add_slots(self, num: int) -> None:
        self._free += range(len(self._ids), len(self._ids) + num)
        for name in ("_ids", "_pad", "_chance"):
            rows = getattr(self, name)
            setattr(self, name, torch.cat([rows, rows.new_zeros(num, rows.shape[1])]))


def _draw(
    log_beliefs: Tensor,
    z: Tensor,
    pad: Tensor,
    revealed: Tensor,
    samplings: Sequence[Sampling],
    calls: Sequence[NetworkCall],
) -> DrawnTokens:
    """The tokens (N,) at the revealed positions of z (B, L); those of rows with equal options are drawn together."""
    device, num_tokens = revealed.device, [len(call.revealed) for call in calls]
    options = list(dict.fromkeys(samplings))
    options_of_row = torch.tensor([options.index(sampling) for sampling in samplings])
    options_of_token = options_of_row.repeat_interleave(torch.tensor(num_tokens))
    uniforms = torch.cat([call.uniforms for call in calls])
    is_final = torch.cat(
        [
            torch.zeros(num, dtype=torch.bool) if call.is_final is None else call.is_final
            for num, call in zip(num_tokens, calls, strict=True)
        ]
    )
    tokens, chance = torch.empty_like(revealed), torch.empty(len(revealed), device=device)
    for number, sampling in enumerate(options):
        index = (options_of_token == number).nonzero()[:, 0]
        where, own_uniforms, own_final = index.to(device), uniforms[index].to(device), is_final[index]
        beliefs = log_beliefs[where]
        drawn = draw_tokens(beliefs, z, revealed[where], own_uniforms, sampling, pad)
        if sampling.final == "argmax" and own_final.any():
            drawn = drawn.with_argmax(own_final.to(device), beliefs)
        tokens[where], chance[where] = drawn.tokens, drawn.chance
    return DrawnTokens(tokens, chance)
