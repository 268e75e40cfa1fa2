"""Documents -> ids -> shards, once: in parallel, resumable, whole or not at all. Knows no rows.

Work goes on in OUT.preparing, which takes the place of OUT when all is done. Every 16 MB of text the files are synced
and a line is added to a journal: how far each split has got, and how much of which part that took. A run that was cut
off goes on from the last such line, and since what a document becomes depends on nothing else, to the same bytes.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from adlm.config.schema import Config
from adlm.data.prepare.journal import JournalEntry, append_entry, locked, resume_entry
from adlm.data.prepare.output_folder import (
    check_replaceable,
    check_work_folder,
    publish,
    remove_leftovers,
    resolve_output,
    work_folder,
)
from adlm.data.prepare.prepared import (
    FORMAT,
    Prepared,
    is_prepared,
    open_prepared,
    read_manifest,
    tokenizer_recipe,
    write_manifest,
)
from adlm.data.prepare.shards import SPLITS, Extent, Ids, ShardWriter, Tokens, dtype_for, list_files, remove_empty
from adlm.data.rows.packing import rows_of, text_width
from adlm.data.sources.source import Source, resolve_source, source_recipe
from adlm.errors import UserError
from adlm.files import remove_parts
from adlm.tokens import Tokenizer, bpe_size, load_tokenizer, train_bpe

BATCH = 2**21  # characters encoded at once
COMMIT = 2**24  # characters between two lines of the journal
LEARNT = 2**26  # characters that a tokenizer is learnt from
AHEAD = 3  # batches being encoded while others are read and written


class View(TypedDict):
    """How a prepared split is cut into rows, unless somebody asks for another way."""

    length: int
    packing: str


@dataclass(frozen=True)
class PrepareProgress:
    """How far a run has got."""

    bytes_read: int
    bytes_in_all: int
    """Of the files as they lie; 0 where nobody knows."""
    characters: int
    tokens: int


@dataclass(frozen=True)
class PrepareOutcome:
    """A prepared folder, and how it came about."""

    prepared: Prepared
    how: str
    """prepared, resumed, reused, or prepared anew (because the source, the tokenizer or a knob had changed)."""
    missing: tuple[str, ...]
    """Splits of a named corpus that are not there."""


@dataclass(frozen=True)
class EncodingBatch:
    """Pieces to be encoded together, and the place after them."""

    texts: list[str]
    splits: list[str]
    ends: list[bool]
    part: int
    pieces: int
    documents: int
    bytes_read: int


def prepare(
    config: Config, out: Path, report: Callable[[PrepareProgress], None] = lambda progress: None, only: str = ""
) -> PrepareOutcome:
    """Make `out` hold the prepared data that the config asks for: build it, finish it, or find it there already.

    `only` is one split: parts that are of another are not read.
    """
    out = resolve_output(out)
    work = work_folder(out)
    check_work_folder(work)
    plan = resolve_source(config.data, without=(out, work))
    if only:
        plan = replace(plan, parts=tuple(part for part in plan.parts if part.split in ("", only)))
    tokenizer = _tokenizer(config, plan)
    text_width(tokenizer.vocabulary, config.length)  # or it says that a row holds nothing
    recipe = recipe_of(plan, tokenizer, config)
    view: View = {"length": config.length, "packing": plan.packing}
    how = "prepared"
    if is_prepared(out):
        manifest = read_manifest(out)
        remove_leftovers(out, work)
        if manifest["recipe"] == recipe:
            return PrepareOutcome(_seen_as(open_prepared(out), view), "reused", plan.missing)
        check_replaceable(out, manifest, plan.title)
        how = "prepared anew"
    with locked(work, out):
        remove_parts(out.parent, out.name)
        remove_parts(work)
        start = resume_entry(work, recipe)
        if start != JournalEntry():
            how = "resumed"
        end = _tokenise(plan, tokenizer, recipe, work, start, view, report)
        _finish(work, out, {"format": FORMAT, "source": plan.title, **view, "recipe": recipe}, end, tokenizer)
    return PrepareOutcome(open_prepared(out, sums=False), how, plan.missing)


def check_source(config: Config, folder: Path, before: Config) -> None:
    """Refuse where the text or the tokenizer is not what a folder was prepared from by the knobs `before`.

    Writes nothing. A tokenizer that is learnt is not learnt again: the same text and the same knob give the same one.
    """
    if config.tokenizer != before.tokenizer and bpe_size(config.tokenizer) is not None:
        raise UserError(f"{folder} was prepared with tokenizer={before.tokenizer}, not {config.tokenizer}; give that")
    recipe = read_manifest(folder)["recipe"]
    instead = f"add data.prepared={folder} to resume with the text as it was prepared"
    try:
        now = source_recipe(resolve_source(config.data, without=(folder.resolve(), work_folder(folder.resolve()))))
        if bpe_size(config.tokenizer) is None:
            now |= tokenizer_recipe(load_tokenizer(config.tokenizer))
    except UserError as error:
        raise UserError(f"{error}; {instead}") from None
    was, parts = recipe["parts"], now["parts"]
    changed = next((entry["name"] for entry in (*parts, *was) if entry not in parts or entry not in was), None)
    if changed is not None:
        raise UserError(f"{changed} is not what {folder} was prepared from; put it back as it was, or {instead}")
    if other := next((knob for knob, value in now.items() if recipe.get(knob) != value), None):
        raise UserError(f"{folder} was prepared with another {other} than now; give the same knobs, or {instead}")


def _tokenizer(config: Config, plan: Source) -> Tokenizer:
    """The tokenizer by its name, or one learnt from the beginning of what is trained on."""
    size = bpe_size(config.tokenizer)
    return load_tokenizer(config.tokenizer) if size is None else train_bpe(_beginning(plan), size)


def _beginning(plan: Source) -> Iterator[str]:
    """The first LEARNT characters of the training split."""
    start, characters = JournalEntry(), 0
    with closing(_batches(plan, start)) as batches:
        for batch in batches:
            for text, split in zip(batch.texts, batch.splits, strict=True):
                if split == "train" and characters < LEARNT:
                    characters += len(text)
                    yield text
            if characters >= LEARNT:
                return


def recipe_of(plan: Source, tokenizer: Tokenizer, config: Config) -> dict[str, Any]:
    """Everything that decides the bytes of the shards: two runs of one recipe write the same."""
    return {
        "format": FORMAT,
        **source_recipe(plan),
        **tokenizer_recipe(tokenizer),
        "dtype": dtype_for(tokenizer.vocabulary.size, config.data.dtype).name,
    }


def _tokenise(
    plan: Source,
    tokenizer: Tokenizer,
    recipe: dict[str, Any],
    work: Path,
    start: JournalEntry,
    view: View,
    report: Callable[[PrepareProgress], None],
) -> JournalEntry:
    """Everything after `start`, written to the working folder."""
    dtype = np.dtype(recipe["dtype"])
    writers = {split: ShardWriter(work / split, dtype, extent) for split, extent in start.splits.items()}
    place, characters, uncommitted = start, 0, 0
    sizes = [part.size for part in plan.parts]
    in_all = 0 if None in sizes else sum(size or 0 for size in sizes)
    with closing(_batches(plan, start)) as batches, closing(_encoded(batches, tokenizer, dtype)) as encoded:
        for batch, ids_of in encoded:
            for split, (ids, ends) in ids_of.items():
                if split not in writers:
                    writers[split] = ShardWriter(work / split, dtype, Extent())
                writers[split].append(ids, ends)
            extents = {split: writer.extent for split, writer in writers.items()}
            place = JournalEntry(batch.part, batch.pieces, batch.documents, extents)
            read = sum(map(len, batch.texts))
            characters, uncommitted = characters + read, uncommitted + read
            if uncommitted >= COMMIT:
                append_entry(work, place, writers.values())
                uncommitted = 0
            report(
                PrepareProgress(batch.bytes_read, in_all, characters, sum(extent.tokens for extent in extents.values()))
            )
    if not any(extent.tokens for extent in place.splits.values()):
        raise UserError(f"{plan.title} holds no text: its {len(plan.parts)} file(s) have {place.documents} documents")
    divided = plan.division.share and any(not part.split for part in plan.parts)
    if divided and not place.splits.get("train", Extent()).tokens:
        raise UserError(
            f"{plan.title}: all of its {place.documents:,} documents were drawn to be held out, and none is left to "
            f"train on; try data.held_out=0 or another data.seed than {plan.division.seed}"
        )
    for split, extent in place.splits.items():
        rows_of(Tokens(work / split, dtype, extent), tokenizer.vocabulary, **view)  # or it says why there are none
    append_entry(work, place, writers.values())
    return place


def _batches(plan: Source, start: JournalEntry) -> Generator[EncodingBatch, None, None]:
    """The pieces after `start`, about BATCH characters at a time."""
    documents, before = start.documents, sum(part.size or 0 for part in plan.parts[: start.part])
    texts: list[str] = []
    splits: list[str] = []
    ends: list[bool] = []
    held, seen = 0, 0

    def note(num_bytes: int) -> None:
        nonlocal seen
        seen = num_bytes

    for index, part in enumerate(plan.parts[start.part :], start.part):
        skipped = start.pieces if index == start.part else 0
        split = plan.split_of(part, documents)
        with closing(part.pieces(note)) as pieces:
            for number, (text, last) in enumerate(islice(pieces, skipped, None), skipped + 1):
                texts.append(text)
                splits.append(split)
                ends.append(last)
                held += len(text) + 1  # so that empty documents fill a batch too
                if last:
                    documents += 1
                    split = plan.split_of(part, documents)
                if held >= BATCH:
                    yield EncodingBatch(texts, splits, ends, index, number, documents, before + seen)
                    texts, splits, ends, held = [], [], [], 0
        before, seen = before + (part.size or 0), 0
    if texts:
        yield EncodingBatch(texts, splits, ends, len(plan.parts), 0, documents, before)


def _encoded(
    batches: Iterator[EncodingBatch], tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> Generator[tuple[EncodingBatch, dict[str, tuple[Ids, list[int]]]], None, None]:
    """Each batch with the ids of each split, in order; some are encoded while others are read and written."""
    waiting: deque[tuple[EncodingBatch, Future[dict[str, tuple[Ids, list[int]]]]]] = deque()
    with ThreadPoolExecutor(2) as threads:  # the encoder uses every core; the second thread is for what Python does
        try:
            for batch in batches:
                waiting.append((batch, threads.submit(_encode, batch, tokenizer, dtype)))
                if len(waiting) >= AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _encode(batch: EncodingBatch, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> dict[str, tuple[Ids, list[int]]]:
    """The ids of each split and where documents end among them, every document followed by eos."""
    eos = [] if tokenizer.vocabulary.eos_id is None else [tokenizer.vocabulary.eos_id]
    ids: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    rows = tokenizer.encode_batch(batch.texts)
    for split, row, last in zip(batch.splits, rows, batch.ends, strict=True):
        flat = ids.setdefault(split, [])
        flat += row
        if last:
            flat += eos
            ends.setdefault(split, []).append(len(flat))
    return {split: (np.array(flat, dtype), ends.get(split, [])) for split, flat in ids.items()}


def _seen_as(found: Prepared, view: View) -> Prepared:
    """The same shards in rows of another length or packing; the manifest keeps that, where it can be written."""
    for split in found.splits:
        found.rows(split, **view)  # or it says why there are none
    if all(found.manifest[knob] == value for knob, value in view.items()):
        return found
    manifest = {**found.manifest, **view}
    with suppress(OSError, UserError):
        write_manifest(found.folder, manifest)
    return replace(found, manifest=manifest)


def _finish(work: Path, out: Path, manifest: dict[str, Any], end: JournalEntry, tokenizer: Tokenizer) -> None:
    """The working folder gets its manifest and becomes the prepared one, in one move."""
    splits = [split for split in SPLITS if end.splits.get(split, Extent()).tokens]
    manifest["splits"] = {split: {**asdict(end.splits[split]), "files": list_files(work / split)} for split in splits}
    remove_empty(work, splits)
    tokenizer.save(work)
    write_manifest(work, manifest)
    publish(work, out)
