"""The request for a metric card, and the job that computes it: cache, progress, device. No metrics and no flags."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from adlm.errors import UserError
from adlm.evaluation.generation.cache import Arrays, compute_in_parts
from adlm.evaluation.generation.generative_perplexity import Eos, Start
from adlm.evaluation.generation.judges import Pooling

MAX_SEEDS = 1_000
METRICS = ("perplexity", "mauve", "entropy", "diversity")
IdsOf = Literal["auto", "retokenised", "as-sampled"]

ReportProgress = Callable[[str, int, int], None]
"""(stage, done, total), called as the work proceeds."""


@dataclass(frozen=True)
class CardRequest:
    """Every setting that the metrics of a card depend on."""

    samples: Path
    metrics: tuple[str, ...]
    reference: Path | None = None
    split: str | None = None
    field: str = "text"
    num_reference: int | None = None
    reference_seed: int = 0
    judge_reference: bool = False
    model: str = "gpt2-large"
    eos: Eos | None = None
    start: Start | None = None
    """`eos` and `start` None: as in training for our own judges, as published for judges of the hub."""
    ids: IdsOf = "auto"
    max_tokens: int | None = None
    context: int | None = None
    features: str = "gpt2-large"
    pooling: Pooling | None = None
    given_features: tuple[Path, Path] | None = None
    num_seeds: int = 5
    clusters: int | None = None
    batch: int | None = None
    device: str = "auto"


def check_card_request(request: CardRequest) -> None:
    """Check the numbers before anything is computed."""
    for name, value in (
        ("batch", request.batch),
        ("max-tokens", request.max_tokens),
        ("seeds", request.num_seeds),
        ("num-reference", request.num_reference),
        ("context", request.context),
    ):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    if request.num_seeds > MAX_SEEDS:
        raise UserError(
            f"--seeds {request.num_seeds} must be at most {MAX_SEEDS:,}: a clustering takes seconds or more"
        )


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
