"""Texts to measure on: corpora by name, the paper's seven zero-shot sets, prepared folders, files, strings. No models.

Shapes: rows of L ids.
"""

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

import numpy as np
from numpy.typing import NDArray

from adlm.config.knobs import suggestion
from adlm.config.load import validate
from adlm.config.schema import Config, Data
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import Prepared, is_prepared, open_prepared, tokenizer_recipe
from adlm.data.prepare.shards import Tokens, TokensInMemory
from adlm.data.rows.packing import LAYOUTS, Rows, rows_of
from adlm.data.sources.chunks import split_into_chunks
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError
from adlm.tokens import Tokenizer

ZERO_SHOT = ("lambada", "ptb", "wikitext2", "lm1b", "ag_news", "pubmed", "arxiv")
STAND_IN = "-standin"
INCOMPARABLE = "no figure of a paper compares"
"""Words in the notes of a text that is not the published one."""
BLOCK = 2**13  # characters of a block of documents that depend on their neighbours, at least
TITLE = re.compile(r"\s*= [^=].*[^=] =\s")
LONGEST_TITLE = 64  # tokens


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
    unit: str = "document"
    """What the error over documents is over: document, article or block (of consecutive documents)."""


def rows_of_texts(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Rows:
    """Texts in memory, each a document, in the rows that a file with these documents would give: packed, framed."""
    eos = [] if tokenizer.vocabulary.eos_id is None else [tokenizer.vocabulary.eos_id]
    encoded = [tokenizer.encode_batch([piece.text for piece in split_into_chunks(text)]) for text in texts]
    documents = [[*chain.from_iterable(pieces), *eos] for pieces in encoded]
    if sum(map(len, documents)) == len(eos) * len(documents):
        raise UserError("the texts hold no tokens: there is nothing to measure")
    return rows_of(TokensInMemory(documents, "texts"), tokenizer.vocabulary, length, "packed")


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
    config = validate(Config(tokenizer=str(place), length=length, data=data))
    try:
        prepared = prepare(config, place / "ids", only=chosen).prepared
    except UserError as error:
        told = str(error).replace(f"tokenizer {place}", f"tokenizer {tokenizer.name}")
        raise UserError(told.replace("give data.root=", "set ADLM_DATA=")) from None
    if chosen not in prepared.splits:
        raise UserError(f"--split {chosen}: {name} has {', '.join(prepared.splits)}")
    rows = prepared.rows(chosen, length)
    if name.startswith("wikitext") and _holds_unknown(rows, tokenizer):
        notes = (
            *notes,
            f"this copy writes <unk> for rare words, it is not the raw text: {INCOMPARABLE}",
        )
    return _clustered(TextSet(name, chosen, rows.packing, rows, notes, _digest(prepared, chosen), name), prepared)


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
            f"{suggestion(name, [*CORPORA, 'zero-shot'])}"
        )
    return Data(path=name, held_out=0.0, root=root), split or "train", ()


def _prepared(folder: Path, tokenizer: Tokenizer, length: int, packing: str, split: str) -> TextSet:
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
    return _clustered(TextSet(str(folder), chosen, rows.packing, rows, digest=digest, corpus=corpus), prepared)


def _clustered(text: TextSet, prepared: Prepared) -> TextSet:
    """The text with documents that depend on their neighbours put in clusters, over which the error is then taken.

    Lines of WikiText are of articles. Sentences of Penn Treebank, and own text cut at lines or blank lines, are put in
    blocks. Taken for independent, they give an error two to three times too small (experiments/document_errors).
    """
    corpus = CORPORA.get(text.corpus)
    form = prepared.manifest["recipe"]["form"]  # of own text: field, boundary, damaged
    by_lines = corpus is None and len(form) == 3 and form[1] in ("line", "blank")
    kind = "blocks" if by_lines else "" if corpus is None else corpus.clusters
    if not kind:
        return text
    tokens = text.rows.tokens
    starts = (_title_lines if kind == "articles" else _block_starts)(tokens, prepared.tokenizer)
    clusters = np.cumsum(starts) - starts[0]
    return replace(text, rows=replace(text.rows, clusters=clusters.astype(np.int64)), unit=kind.removesuffix("s"))


def _block_starts(tokens: Tokens, tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """(D,), True at the first document of every block: the fewest consecutive documents that have BLOCK characters.

    By the number of tokens that BLOCK characters have at the beginning of the text.
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
    """(D,), True at the lines of WikiText that are the title of an article."""
    starts = np.zeros(tokens.extent.documents, bool)
    for number in range(len(starts)):
        first, last = tokens.document(number)
        line = np.empty(min(last - first, LONGEST_TITLE), np.int64)
        tokens.copy_to(line, first, first + len(line))
        starts[number] = len(line) < LONGEST_TITLE and TITLE.match(tokenizer.decode(line.tolist())) is not None
    return starts


def _digest(prepared: Prepared, split: str) -> str:
    files = [(file["name"], file["sha256"]) for file in prepared.manifest["splits"][split]["files"]]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _holds_unknown(rows: Rows, tokenizer: Tokenizer) -> bool:
    some, _ = rows.read(range(min(8, len(rows))))
    return any("<unk>" in tokenizer.decode(row.tolist()) for row in some)
