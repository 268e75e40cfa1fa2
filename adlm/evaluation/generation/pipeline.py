"""From a file of samples to its metric card: reads samples and reference, runs judge and featuriser, caches their
results.

Under torchrun every process computes its share, and rank 0 makes the card. Prints nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm import __version__, distributed
from adlm.distributed import local_device
from adlm.errors import UserError
from adlm.evaluation.generation.cache import Arrays, texts_sha256
from adlm.evaluation.generation.card import FORMAT, Card, mauve_label, notes, perplexity_label, versions
from adlm.evaluation.generation.diversity import diversity_of, entropy_of, lengths_of
from adlm.evaluation.generation.generative_perplexity import (
    EOS,
    START,
    Judge,
    TokenNats,
    generative_perplexity,
    scoring_convention,
    split_into_windows,
    token_nats,
    truncate_texts,
    window_layout,
)
from adlm.evaluation.generation.judges import HuggingFaceFeaturiser, HuggingFaceJudge, OwnJudge
from adlm.evaluation.generation.mauve import (
    PUBLISHED_SEED,
    Features,
    FeaturiserInfo,
    check_enough,
    check_installed,
    given_features,
    mauve_of,
)
from adlm.evaluation.generation.reference_texts import Reference, ReferenceRequest, read_reference
from adlm.evaluation.generation.request import (
    CardJob,
    CardRequest,
    IdsOf,
    ReportProgress,
    TextCollection,
    check_card_request,
)
from adlm.evaluation.generation.sample_tokenizer import SampleTokenizer, find_sample_tokenizer
from adlm.files import opened
from adlm.language_model import load
from adlm.samples_file import Sample, Samples, read_samples


@dataclass(frozen=True)
class BothFeatures:
    """Of the samples and of the reference, by one featuriser; empty texts have none."""

    ours: Features
    theirs: Features
    by: FeaturiserInfo
    num_empty: tuple[int, int] = (0, 0)


def given_feature_pair(asked: CardRequest, ours: TextCollection, reference: Reference | None) -> BothFeatures | None:
    """Those of --given-features. Whoever has to be featurised, and what is given, is checked before anything is."""
    check_installed()
    if asked.given is None:
        assert reference is not None
        check_enough(sum(map(bool, ours.texts)), sum(map(bool, reference.texts)), asked.clusters)
        return None
    first, second = asked.given
    samples, others = given_features(first, len(ours.texts), "samples"), given_features(second, None, "reference texts")
    if samples.shape[1] != others.shape[1]:
        widths = f"{first} has {samples.shape[1]} numbers a text and {second} {others.shape[1]}"
        raise UserError(f"--given-features: {widths}; use one featuriser for both")
    check_enough(len(samples), len(others), asked.clusters)
    digest = hashlib.sha256(samples.tobytes() + others.tobytes()).hexdigest()
    name = f"given features {first.name} and {second.name}"
    return BothFeatures(samples, others, FeaturiserInfo(name, digest, "given", None, "given", "float32"))


def compute_feature_pair(work: CardJob, ours: TextCollection, reference: Reference | None) -> BothFeatures:
    """Of the texts that are not empty; an empty one has no last token."""
    assert reference is not None
    featuriser = HuggingFaceFeaturiser(work.asked.features, work.device, work.asked.pooling)

    def compute(part: Sequence[str]) -> Arrays:
        return {"features": work.fitting(lambda: featuriser.features(part, work.batch))}

    found = []
    for name, texts in (("samples", ours.texts), ("reference", reference.texts)):
        there = [text for text in texts if text]
        about = {"featuriser": asdict(featuriser.about), "texts": texts_sha256(there)}
        parts = work.in_parts(there, compute, _are_features, "features", about, f"features of {name}")
        found.append(np.concatenate([part["features"] for part in parts]))
    empty = len(ours.texts) - len(found[0]), len(reference.texts) - len(found[1])
    return BothFeatures(found[0], found[1], featuriser.about, empty)


def _are_features(part: Sequence[str], arrays: Arrays) -> bool:
    found = arrays.get("features")
    return found is not None and found.ndim == 2 and len(found) == len(part) and found.dtype == np.float32


def mauve_section(work: CardJob, features: BothFeatures) -> dict[str, Any]:
    asked = work.asked
    seeds = range(PUBLISHED_SEED, PUBLISHED_SEED + asked.num_seeds)

    def tell(done: int) -> None:
        work.tell("clustering", done, asked.num_seeds)

    figures = {
        "featuriser": asdict(features.by),
        "num_empty_samples": features.num_empty[0],
        "num_empty_reference": features.num_empty[1],
        **asdict(mauve_of(features.ours, features.theirs, seeds, asked.clusters, tell=tell)),
    }
    return figures | {"label": mauve_label(figures)}


def make_card(asked: CardRequest, keep_in: Path | None, tell: ReportProgress) -> Card | None:
    """The whole card, in the first process; the others have none. What is kept in `keep_in` is read the next time."""
    work = CardJob(asked, keep_in, tell, local_device(asked.device))
    check_card_request(asked)
    file = read_samples(asked.samples)
    samples = list(file)
    if not samples:
        raise UserError(f"{asked.samples} holds no sample yet")
    writer = find_sample_tokenizer(file.made_by, samples, asked.tokenizer)
    reference = _reference(asked, samples, writer)
    ours = TextCollection("samples", [sample.text for sample in samples], [sample.ids for sample in samples])
    theirs = (
        TextCollection("reference", reference.texts, reference.ids) if reference and asked.judge_reference else None
    )
    compares = "mauve" in asked.metrics
    features = given_feature_pair(asked, ours, reference) if compares else None

    judged = _judged(work, [each for each in (ours, theirs) if each is not None], writer)
    if compares and features is None:
        features = compute_feature_pair(work, ours, reference)
    if distributed.rank_and_size()[0] > 0:
        return None

    card: Card = {
        "adlm": __version__,
        "card": FORMAT,
        "made_with": versions(),
        "samples": _described(file, samples, writer),
    }
    if reference is not None:
        card["reference"] = reference.about
    card |= judged["samples"]
    if features is not None:
        card["mauve"] = mauve_section(work, features)
    card |= _counted(asked, ours)
    beside = {} if theirs is None else judged["reference"] | _counted(asked, theirs)
    if beside:
        card["reference_judged"] = beside
    card["notes"] = list(notes(card))
    return card


def _reference(asked: CardRequest, samples: Sequence[Sample], writer: SampleTokenizer | None) -> Reference | None:
    if asked.reference is not None:
        num = len(samples) if asked.num_reference is None else asked.num_reference
        wanted = ReferenceRequest(num, asked.reference_seed, asked.split, asked.field)
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


def _described(file: Samples, samples: Sequence[Sample], writer: SampleTokenizer | None) -> dict[str, Any]:
    with opened(file.path) as raw:
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


def _judged(work: CardJob, some: Sequence[TextCollection], writer: SampleTokenizer | None) -> dict[str, dict[str, Any]]:
    """The perplexity of each, by name; nothing where none is asked for."""
    if "perplexity" not in work.asked.metrics:
        return {what.name: {} for what in some}
    judge = judge_of(work.asked.model, work.device)  # its memory is the featuriser's afterwards
    return {what.name: {"perplexity": _perplexity(work, judge, what, writer)} for what in some}


def _perplexity(work: CardJob, judge: Judge, what: TextCollection, writer: SampleTokenizer | None) -> dict[str, Any]:
    asked = work.asked
    read, how = _read_by(judge, what, asked.ids, writer)
    start, eos = scoring_convention(judge.about, asked.start, asked.eos)
    context = judge.about.context if asked.context is None else min(asked.context, judge.about.context)
    reading = window_layout(judge.about, start, context)
    rows = truncate_texts(read, reading, asked.longest)
    about = {"judge": asdict(judge.about), "context": context, "start": start, "ids": texts_sha256(rows)}

    def compute(part: Sequence[list[int]]) -> Arrays:
        found = work.fitting(lambda: token_nats(judge, part, work.batch, reading))
        return {"nats": np.concatenate(found), "lengths": np.array([len(row) for row in part])}

    nats: list[TokenNats] = []
    for part in work.in_parts(rows, compute, _are_nats, "nats", about, f"judging {what.name}"):
        nats += np.split(part["nats"], np.cumsum(part["lengths"])[:-1])
    figures = {
        "judge": asdict(judge.about),
        "ids": how,
        "start": start,
        "start_means": START[start],
        "eos": eos,
        "eos_means": EOS[eos],
        "max_tokens": asked.longest,
        "num_cut": sum(len(row) > len(cut) for row, cut in zip(truncate_texts(read, reading, None), rows, strict=True)),
        "context": context,
        "windows": f"texts longer than {reading.room} tokens are read in windows that overlap by {reading.room // 2}",
        "num_in_windows": sum(len(split_into_windows(0, row, reading)) > 1 for row in rows),
        **asdict(generative_perplexity(rows, nats, judge.about.eos_id, eos, start)),
    }
    return figures | {"label": perplexity_label(figures)}


def _are_nats(part: Sequence[list[int]], arrays: Arrays) -> bool:
    nats, lengths = arrays.get("nats"), arrays.get("lengths")
    if nats is None or lengths is None or lengths.tolist() != [len(row) for row in part]:
        return False
    return nats.shape == (sum(map(len, part)),) and nats.dtype.kind == "f"


def _read_by(
    judge: Judge, what: TextCollection, ids: IdsOf, writer: SampleTokenizer | None
) -> tuple[list[list[int]], str]:
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


def _counted(asked: CardRequest, what: TextCollection) -> dict[str, Any]:
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
