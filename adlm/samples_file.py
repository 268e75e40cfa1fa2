"""Samples files: JSON lines, the first with the provenance and one for each sample.

    {"made_by": {"adlm": "0.1.0", "model": "runs/own", "method": "adlm", ...}}
    {"row": 0, "canvas": 0, "seed": 0, "text": "...", "ids": [...]}

Samples are appended in batches, each synced to disk before the next is sampled. An incomplete last line, left by a
killed process, is ignored by readers and truncated when sampling is resumed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adlm import __version__
from adlm.config.load import differences
from adlm.config.schema import ETA
from adlm.errors import UserError
from adlm.files import Journal, json_lines, opened, read_metrics, reporting_os_errors

if TYPE_CHECKING:  # files are read and checked without torch
    from adlm.language_model import LanguageModel, Run
    from adlm.sampling.frame import Frame


@dataclass(frozen=True)
class Provenance:
    """Everything that the samples depend on: with equal provenance, samples files are byte-identical."""

    adlm: str
    """The version of adlm."""
    model: str
    """The path it was loaded from."""
    weights: str
    """sha256 of the weights."""
    method: str
    tokenizer: str
    length: int
    """The model's length in tokens."""
    canvases: list[str]
    """Texts with masks, such as `[MASK*128]`; row i is a sample of canvas i // num."""
    num: int
    """Number of samples per canvas."""
    seed: int
    """The RNG of row i is seeded with (seed, i)."""
    sampling: Mapping[str, Any]
    """The sampler and all its options."""
    batch: int
    """Rows sampled at a time: the rounding of a device depends on the batch size."""
    device: str
    dtype: str
    """dtype of weights and matrix products."""
    tokenizer_sha256: str
    """`Tokenizer.sha256`: ids of tokenizers with the same sha256 are interchangeable."""
    about: Mapping[str, Any]
    """Facts about the model that do not affect the samples: parameters, symbols, training."""

    @property
    def num_rows(self) -> int:
        """Number of samples in a complete file."""
        return self.num * len(self.canvases)


PROVENANCE_TYPES: dict[str, type] = {
    "length": int,
    "canvases": list,
    "num": int,
    "seed": int,
    "sampling": dict,
    "batch": int,
    "about": dict,
}
"""Types of the provenance entries; all others are strings."""


@dataclass(frozen=True)
class Sample:
    """One sample."""

    row: int
    canvas: int
    """Index of its canvas."""
    seed: int
    text: str
    """The decoded ids, including special tokens: the published judge models read bos and eos."""
    ids: list[int]


@dataclass(frozen=True)
class ModelSummary:
    """Size, vocabulary and training of a model, to be written next to its results."""

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


def summarize_model(model: str, lm: "LanguageModel") -> ModelSummary:
    """`model` is the path that `lm` was loaded from."""
    from adlm.methods.inputs import vocabulary_of
    from adlm.models.transformer import num_parameters

    config, path = lm.config, Path(model)
    # training sets data.packing; the config of a released .ckpt has no training settings, only defaults
    anchored = lm.method.anchored and config.data.packing is not None
    run = path.parent if path.name == "model" else path
    logged = read_metrics(run / "metrics.jsonl") if run.is_dir() else []
    return ModelSummary(
        parameters=num_parameters(lm.network),
        symbols=vocabulary_of(config).size,
        gamma=config.anchor.gamma if anchored else None,
        tau=config.anchor.tau if anchored and config.anchor.rule == "count" else None,
        trained_on=config.data.name or config.data.path or config.data.hub or config.data.prepared,
        tokens_trained=logged[-1]["step"] * config.train.batch_size * config.length if logged else None,
    )


def provenance_of(run: "Run", model: str, batch: int) -> Provenance:
    """What the samples of a run depend on. `model` is the path of its model, `batch` the rows sampled at a time."""
    from adlm.distributed import device_name
    from adlm.models.transformer import weights_sha256

    lm, sampling = run.lm, run.sampling
    return Provenance(
        adlm=__version__,
        model=model,
        weights=weights_sha256(lm.network),
        method=lm.config.method,
        tokenizer=lm.config.tokenizer,
        length=lm.config.length,
        canvases=list(run.texts),
        num=run.num,
        seed=cast(int, run.rng.seed),
        sampling=asdict(replace(sampling, eta=sampling.strength if sampling.sampler in ETA else None)),
        batch=batch,
        device=device_name(lm.device),
        dtype=str(lm.frozen.dtype).removeprefix("torch."),
        tokenizer_sha256=lm.require_tokenizer().sha256,
        about=asdict(summarize_model(model, lm)),
    )


def draw_samples(batch: "Run", num: int, frames: "Iterator[Frame] | None" = None) -> list[Sample]:
    """The samples of one batch of a run that has `num` samples of each canvas; `frames` as in `Run.filled`."""
    decode, seed = batch.lm.require_tokenizer().decode, cast(int, batch.rng.seed)
    rows = zip(batch.rng.rows, batch.filled(frames), strict=True)
    return [Sample(row, row // num, seed, decode(ids), ids) for row, ids in rows]


@dataclass(frozen=True)
class Samples:
    """A samples file for reading, complete or not. Each iteration reads it from the start."""

    path: Path
    made_by: Provenance

    def __iter__(self) -> Iterator[Sample]:
        with opened(self.path) as file:
            next(file)
            yield from _parse_samples((content for _, content in json_lines(file)), self.made_by, self.path)


def read_samples(path: str | Path) -> Samples:
    """Open a samples file for reading; an incomplete last line is ignored."""
    path = Path(path)
    with opened(path) as file:
        line, first = next(json_lines(file), (b"", None))
    if line and first is None:
        raise UserError(f"{path} is not a samples file: `adlm sample --out` writes lines of JSON")
    return Samples(path, _parse_provenance(first, path))


@contextmanager
def open_samples(path: Path, made_by: Provenance, force: bool = False) -> Iterator["SamplesWriter"]:
    """A samples file for appending, locked by this process: new, or resumed if its provenance is the same.

    With `force`, a file with other content is overwritten. A new file without samples is deleted at the end.
    """
    with reporting_os_errors(path):
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)

    def resumes(first: Any) -> bool:
        try:
            _check_provenance(first, made_by, path)
        except UserError:
            if not force:
                raise
            return False
        return True

    busy = f"{path} is being written by another process; wait for it to finish, or stop it"
    with closing(Journal(path, busy, {"made_by": asdict(made_by)}, resumes)) as journal:
        try:
            yield SamplesWriter(journal, made_by)
        finally:
            if not existed and journal.is_empty:
                path.unlink(missing_ok=True)


class SamplesWriter:
    """An open samples file; appends after the last complete line. `num_rows` samples are in it."""

    def __init__(self, journal: Journal, made_by: Provenance):
        self._journal, self._made_by, self.num_rows = journal, made_by, 0
        for sample in _parse_samples(journal.entries(), made_by, journal.path):
            self.num_rows = sample.row + 1
        journal.append()  # cuts off an incomplete line

    def first_to_sample(self, batch: int) -> int:
        """The row at which sampling continues in batches of this size.

        An incomplete batch is sampled again from its first row: rounding depends on the batch.
        """
        return self.num_rows - self.num_rows % batch if self.num_rows < self._made_by.num_rows else self.num_rows

    def append(self, batch: Sequence[Sample]) -> None:
        """Append the rows of a batch that are not yet in the file, and sync them to disk."""
        samples = [sample for sample in batch if sample.row >= self.num_rows]
        try:
            self._journal.append(*map(asdict, samples))
        except OSError as error:
            raise UserError(
                f"{self._journal.path} cannot be written: {error.strerror or error}; {self.num_rows} samples are "
                "complete; rerun the same command to resume"
            ) from None
        self.num_rows += len(samples)


def _check_provenance(first: Any, made_by: Provenance, path: Path) -> None:
    """A user error if the header is not that of a samples file with the same provenance."""
    try:
        existing = _parse_provenance(first, path)
    except UserError:
        raise UserError(f"{path} exists and is not a samples file; give another --out, or add --force") from None
    changes = differences(asdict(replace(existing, about=made_by.about)), asdict(made_by))
    if changes:
        listed = ", ".join(f"{name} {_shorten(was)} -> {_shorten(now)}" for name, (was, now) in changes.items())
        raise UserError(f"{path} holds samples with other settings: {listed}; give another --out, or add --force")


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse_provenance(content: Any, path: Path) -> Provenance:
    entries = content.get("made_by") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or entries.keys() != {each.name for each in fields(Provenance)}:
        raise UserError(f"{path} is not a samples file: its first line is not that of `adlm sample --out`")
    for name, value in entries.items():
        if not isinstance(value, PROVENANCE_TYPES.get(name, str)):
            raise UserError(f"{path} is damaged: its first line has {name} {_shorten(value)}; move the file away")
    return Provenance(**entries)


def _parse_samples(contents: Iterator[Any], made_by: Provenance, path: Path) -> Iterator[Sample]:
    names = {each.name for each in fields(Sample)}
    for row, content in enumerate(contents):
        if content is None:
            raise UserError(f"{path} is damaged: line {row + 2} is not JSON; move the file away")
        if not isinstance(content, dict) or content.keys() != names or content["row"] != row:
            raise UserError(f"{path} is damaged: line {row + 2} is not row {row}; move the file away")
        text, ids = content["text"], content["ids"]  # JSON can express lone surrogates, UTF-8 cannot
        is_valid_text = isinstance(text, str) and re.search("[\ud800-\udfff]", text) is None
        if not is_valid_text or not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise UserError(
                f"{path} is damaged: row {row} on line {row + 2} has no valid text and ids; move the file away"
            )
        if row >= made_by.num_rows:
            raise UserError(f"{path} is damaged: it has more than the {made_by.num_rows} rows of its first line")
        yield Sample(**content)
