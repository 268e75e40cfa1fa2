"""A summary of a model, to be written next to its results: size, vocabulary, training. No results."""

from dataclasses import dataclass
from pathlib import Path

from adlm.language_model import LanguageModel
from adlm.methods.inputs import vocabulary_of
from adlm.training.metrics import read_metrics


@dataclass(frozen=True)
class ModelSummary:
    """Size, vocabulary and training of a model."""

    parameters: int
    symbols: int
    """Vocabulary size, including the mask."""
    gamma: float | None
    tau: int | None
    """`gamma` and `tau` of the anchor term; None where the method has none, and unknown for a released checkpoint."""
    trained_on: str
    """A corpus or a path; empty where the config has neither."""
    tokens_trained: int | None
    """Steps x batch x length, including padding; None without the metrics.jsonl of the run."""


def summarize_model(model: str, lm: LanguageModel) -> ModelSummary:
    """`model` is the path that `lm` was loaded from."""
    config = lm.config
    text = config.data.name or config.data.path or config.data.hub or config.data.prepared
    # training sets data.packing; the config of a released .ckpt has no training settings, only defaults
    anchored = lm.method.anchored and config.data.packing is not None
    path = Path(model)
    run = path.parent if path.name == "model" else path
    logged = read_metrics(run / "metrics.jsonl") if run.is_dir() else []
    return ModelSummary(
        parameters=sum(weight.numel() for weight in lm.network.parameters()),
        symbols=vocabulary_of(config).size,
        gamma=config.anchor.gamma if anchored else None,
        tau=config.anchor.tau if anchored and config.anchor.rule == "count" else None,
        trained_on=text,
        tokens_trained=logged[-1]["step"] * config.train.batch_size * config.length if logged else None,
    )
