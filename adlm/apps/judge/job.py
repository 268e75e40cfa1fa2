"""The computation of a metric card: a request with its cache, progress and device, and the texts. No metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adlm.apps.judge.cache import Arrays, compute_in_parts
from adlm.apps.judge.request import CardRequest
from adlm.errors import UserError

ReportProgress = Callable[[str, int, int], None]
"""(stage, done, total), called as the work proceeds."""


@dataclass(frozen=True)
class CardJob:
    """A request with the cache folder, if any, the progress callback and the device."""

    request: CardRequest
    cache_folder: Path | None
    report_progress: ReportProgress
    device: torch.device

    @property
    def batch(self) -> int:
        if self.request.batch is not None:
            return self.request.batch
        return 16 if self.device.type == "cuda" else 4

    def compute_in_parts(
        self,
        items: Sequence[Any],
        compute: Callable[[Sequence[Any]], Arrays],
        fits: Callable[[Sequence[Any], Arrays], bool],
        kind: str,
        about: Mapping[str, Any],
        stage: str,
    ) -> list[Arrays]:
        """The arrays of all items, with progress and cache; running out of memory is a user error."""

        def report_done(done: int) -> None:
            self.report_progress(stage, done, len(items))

        try:
            return compute_in_parts(items, compute, fits, kind, about, self.cache_folder, report_done)
        except torch.OutOfMemoryError:
            raise UserError(
                f"--batch {self.batch} does not fit the memory of the device; try --batch {max(1, self.batch // 2)}"
            ) from None


@dataclass(frozen=True)
class TextCollection:
    """The texts of the samples or of the reference, and their ids if they are the samples' tokenizer's."""

    name: str
    texts: list[str]
    ids: list[list[int]] | None
