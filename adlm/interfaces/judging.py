"""From a file of samples to its metric card: reads, asks, keeps what took long. Knows no screens and no flags.

Under torchrun every process does its share of what takes long, and the first makes the card.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from adlm.errors import UserError
from adlm.evaluation import shares
from adlm.evaluation.card import FORMAT, Card, mauve_label, notes, perplexity_label, versions
from adlm.evaluation.generation import diversity_of, entropy_of, lengths_of
from adlm.evaluation.hugging_face import HuggingFaceFeaturiser, HuggingFaceJudge, Pooling
from adlm.evaluation.judging import (
    EOS,
    START,
    Eos,
    Judge,
    Nats,
    Start,
    check_context,
    generative_perplexity,
    rows_of,
    token_nats,
)
from adlm.evaluation.kept import Arrays, in_parts, of_texts
from adlm.evaluation.mauve import (
    PUBLISHED_SEED,
    AboutFeatures,
    Features,
    check_enough,
    check_installed,
    given_features,
    mauve_of,
)
from adlm.evaluation.own_judge import OwnJudge
from adlm.evaluation.reference import Reference, Wanted, read_reference
from adlm.evaluation.writer import Writer, writer_of
from adlm.interfaces.processes import own_device
from adlm.language_model import load
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
class Work:
    """A card to be made: what is asked, where what takes long is kept, if anywhere, and who hears how far it is."""

    asked: Asked
    keep_in: Path | None
    tell: Tell
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
        kind: str,
        about: Mapping[str, Any],
        name: str,
    ) -> list[Arrays]:
        return in_parts(items, compute, kind, about, self.keep_in, lambda done: self.tell(name, done, len(items)))

    def fitting(self, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except torch.OutOfMemoryError:
            raise UserError(
                f"--batch {self.batch} does not fit the memory of the device; try --batch {max(1, self.batch // 2)}"
            ) from None


@dataclass(frozen=True)
class Texts:
    """Samples, or the reference, as they are judged."""

    name: str
    texts: list[str]
    ids: list[list[int]] | None


@dataclass(frozen=True)
class BothFeatures:
    """Of the samples and of the reference, by one featuriser; empty texts have none."""

    ours: Features
    theirs: Features
    by: AboutFeatures
    num_empty: tuple[int, int] = (0, 0)


def card_of(asked: Asked, keep_in: Path | None, tell: Tell) -> Card | None:
    """The whole card, in the first process; the others have none. What is kept in `keep_in` is read the next time."""
    work = Work(asked, keep_in, tell, own_device(asked.device))
    _check(asked)
    file = read_samples(asked.samples)
    samples = list(file)
    if not samples:
        raise UserError(f"{asked.samples} holds no sample yet")
    writer = writer_of(file.made_by, samples, asked.tokenizer)
    reference = _reference(asked, samples, writer)
    ours = Texts("samples", [sample.text for sample in samples], [sample.ids for sample in samples])
    theirs = Texts("reference", reference.texts, reference.ids) if reference and asked.judge_reference else None
    given = _given(asked, len(samples))
    _check_mauve(asked, ours, reference, given)

    judged = _judged(work, [each for each in (ours, theirs) if each is not None], writer)
    features = _features(work, ours, reference) if "mauve" in asked.metrics and given is None else given
    if shares.place()[0] > 0:
        return None

    card: Card = {"card": FORMAT, "made_with": versions(), "samples": _described(file, samples, writer)}
    if reference is not None:
        card["reference"] = reference.about
    card |= judged["samples"]
    if features is not None:
        card["mauve"] = _mauve(asked, features)
    card |= _counted(asked, ours)
    if theirs is not None:
        card["reference_judged"] = judged["reference"] | _counted(asked, theirs)
    card["notes"] = list(notes(card))
    return card


def _check(asked: Asked) -> None:
    """What would fail after hours fails now."""
    for name, value in (
        ("batch", asked.batch),
        ("max-tokens", asked.longest),
        ("seeds", asked.num_seeds),
        ("num-reference", asked.num_reference),
    ):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    if asked.context is not None:
        check_context(asked.context)
    if "mauve" in asked.metrics:
        check_installed()


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


def _given(asked: Asked, num: int) -> BothFeatures | None:
    if asked.given is None or "mauve" not in asked.metrics:
        return None
    first, second = asked.given
    ours, theirs = given_features(first, num, "samples"), given_features(second, None, "reference texts")
    if ours.shape[1] != theirs.shape[1]:
        widths = f"{first} has {ours.shape[1]} numbers a text and {second} {theirs.shape[1]}"
        raise UserError(f"--given-features: {widths}; use one featuriser for both")
    digest = hashlib.sha256(ours.tobytes() + theirs.tobytes()).hexdigest()
    name = f"given features {first.name} and {second.name}"
    return BothFeatures(ours, theirs, AboutFeatures(name, digest, "given", None, "given", "float32"))


def _check_mauve(asked: Asked, ours: Texts, reference: Reference | None, given: BothFeatures | None) -> None:
    if given is not None:
        check_enough(len(given.ours), len(given.theirs), asked.clusters)
    elif "mauve" in asked.metrics and reference is not None:
        check_enough(sum(map(bool, ours.texts)), sum(map(bool, reference.texts)), asked.clusters)


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


def _judged(work: Work, some: Sequence[Texts], writer: Writer | None) -> dict[str, dict[str, Any]]:
    """The perplexity of each, by name; nothing where none is asked for."""
    if "perplexity" not in work.asked.metrics:
        return {what.name: {} for what in some}
    judge = judge_of(work.asked.model, work.device)  # its memory is the featuriser's afterwards
    return {what.name: {"perplexity": _perplexity(work, judge, what, writer)} for what in some}


def _perplexity(work: Work, judge: Judge, what: Texts, writer: Writer | None) -> dict[str, Any]:
    asked = work.asked
    read, how = _read_by(judge, what, asked.ids, writer)
    rows = rows_of(judge, read, asked.start, asked.longest)
    context = judge.about.context if asked.context is None else min(asked.context, judge.about.context)
    about = {"judge": asdict(judge.about), "context": context, "ids": of_texts(rows)}

    def compute(part: Sequence[list[int]]) -> Arrays:
        found = work.fitting(lambda: token_nats(judge, part, work.batch, context))
        return {"nats": np.concatenate(found), "lengths": np.array([len(row) for row in part])}

    nats: list[Nats] = []
    for part in work.in_parts(rows, compute, "nats", about, f"judging {what.name}"):
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
    try:
        return judge.encode(what.texts), "retokenised"
    except UserError as error:
        raise UserError(
            f"the judge {judge.about.name} cannot read the {what.name}: {error}; give another --model"
        ) from None


def _features(work: Work, ours: Texts, reference: Reference | None) -> BothFeatures:
    """Of the texts that are not empty; an empty one has no last token."""
    assert reference is not None
    featuriser = HuggingFaceFeaturiser(work.asked.features, work.device, work.asked.pooling)

    def compute(part: Sequence[str]) -> Arrays:
        return {"features": work.fitting(lambda: featuriser.features(part, work.batch))}

    found = []
    for name, texts in (("samples", ours.texts), ("reference", reference.texts)):
        there = [text for text in texts if text]
        about = {"featuriser": asdict(featuriser.about), "texts": of_texts(there)}
        parts = work.in_parts(there, compute, "features", about, f"features of {name}")
        found.append(np.concatenate([part["features"] for part in parts]))
    empty = len(ours.texts) - len(found[0]), len(reference.texts) - len(found[1])
    return BothFeatures(found[0], found[1], featuriser.about, empty)


def _mauve(asked: Asked, features: BothFeatures) -> dict[str, Any]:
    seeds = range(PUBLISHED_SEED, PUBLISHED_SEED + asked.num_seeds)
    figures = {
        "featuriser": asdict(features.by),
        "num_empty_samples": features.num_empty[0],
        "num_empty_reference": features.num_empty[1],
        **asdict(mauve_of(features.ours, features.theirs, seeds, asked.clusters)),
    }
    return figures | {"label": mauve_label(figures)}


def _counted(asked: Asked, what: Texts) -> dict[str, Any]:
    """What needs ids alone: a reference of another tokenizer has none that compare."""
    figures: dict[str, Any] = {}
    if what.ids is None:
        return figures
    if "entropy" in asked.metrics:
        figures["entropy"] = asdict(entropy_of(what.ids))
    if "diversity" in asked.metrics:
        found = asdict(diversity_of(what.ids))
        for by_n in ("distinct", "distinct_in_all"):
            found[by_n] = {str(n): value for n, value in found[by_n].items()}  # as JSON has it
        figures["diversity"] = found | {"characters": asdict(lengths_of([len(text) for text in what.texts]))}
    return figures
