"""What a metric card is computed from: the settings, the samples, the reference texts and given features.

Imports no torch, for `adlm judge --help`. Everything that can be checked without a model is checked here. The
reference is a prepared folder, a file with one text per line, or a samples file; a seeded random subset is taken, in
its original order. Rows of a prepared folder are as long as the samples and include bos and eos, as in training.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from adlm.apps.judge.mauve import Features, FeaturiserInfo, check_enough, check_installed, read_features
from adlm.data.prepare.prepared import is_prepared, open_prepared
from adlm.data.sources.decoding import REPLACE_HINT
from adlm.data.sources.text_files import TextFile
from adlm.errors import UserError
from adlm.files import file_sha256, holds_samples
from adlm.request import Request, option
from adlm.samples_file import read_samples

Metric = Literal["perplexity", "mauve", "entropy", "diversity"]
METRICS: tuple[Metric, ...] = get_args(Metric)
IdsOf = Literal["auto", "retokenised", "as-sampled"]
Pooling = Literal["last", "mean"]
Eos = Literal["published", "first", "all", "closing"]
Start = Literal["given", "bos"]

# Which tokens are counted, by name; a first token that is given never is.
EOS: dict[Eos, str] = {
    "published": "every token that is not eos, and the first eos (of a text that begins with one, no other)",
    "first": "up to and including the first eos after the first token",
    "all": "every token, each eos too",
    "closing": "every token but an eos that ends the text, whose nats are added and which is not counted",
}
START: dict[Start, str] = {
    "given": "the text's first token is given and not counted, as published",
    "bos": "every window begins with the judge's bos, as in its training, and every token of the text counts",
}
KINDS = "a folder of `adlm prepare`, a .jsonl or .txt with a text a line, or a file of samples"
REFERENCE, PERPLEXITY, MAUVE = "reference texts", "generative perplexity", "MAUVE"


@dataclass(frozen=True)
class JudgeSettings(Request):
    """Every setting that the metrics of a card depend on."""

    metrics: tuple[Metric, ...] = option(
        f"comma-separated subset of {','.join(METRICS)} (default: all)", METRICS, commas=True, metavar="LIST"
    )
    device: str = option("auto, cuda or cpu (default: auto, a GPU if available)", "auto")
    batch: int | None = option(
        "texts per batch (default: 4, on a GPU 16); does not change the results", None, minimum=1
    )
    reference: Path | None = option(
        "a prepared folder, a file with one text per line (.txt, .jsonl), or a samples file",
        None,
        group=REFERENCE,
        metavar="DATA",
    )
    split: str | None = option("split of a prepared folder (default: valid)", None, group=REFERENCE)
    field: str = option("field of a .jsonl file", "text", group=REFERENCE)
    num_reference: int | None = option(
        "number of reference texts (default: as many as samples)", None, group=REFERENCE, minimum=1
    )
    reference_seed: int = option("seed that selects the reference texts", 0, group=REFERENCE)
    judge_reference: bool = option(
        "also report perplexity, entropy and diversity of the reference", False, group=REFERENCE
    )
    model: str = option(
        "Hugging Face name or folder, a .gguf file, or an AR or A2R model folder",
        "gpt2-large",
        group=PERPLEXITY,
        metavar="JUDGE",
    )
    eos: Eos | None = option(
        "(default: closing for an adlm model, published for a Hugging Face model)", None, group=PERPLEXITY, choices=EOS
    )
    start: Start | None = option(
        "(default: bos for an adlm model, given for a Hugging Face model)", None, group=PERPLEXITY, choices=START
    )
    ids: IdsOf = option(
        "ids the judge reads: the text retokenised, as published, or the ids as\n"
        "sampled (default: auto, as-sampled for an adlm model with the same tokenizer)",
        "auto",
        group=PERPLEXITY,
    )
    max_tokens: int | None = option(
        "truncate texts to N tokens (default: no truncation; published: the model's length)",
        None,
        group=PERPLEXITY,
        minimum=1,
    )
    context: int | None = option("maximum context window (default: the judge's)", None, group=PERPLEXITY, minimum=1)
    features: str = option("Hugging Face name or folder, or minilm", "gpt2-large", group=MAUVE)
    pooling: Pooling | None = option(
        "pooling of the last layer: last token or mean (default: last; minilm: mean)", None, group=MAUVE
    )
    given_features: tuple[Path, Path] | None = option(
        "precomputed features", None, group=MAUVE, metavar=("SAMPLES.npy", "REFERENCE.npy")
    )
    seeds: int = option(
        "number of clusterings, with seeds 25, 26, ...",
        5,
        group=MAUVE,
        minimum=1,
        maximum=1_000,
        remedy="5 are usual, and each takes seconds or more",
    )
    clusters: int | None = option("clusters per clustering (default: a tenth of the samples)", None, group=MAUVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metrics:
            raise UserError(f"--metrics is empty; give a subset of {','.join(METRICS)}")


@dataclass(frozen=True)
class TextCollection:
    """The samples, or the reference texts."""

    texts: list[str]
    ids: list[list[int]] | None
    """By the tokenizer of the samples; None for a reference with another tokenizer or none."""
    about: dict[str, Any]
    """Where they are from: a section of the card."""


@dataclass(frozen=True)
class FeaturePair:
    """Features of the samples and of the reference by one featuriser; empty texts are left out."""

    samples: Features
    reference: Features
    featuriser: FeaturiserInfo
    num_empty: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class JudgeInputs:
    settings: JudgeSettings
    samples: TextCollection
    reference: TextCollection | None
    given_features: FeaturePair | None


def read_inputs(samples_file: Path, settings: JudgeSettings) -> JudgeInputs:
    """Read and check the samples file and what the settings name."""
    file = read_samples(samples_file)
    rows = list(file)
    if not rows:
        raise UserError(f"{samples_file} holds no sample yet")
    about = {
        "file": str(file.path),
        "sha256": file_sha256(file.path),
        "num": len(rows),
        "of": file.made_by.num_rows,
        "num_empty": sum(not row.text for row in rows),
        "tokenizer": {"name": file.made_by.tokenizer, "sha256": file.made_by.tokenizer_sha256},
        "made_by": asdict(file.made_by),
    }
    samples = TextCollection([row.text for row in rows], [row.ids for row in rows], about)
    needs_features = "mauve" in settings.metrics
    if settings.reference is not None:
        max_tokens = max(len(row.ids) for row in rows)
        reference = read_reference(settings, len(rows), file.made_by.tokenizer_sha256, max_tokens)
    elif needs_features and settings.given_features is None:
        without_mauve = ",".join(metric for metric in settings.metrics if metric != "mauve")
        raise UserError(
            "--reference is not given, and MAUVE compares the samples with one: give a folder of `adlm prepare` or a "
            f"file of texts, or leave it out: --metrics {without_mauve or 'perplexity'}"
        )
    elif settings.judge_reference:
        raise UserError("--judge-reference needs a --reference to judge")
    else:
        reference = None
    given = None
    if needs_features:
        check_installed()
        if settings.given_features is not None:
            given = _read_feature_pair(*settings.given_features, len(rows), settings.clusters)
        else:
            assert reference is not None
            check_enough(sum(map(bool, samples.texts)), sum(map(bool, reference.texts)), settings.clusters)
    return JudgeInputs(settings, samples, reference, given)


def _read_feature_pair(first: Path, second: Path, num_samples: int, clusters: int | None) -> FeaturePair:
    of_samples = read_features(first, num_samples, "samples")
    of_reference = read_features(second, None, "reference texts")
    if of_samples.shape[1] != of_reference.shape[1]:
        widths = f"{first} has {of_samples.shape[1]} numbers a text and {second} {of_reference.shape[1]}"
        raise UserError(f"--given-features: {widths}; use one featuriser for both")
    check_enough(len(of_samples), len(of_reference), clusters)
    digest = hashlib.sha256(of_samples.tobytes() + of_reference.tobytes()).hexdigest()
    name = f"given features {first.name} and {second.name}"
    return FeaturePair(of_samples, of_reference, FeaturiserInfo(name, digest, "given", None, "given", "float32"))


def read_reference(settings: JudgeSettings, num_samples: int, tokenizer_sha256: str, max_tokens: int) -> TextCollection:
    """`num_reference` texts, by default as many as samples, or all if there are fewer.

    The sha256 is that of the samples' tokenizer; the longest sample has `max_tokens` ids.
    """
    path, num = settings.reference, settings.num_reference or num_samples
    assert path is not None
    if path.is_dir():
        if not is_prepared(path):
            raise UserError(f"--reference {path} is a folder but no prepared one; give {KINDS}")
        return _from_prepared(path, settings, num, tokenizer_sha256, max_tokens)
    if not path.exists():
        raise UserError(f"--reference {path} does not exist; give {KINDS}")
    if not path.is_file():
        raise UserError(f"--reference {path} is not a regular file; give {KINDS}")
    if settings.split is not None:
        raise UserError(f"--split {settings.split}: {path} is a file and has no splits; leave it out")
    if holds_samples(path):
        return _from_samples(path, settings, num, tokenizer_sha256)
    return _from_texts(path, settings, num)


def _from_prepared(
    path: Path, settings: JudgeSettings, num: int, tokenizer_sha256: str, max_tokens: int
) -> TextCollection:
    prepared = open_prepared(path, sums=False)
    split = settings.split or ("valid" if "valid" in prepared.splits else prepared.splits[-1])
    same_tokenizer = tokenizer_sha256 == prepared.tokenizer.sha256
    rows = prepared.rows(split, length=max_tokens if same_tokenizer and max_tokens else None)
    chosen = sorted(random.Random(settings.reference_seed).sample(range(len(rows)), min(num, len(rows))))
    x, pad = rows.read(chosen)
    ids = x.tolist() if pad is None else [row[~row_pad].tolist() for row, row_pad in zip(x, pad, strict=True)]
    return TextCollection(
        texts=[prepared.tokenizer.decode(row) for row in ids],
        ids=ids if same_tokenizer else None,
        about={
            "kind": "prepared",
            "place": str(path),
            "source": prepared.manifest["source"],
            "split": split,
            "row_length": rows.length,
            "tokenizer_of_samples": same_tokenizer,
            **_counts(len(chosen), len(rows), settings.reference_seed),
        },
    )


def _from_samples(path: Path, settings: JudgeSettings, num: int, tokenizer_sha256: str) -> TextCollection:
    found = read_samples(path)
    chosen, num_in_all = _random_subset(found, num, settings.reference_seed)
    if not chosen:
        raise UserError(f"--reference {path} holds no sample yet")
    same_tokenizer = tokenizer_sha256 == found.made_by.tokenizer_sha256
    about = {
        "kind": "samples",
        "place": str(path),
        "sha256": file_sha256(path),
        "made_by": asdict(found.made_by),
        "tokenizer_of_samples": same_tokenizer,
        **_counts(len(chosen), num_in_all, settings.reference_seed),
    }
    ids = [sample.ids for sample in chosen] if same_tokenizer else None
    return TextCollection([sample.text for sample in chosen], ids, about)


def _from_texts(path: Path, settings: JudgeSettings, num: int) -> TextCollection:
    file = TextFile(path, path.name, field=settings.field, boundary="line", whole=True)
    try:
        chosen, num_in_all = _random_subset((chunk.text for chunk in file.chunks()), num, settings.reference_seed)
    except UserError as error:  # name the option of this command
        message = str(error).replace("data.field=...", "--field NAME").replace(REPLACE_HINT, "")
        raise UserError(f"--reference {path}: {message.rstrip()}") from None
    if not chosen:
        raise UserError(f"--reference {path} holds no text")
    about = {"kind": "texts", "place": str(path), "sha256": file_sha256(path), "field": settings.field}
    return TextCollection(chosen, None, about | _counts(len(chosen), num_in_all, settings.reference_seed))


def _random_subset(items: Iterable[Any], num: int, seed: int) -> tuple[list[Any], int]:
    """A uniform random subset of `num` items, in their order, and the number of all items.

    Reservoir sampling [Algorithm R]: item i enters with probability num / (i + 1); at most `num` are held in memory.
    """
    rng, reservoir = random.Random(seed), list[tuple[int, Any]]()
    number = -1
    for number, item in enumerate(items):
        if len(reservoir) < num:
            reservoir.append((number, item))
        elif (slot := rng.randrange(number + 1)) < num:
            reservoir[slot] = (number, item)
    return [item for _, item in sorted(reservoir, key=lambda pair: pair[0])], number + 1


def _counts(taken: int, num: int, seed: int) -> dict[str, int]:
    return {"num": taken, "of": num, "seed": seed}
