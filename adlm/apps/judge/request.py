"""The request for a metric card: metrics, conventions, settings. Imports no torch, for `adlm judge --help`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adlm.errors import UserError

MAX_SEEDS = 1_000
METRICS = ("perplexity", "mauve", "entropy", "diversity")
IdsOf = Literal["auto", "retokenised", "as-sampled"]
Pooling = Literal["last", "mean"]
Eos = Literal["published", "first", "all", "closing"]
Start = Literal["given", "bos"]

# Which tokens are counted, by name; a first token that is given never is.
EOS: dict[Eos, str] = {
    "published": "every token that is not eos, and the first eos (of a text that begins with one, no other)",
    "first": "up to and including the first eos after the first token",
    "all": "every token, each eos too",
    "closing": "every token but an eos that ends the text, whose nats are added and which is not counted",
}
START: dict[Start, str] = {
    "given": "the text's first token is given and not counted, as published",
    "bos": "every window begins with the judge's bos, as in its training, and every token of the text counts",
}


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
