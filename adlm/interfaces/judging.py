"""From a file of samples to its metric card: reads, asks, keeps what took long. Knows no screens and no flags."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from adlm.errors import UserError
from adlm.evaluation.card import FORMAT, Card, mauve_label, notes, perplexity_label, versions
from adlm.evaluation.generation import diversity_of, entropy_of, lengths_of
from adlm.evaluation.hugging_face import HuggingFaceFeaturiser, HuggingFaceJudge, Pooling
from adlm.evaluation.judging import EOS, START, Eos, Judge, Nats, Start, generative_perplexity, rows_of, token_nats
from adlm.evaluation.kept import Arrays, in_parts, of_texts
from adlm.evaluation.mauve import (
    PUBLISHED_LONGEST,
    PUBLISHED_SEED,
    SOUND,
    AboutFeatures,
    Features,
    check_enough,
    given_features,
    mauve_of,
)
from adlm.evaluation.own_judge import OwnJudge
from adlm.evaluation.reference import Reference, Wanted, read_reference
from adlm.evaluation.writer import Writer, writer_of
from adlm.language_model import device_of, load
from adlm.samples_file import Sample, Samples, read_samples

METRICS = ("perplexity", "mauve", "entropy", "diversity")
IdsOf = Literal["auto", "retokenised", "as-sampled"]

Tell = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class Asked:
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
    eos: Eos = "published"
    start: Start = "given"
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


@dataclass(frozen=True)
class Texts:
    """Samples, or the reference, as they are judged."""

    name: str
    texts: list[str]
    ids: list[list[int]] | None


def card_of(asked: Asked, keep_in: Path | None, tell: Tell) -> Card:
    """The whole card. What takes long is kept in `keep_in`, if given, and read from there the next time."""
    file = read_samples(asked.samples)
    samples = list(file)
    if not samples:
        raise UserError(f"{asked.samples} holds no sample yet")
    writer = writer_of(file.made_by, samples, asked.tokenizer)
    reference = _reference(asked, samples, writer)
    _check(asked, samples, reference)
    ours = Texts("samples", [sample.text for sample in samples], [sample.ids for sample in samples])
    card: Card = {"card": FORMAT, "made_with": versions(), "samples": _described(file, samples, writer)}
    if reference is not None:
        card["reference"] = reference.about
    theirs = Texts("reference", reference.texts, reference.ids) if reference and asked.judge_reference else None
    if "perplexity" in asked.metrics:
        judge = judge_of(asked.model, device_of(asked.device))
        card["perplexity"] = _perplexity(asked, judge, ours, writer, keep_in, tell)
        if theirs is not None:
            card["reference_judged"] = {"perplexity": _perplexity(asked, judge, theirs, writer, keep_in, tell)}
        del judge  # its memory is the featuriser's now
    if "mauve" in asked.metrics:
        card["mauve"] = _mauve(asked, ours.texts, reference, keep_in, tell)
    card |= _counted(asked, ours)
    if theirs is not None and theirs.ids is not None:
        card.setdefault("reference_judged", {}).update(_counted(asked, theirs))
    card["notes"] = list(notes(card))
    return card


def _reference(asked: Asked, samples: Sequence[Sample], writer: Writer | None) -> Reference | None:
    if asked.reference is not None:
        num = len(samples) if asked.num_reference is None else asked.num_reference
        wanted = Wanted(num, asked.reference_seed, asked.split, asked.field)
        return read_reference(asked.reference, wanted, writer, max(len(sample.ids) for sample in samples))
    if "mauve" in asked.metrics and asked.given is None:
        others = ",".join(metric for metric in asked.metrics if metric != "mauve")
        raise UserError(
            "--reference is not given, and MAUVE compares the samples with one: give a folder of `adlm prepare` or a "
            f"file of texts, or leave it out: --metrics {others or 'perplexity'}"
        )
    if asked.judge_reference:
        raise UserError("--judge-reference needs a --reference to judge")
    return None


def _check(asked: Asked, samples: Sequence[Sample], reference: Reference | None) -> None:
    """What would fail after hours fails now."""
    for name, value in (("batch", asked.batch), ("max-tokens", asked.longest), ("seeds", asked.num_seeds)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    if "mauve" in asked.metrics and asked.given is None and reference is not None:
        check_enough(sum(bool(sample.text) for sample in samples), sum(map(bool, reference.texts)), asked.clusters)


def _described(file: Samples, samples: Sequence[Sample], writer: Writer | None) -> dict[str, Any]:
    with file.path.open("rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
    return {
        "file": str(file.path),
        "sha256": digest,
        "num": len(samples),
        "of": file.made_by.num_rows,
        "num_empty": sum(not sample.text for sample in samples),
        "tokenizer": None if writer is None else asdict(writer),
        "made_by": asdict(file.made_by),
    }


def judge_of(name: str, device: torch.device) -> Judge:
    """A model folder of ours, the folder of a run, a .ckpt, or whatever transformers loads by this name."""
    place = Path(name)
    ours = [folder for folder in (place / "model", place) if (folder / "config.yaml").is_file()]
    if ours or place.suffix == ".ckpt":
        lm = load(place, str(device))
        return OwnJudge(name, lm.config, lm.network, lm.tokenizer)
    return HuggingFaceJudge(name, device)


def _perplexity(
    asked: Asked, judge: Judge, what: Texts, writer: Writer | None, keep_in: Path | None, tell: Tell
) -> dict[str, Any]:
    read, how = _read_by(judge, what, asked.ids, writer)
    rows = rows_of(judge, read, asked.start, asked.longest)
    context = min(asked.context or judge.about.context, judge.about.context)
    about = {"judge": asdict(judge.about), "context": context, "ids": of_texts(rows)}
    batch = _batch(asked)

    def compute(part: Sequence[list[int]]) -> Arrays:
        found = _fitting(lambda: token_nats(judge, part, batch, context), asked)
        return {"nats": np.concatenate(found), "lengths": np.array([len(row) for row in part])}

    nats: list[Nats] = []
    for part in in_parts(rows, compute, "nats", about, keep_in, lambda n: tell(f"judging {what.name}", n, len(rows))):
        nats += np.split(part["nats"], np.cumsum(part["lengths"])[:-1])
    figures = {
        "judge": asdict(judge.about),
        "ids": how,
        "start": asked.start,
        "start_means": START[asked.start],
        "eos": asked.eos,
        "eos_means": EOS[asked.eos],
        "max_tokens": asked.longest,
        "num_cut": 0 if asked.longest is None else sum(len(row) > asked.longest for row in read),
        "context": context,
        "windows": f"texts longer than {context} tokens are read in windows that overlap by {context // 2}",
        "num_in_windows": sum(len(row) > context for row in rows),
        **asdict(generative_perplexity(rows, nats, judge.about.eos_id, asked.eos)),
    }
    return figures | {"label": perplexity_label(figures)}


def _read_by(judge: Judge, what: Texts, ids: IdsOf, writer: Writer | None) -> tuple[list[list[int]], str]:
    """The judge's ids: the sampled ones only where it has the tokenizer that wrote them."""
    wanted = {"auto": "as-sampled" if judge.about.kind == "adlm" else "retokenised"}.get(ids, ids)
    agrees = writer is not None and writer.sha256 == judge.about.tokenizer_sha256
    if wanted == "as-sampled" and what.ids is not None and agrees:
        return what.ids, "as-sampled"
    if ids == "as-sampled":
        raise UserError(
            f"--ids as-sampled: the tokenizer of the judge {judge.about.name} is not the one that wrote the "
            f"{what.name}; leave it out, and the texts are read anew"
        )
    return judge.encode(what.texts), "retokenised"


def _mauve(
    asked: Asked, texts: Sequence[str], reference: Reference | None, keep_in: Path | None, tell: Tell
) -> dict[str, Any]:
    if asked.given is not None:
        ours, theirs, about, dropped = _given(asked.given, len(texts))
    else:
        assert reference is not None
        featuriser = HuggingFaceFeaturiser(asked.features, device_of(asked.device), asked.pooling)
        sides = (("samples", texts), ("reference", reference.texts))
        ours, theirs = (_features(featuriser, *side, asked, keep_in, tell) for side in sides)
        about, dropped = featuriser.about, [sum(not text for text in side) for _, side in sides]
    seeds = range(PUBLISHED_SEED, PUBLISHED_SEED + asked.num_seeds)
    with _quiet():
        found = mauve_of(ours, theirs, seeds, asked.clusters)
    figures = {
        "featuriser": asdict(about),
        "num_empty_samples": dropped[0],
        "num_empty_reference": dropped[1],
        **asdict(found),
    }
    return figures | {"label": mauve_label(figures, PUBLISHED_LONGEST, SOUND)}


def _given(places: tuple[Path, Path], num: int) -> tuple[Features, Features, AboutFeatures, list[int]]:
    ours, theirs = given_features(places[0], num, "samples"), given_features(places[1], None, "reference texts")
    if ours.shape[1] != theirs.shape[1]:
        raise UserError(
            f"{places[0]} has {ours.shape[1]} numbers a text and {places[1]} {theirs.shape[1]}; use one featuriser"
        )
    digest = hashlib.sha256(ours.tobytes() + theirs.tobytes()).hexdigest()
    name = f"given features {places[0].name} and {places[1].name}"
    return ours, theirs, AboutFeatures(name, digest, "given", None, "given", "float32"), [0, 0]


def _features(
    featuriser: HuggingFaceFeaturiser, name: str, texts: Sequence[str], asked: Asked, keep_in: Path | None, tell: Tell
) -> Features:
    """Of the texts that are not empty; an empty one has no last token."""
    there = [text for text in texts if text]
    about = {"featuriser": asdict(featuriser.about), "texts": of_texts(there)}
    batch = _batch(asked)

    def compute(part: Sequence[str]) -> Arrays:
        return {"features": _fitting(lambda: featuriser.features(part, batch), asked)}

    parts = in_parts(there, compute, "features", about, keep_in, lambda n: tell(f"features of {name}", n, len(there)))
    return np.concatenate([part["features"] for part in parts])


def _batch(asked: Asked) -> int:
    if asked.batch is not None:
        return asked.batch
    return 16 if device_of(asked.device).type == "cuda" else 4


def _fitting(compute: Callable[[], Any], asked: Asked) -> Any:
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise UserError(
            f"--batch {_batch(asked)} does not fit the memory of the device; try --batch {max(1, _batch(asked) // 2)}"
        ) from None


def _counted(asked: Asked, what: Texts) -> dict[str, Any]:
    """What needs ids alone."""
    assert what.ids is not None
    figures: dict[str, Any] = {}
    if "entropy" in asked.metrics:
        figures["entropy"] = asdict(entropy_of(what.ids))
    if "diversity" in asked.metrics:
        found = asdict(diversity_of(what.ids))
        for by_n in ("distinct", "distinct_in_all"):
            found[by_n] = {str(n): value for n, value in found[by_n].items()}  # as JSON has it
        figures["diversity"] = found | {"characters": asdict(lengths_of([len(text) for text in what.texts]))}
    return figures


@contextmanager
def _quiet() -> Iterator[None]:
    """k-means warns on standard error, from C, of fewer points a cluster than MAUVE's own rule gives it."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
