"""Samples and a reference as features, given or made, and how close they are. Knows no judge."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adlm.errors import UserError
from adlm.evaluation.generation.cache import Arrays, texts_sha256
from adlm.evaluation.generation.card import mauve_label
from adlm.evaluation.generation.hugging_face import HuggingFaceFeaturiser
from adlm.evaluation.generation.mauve import (
    PUBLISHED_SEED,
    Features,
    FeaturiserInfo,
    check_enough,
    check_installed,
    given_features,
    mauve_of,
)
from adlm.evaluation.generation.reference_texts import Reference
from adlm.evaluation.generation.request import CardJob, CardRequest, TextCollection


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
