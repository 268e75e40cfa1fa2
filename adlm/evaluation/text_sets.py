"""Texts to measure on: corpora by name, the paper's seven zero-shot sets, prepared folders, files. Knows no models.

Shapes: rows of L ids.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.config.knobs import instead
from adlm.config.load import check
from adlm.config.schema import Config, Data
from adlm.data.corpora import CORPORA
from adlm.data.packing import LAYOUTS, Rows, filler_of
from adlm.data.prepare import prepare
from adlm.data.prepared import Prepared, is_prepared, open_prepared, tokenizer_described
from adlm.errors import UserError
from adlm.tokens import Tokenizer

ZERO_SHOT = ("lambada", "ptb", "wikitext2", "lm1b", "ag_news", "pubmed", "arxiv")
STAND_IN = "-standin"
INCOMPARABLE = "no figure of a paper compares"
"""Words in the notes of a text that is not the published one."""


@dataclass(frozen=True)
class TextSet:
    """Rows of a split, and what must be said of them beside any figure."""

    name: str
    split: str
    packing: str
    rows: Rows
    notes: tuple[str, ...] = ()
    digest: str = ""
    """sha256 of its ids, as they lie."""
    corpus: str = ""
    """What a prepared folder was made from; else the name again."""


@dataclass(frozen=True)
class OwnTexts:
    """Texts in memory, each a document of its own, cut into rows where it is longer than one."""

    tokenizer: Tokenizer
    length: int
    texts: Sequence[str]
    pieces: list[tuple[int, list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        encoded = self.tokenizer.encode_batch(self.texts)
        cut = [
            (number, ids[start : start + self.length])
            for number, ids in enumerate(encoded)
            for start in range(0, len(ids), self.length)
        ]
        if not cut:
            raise UserError("the texts hold no tokens: there is nothing to measure")
        object.__setattr__(self, "pieces", cut)

    def __len__(self) -> int:
        return len(self.pieces)

    def read(self, rows: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        x = np.full((len(rows), self.length), filler_of(self.tokenizer.vocabulary), np.int64)
        used = np.empty(len(rows), np.int64)
        for index, row in enumerate(rows):
            ids = self.pieces[int(row)][1]
            x[index, : len(ids)], used[index] = ids, len(ids)
        return x, np.arange(self.length) >= used[:, None]

    def documents(self, rows: Any) -> NDArray[np.int64]:
        numbers = np.array([self.pieces[int(row)][0] for row in rows])
        return np.repeat(numbers[:, None], self.length, axis=1)


@contextmanager
def text_sets(
    names: Sequence[str], tokenizer: Tokenizer, length: int, packing: str = "", split: str = "", root: str = ""
) -> Iterator[list[TextSet]]:
    """The sets by these names, as ids of this tokenizer; what was written for them goes when they do.

    `zero-shot` stands for the paper's seven in the paper's packing, unless another is given (so LM1B in blocks, though
    it is padded where it is trained on); those that are not here are left out, with a note in the first that is.
    """
    wanted = [each for name in names for each in (ZERO_SHOT if name == "zero-shot" else (name,))]
    optional = set(ZERO_SHOT) - set(names) if "zero-shot" in names else set()
    with ExitStack() as stack:
        found, absent = [], []
        for name in dict.fromkeys(wanted):
            place = Path(stack.enter_context(TemporaryDirectory(prefix="adlm-")))
            try:
                cut = packing or ("packed-published" if name in optional else "")
                found.append(_text_set(name, tokenizer, length, cut, split, root, place))
            except UserError as error:
                if name not in optional:
                    raise
                absent.append(f"{name} is not here ({error})")
        if not found:
            raise UserError(f"none of the zero-shot sets is here: {absent[0]}")
        yield [_noted(found[0], absent), *found[1:]]


def _noted(text: TextSet, notes: list[str]) -> TextSet:
    return replace(text, notes=(*text.notes, *notes))


def _text_set(
    name: str, tokenizer: Tokenizer, length: int, packing: str, split: str, root: str, place: Path
) -> TextSet:
    if is_prepared(Path(name)):
        return _prepared(Path(name), tokenizer, length, packing, split)
    tokenizer.save(place)
    data, chosen, notes = _source(name, split, root)
    data = data if not packing else Data(**{**vars(data), "packing": packing})
    config = check(Config(tokenizer=str(place), length=length, data=data))
    try:
        prepared = prepare(config, place / "ids", only=chosen).prepared
    except UserError as error:
        raise UserError(str(error).replace(f"tokenizer {place}", f"tokenizer {tokenizer.name}")) from None
    if chosen not in prepared.splits:
        raise UserError(f"--split {chosen}: {name} has {', '.join(prepared.splits)}")
    rows = prepared.rows(chosen, length)
    if name.startswith("wikitext") and _holds_unknown(rows, tokenizer):
        notes = (
            *notes,
            f"this copy writes <unk> for rare words, it is not the raw text: {INCOMPARABLE}",
        )
    return TextSet(name, chosen, prepared.manifest["packing"], rows, notes, _digest(prepared, chosen), name)


def _source(name: str, split: str, root: str) -> tuple[Data, str, tuple[str, ...]]:
    """What is read under a name, which split of it, and what must be said."""
    if name in CORPORA:
        corpus, folder = CORPORA[name], Path(root or os.environ.get("ADLM_DATA", ""))
        stand_in = folder / f"{name}{STAND_IN}"
        if (
            (root or os.environ.get("ADLM_DATA"))
            and stand_in.is_dir()
            and not any((folder / each).is_dir() for each in corpus.folders)
        ):
            note = f"a stand-in for {name} ({stand_in.name}), each paragraph a document: {INCOMPARABLE}"
            return Data(path=str(stand_in), held_out=0.0, boundary="blank"), "train", (note,)
        return Data(name=name, root=root), split or corpus.zero_shot or "valid", ()
    if not name or not Path(name).exists():
        raise UserError(
            f"--data {name!r} is no corpus known by name (`adlm prepare --list`), no file and no prepared folder"
            f"{instead(name, [*CORPORA, 'zero-shot'])}"
        )
    return Data(path=name, held_out=0.0, root=root), split or "train", ()


def _prepared(folder: Path, tokenizer: Tokenizer, length: int, packing: str, split: str) -> TextSet:
    prepared = open_prepared(folder)
    if tokenizer_described(prepared.tokenizer) != tokenizer_described(tokenizer):
        raise UserError(
            f"--data {folder} was prepared with another tokenizer than the model's; give the text itself, or prepare "
            "it with the model's folder for a tokenizer"
        )
    if packing and packing not in LAYOUTS:
        raise UserError(f"--packing {packing!r} is not one of {', '.join(LAYOUTS)}")
    chosen = split or ("valid" if "valid" in prepared.splits else prepared.splits[-1])
    rows = prepared.rows(chosen, length, packing or None)
    corpus = prepared.manifest["source"]
    cut = packing or prepared.manifest["packing"]
    return TextSet(str(folder), chosen, cut, rows, digest=_digest(prepared, chosen), corpus=corpus)


def _digest(prepared: Prepared, split: str) -> str:
    files = [(file["name"], file["sha256"]) for file in prepared.manifest["splits"][split]["files"]]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _holds_unknown(rows: Rows, tokenizer: Tokenizer) -> bool:
    some, _ = rows.read(range(min(8, len(rows))))
    return any("<unk>" in tokenizer.decode(row.tolist()) for row in some)
