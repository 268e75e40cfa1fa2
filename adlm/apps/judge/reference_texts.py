"""Reference texts to compare samples with: from a prepared folder, a file with one text per line, or a samples file.

A seeded random subset is taken, in its original order. Rows of a prepared folder are as long as the samples and
include bos and eos, as in training. No metrics.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adlm.data.prepare.prepared import is_prepared, open_prepared
from adlm.data.sources.decoding import REPLACE_HINT
from adlm.data.sources.text_files import TextFile
from adlm.errors import UserError
from adlm.files import file_sha256, holds_samples
from adlm.samples_file import read_samples

KINDS = "a folder of `adlm prepare`, a .jsonl or .txt with a text a line, or a file of samples"


@dataclass(frozen=True)
class Reference:
    texts: list[str]
    ids: list[list[int]] | None
    """None unless the reference is a prepared folder or a samples file with the tokenizer of the samples."""
    about: dict[str, Any]


@dataclass(frozen=True)
class ReferenceRequest:
    """Which texts to take from a reference."""

    num: int
    seed: int = 0
    split: str | None = None
    field: str = "text"


def read_reference(path: Path, request: ReferenceRequest, tokenizer_sha256: str, max_tokens: int) -> Reference:
    """`num` texts of the reference at `path`, or all if it has fewer; `about` describes them.

    The sha256 is that of the samples' tokenizer; the longest sample has `max_tokens` ids.
    """
    if request.num < 1:
        raise UserError(f"--num-reference {request.num} must be at least 1")
    if path.is_dir():
        if not is_prepared(path):
            raise UserError(f"--reference {path} is a folder but no prepared one; give {KINDS}")
        return _from_prepared(path, request, tokenizer_sha256, max_tokens)
    if not path.exists():
        raise UserError(f"--reference {path} does not exist; give {KINDS}")
    if not path.is_file():
        raise UserError(f"--reference {path} is not a regular file; give {KINDS}")
    if request.split is not None:
        raise UserError(f"--split {request.split}: {path} is a file and has no splits; leave it out")
    return _from_samples(path, request, tokenizer_sha256) if holds_samples(path) else _from_texts(path, request)


def _from_prepared(path: Path, request: ReferenceRequest, tokenizer_sha256: str, max_tokens: int) -> Reference:
    prepared = open_prepared(path, sums=False)
    split = request.split or ("valid" if "valid" in prepared.splits else prepared.splits[-1])
    same_tokenizer = tokenizer_sha256 == prepared.tokenizer.sha256
    rows = prepared.rows(split, length=max_tokens if same_tokenizer and max_tokens else None)
    chosen = sorted(random.Random(request.seed).sample(range(len(rows)), min(request.num, len(rows))))
    x, pad = rows.read(chosen)
    ids = x.tolist() if pad is None else [row[~row_pad].tolist() for row, row_pad in zip(x, pad, strict=True)]
    return Reference(
        texts=[prepared.tokenizer.decode(row) for row in ids],
        ids=ids if same_tokenizer else None,
        about={
            "kind": "prepared",
            "place": str(path),
            "source": prepared.manifest["source"],
            "split": split,
            "row_length": rows.length,
            "tokenizer_of_samples": same_tokenizer,
            **_counts(len(chosen), len(rows), request.seed),
        },
    )


def _from_samples(path: Path, request: ReferenceRequest, tokenizer_sha256: str) -> Reference:
    found = read_samples(path)
    chosen, num = _random_subset(found, request)
    if not chosen:
        raise UserError(f"--reference {path} holds no sample yet")
    same_tokenizer = tokenizer_sha256 == found.made_by.tokenizer_sha256
    about = {
        "kind": "samples",
        "place": str(path),
        "sha256": file_sha256(path),
        "made_by": asdict(found.made_by),
        "tokenizer_of_samples": same_tokenizer,
        **_counts(len(chosen), num, request.seed),
    }
    ids = [sample.ids for sample in chosen] if same_tokenizer else None
    return Reference([sample.text for sample in chosen], ids, about)


def _from_texts(path: Path, request: ReferenceRequest) -> Reference:
    file = TextFile(path, path.name, field=request.field, boundary="line")
    try:
        chosen, num = _random_subset(_documents(file), request)
    except UserError as error:  # name the option of this command
        message = str(error).replace("data.field=...", "--field NAME").replace(REPLACE_HINT, "")
        raise UserError(f"--reference {path}: {message.rstrip()}") from None
    if not chosen:
        raise UserError(f"--reference {path} holds no text")
    about = {"kind": "texts", "place": str(path), "sha256": file_sha256(path), "field": request.field}
    return Reference(chosen, None, about | _counts(len(chosen), num, request.seed))


def _documents(file: TextFile) -> Iterable[str]:
    parts: list[str] = []
    for text, ends in file.chunks():
        parts.append(text)
        if ends:
            yield "".join(parts)
            parts = []


def _random_subset(items: Iterable[Any], request: ReferenceRequest) -> tuple[list[Any], int]:
    """A uniform random subset of `num` items, in their order, and the number of all items.

    Reservoir sampling [Algorithm R]: item i enters with probability num / (i + 1); at most `num` are held in memory.
    """
    rng, reservoir = random.Random(request.seed), list[tuple[int, Any]]()
    number = -1
    for number, item in enumerate(items):
        if len(reservoir) < request.num:
            reservoir.append((number, item))
        elif (slot := rng.randrange(number + 1)) < request.num:
            reservoir[slot] = (number, item)
    return [item for _, item in sorted(reservoir, key=lambda pair: pair[0])], number + 1


def _counts(taken: int, num: int, seed: int) -> dict[str, int]:
    return {"num": taken, "of": num, "seed": seed}
