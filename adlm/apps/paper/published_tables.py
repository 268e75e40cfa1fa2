"""The published results of the paper, read from published_tables.yaml: tables with their protocols and caveats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

import yaml

PAPER = "arXiv 2505.18456"
ResultKind = Literal["perplexity", "card", "accuracy"]


@dataclass(frozen=True)
class EvaluationProtocol:
    """How the results of a table were measured, and the training data of its models."""

    corpora: Mapping[str, list[str]]
    """By column: its corpora, by the names of `adlm prepare --list`."""
    splits: Mapping[str, str]
    length: int
    packing: str
    symbols: int
    """Vocabulary size, including the mask. Perplexities per token of different tokenizers are not comparable."""
    tokenizer: str
    trained_on: str


@dataclass(frozen=True)
class PublishedRow:
    """A row of a table."""

    name: str
    """The name for --row."""
    title: str
    figures: Mapping[str, float]
    """By column."""
    method: str = ""
    """Our name of the method; empty where we have none."""
    tokens: float | None = None
    """Training tokens in billions, as the paper counts them; None where it does not say."""
    parameters: float | None = None
    """In millions."""
    options: Mapping[str, float | str] = field(default_factory=dict)
    """What distinguishes it from other rows of the method: gamma, tau, steps, and a prefix of the sampler's name."""
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper."""

    name: str
    title: str
    source: str
    kind: ResultKind
    units: Mapping[str, str]
    """By column."""
    rows: tuple[PublishedRow, ...]
    caveats: tuple[str, ...]
    protocol: EvaluationProtocol | None = None


_RAW: dict[str, Any] = yaml.safe_load(
    files("adlm.apps.paper").joinpath("published_tables.yaml").read_text(encoding="utf-8")
)


def _caveats(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_RAW["caveats"][name] for name in entry.get("caveats", ()))


def _table(name: str, entry: dict[str, Any]) -> PublishedTable:
    """The record of a table; the figures of its rows are in the order of its columns."""
    rows = tuple(
        PublishedRow(
            **row
            | {"figures": dict(zip(entry["units"], row["figures"], strict=False)), "caveats": _caveats(row)}
            | {"parameters": _RAW["parameters"].get(row.get("method"))}
        )
        for row in entry["rows"]
    )
    protocol = EvaluationProtocol(**_RAW["protocols"][entry["protocol"]]) if "protocol" in entry else None
    record = {"name": name, "source": f"{PAPER}, {entry['source']}", "rows": rows, "caveats": _caveats(entry)}
    return PublishedTable(**{**entry, **record, "protocol": protocol})


TABLES = {name: _table(name, entry) for name, entry in _RAW["tables"].items()}
DECIMALS: dict[str, int] = _RAW["decimals"]
"""By unit, as published."""
BATCH: int = _RAW["batch"]
"""Sequences per step, in every run of the paper."""
JUDGES: list[str] = _RAW["judges"]
"""Names of the model behind published generative perplexities and MAUVE."""


def published_sampling(sampler: str) -> dict[str, float | str]:
    """The published `sampling` options of a sampler, except the number of steps."""
    options = _RAW["sampling"]
    diffusion = {} if sampler == "left-to-right" else options["diffusion"]
    return {**options["every_row"], **diffusion, **options["samplers"].get(sampler, {})}
