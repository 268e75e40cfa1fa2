"""MAUVE: how close the features of samples are to those of a reference, by the package mauve-text. No models.

MAUVE clusters both sets together and compares their histograms [Pillutla et al. 2021]. It depends on the featuriser,
the number of texts, the number of clusters and the seed of k-means, so each is part of the result. Higher is closer;
for two halves of one corpus it is near 1.

Shapes: n texts, d features each.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError
from adlm.files import opened

Features = NDArray[np.float32]

MIN_TEXTS = 20  # two clusters of ten: with fewer there is no meaningful histogram
ENOUGH_TEXTS = 1000  # the authors recommend thousands: below, MAUVE depends more on the number of texts than on them
PUBLISHED_SEED = 25  # the default of mauve-text
PUBLISHED_LONGEST = 1024
SCALING = 5.0  # as published


@dataclass(frozen=True)
class FeaturiserInfo:
    """Description of a featuriser."""

    name: str
    weights: str
    """sha256 of its weights, or of the given features."""
    pooling: str
    longest: int | None
    """Maximum number of tokens of a text; the rest is ignored."""
    device: str
    dtype: str


@dataclass(frozen=True)
class Mauve:
    """Mean and spread over k-means seeds; the spread is due to the clustering alone, not an error over samples."""

    value: float
    spread: float | None
    """Standard deviation over the seeds; None with one seed."""
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
    report_done: Callable[[int], None] = lambda done: None,
) -> Mauve:
    """One score per seed; by default mauve-text uses a tenth of the smaller set as the number of clusters.

    `report_done` is called with the number of finished clusterings.
    """
    import mauve  # check_installed sees to it

    features = np.concatenate([samples, reference])
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    if np.ptp(features / np.where(lengths > 0, lengths, 1), axis=0).max() < 1e-6:
        # mauve-text normalises every row; identical rows would then get a perfect score
        raise UserError("all texts have the same features, so MAUVE cannot tell them apart; use another featuriser")
    results: list[Any] = []
    for seed in seeds:
        report_done(len(results))
        with _silenced_stderr():
            results.append(
                mauve.compute_mauve(
                    p_features=reference,
                    q_features=samples,
                    num_buckets="auto" if num_clusters is None else num_clusters,
                    mauve_scaling_factor=SCALING,
                    seed=seed,
                    verbose=False,
                )
            )
    scores = [float(result.mauve) for result in results]
    return Mauve(
        value=float(np.mean(scores)),
        spread=float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        by_seed=dict(zip(seeds, scores, strict=True)),
        star=float(np.mean([result.mauve_star for result in results])),
        num_samples=len(samples),
        num_reference=len(reference),
        num_clusters=int(results[0].num_buckets),
        scaling=SCALING,
    )


def check_installed() -> None:
    if importlib.util.find_spec("mauve") is None:
        raise UserError(
            "MAUVE needs the package mauve-text, which is not installed; try pip install 'adlm[eval]', or leave it out "
            "with --metrics"
        )


def check_enough(num_samples: int, num_reference: int, num_clusters: int | None = None) -> None:
    """Checked before the features are computed, which takes long."""
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


def read_features(path: Path, num: int | None, what: str) -> Features:
    """(n, d) from a .npy file, one row for each text."""
    try:
        with opened(path) as file:
            array = np.load(file, allow_pickle=False)
    except UserError:
        raise
    except (ValueError, TypeError, EOFError, SyntaxError, MemoryError, struct.error, zipfile.BadZipFile):
        raise UserError(f"{path} is not a .npy file of numbers") from None
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in "fiu" or not array.shape[1]:
        raise UserError(f"{path} must hold one array (texts, numbers of each)")
    if num is not None and len(array) != num:
        raise UserError(f"{path} has features of {len(array)} texts, and there are {num} {what}")
    with np.errstate(over="ignore"):
        features = array.astype(np.float32)
    check_finite(features, str(path))
    return features


def check_finite(features: Features, source: str) -> None:
    if not np.isfinite(features).all():
        text = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
        raise UserError(f"{source}: the features of text {text} are not finite in float32; use another featuriser")


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """faiss warns from C that MAUVE's default number of clusters has few points per cluster."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        os.close(devnull)
