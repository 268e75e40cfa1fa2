"""Texts to compare samples with: of a prepared folder, a file with a text a line, or other samples. Knows no metric.

As many are taken as there are samples, drawn by a seed, in their own order; rows of a prepared folder are as long as
the samples, with bos and eos, as models see them.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adlm.data.prepare.prepared import is_prepared, open_prepared
from adlm.data.sources.decoding import REPLACE_HINT
from adlm.data.sources.text_files import TextFile
from adlm.errors import UserError
from adlm.evaluation.generation.sample_tokenizer import SampleTokenizer, find_sample_tokenizer
from adlm.files import opened
from adlm.samples_file import read_samples

KINDS = "a folder of `adlm prepare`, a .jsonl or .txt with a text a line, or a file of samples"


@dataclass(frozen=True)
class Reference:
    texts: list[str]
    ids: list[list[int]] | None
    """Of a prepared folder or of samples whose tokenizer is the samples' own; there are none else."""
    about: dict[str, Any]


@dataclass(frozen=True)
class ReferenceRequest:
    """What is asked of a place."""

    num: int
    seed: int = 0
    split: str | None = None
    field: str = "text"


def read_reference(place: Path, wanted: ReferenceRequest, writer: SampleTokenizer | None, longest: int) -> Reference:
    """`num` texts of the place, or all where it has fewer; `about` says which.

    `writer` wrote the samples, if that is known, and the longest of them has `longest` ids.
    """
    if wanted.num < 1:
        raise UserError(f"--num-reference {wanted.num} must be at least 1")
    if place.is_dir():
        if not is_prepared(place):
            raise UserError(f"--reference {place} is a folder but no prepared one; give {KINDS}")
        return _of_prepared(place, wanted, writer, longest)
    if not place.exists():
        raise UserError(f"--reference {place} does not exist; give {KINDS}")
    if not place.is_file():
        raise UserError(f"--reference {place} is not a regular file; give {KINDS}")
    if wanted.split is not None:
        raise UserError(f"--split {wanted.split}: {place} is a file and has no splits; leave it out")
    return _of_samples(place, wanted, writer) if _is_samples(place) else _of_texts(place, wanted)


def _of_prepared(place: Path, wanted: ReferenceRequest, writer: SampleTokenizer | None, longest: int) -> Reference:
    prepared = open_prepared(place, sums=False)
    split = wanted.split or ("valid" if "valid" in prepared.splits else prepared.splits[-1])
    agrees = writer is not None and writer.sha256 == prepared.tokenizer.sha256
    rows = prepared.rows(split, length=longest if agrees and longest else None)
    chosen = sorted(random.Random(wanted.seed).sample(range(len(rows)), min(wanted.num, len(rows))))
    x, pad = rows.read(chosen)
    ids = [row[~hidden].tolist() for row, hidden in zip(x, pad, strict=True)] if pad is not None else x.tolist()
    return Reference(
        texts=[prepared.tokenizer.decode(row) for row in ids],
        ids=ids if agrees else None,
        about={
            "kind": "prepared",
            "place": str(place),
            "source": prepared.manifest["source"],
            "split": split,
            "row_length": rows.length,
            "tokenizer_of_samples": agrees,
            **_numbers(len(chosen), len(rows), wanted.seed),
        },
    )


def _of_samples(place: Path, wanted: ReferenceRequest, writer: SampleTokenizer | None) -> Reference:
    found = read_samples(place)
    chosen, num = _drawn(found, wanted)
    if not chosen:
        raise UserError(f"--reference {place} holds no sample yet")
    theirs = find_sample_tokenizer(found.made_by, chosen)
    agrees = writer is not None and theirs is not None and writer.sha256 == theirs.sha256
    about = {
        "kind": "samples",
        "place": str(place),
        "sha256": _sha256(place),
        "made_by": asdict(found.made_by),
        "tokenizer_of_samples": agrees,
        **_numbers(len(chosen), num, wanted.seed),
    }
    ids = [sample.ids for sample in chosen] if agrees else None
    return Reference([sample.text for sample in chosen], ids, about)


def _of_texts(place: Path, wanted: ReferenceRequest) -> Reference:
    file = TextFile(place, place.name, field=wanted.field, boundary="line")
    try:
        chosen, num = _drawn(_documents(file), wanted)
    except UserError as error:  # in the words of this command
        told = str(error).replace("data.field=...", "--field NAME").replace(REPLACE_HINT, "")
        raise UserError(f"--reference {place}: {told.rstrip()}") from None
    if not chosen:
        raise UserError(f"--reference {place} holds no text")
    about = {"kind": "texts", "place": str(place), "sha256": _sha256(place), "field": wanted.field}
    return Reference(chosen, None, about | _numbers(len(chosen), num, wanted.seed))


def _documents(file: TextFile) -> Iterable[str]:
    parts: list[str] = []
    for text, ends in file.chunks():
        parts.append(text)
        if ends:
            yield "".join(parts)
            parts = []


def _drawn(items: Iterable[Any], wanted: ReferenceRequest) -> tuple[list[Any], int]:
    """`num` of the items, each as likely as any other, in their order, without holding more; and how many there were.

    Algorithm R: item i takes a place with chance num / (i + 1).
    """
    draws, held = random.Random(wanted.seed), list[tuple[int, Any]]()
    number = -1
    for number, item in enumerate(items):
        if len(held) < wanted.num:
            held.append((number, item))
        elif (place := draws.randrange(number + 1)) < wanted.num:
            held[place] = (number, item)
    return [item for _, item in sorted(held, key=lambda pair: pair[0])], number + 1


def _numbers(taken: int, num: int, seed: int) -> dict[str, int]:
    return {"num": taken, "of": num, "seed": seed}


def _is_samples(place: Path) -> bool:
    with opened(place) as file:
        return file.read(64).lstrip().startswith(b'{"made_by"')


def _sha256(place: Path) -> str:
    with opened(place) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
