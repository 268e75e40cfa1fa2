"""Texts to measure on: named corpora, the paper's seven zero-shot sets, prepared folders, files, strings. No models.

Shapes: rows of L ids.
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adlm.config.load import validate
from adlm.config.options import suggestion
from adlm.config.schema import Config, Data, FormatName
from adlm.data.prepare.prepare import PrepareProgress, prepare
from adlm.data.prepare.prepared import Prepared, is_prepared, open_prepared, tokenizer_recipe
from adlm.data.prepare.shards import Tokens, TokensInMemory
from adlm.data.rows.packing import LAYOUTS, Rows, rows_of
from adlm.data.sources.corpora import CORPORA
from adlm.data.sources.decoding import REPLACE_HINT
from adlm.data.sources.text_files import split_into_chunks
from adlm.errors import UserError
from adlm.likelihood.settings import ZERO_SHOT
from adlm.tokens import Tokenizer

STAND_IN = "-standin"
INCOMPARABLE = "no figure of a paper compares"
"""Part of the notes of a text that differs from the published one."""
BLOCK = 2**13  # minimum characters in a block of consecutive documents
TITLE = re.compile(r"\s*= [^=].*[^=] =\s")
MAX_TITLE_TOKENS = 64


class ReportProgress(Protocol):
    """Called during a stage with its name, how much of it is done, and the total, in `unit`; by default tokens."""

    def __call__(self, name: str, done: float, total: int, unit: str = "") -> None: ...


def no_report(name: str, done: float, total: int, unit: str = "") -> None:
    pass


@dataclass(frozen=True)
class TextSet:
    """The rows of a split, and notes to print with any result on them."""

    name: str
    split: str
    packing: str
    rows: Rows
    notes: tuple[str, ...] = ()
    digest: str = ""
    """sha256 over the files of ids."""
    corpus: str = ""
    """The source of a prepared folder; otherwise the name."""
    unit: str = "document"
    """The sampling unit of the error over documents: document, article or block (of consecutive documents)."""


def rows_of_texts(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Rows:
    """Texts in memory, each a document, packed and framed into the same rows as a file with these documents."""
    eos = [] if tokenizer.vocabulary.eos_id is None else [tokenizer.vocabulary.eos_id]
    encoded = [tokenizer.encode_batch([piece.text for piece in split_into_chunks(text)]) for text in texts]
    documents = [[*chain.from_iterable(pieces), *eos] for pieces in encoded]
    if sum(map(len, documents)) == len(eos) * len(documents):
        raise UserError("the texts hold no tokens: there is nothing to measure")
    return rows_of(TokensInMemory(documents, "texts"), tokenizer.vocabulary, length, "packed")


@contextmanager
def text_sets(
    names: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    packing: str = "",
    split: str = "",
    root: str = "",
    report: ReportProgress = no_report,
    format: FormatName = "text",
    chat_template: str | None = None,
) -> Iterator[list[TextSet]]:
    """The named sets, encoded with this tokenizer. Temporary files are deleted on exit.

    `zero-shot` means the paper's seven sets in the paper's packing, unless `packing` is given (LM1B too is packed then,
    though it is padded in training). Sets that are not available are skipped, with a note on the first that is. Files
    are of a `format`; pairs are written by `chat_template`, if there is one.
    """
    if format == "pairs" and packing:
        raise UserError(f"--packing {packing} is for running text; leave it out with --format pairs")
    reader = _Reader(tokenizer, length, split, root, format, chat_template)
    requested = [each for name in names for each in (ZERO_SHOT if name == "zero-shot" else (name,))]
    optional = set(ZERO_SHOT) - set(names) if "zero-shot" in names else set()
    with ExitStack() as stack:
        found, absent = [], []
        for name in dict.fromkeys(requested):
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="adlm-")))
            try:
                packing_of_set = packing or ("packed-published" if name in optional else "")
                found.append(_text_set(name, reader, packing_of_set, folder, report))
            except UserError as error:
                if name not in optional:
                    raise
                absent.append(f"{name} is not here ({error})")
        if not found:
            raise UserError(f"none of the zero-shot sets is here: {absent[0]}")
        yield [replace(found[0], notes=(*found[0].notes, *absent)), *found[1:]]


@dataclass(frozen=True)
class _Reader:
    """How all sets of a measurement are read."""

    tokenizer: Tokenizer
    length: int
    split: str
    root: str
    format: FormatName
    chat_template: str | None


def _text_set(name: str, reader: _Reader, packing: str, folder: Path, report: ReportProgress) -> TextSet:
    tokenizer, length = reader.tokenizer, reader.length
    if is_prepared(Path(name)):
        return _prepared_text_set(Path(name), tokenizer, length, packing, reader.split)
    tokenizer.save(folder)
    data, chosen, notes = _source(name, reader.split, reader.root)
    data = Data(**{**vars(data), "packing": packing or data.packing, "format": reader.format})
    config = validate(Config(tokenizer=str(folder), length=length, data=data))

    def report_bytes(progress: PrepareProgress) -> None:
        if progress.bytes_in_all:
            report(f"tokenizing {name}", progress.bytes_read, progress.bytes_in_all, "bytes")

    try:
        outcome = prepare(config, folder / "ids", report_bytes, chosen, reader.chat_template)
    except UserError as error:
        names = {f"tokenizer {folder}": f"tokenizer {tokenizer.name}", "data.path": "--data", REPLACE_HINT: ""}
        names |= {
            "data.format": "--format",
            "give data.field=...": "texts are read from the field text; for prompts and answers add --format pairs",
        }
        message = str(error).replace("give data.root=", "set ADLM_DATA=")
        for option, name_here in names.items():
            message = message.replace(option, name_here)
        raise UserError(message.rstrip()) from None
    prepared, notes = outcome.prepared, (*notes, *outcome.notes)
    if chosen not in prepared.splits:
        raise UserError(f"--split {chosen}: {name} has {', '.join(prepared.splits)} only; leave --split out")
    rows = prepared.rows(chosen, length)
    first_rows = rows.read(range(min(8, len(rows))))[0] if name.startswith("wikitext") else ()
    if any("<unk>" in tokenizer.decode(row.tolist()) for row in first_rows):
        notes = (
            *notes,
            f"this copy writes <unk> for rare words, it is not the raw text: {INCOMPARABLE}",
        )
    notes = (*notes, *rows.notes())
    return _clustered(TextSet(name, chosen, rows.packing, rows, notes, _digest(prepared, chosen), name), prepared)


def check_names(names: Sequence[str]) -> None:
    """A user error for a name that is no text: quick, so that it comes before models are loaded."""
    for name in names:
        is_named = name in CORPORA or name == "zero-shot"
        if not is_named and not (name and (Path(name).exists() or glob.glob(name, recursive=True))):
            raise UserError(
                f"--data {name!r} is neither a named corpus (`adlm prepare --list`), nor a file or folder, nor a glob "
                f"that matches one{suggestion(name, [*CORPORA, 'zero-shot'])}"
            )


def _source(name: str, split: str, root: str) -> tuple[Data, str, tuple[str, ...]]:
    """The data config of a name, the split to read, and notes."""
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
    check_names([name])
    return Data(path=name, held_out=0.0, root=root), split or "train", ()


def _prepared_text_set(folder: Path, tokenizer: Tokenizer, length: int, packing: str, split: str) -> TextSet:
    prepared = open_prepared(folder)
    if tokenizer_recipe(prepared.tokenizer) != tokenizer_recipe(tokenizer):
        raise UserError(
            f"--data {folder} was prepared with another tokenizer than the model's; give the text itself, or prepare "
            "it with the model's folder for a tokenizer"
        )
    if packing and packing not in LAYOUTS:
        raise UserError(f"--packing {packing!r} is not one of {', '.join(LAYOUTS)}")
    chosen = split or ("valid" if "valid" in prepared.splits else prepared.splits[-1])
    rows = prepared.rows(chosen, length, packing or None)
    digest, corpus = _digest(prepared, chosen), prepared.manifest["source"]
    text = TextSet(str(folder), chosen, rows.packing, rows, rows.notes(), digest, corpus)
    return _clustered(text, prepared)


def _clustered(text: TextSet, prepared: Prepared) -> TextSet:
    """The text with dependent neighbouring documents grouped into clusters, the units of the error over documents.

    Lines of WikiText are grouped by article. Sentences of Penn Treebank, and own text split at lines or blank lines,
    are grouped into blocks. Treated as independent, their standard error is two to three times too small
    (experiments/document_errors).
    """
    corpus = CORPORA.get(text.corpus)
    form = prepared.manifest["recipe"]["form"]  # for own text: field, boundary, damaged
    split_at_lines = corpus is None and len(form) == 3 and form[1] in ("line", "blank")
    kind = "blocks" if split_at_lines else "" if corpus is None else corpus.clusters
    if not kind:
        return text
    tokens = text.rows.tokens
    starts = (_title_lines if kind == "articles" else _block_starts)(tokens, prepared.tokenizer)
    clusters = np.cumsum(starts) - starts[0]
    return replace(text, rows=replace(text.rows, clusters=clusters.astype(np.int64)), unit=kind.removesuffix("s"))


def _block_starts(tokens: Tokens, tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """(D,), True at the first document of every block: the fewest consecutive documents with BLOCK characters.

    BLOCK is converted to tokens by the characters per token at the beginning of the text.
    """
    beginning = np.empty(min(len(tokens), BLOCK), np.int64)
    tokens.copy_to(beginning, 0, len(beginning))
    size = BLOCK * len(beginning) / max(1, len(tokenizer.decode(beginning.tolist(), special_tokens=False)))
    starts = np.zeros(tokens.extent.documents, bool)
    document, end = 0, 0
    while document < len(starts):
        starts[document] = True
        document = int(np.searchsorted(tokens.ends, end + size)) + 1
        end = int(tokens.ends[min(document, len(starts)) - 1])
    return starts


def _title_lines(tokens: Tokens, tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """(D,), True at the lines of WikiText that are article titles."""
    starts = np.zeros(tokens.extent.documents, bool)
    for number in range(len(starts)):
        first, last = tokens.document(number)
        line = np.empty(min(last - first, MAX_TITLE_TOKENS), np.int64)
        tokens.copy_to(line, first, first + len(line))
        starts[number] = len(line) < MAX_TITLE_TOKENS and TITLE.match(tokenizer.decode(line.tolist())) is not None
    return starts


def _digest(prepared: Prepared, split: str) -> str:
    files = [(file["name"], file["sha256"]) for file in prepared.manifest["splits"][split]["files"]]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
