"""MAUVE: how close the samples' features lie to a reference's, by the package mauve-text. Knows no models.

MAUVE clusters both sets together and compares their histograms [Pillutla et al. 2021]. It depends on the featuriser,
the number of texts, the number of clusters and the seed of k-means, so each is part of the answer. Higher is closer; of
two halves of one corpus it is near 1.

Shapes: n texts, d numbers each.
"""

import importlib.util
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError
from adlm.files import opened

Features = NDArray[np.float32]

MIN_TEXTS = 20  # two clusters of ten: with fewer there is no histogram to speak of
ENOUGH_TEXTS = 1000  # the authors ask for thousands: below it MAUVE says more of the number than of the texts
PUBLISHED_SEED = 25  # mauve-text's own
PUBLISHED_LONGEST = 1024


@dataclass(frozen=True)
class FeaturiserInfo:
    """Which featuriser it is."""

    name: str
    weights: str
    """sha256 of its weights, or of the features that were given."""
    pooling: str
    longest: int | None
    """Tokens of a text that are read."""
    device: str
    dtype: str


class Featuriser(Protocol):
    @property
    def about(self) -> FeaturiserInfo: ...

    def features(self, texts: Sequence[str], batch: int) -> Features: ...


@dataclass(frozen=True)
class Mauve:
    """Mean over k-means seeds, and their spread: what the clustering alone does, not an error over samples."""

    value: float
    spread: float | None
    """Standard deviation over the seeds; None for one seed."""
    by_seed: dict[int, float]
    star: float
    """The same with smoothed histograms (MAUVE*), which is less biased for few samples."""
    num_samples: int
    num_reference: int
    num_clusters: int
    scaling: float


def mauve_of(
    samples: Features,
    reference: Features,
    seeds: Sequence[int],
    num_clusters: int | None = None,
    scaling: float = 5.0,
    tell: Callable[[int], None] = lambda done: None,
) -> Mauve:
    """One score a seed; clusters are a tenth of the smaller set unless given, as mauve-text has it.

    `tell` is told how many clusterings are done.
    """
    check_enough(len(samples), len(reference), num_clusters)
    if not seeds:
        raise UserError("--seeds 0 leaves no clustering; give at least 1")
    check_installed()
    _refuse_one_direction(np.concatenate([samples, reference]))
    found: list[Any] = []
    for seed in seeds:
        tell(len(found))
        found.append(_scored(samples, reference, seed, num_clusters, scaling))
    scores = [float(each.mauve) for each in found]
    return Mauve(
        value=float(np.mean(scores)),
        spread=float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        by_seed=dict(zip(seeds, scores, strict=True)),
        star=float(np.mean([each.mauve_star for each in found])),
        num_samples=len(samples),
        num_reference=len(reference),
        num_clusters=int(found[0].num_buckets),
        scaling=scaling,
    )


def check_installed() -> None:
    if importlib.util.find_spec("mauve") is None:
        raise UserError(
            "MAUVE needs the package mauve-text, which is not installed; try pip install 'adlm[eval]', or leave it out "
            "with --metrics"
        )


def check_enough(num_samples: int, num_reference: int, num_clusters: int | None = None) -> None:
    """Said before anything is computed: features take long."""
    for what, num in (("samples", num_samples), ("reference texts", num_reference)):
        if num < MIN_TEXTS:
            raise UserError(
                f"MAUVE needs at least {MIN_TEXTS} samples and {MIN_TEXTS} reference texts that are not empty, better "
                f"{ENOUGH_TEXTS:,} or more, and there are {num} {what}; give more, or leave it out with --metrics"
            )
    if num_clusters is not None and not 2 <= num_clusters <= num_samples + num_reference:
        raise UserError(
            f"--clusters {num_clusters} must be from 2 to {num_samples + num_reference}, the number of texts in all"
        )


def given_features(path: Path, num: int | None, what: str) -> Features:
    """(n, d) from a .npy file, one row for each text."""
    try:
        with opened(path) as file:
            found = np.load(file, allow_pickle=False)
    except UserError:
        raise
    except (ValueError, TypeError, EOFError, SyntaxError, MemoryError, struct.error, zipfile.BadZipFile):
        raise UserError(f"{path} is no .npy file of numbers") from None
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "fiu" or not found.shape[1]:
        raise UserError(f"{path} must hold one array (texts, numbers of each)")
    if num is not None and len(found) != num:
        raise UserError(f"{path} has features of {len(found)} texts, and there are {num} {what}")
    with np.errstate(over="ignore"):
        features = found.astype(np.float32)
    check_finite(features, str(path))
    return features


def check_finite(features: Features, whose: str) -> None:
    if not np.isfinite(features).all():
        text = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
        raise UserError(f"{whose}: the features of text {text} are no numbers of float32; use another featuriser")


def _refuse_one_direction(features: Features) -> None:
    """mauve-text scales every row to length 1, and what is then all the same would get a perfect score."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    if np.ptp(features / np.where(lengths > 0, lengths, 1), axis=0).max() < 1e-6:
        raise UserError("all texts have the same features, so MAUVE cannot tell them apart; use another featuriser")


def _scored(samples: Features, reference: Features, seed: int, num_clusters: int | None, scaling: float) -> Any:
    import mauve

    with _quiet():
        return mauve.compute_mauve(
            p_features=reference,
            q_features=samples,
            num_buckets="auto" if num_clusters is None else num_clusters,
            mauve_scaling_factor=scaling,
            seed=seed,
            verbose=False,
        )


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
