"""Positions-first sampling of rows that join and leave between network calls. Does not depend on queues or requests.

Each row has its own steps, options and RNG; one network call serves the next reveals of all of them. The plain form is
`sample_positions_first` of each row alone: with a network of fixed batch (`FrozenNetwork`) both give the same bits.

Shapes: B slots, L positions, N revealed in one call, V symbols. Positions are flat: slot * L + position.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.events import NetworkCall, plan_events
from adlm.sampling.frame import SamplingRun
from adlm.sampling.shaping import DrawnTokens, draw_tokens


@dataclass(frozen=True, eq=False)
class JoinedRow:
    """A row among others."""

    slot: int
    sampling: Sampling
    calls: deque[NetworkCall]
    """The network calls still to make, planned for this row alone."""


class JoinedRows:
    """Up to `num_slots` rows of the length, denoiser and mask of the run `like`."""

    def __init__(self, num_slots: int, like: SamplingRun):
        self._denoiser, self._mask_id = like.denoiser, like.mask_id
        self._ids = like.canvas[:1].repeat(num_slots, 1)
        self._pad = torch.zeros_like(self._ids, dtype=torch.bool)
        self._chance = torch.zeros_like(self._ids, dtype=torch.float32)
        self._free = list(range(num_slots))
        self._rows: list[JoinedRow] = []

    def join(self, run: SamplingRun) -> JoinedRow:
        """Add the row of a run (1, L). There must be a free slot."""
        [canvas], to_fill = run.canvas, (run.canvas == run.mask_id).cpu()
        row = JoinedRow(self._free.pop(), run.sampling, deque(plan_events(run.steps, to_fill, run.rng).calls))
        self._ids[row.slot], self._chance[row.slot] = canvas, (canvas != run.mask_id).float()
        self._pad[row.slot] = False if run.pad is None else run.pad[0]
        self._rows.append(row)
        return row

    def leave(self, row: JoinedRow) -> None:
        """Free the slot of a row, complete or not."""
        self._rows.remove(row)
        self._free.append(row.slot)

    def on_cpu(self) -> tuple[Tensor, Tensor]:
        """(B, L) each: ids, with masks where nothing is revealed, and the probabilities of tokens when they were drawn.

        For all slots at once, because every copy from a GPU waits for it. The next call may overwrite them.
        """
        return self._ids.cpu(), self._chance.cpu()

    def step(self) -> None:
        """One network call for all rows, each of which has calls left. The network reads free slots too."""
        ids = self._ids.view(-1)
        calls = [row.calls.popleft() for row in self._rows]
        remasked = self._flat([call.remasked for call in calls])
        revealed = self._flat([call.revealed for call in calls])
        alpha = torch.ones(len(self._ids), dtype=torch.float64)
        alpha[[row.slot for row in self._rows]] = torch.cat([call.alpha for call in calls])
        ids.index_fill_(0, remasked, self._mask_id)
        log_beliefs = self._denoiser(self._ids, alpha, self._pad).log_beliefs(revealed)
        drawn = self._draw(log_beliefs, revealed, calls)
        ids.index_copy_(0, revealed, drawn.tokens)
        self._chance.view(-1).index_copy_(0, revealed, drawn.chance)

    def _flat(self, positions: list[Tensor]) -> Tensor:
        """Flat positions on the device, from those of each row."""
        length = self._ids.shape[1]
        flat = [row.slot * length + own for row, own in zip(self._rows, positions, strict=True)]
        return torch.cat(flat).to(self._ids.device)

    def _draw(self, log_beliefs: Tensor, revealed: Tensor, calls: list[NetworkCall]) -> DrawnTokens:
        """The tokens (N,) at the revealed positions; those of rows with equal options are drawn together."""
        device, num_tokens = revealed.device, [len(call.revealed) for call in calls]
        options = list(dict.fromkeys(row.sampling for row in self._rows))
        options_of_row = torch.tensor([options.index(row.sampling) for row in self._rows])
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
            drawn = draw_tokens(beliefs, self._ids, revealed[where], own_uniforms, sampling, self._pad)
            if sampling.final == "argmax" and own_final.any():
                drawn = drawn.with_argmax(own_final.to(device), beliefs)
            tokens[where], chance[where] = drawn.tokens, drawn.chance
        return DrawnTokens(tokens, chance)
