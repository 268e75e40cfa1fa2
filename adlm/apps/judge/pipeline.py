"""Makes a metric card: runs the judge and the featuriser on the samples and the reference. No terminal output.

A card is JSON: metrics and the settings they depend on. Metrics by another judge or featuriser than GPT-2 large, or by
another protocol than the published one, carry a label that says so, in the card, in its table and in every plot.
Under torchrun every process computes its share of nats and features, and rank 0 makes the card.
"""

import hashlib
import json
import platform
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm import __version__, distributed
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
from adlm.apps.judge.inputs import EOS, START, FeaturePair, IdsOf, JudgeInputs, JudgeSettings, TextCollection
from adlm.apps.judge.judges import HuggingFaceFeaturiser, judge_of
from adlm.apps.judge.mauve import ENOUGH_TEXTS, PUBLISHED_LONGEST, PUBLISHED_SEED, Features, mauve_of
from adlm.distributed import local_device
from adlm.errors import UserError
from adlm.files import opened, replacing, reporting_os_errors, write_file
from adlm.request import narrow, to_json

FORMAT = 1
GPT2_LARGE = ("gpt2-large", "openai-community/gpt2-large")
PACKAGES = ("torch", "numpy", "transformers", "mauve-text", "faiss-cpu", "scikit-learn")
TEXTS_PER_PART = 64  # texts in a cached file; an interruption loses at most this many

Card = dict[str, Any]
Arrays = dict[str, NDArray[Any]]
ReportProgress = Callable[[str, int, int], None]
"""(stage, done, total), called as the work proceeds."""


def make_card(
    inputs: JudgeInputs,
    cache_folder: Path | None,
    report_progress: ReportProgress,
    open_judge: Callable[[str, torch.device], Judge] = judge_of,
) -> Card | None:
    """The card on rank 0, None on other ranks. Nats and features in `cache_folder` are reused.

    For several cards, `open_judge` may return the same judge again instead of loading it.
    """
    settings, device = inputs.settings, local_device(inputs.settings.device)
    batch, cache = settings.batch or (16 if device.type == "cuda" else 4), PartCache(cache_folder, report_progress)
    judged = {"samples": inputs.samples}
    if inputs.reference is not None and settings.judge_reference:
        judged["reference"] = inputs.reference
    metrics: dict[str, dict[str, Any]] = {name: {} for name in judged}
    features = inputs.given_features
    try:
        if "perplexity" in settings.metrics:
            judge = open_judge(settings.model, device)
            sha256 = inputs.samples.about["tokenizer"]["sha256"]
            for name, texts in judged.items():
                metrics[name]["perplexity"] = _perplexity(settings, judge, name, texts, sha256, batch, cache)
            del judge  # its memory is needed by the featuriser
        if "mauve" in settings.metrics and features is None:
            featuriser = HuggingFaceFeaturiser(settings.features, device, settings.pooling)
            features = _features(inputs, featuriser, batch, cache)
    except torch.OutOfMemoryError:
        raise UserError(
            f"--batch {batch} does not fit the memory of the device; try --batch {max(1, batch // 2)}"
        ) from None
    if distributed.rank_and_size()[0] > 0:
        return None
    if features is not None:
        metrics["samples"]["mauve"] = _mauve(settings, features, report_progress)
    for name, texts in judged.items():
        metrics[name] |= _id_metrics(settings, texts)
    card: Card = {
        "adlm": __version__,
        "card": FORMAT,
        "made_with": versions(),
        "settings": to_json(narrow(settings, JudgeSettings)),
        "samples": inputs.samples.about,
    }
    if inputs.reference is not None:
        card["reference"] = inputs.reference.about
    card |= metrics["samples"]
    if metrics.get("reference"):
        card["reference_judged"] = metrics["reference"]
    card["notes"] = list(card_notes(card))
    return card


def _perplexity(
    settings: JudgeSettings,
    judge: Judge,
    name: str,
    collection: TextCollection,
    tokenizer_sha256: str,
    batch: int,
    cache: "PartCache",
) -> dict[str, Any]:
    """The generative perplexity of the samples, or of the reference."""
    read, ids_kind = _judge_ids(judge, name, collection, settings.ids, tokenizer_sha256)
    start, eos = scoring_convention(judge.about, settings.start, settings.eos)
    context = judge.about.context if settings.context is None else min(settings.context, judge.about.context)
    layout = window_layout(judge.about, start, context)
    rows = truncate_texts(read, layout, settings.max_tokens)
    about = {"judge": asdict(judge.about), "context": context, "start": start, "ids": json_sha256(rows)}

    def compute(part: Sequence[list[int]]) -> Arrays:
        part_nats = token_nats(judge, part, batch, layout)
        return {"nats": np.concatenate(part_nats), "lengths": np.array([len(row) for row in part])}

    def fits(part: Sequence[list[int]], arrays: Arrays) -> bool:
        nats, lengths = arrays.get("nats"), arrays.get("lengths")
        if nats is None or lengths is None or lengths.tolist() != [len(row) for row in part]:
            return False
        return nats.shape == (sum(map(len, part)),) and nats.dtype.kind == "f"

    nats: list[TokenNats] = []
    for part in cache.compute(rows, compute, fits, "nats", about, f"judging {name}"):
        nats += np.split(part["nats"], np.cumsum(part["lengths"])[:-1])
    section = {
        "judge": asdict(judge.about),
        "ids": ids_kind,
        "start": start,
        "start_means": START[start],
        "eos": eos,
        "eos_means": EOS[eos],
        "max_tokens": settings.max_tokens,
        "num_cut": sum(len(row) > len(cut) for row, cut in zip(truncate_texts(read, layout, None), rows, strict=True)),
        "context": context,
        "windows": f"texts longer than {layout.room} tokens are read in windows that overlap by {layout.room // 2}",
        "num_in_windows": sum(len(split_into_windows(0, row, layout)) > 1 for row in rows),
        **asdict(generative_perplexity(rows, nats, judge.about.eos_id, eos, start)),
    }
    return section | {"label": perplexity_label(section)}


def _judge_ids(
    judge: Judge, name: str, collection: TextCollection, ids: IdsOf, tokenizer_sha256: str
) -> tuple[list[list[int]], str]:
    """The texts as ids of the judge, as sampled or retokenised; as sampled only with the tokenizer of the samples."""
    preferred = {"auto": "as-sampled" if judge.about.kind == "adlm" else "retokenised"}.get(ids, ids)
    same_tokenizer = tokenizer_sha256 == judge.about.tokenizer_sha256
    if preferred == "as-sampled" and collection.ids is not None and same_tokenizer:
        return collection.ids, "as-sampled"
    if ids == "as-sampled":
        raise UserError(
            f"--ids as-sampled: the tokenizer of the judge {judge.about.name} is not the one that wrote the "
            f"{name}; leave it out, and the texts are retokenised"
        )
    try:
        return judge.encode(collection.texts), "retokenised"
    except UserError as error:
        raise UserError(f"the judge {judge.about.name} cannot read the {name}: {error}; give another --model") from None


def _features(inputs: JudgeInputs, featuriser: HuggingFaceFeaturiser, batch: int, cache: "PartCache") -> FeaturePair:
    """Features of the texts that are not empty; an empty one has no last token."""

    def compute(part: Sequence[str]) -> Arrays:
        return {"features": featuriser.features(part, batch)}

    def fits(part: Sequence[str], arrays: Arrays) -> bool:
        found = arrays.get("features")
        return found is not None and found.ndim == 2 and len(found) == len(part) and found.dtype == np.float32

    def features_of(name: str, texts: Sequence[str]) -> Features:
        nonempty = [text for text in texts if text]
        about = {"featuriser": asdict(featuriser.about), "texts": json_sha256(nonempty)}
        parts = cache.compute(nonempty, compute, fits, "features", about, f"features of {name}")
        return np.concatenate([part["features"] for part in parts])

    assert inputs.reference is not None
    samples, reference = inputs.samples.texts, inputs.reference.texts
    of_samples, of_reference = features_of("samples", samples), features_of("reference", reference)
    num_empty = len(samples) - len(of_samples), len(reference) - len(of_reference)
    return FeaturePair(of_samples, of_reference, featuriser.about, num_empty)


def _mauve(settings: JudgeSettings, features: FeaturePair, report_progress: ReportProgress) -> dict[str, Any]:
    seeds = range(PUBLISHED_SEED, PUBLISHED_SEED + settings.seeds)

    def report_done(done: int) -> None:
        report_progress("clustering", done, settings.seeds)

    section = {
        "featuriser": asdict(features.featuriser),
        "num_empty_samples": features.num_empty[0],
        "num_empty_reference": features.num_empty[1],
        **asdict(mauve_of(features.samples, features.reference, seeds, settings.clusters, report_done=report_done)),
    }
    return section | {"label": mauve_label(section)}


def _id_metrics(settings: JudgeSettings, collection: TextCollection) -> dict[str, Any]:
    """Entropy and diversity, which need only ids; {} for a reference with another tokenizer."""
    metrics: dict[str, Any] = {}
    if collection.ids is None:
        return metrics
    if "entropy" in settings.metrics:
        metrics["entropy"] = asdict(entropy_of(collection.ids))
    if "diversity" in settings.metrics:
        diversity = asdict(diversity_of(collection.ids))
        for key in ("distinct", "distinct_in_all"):
            diversity[key] = {str(n): value for n, value in diversity[key].items()}  # JSON keys are strings
        lengths = lengths_of([len(text) for text in collection.texts])
        metrics["diversity"] = diversity | {"characters": asdict(lengths)}
    return metrics


def versions() -> dict[str, str | None]:
    """Versions of the packages that computed the metrics; None where a package is not installed."""
    found: dict[str, str | None] = {"adlm": __version__, "python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def perplexity_label(perplexity: Mapping[str, Any]) -> str | None:
    """Why this perplexity is not comparable with published ones; None where it is."""
    differences = []
    if perplexity["judge"]["name"] not in GPT2_LARGE:
        differences.append(f"the judge is {perplexity['judge']['name']}, not GPT-2 large")
    for choice, published in (("eos", "published"), ("start", "given"), ("ids", "retokenised")):
        if perplexity[choice] != published:
            differences.append(f"{choice} {perplexity[choice]}, not {published}")
    return f"not comparable with published perplexities: {'; '.join(differences)}" if differences else None


def mauve_label(mauve: Mapping[str, Any]) -> str | None:
    """Why this MAUVE is not comparable with published ones; None where it is."""
    differences, featuriser = [], mauve["featuriser"]
    if featuriser["name"] not in GPT2_LARGE:
        differences.append(f"the features are of {featuriser['name']}, not GPT-2 large")
    elif (featuriser["pooling"], featuriser["longest"]) != ("last", PUBLISHED_LONGEST):
        differences.append(
            f"pooling {featuriser['pooling']} of {featuriser['longest']} tokens, not last of {PUBLISHED_LONGEST}"
        )
    if min(mauve["num_samples"], mauve["num_reference"]) < ENOUGH_TEXTS:
        differences.append(f"of fewer than {ENOUGH_TEXTS:,} texts, where it says more of their number than of them")
    return f"not comparable with published MAUVE: {'; '.join(differences)}" if differences else None


def card_notes(card: Card) -> Iterator[str]:
    """Warnings for the reader of the card."""
    samples, perplexity, mauve = card["samples"], card.get("perplexity"), card.get("mauve")
    if samples["num"] < samples["of"]:
        yield f"the file holds {samples['num']:,} of the {samples['of']:,} samples that were asked for"
    if samples["num_empty"]:
        yield f"{samples['num_empty']:,} samples are empty texts"
    if perplexity is not None and perplexity["num_uncounted"]:
        yield f"{perplexity['num_uncounted']:,} samples have no token that counts, so no perplexity"
    if perplexity is not None and perplexity["num_in_windows"]:
        yield f"{perplexity['num_in_windows']:,} samples: {perplexity['windows']}"
    if mauve is not None and mauve["num_empty_samples"] + mauve["num_empty_reference"]:
        yield f"MAUVE leaves out {mauve['num_empty_samples']} empty samples, {mauve['num_empty_reference']} empty texts"
    if mauve is not None and mauve["num_samples"] != mauve["num_reference"]:
        yield f"MAUVE of {mauve['num_samples']:,} samples against {mauve['num_reference']:,}: equal numbers are usual"
    reference = card.get("reference", {})
    if reference.get("tokenizer_of_samples") is False:
        rows = f", and its rows are {reference['row_length']} tokens of its own" if "row_length" in reference else ""
        yield f"the reference's tokenizer is not the samples', so its entropy and diversity are not computed{rows}"


@dataclass(frozen=True)
class PartCache:
    """Arrays computed in parts: divided among processes, cached on disk, resumed after an interruption.

    FOLDER/nats-3f0c.../about.json   the inputs of the computation; its sha256 is in the folder's name
    FOLDER/nats-3f0c.../00000.npz    arrays of the first TEXTS_PER_PART texts
    """

    folder: Path | None
    report_progress: ReportProgress

    def compute(
        self,
        items: Sequence[Any],
        compute: Callable[[Sequence[Any]], Arrays],
        fits: Callable[[Sequence[Any], Arrays], bool],
        kind: str,
        about: Mapping[str, Any],
        stage: str,
    ) -> list[Arrays]:
        """compute(items), TEXTS_PER_PART items at a time; parts of the same inputs that are cached are read instead.

        Each part is computed by one process, so that results do not depend on their number. `fits` checks that cached
        arrays have the form that `compute` returns.
        """
        digest, (rank, ranks) = json_sha256(about), distributed.rank_and_size()
        cache = None if self.folder is None else self.folder / f"{kind}-{digest[:24]}"
        if cache is not None:
            with reporting_os_errors(cache):
                cache.mkdir(parents=True, exist_ok=True)
            if not (cache / "about.json").is_file():
                write_file(cache / "about.json", json.dumps(about, indent=1))
        done: dict[int, Arrays] = {}
        for number in range(rank, -(-len(items) // TEXTS_PER_PART), ranks):
            path = None if cache is None else cache / f"{number:05}.npz"
            part = items[number * TEXTS_PER_PART : (number + 1) * TEXTS_PER_PART]
            if path is not None and path.exists():
                done[number] = _read_part(path)
                if not done[number] or not fits(part, done[number]):
                    raise UserError(f"{path} is damaged; delete it, and it is made again")
            else:
                done[number] = compute(part)
                if path is not None:
                    with replacing(path) as temporary, temporary.open("wb") as file:
                        np.savez(file, **done[number])  # type: ignore[arg-type]
            self.report_progress(stage, min(len(items), (number + ranks) * TEXTS_PER_PART), len(items))
        gathered = distributed.gather([(digest, done)])
        if any(other_digest != digest for other_digest, _ in gathered):
            raise UserError("the processes read different texts; wait until the files are written, and run this again")
        parts = {number: arrays for _, done_by_rank in gathered for number, arrays in done_by_rank.items()}
        return [parts[number] for number in sorted(parts)]


def _read_part(path: Path) -> Arrays:
    """The arrays of a file; none if it is damaged."""
    try:
        with opened(path) as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, TypeError, AttributeError, EOFError, struct.error, zlib.error, zipfile.BadZipFile):
        return {}


def json_sha256(content: Any) -> str:
    """sha256 of texts, ids or settings."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
