"""Makes the metric card of a samples file: reads samples and reference, runs judge and featuriser. No terminal output.

Under torchrun every process computes its share of nats and features, and rank 0 makes the card.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm import __version__, distributed
from adlm.apps.judge.cache import Arrays, json_sha256
from adlm.apps.judge.card import FORMAT, Card, card_notes, mauve_label, perplexity_label, versions
from adlm.apps.judge.diversity import diversity_of, entropy_of, lengths_of
from adlm.apps.judge.generative_perplexity import (
    Judge,
    TokenNats,
    generative_perplexity,
    scoring_convention,
    split_into_windows,
    token_nats,
    truncate_texts,
    window_layout,
)
from adlm.apps.judge.job import CardJob, ReportProgress, TextCollection
from adlm.apps.judge.judges import HuggingFaceFeaturiser, HuggingFaceJudge, OwnJudge
from adlm.apps.judge.mauve import (
    PUBLISHED_SEED,
    Features,
    FeaturiserInfo,
    check_enough,
    check_installed,
    mauve_of,
    read_features,
)
from adlm.apps.judge.reference_texts import Reference, ReferenceRequest, read_reference
from adlm.apps.judge.request import EOS, START, CardRequest, IdsOf, check_card_request
from adlm.checkpoints.exported import is_exported
from adlm.config.load import BOX
from adlm.distributed import local_device
from adlm.errors import UserError
from adlm.files import file_sha256
from adlm.language_model import load
from adlm.samples_file import Sample, Samples, read_samples


@dataclass(frozen=True)
class FeaturePair:
    """Features of the samples and of the reference by one featuriser; empty texts are left out."""

    samples: Features
    reference: Features
    featuriser: FeaturiserInfo
    num_empty: tuple[int, int] = (0, 0)


def given_feature_pair(
    request: CardRequest, samples: TextCollection, reference: Reference | None
) -> FeaturePair | None:
    """The features of --given-features, or None without it. The number of texts is checked in both cases."""
    check_installed()
    if request.given_features is None:
        assert reference is not None
        check_enough(sum(map(bool, samples.texts)), sum(map(bool, reference.texts)), request.clusters)
        return None
    first, second = request.given_features
    of_samples = read_features(first, len(samples.texts), "samples")
    of_reference = read_features(second, None, "reference texts")
    if of_samples.shape[1] != of_reference.shape[1]:
        widths = f"{first} has {of_samples.shape[1]} numbers a text and {second} {of_reference.shape[1]}"
        raise UserError(f"--given-features: {widths}; use one featuriser for both")
    check_enough(len(of_samples), len(of_reference), request.clusters)
    digest = hashlib.sha256(of_samples.tobytes() + of_reference.tobytes()).hexdigest()
    name = f"given features {first.name} and {second.name}"
    return FeaturePair(of_samples, of_reference, FeaturiserInfo(name, digest, "given", None, "given", "float32"))


def compute_feature_pair(job: CardJob, samples: TextCollection, reference: Reference | None) -> FeaturePair:
    """Features of the texts that are not empty; an empty one has no last token."""
    assert reference is not None
    featuriser = HuggingFaceFeaturiser(job.request.features, job.device, job.request.pooling)

    def compute(part: Sequence[str]) -> Arrays:
        return {"features": featuriser.features(part, job.batch)}

    def features_of(name: str, texts: Sequence[str]) -> Features:
        nonempty = [text for text in texts if text]
        about = {"featuriser": asdict(featuriser.about), "texts": json_sha256(nonempty)}
        parts = job.compute_in_parts(nonempty, compute, _are_features, "features", about, f"features of {name}")
        return np.concatenate([part["features"] for part in parts])

    of_samples, of_reference = features_of("samples", samples.texts), features_of("reference", reference.texts)
    num_empty = len(samples.texts) - len(of_samples), len(reference.texts) - len(of_reference)
    return FeaturePair(of_samples, of_reference, featuriser.about, num_empty)


def _are_features(part: Sequence[str], arrays: Arrays) -> bool:
    features = arrays.get("features")
    return features is not None and features.ndim == 2 and len(features) == len(part) and features.dtype == np.float32


def mauve_section(job: CardJob, features: FeaturePair) -> dict[str, Any]:
    request = job.request
    seeds = range(PUBLISHED_SEED, PUBLISHED_SEED + request.num_seeds)

    def report_done(done: int) -> None:
        job.report_progress("clustering", done, request.num_seeds)

    section = {
        "featuriser": asdict(features.featuriser),
        "num_empty_samples": features.num_empty[0],
        "num_empty_reference": features.num_empty[1],
        **asdict(mauve_of(features.samples, features.reference, seeds, request.clusters, report_done=report_done)),
    }
    return section | {"label": mauve_label(section)}


def judge_of(name: str, device: torch.device) -> Judge:
    """A judge from one of our model folders, run folders or .ckpt files, else from transformers by this name."""
    path = Path(name)
    is_ours = any((folder / "config.yaml").is_file() for folder in (path / "model", path)) or is_exported(path)
    if is_ours or path.suffix == ".ckpt" or name == BOX:
        lm = load(name, str(device))
        return OwnJudge(name, lm.config, lm.network, lm.tokenizer)
    return HuggingFaceJudge(name, device)


def make_card(
    request: CardRequest,
    cache_folder: Path | None,
    report_progress: ReportProgress,
    open_judge: Callable[[str, torch.device], Judge] = judge_of,
) -> Card | None:
    """The card on rank 0, None on other ranks. Nats and features in `cache_folder` are reused.

    For several cards, `open_judge` may return the same judge again instead of loading it.
    """
    job = CardJob(request, cache_folder, report_progress, local_device(request.device))
    check_card_request(request)
    file = read_samples(request.samples)
    rows = list(file)
    if not rows:
        raise UserError(f"{request.samples} holds no sample yet")
    reference = _read_reference(request, file, rows)
    samples = TextCollection("samples", [row.text for row in rows], [row.ids for row in rows])
    collections = [samples]
    if reference is not None and request.judge_reference:
        collections.append(TextCollection("reference", reference.texts, reference.ids))
    needs_features = "mauve" in request.metrics
    features = given_feature_pair(request, samples, reference) if needs_features else None

    perplexities = _perplexity_sections(job, open_judge, collections, file.made_by.tokenizer_sha256)
    if needs_features and features is None:
        features = compute_feature_pair(job, samples, reference)
    if distributed.rank_and_size()[0] > 0:
        return None

    card: Card = {
        "adlm": __version__,
        "card": FORMAT,
        "made_with": versions(),
        "samples": _samples_section(file, rows),
    }
    if reference is not None:
        card["reference"] = reference.about
    card |= perplexities[0]
    if features is not None:
        card["mauve"] = mauve_section(job, features)
    card |= _id_metrics(request, samples)
    of_reference = perplexities[1] | _id_metrics(request, collections[1]) if len(collections) > 1 else {}
    if of_reference:
        card["reference_judged"] = of_reference
    card["notes"] = list(card_notes(card))
    return card


def _read_reference(request: CardRequest, file: Samples, samples: Sequence[Sample]) -> Reference | None:
    if request.reference is not None:
        num = len(samples) if request.num_reference is None else request.num_reference
        texts = ReferenceRequest(num, request.reference_seed, request.split, request.field)
        max_tokens = max(len(sample.ids) for sample in samples)
        return read_reference(request.reference, texts, file.made_by.tokenizer_sha256, max_tokens)
    if "mauve" in request.metrics and request.given_features is None:
        without_mauve = ",".join(metric for metric in request.metrics if metric != "mauve")
        raise UserError(
            "--reference is not given, and MAUVE compares the samples with one: give a folder of `adlm prepare` or a "
            f"file of texts, or leave it out: --metrics {without_mauve or 'perplexity'}"
        )
    if request.judge_reference:
        raise UserError("--judge-reference needs a --reference to judge")
    return None


def _samples_section(file: Samples, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "file": str(file.path),
        "sha256": file_sha256(file.path),
        "num": len(samples),
        "of": file.made_by.num_rows,
        "num_empty": sum(not sample.text for sample in samples),
        "tokenizer": {"name": file.made_by.tokenizer, "sha256": file.made_by.tokenizer_sha256},
        "made_by": asdict(file.made_by),
    }


def _perplexity_sections(
    job: CardJob,
    open_judge: Callable[[str, torch.device], Judge],
    collections: Sequence[TextCollection],
    tokenizer_sha256: str,
) -> list[dict[str, Any]]:
    """{"perplexity": ...} for each collection; {} where the metric is not requested."""
    if "perplexity" not in job.request.metrics:
        return [{} for _ in collections]
    judge = open_judge(job.request.model, job.device)  # local, so that its memory is free for the featuriser
    return [{"perplexity": _perplexity(job, judge, collection, tokenizer_sha256)} for collection in collections]


def _perplexity(job: CardJob, judge: Judge, collection: TextCollection, tokenizer_sha256: str) -> dict[str, Any]:
    request = job.request
    read, ids_kind = _judge_ids(judge, collection, request.ids, tokenizer_sha256)
    start, eos = scoring_convention(judge.about, request.start, request.eos)
    context = judge.about.context if request.context is None else min(request.context, judge.about.context)
    layout = window_layout(judge.about, start, context)
    rows = truncate_texts(read, layout, request.max_tokens)
    about = {"judge": asdict(judge.about), "context": context, "start": start, "ids": json_sha256(rows)}

    def compute(part: Sequence[list[int]]) -> Arrays:
        part_nats = token_nats(judge, part, job.batch, layout)
        return {"nats": np.concatenate(part_nats), "lengths": np.array([len(row) for row in part])}

    nats: list[TokenNats] = []
    for part in job.compute_in_parts(rows, compute, _are_nats, "nats", about, f"judging {collection.name}"):
        nats += np.split(part["nats"], np.cumsum(part["lengths"])[:-1])
    section = {
        "judge": asdict(judge.about),
        "ids": ids_kind,
        "start": start,
        "start_means": START[start],
        "eos": eos,
        "eos_means": EOS[eos],
        "max_tokens": request.max_tokens,
        "num_cut": sum(len(row) > len(cut) for row, cut in zip(truncate_texts(read, layout, None), rows, strict=True)),
        "context": context,
        "windows": f"texts longer than {layout.room} tokens are read in windows that overlap by {layout.room // 2}",
        "num_in_windows": sum(len(split_into_windows(0, row, layout)) > 1 for row in rows),
        **asdict(generative_perplexity(rows, nats, judge.about.eos_id, eos, start)),
    }
    return section | {"label": perplexity_label(section)}


def _are_nats(part: Sequence[list[int]], arrays: Arrays) -> bool:
    nats, lengths = arrays.get("nats"), arrays.get("lengths")
    if nats is None or lengths is None or lengths.tolist() != [len(row) for row in part]:
        return False
    return nats.shape == (sum(map(len, part)),) and nats.dtype.kind == "f"


def _judge_ids(
    judge: Judge, collection: TextCollection, ids: IdsOf, tokenizer_sha256: str
) -> tuple[list[list[int]], str]:
    """The texts as ids of the judge, as sampled or retokenised; as sampled only with the tokenizer of the samples."""
    preferred = {"auto": "as-sampled" if judge.about.kind == "adlm" else "retokenised"}.get(ids, ids)
    same_tokenizer = tokenizer_sha256 == judge.about.tokenizer_sha256
    if preferred == "as-sampled" and collection.ids is not None and same_tokenizer:
        return collection.ids, "as-sampled"
    if ids == "as-sampled":
        raise UserError(
            f"--ids as-sampled: the tokenizer of the judge {judge.about.name} is not the one that wrote the "
            f"{collection.name}; leave it out, and the texts are retokenised"
        )
    try:
        return judge.encode(collection.texts), "retokenised"
    except UserError as error:
        raise UserError(
            f"the judge {judge.about.name} cannot read the {collection.name}: {error}; give another --model"
        ) from None


def _id_metrics(request: CardRequest, collection: TextCollection) -> dict[str, Any]:
    """Entropy and diversity, which need only ids; {} for a reference with another tokenizer."""
    metrics: dict[str, Any] = {}
    if collection.ids is None:
        return metrics
    if "entropy" in request.metrics:
        metrics["entropy"] = asdict(entropy_of(collection.ids))
    if "diversity" in request.metrics:
        diversity = asdict(diversity_of(collection.ids))
        for key in ("distinct", "distinct_in_all"):
            diversity[key] = {str(n): value for n, value in diversity[key].items()}  # JSON keys are strings
        lengths = lengths_of([len(text) for text in collection.texts])
        metrics["diversity"] = diversity | {"characters": asdict(lengths)}
    return metrics
