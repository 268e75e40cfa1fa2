"""Where a run stands, in plain numbers: what a snapshot holds beside tensors. Knows nothing of files or networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adlm.data.rows.loader import Position


@dataclass(frozen=True)
class Counters:
    """After `step` steps. All of it is a function of the steps done, so a resumed run counts on as if never broken."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    """With `epoch`, where the next batch begins: see `data.loader.Position`."""
    tokens: int = 0
    """Trained on, over all processes."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_nats: float | None = None
    """The lowest validation bound so far."""
    best_step: int | None = None
    window: Mapping[str, float] = field(default_factory=dict)
    """Sums since the last line of the logbook: of each part of the loss over tokens, of the norm over steps."""

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights."""
        return self.step - self.skipped

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.row)


def parse_counters(raw: Mapping[str, Any]) -> Counters:
    """Counters as JSON gives them back; TypeError where they are none."""
    counters = Counters(**raw)
    whole = (counters.step, counters.epoch, counters.row, counters.tokens, counters.skipped, counters.skipped_in_a_row)
    if not all(type(value) is int and value >= 0 for value in whole) or not isinstance(counters.window, dict):
        raise TypeError("its counters are not numbers")
    return counters
