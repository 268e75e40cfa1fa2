"""What a metric card is asked to tell, and by what means it is made. Knows no metric's mathematics and no flags."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from adlm.errors import UserError
from adlm.evaluation.generation.cache import Arrays, compute_in_parts
from adlm.evaluation.generation.generative_perplexity import Eos, Start
from adlm.evaluation.generation.judges import Pooling

MOST_SEEDS = 1_000
METRICS = ("perplexity", "mauve", "entropy", "diversity")
IdsOf = Literal["auto", "retokenised", "as-sampled"]

ReportProgress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class CardRequest:
    """Every choice that a card's figures depend on."""

    samples: Path
    metrics: tuple[str, ...]
    tokenizer: str | None = None
    """Which wrote the samples, where their model's folder is gone."""
    reference: Path | None = None
    split: str | None = None
    field: str = "text"
    num_reference: int | None = None
    reference_seed: int = 0
    judge_reference: bool = False
    model: str = "gpt2-large"
    eos: Eos | None = None
    start: Start | None = None
    """Both empty: as a judge of ours was trained, or as published for one of the hub."""
    ids: IdsOf = "auto"
    longest: int | None = None
    context: int | None = None
    features: str = "gpt2-large"
    pooling: Pooling | None = None
    given: tuple[Path, Path] | None = None
    num_seeds: int = 5
    clusters: int | None = None
    batch: int | None = None
    device: str = "auto"


def check_card_request(asked: CardRequest) -> None:
    """What would fail after hours fails now."""
    for name, value in (
        ("batch", asked.batch),
        ("max-tokens", asked.longest),
        ("seeds", asked.num_seeds),
        ("num-reference", asked.num_reference),
        ("context", asked.context),
    ):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    if asked.num_seeds > MOST_SEEDS:
        raise UserError(f"--seeds {asked.num_seeds} must be at most {MOST_SEEDS:,}: a clustering takes seconds or more")


@dataclass(frozen=True)
class CardJob:
    """A card to be made: what is asked, where what takes long is kept, if anywhere, and who hears how far it is."""

    asked: CardRequest
    keep_in: Path | None
    tell: ReportProgress
    device: torch.device

    @property
    def batch(self) -> int:
        if self.asked.batch is not None:
            return self.asked.batch
        return 16 if self.device.type == "cuda" else 4

    def in_parts(
        self,
        items: Sequence[Any],
        compute: Callable[[Sequence[Any]], Arrays],
        fits: Callable[[Sequence[Any], Arrays], bool],
        kind: str,
        about: Mapping[str, Any],
        name: str,
    ) -> list[Arrays]:
        def tell(done: int) -> None:
            self.tell(name, done, len(items))

        return compute_in_parts(items, compute, fits, kind, about, self.keep_in, tell)

    def fitting(self, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except torch.OutOfMemoryError:
            raise UserError(
                f"--batch {self.batch} does not fit the memory of the device; try --batch {max(1, self.batch // 2)}"
            ) from None


@dataclass(frozen=True)
class TextCollection:
    """Samples, or the reference, as they are judged."""

    name: str
    texts: list[str]
    ids: list[list[int]] | None
