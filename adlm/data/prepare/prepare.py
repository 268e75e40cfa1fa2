"""Tokenises the documents of a source into shards: in parallel, resumably and atomically.

The shards are written to OUT.preparing, which replaces OUT at the end. After every 16 MB of text the files are synced
and a line is appended to a journal: the extent of each split, and the position in the source. An interrupted run
resumes from the last line, and ends with the same bytes as an uninterrupted run.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from adlm.chat.template import PLAIN_TEMPLATE, encode_conversation
from adlm.config.load import init_template
from adlm.config.schema import Config
from adlm.data.prepare.labels import LABELS, label_tokens
from adlm.data.prepare.prepared import (
    FORMAT,
    JournalEntry,
    Prepared,
    append_entry,
    check_replaceable,
    check_work_folder,
    is_prepared,
    marks_of,
    open_prepared,
    opened_journal,
    publish,
    read_manifest,
    remove_leftovers,
    resolve_output,
    tokenizer_recipe,
    work_folder,
    write_manifest,
)
from adlm.data.prepare.shards import SPLITS, Extent, Ids, ShardWriter, Tokens, dtype_for, list_files, remove_empty
from adlm.data.rows.packing import PAIRS, rows_of, text_width
from adlm.data.sources.conversations import Conversation
from adlm.data.sources.source import Source, resolve_source, source_recipe
from adlm.errors import UserError
from adlm.files import Journal
from adlm.tokens import Tokenizer, bpe_size, load_tokenizer, train_bpe

BATCH = 2**21  # characters encoded at once
COMMIT = 2**24  # characters between two lines of the journal
TOKENIZER_TEXT = 2**26  # characters on which a BPE tokenizer is trained
NUM_PENDING = 3  # batches that are encoded while others are read and written


class RowSettings(TypedDict):
    """Default row length and packing of a prepared folder."""

    length: int
    packing: str


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of a run, for display."""

    bytes_read: int
    bytes_in_all: int
    """Total size of the files as stored; 0 if unknown."""
    characters: int
    tokens: int


@dataclass(frozen=True)
class PrepareOutcome:
    """A prepared folder, and what was done to obtain it."""

    prepared: Prepared
    how: str
    """prepared, resumed, reused, or prepared anew (because the source, the tokenizer or an option had changed)."""
    missing: tuple[str, ...]
    """Splits of a named corpus without files."""
    notes: tuple[str, ...]
    """`Source.notes`."""


@dataclass(frozen=True)
class EncodingBatch:
    """Chunks that are encoded together, and the position in the source after them."""

    texts: list[str]
    splits: list[str]
    ends: list[bool]
    part: int
    pieces: int
    documents: int
    bytes_read: int


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents of one split as ids."""

    ids: Ids
    ends: list[int]
    """The positions at which documents end."""
    is_marked: list[bool]
    """For each id whether it is an answer, or labelled; empty of text that has neither."""


def prepare(
    config: Config,
    out: Path,
    report: Callable[[PrepareProgress], None] = lambda progress: None,
    only: str = "",
    chat_template: str | None = None,
) -> PrepareOutcome:
    """Prepare the data of the config in `out`: build it, resume an interrupted run, or reuse what is there.

    `only` names one split: parts of other splits are not read. Pairs are written by `chat_template`, by default that of
    the model `init`, or plainly where that has none.
    """
    out = resolve_output(out)
    work = work_folder(out)
    check_work_folder(work)
    source = resolve_source(config.data, without=(out, work))
    if only:
        source = replace(source, parts=tuple(part for part in source.parts if part.split in ("", only)))
    size = bpe_size(config.tokenizer)
    tokenizer = load_tokenizer(config.tokenizer) if size is None else train_bpe(_tokenizer_text(source), size)
    text_width(tokenizer.vocabulary, config.length)  # raises if the length leaves no room for text
    template = None
    if config.data.format == "pairs":
        template = chat_template or (init_template(config.init) if config.init else None) or PLAIN_TEMPLATE
    recipe = recipe_of(source, tokenizer, config, template)
    settings: RowSettings = {"length": config.length, "packing": source.packing}
    how = "prepared"
    if is_prepared(out):
        manifest = read_manifest(out)
        remove_leftovers(out, work)
        if manifest["recipe"] == recipe:
            prepared = _with_settings(open_prepared(out), settings)
            return PrepareOutcome(prepared, "reused", source.missing, source.notes())
        check_replaceable(out, manifest, source.title)
        how = "prepared anew"
    with opened_journal(work, out, recipe) as (journal, start):
        if start != JournalEntry():
            how = "resumed"
        end = _tokenise(source, tokenizer, template, recipe, work, journal, start, settings, report)
        splits = [split for split in SPLITS if end.splits.get(split, Extent()).tokens]
        files = {split: {**asdict(end.splits[split]), "files": list_files(work / split)} for split in splits}
        remove_empty(work, splits)
        tokenizer.save(work)
        head = {"format": FORMAT, "source": source.title, **settings}
        write_manifest(work, {**head, "recipe": recipe, "splits": files})
        publish(work, out)
    return PrepareOutcome(open_prepared(out, sums=False), how, source.missing, source.notes())


def check_source(config: Config, folder: Path, before: Config) -> None:
    """Refuse if the text or tokenizer differs from what `folder` was prepared from with the config `before`.

    Writes nothing. A BPE tokenizer is not trained again: the same text and option give the same tokenizer.
    """
    if config.tokenizer != before.tokenizer and bpe_size(config.tokenizer) is not None:
        raise UserError(f"{folder} was prepared with tokenizer={before.tokenizer}, not {config.tokenizer}; give that")
    recipe = read_manifest(folder)["recipe"]
    instead = f"add data.prepared={folder} to resume with the text as it was prepared"
    try:
        now = source_recipe(resolve_source(config.data, without=(folder.resolve(), work_folder(folder.resolve()))))
        if bpe_size(config.tokenizer) is None and not config.init:  # of `init`, the run has its own copy
            now |= tokenizer_recipe(load_tokenizer(config.tokenizer))
    except UserError as error:
        raise UserError(f"{error}; {instead}") from None
    old_parts, parts = recipe["parts"], now["parts"]
    changed = next(
        (entry["name"] for entry in (*parts, *old_parts) if entry not in parts or entry not in old_parts), None
    )
    if changed is not None:
        raise UserError(f"{changed} is not what {folder} was prepared from; put it back as it was, or {instead}")
    if key := next((key for key, value in now.items() if recipe.get(key) != value), None):
        raise UserError(f"{folder} was prepared with another {key} than now; give the same options, or {instead}")


def _tokenizer_text(source: Source) -> Iterator[str]:
    """The first TOKENIZER_TEXT characters of the training split, on which a BPE tokenizer is trained."""
    characters = 0
    with closing(_batches(source, JournalEntry())) as batches:
        for batch in batches:
            for text, split in zip(batch.texts, batch.splits, strict=True):
                if split == "train" and characters < TOKENIZER_TEXT:
                    characters += len(text)
                    yield Conversation.of_document(text).text if source.packing == PAIRS else text
            if characters >= TOKENIZER_TEXT:
                return


def recipe_of(source: Source, tokenizer: Tokenizer, config: Config, template: str | None = None) -> dict[str, Any]:
    """Everything that determines the bytes of the shards: equal recipes give equal shards."""
    return {
        "format": FORMAT,
        **source_recipe(source),
        **tokenizer_recipe(tokenizer),
        "dtype": dtype_for(tokenizer.vocabulary.size, config.data.dtype).name,
        **({} if template is None else {"chat_template": template_sha256(template)}),
        **({} if config.data.labels == "none" else {"labels": config.data.labels}),
    }


def template_sha256(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()


def _tokenise(
    source: Source,
    tokenizer: Tokenizer,
    template: str | None,
    recipe: dict[str, Any],
    work: Path,
    journal: Journal,
    start: JournalEntry,
    settings: RowSettings,
    report: Callable[[PrepareProgress], None],
) -> JournalEntry:
    """Write the ids of everything after `start` to the working folder; returns the final journal entry."""
    dtype = np.dtype(recipe["dtype"])
    writers = {split: ShardWriter(work / split, dtype, extent) for split, extent in start.splits.items()}
    entry, characters, uncommitted = start, 0, 0
    sizes = [part.size for part in source.parts]
    total_bytes = 0 if None in sizes else sum(size or 0 for size in sizes)
    encode = partial(_encode, tokenizer=tokenizer, template=template, labels=recipe.get("labels", "none"), dtype=dtype)
    with closing(_batches(source, start)) as batches, closing(_encode_all(batches, encode)) as encoded:
        for batch, documents in encoded:
            for split, found in documents.items():
                if split not in writers:
                    writers[split] = ShardWriter(work / split, dtype, Extent())
                writers[split].append(found.ids, found.ends, marks_of(recipe), found.is_marked)
            extents = {split: writer.extent for split, writer in writers.items()}
            entry = JournalEntry(batch.part, batch.pieces, batch.documents, extents)
            num_read = sum(map(len, batch.texts))
            characters, uncommitted = characters + num_read, uncommitted + num_read
            if uncommitted >= COMMIT:
                append_entry(journal, entry, writers.values())
                uncommitted = 0
            num_tokens = sum(extent.tokens for extent in extents.values())
            report(PrepareProgress(batch.bytes_read, total_bytes, characters, num_tokens))
    _check_not_empty(source, entry)
    for split, extent in entry.splits.items():
        rows_of(Tokens(work / split, dtype, extent), tokenizer.vocabulary, **settings)  # raises if there are no rows
    append_entry(journal, entry, writers.values())
    return entry


def _check_not_empty(source: Source, entry: JournalEntry) -> None:
    if not any(extent.tokens for extent in entry.splits.values()):
        raise UserError(
            f"{source.title} holds no text: its {len(source.parts)} file(s) have {entry.documents} documents"
        )
    divided = source.division.share and any(not part.split for part in source.parts)
    if divided and not entry.splits.get("train", Extent()).tokens:
        raise UserError(
            f"{source.title}: all of its {entry.documents:,} documents were drawn to be held out, and none is left to "
            f"train on; try data.held_out=0 or another data.seed than {source.division.seed}"
        )


def _batches(source: Source, start: JournalEntry) -> Generator[EncodingBatch, None, None]:
    """The chunks after `start`, in batches of about BATCH characters."""
    documents, before = start.documents, sum(part.size or 0 for part in source.parts[: start.part])
    texts: list[str] = []
    splits: list[str] = []
    ends: list[bool] = []
    size, seen = 0, 0

    def on_progress(num_bytes: int) -> None:
        nonlocal seen
        seen = num_bytes

    for index, part in enumerate(source.parts[start.part :], start.part):
        skipped = start.pieces if index == start.part else 0
        split = source.split_of(part, documents)
        with closing(part.chunks(on_progress)) as chunks:
            for number, (text, last) in enumerate(islice(chunks, skipped, None), skipped + 1):
                texts.append(text)
                splits.append(split)
                ends.append(last)
                size += len(text) + 1  # + 1 so that empty documents fill a batch too
                if last:
                    documents += 1
                    split = source.split_of(part, documents)
                if size >= BATCH:
                    yield EncodingBatch(texts, splits, ends, index, number, documents, before + seen)
                    texts, splits, ends, size = [], [], [], 0
        before, seen = before + (part.size or 0), 0
    if texts:
        yield EncodingBatch(texts, splits, ends, len(source.parts), 0, documents, before)


def _encode_all(
    batches: Iterator[EncodingBatch], encode: Callable[[EncodingBatch], dict[str, EncodedDocuments]]
) -> Generator[tuple[EncodingBatch, dict[str, EncodedDocuments]], None, None]:
    """Each batch in order, with the ids of each split; batches are encoded while others are read and written."""
    pending: deque[tuple[EncodingBatch, Future[dict[str, EncodedDocuments]]]] = deque()
    with ThreadPoolExecutor(2) as threads:  # the encoder uses every core; a second thread overlaps the Python code
        try:
            for batch in batches:
                pending.append((batch, threads.submit(encode, batch)))
                if len(pending) >= NUM_PENDING:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _encode(
    batch: EncodingBatch, tokenizer: Tokenizer, template: str | None, labels: str, dtype: np.dtype[Any]
) -> dict[str, EncodedDocuments]:
    """The documents of each split: running text with eos after each, which is never labelled, or conversations."""
    encoded: Iterable[tuple[list[int], list[bool]]]
    eos = [] if tokenizer.vocabulary.eos_id is None or template is not None else [tokenizer.vocabulary.eos_id]
    eos_marks: list[bool] = []
    if template is not None:
        encoded = (_encode_conversation(document, tokenizer, template) for document in batch.texts)
    elif labels == "none":
        encoded = ((row, []) for row in tokenizer.encode_batch(batch.texts))
    else:
        eos_marks = [False] * len(eos)
        with_offsets = zip(batch.texts, tokenizer.encode_with_offsets(batch.texts), strict=True)
        encoded = (
            (row, label_tokens(LABELS[labels](text), offsets, len(text)).tolist())
            for text, (row, offsets) in with_offsets
        )
    ids: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    marks: dict[str, list[bool]] = {}
    for split, (row, is_marked), last in zip(batch.splits, encoded, batch.ends, strict=True):
        flat = ids.setdefault(split, [])
        flat += row
        marks.setdefault(split, []).extend(is_marked)
        if last:
            flat += eos
            marks[split] += eos_marks
            ends.setdefault(split, []).append(len(flat))
    return {
        split: EncodedDocuments(np.array(flat, dtype), ends.get(split, []), marks[split]) for split, flat in ids.items()
    }


def _encode_conversation(document: str, tokenizer: Tokenizer, template: str) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and which the assistant writes; without bos, which rows begin with."""
    where, messages = Conversation.of_document(document)
    try:
        ids, is_answer = encode_conversation(tokenizer, template, messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    begins = len(tokenizer.vocabulary.row_boundaries[0]) if ids[0] == tokenizer.vocabulary.bos_id else 0
    return ids[begins:], is_answer[begins:]


def _with_settings(prepared: Prepared, settings: RowSettings) -> Prepared:
    """The same shards with other default row settings, which are saved in the manifest if it is writable."""
    for split in prepared.splits:
        prepared.rows(split, **settings)  # raises if there are no rows
    if all(prepared.manifest[key] == value for key, value in settings.items()):
        return prepared
    manifest = {**prepared.manifest, **settings}
    with suppress(OSError, UserError):
        write_manifest(prepared.folder, manifest)
    return replace(prepared, manifest=manifest)
