"""What a reader of a model's figures asks of the model: its size, its symbols, its training. Knows no figures."""

from dataclasses import dataclass
from pathlib import Path

from adlm.language_model import LanguageModel
from adlm.methods.inputs import vocabulary_of
from adlm.training.metrics import read_metrics


@dataclass(frozen=True)
class ModelSummary:
    """A model, as far as a reader of its figures asks."""

    parameters: int
    symbols: int
    """Of its tokenizer, the mask included."""
    gamma: float | None
    tau: int | None
    """Of the anchor term; None where the method has none, or where the config does not tell of training."""
    trained_on: str
    """A corpus or a path; empty where the config does not tell."""
    tokens_trained: int | None
    """Steps done x batch x length, padding included; None where there is no logbook of the run."""


def summarize_model(model: str, lm: LanguageModel) -> ModelSummary:
    """`model` is where it was loaded from."""
    config = lm.config
    text = config.data.name or config.data.path or config.data.hub or config.data.prepared
    anchored = bool(text) and config.method in ("adlm", "a2r")  # a checkpoint's config knows nothing of its training
    place = Path(model)
    run = place.parent if place.name == "model" else place
    logged = read_metrics(run / "metrics.jsonl") if run.is_dir() else []
    return ModelSummary(
        parameters=sum(weight.numel() for weight in lm.network.parameters()),
        symbols=vocabulary_of(config).size,
        gamma=config.anchor.gamma if anchored else None,
        tau=config.anchor.tau if anchored else None,
        trained_on=text,
        tokens_trained=logged[-1]["step"] * config.train.batch_size * config.length if logged else None,
    )
