"""Training and validation data of a run: prepared if necessary, opened, and read in batches. No networks, no steps.

Held-out rows are read in groups of `train.batch_size`, each with its own noise seed, so that the validation bound is
the same for any number of processes. Shapes: B sequences, L tokens, V symbols.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.data.prepare.prepare import PrepareProgress, check_source, prepare
from adlm.data.prepare.prepared import Prepared, is_prepared, open_prepared, read_manifest
from adlm.data.rows.anchor_rules import SymbolStatistics
from adlm.data.rows.loader import Batches, Loader, Stream
from adlm.data.rows.packing import Rows, counted_positions, text_width
from adlm.data.rows.statistics import count_symbols, symbol_texts
from adlm.data.sources.corpora import CORPORA
from adlm.data.sources.source import resolve_source, source_recipe
from adlm.data.sources.text_files import user_path
from adlm.diffusion.times import BatchSlice
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.tokens import Tokenizer, load_tokenizer
from adlm.training.run_folder import RunFolder
from adlm.training.seeds import seed_of

LARGE = 10**9  # bytes of shards: verifying more than this is reported
SAMPLED_TOKENS = 2**20  # about how many tokens the frequencies of symbols are estimated from
PREPARED_TOKENIZER = "tokenizer.json"  # the option `tokenizer` of a run whose prepared folder has its own tokenizer


@dataclass(frozen=True)
class HeldOutBatch:
    """Held-out rows of one group."""

    x: Tensor
    pad: Tensor | None
    is_counted: Tensor
    """(B, L), True at the tokens of the text, over which the mean per token is taken."""
    group: int
    batch_slice: BatchSlice
    """Which rows of the group these are."""


@dataclass(frozen=True)
class TrainingData:
    """The data of a run; `config` is the run's config with the options that depend on the data filled in."""

    config: Config
    tokenizer: Tokenizer
    training: Batches
    fingerprint: str
    """A checksum of the training text."""
    num_rows: int | None
    """Of the training text; None for a stream."""
    num_tokens: int | None
    """Of the training text, before it is cut into rows; None for a stream."""
    num_held_out: int
    """Rows used for validation; 0 if nothing is held out."""
    num_held_out_in_all: int
    """Rows held out; for a stream those that are read, at most `train.valid_rows`."""
    read_held_out: Callable[[int, int], tuple[Tensor, Tensor | None]]
    """x and pad of the held-out rows [start, stop)."""

    def held_out_batches(self, size: int) -> Iterator[HeldOutBatch]:
        """All held-out rows in order, at most `size` at a time and never across two groups."""
        group_size, vocabulary = self.config.train.batch_size, self.tokenizer.vocabulary
        for start in range(0, self.num_held_out, group_size):
            stop = min(start + group_size, self.num_held_out)
            for first in range(start, stop, size):
                x, pad = self.read_held_out(first, min(first + size, stop))
                padding = None if pad is None else pad.numpy()
                counted = counted_positions(x.numpy(), padding, vocabulary, self.config.data.packing)
                yield HeldOutBatch(
                    x, pad, torch.from_numpy(counted), start // group_size, BatchSlice(first - start, stop - start)
                )


def training_statistics(data: TrainingData, processes: Processes) -> SymbolStatistics:
    """Counted in the first training batches of all processes."""
    train, num_symbols = data.config.train, data.tokenizer.vocabulary.size
    sampled = SAMPLED_TOKENS // data.config.length + 1
    num_batches = -(-min(sampled, data.num_rows or sampled) // train.batch_size)  # at most one epoch
    batches = ((batch.x, batch.pad) for batch in islice(data.training.batches(), num_batches))
    *numbers, num_rows = count_symbols(batches, num_symbols)
    counts, rows = (torch.tensor(processes.sum(found.tolist())) for found in numbers)
    return SymbolStatistics(symbol_texts(data.tokenizer), counts, rows, int(processes.sum([num_rows])[0]))


def log_frequencies(counts: Tensor) -> Tensor:
    """(V,), log unigram frequencies with add-one smoothing."""
    return ((1 + counts) / (1 + counts).sum()).log()


def open_training_data(
    config: Config, run: RunFolder, processes: Processes, report: Callable[[str], None]
) -> TrainingData:
    """The data that the config names. Without `data.prepared`, a new run first prepares it in RUN/data."""
    if config.data.streaming:
        return _open_stream(config, processes)
    saved = processes.broadcast(run.config)
    prepared = processes.main_process_first(
        lambda: _open_or_prepare(config, run.path, saved, processes.is_main_process, report)
    )
    packing = config.data.packing or prepared.manifest["packing"]
    resolved = replace(config, vocabulary=prepared.tokenizer.vocabulary, data=replace(config.data, packing=packing))
    if config.data.prepared:  # record the source of the text in the config, not only the folder of its shards
        source, form = prepared.manifest["source"], prepared.manifest["recipe"]["form"]
        kind = "name" if source in CORPORA else "hub" if len(form) == 2 else "path"  # the recipe of files has 3 entries
        options = {kind: source, "prepared": str(prepared.folder.resolve())}  # absolute, to resume from any folder
        resolved = replace(resolved, tokenizer=PREPARED_TOKENIZER, data=replace(resolved.data, **options))
    rows = prepared.rows("train", config.length, packing, overlap=True)
    train = config.train
    order_seed = seed_of(train.seed, "order")
    loader = Loader(rows, train.batch_size, order_seed, processes.rank, processes.num_ranks)
    valid = next((split for split in ("valid", "test") if split in prepared.splits), None)
    held_out = None if valid is None else prepared.rows(valid, config.length, packing)
    num_held_out = 0 if held_out is None else min(train.valid_rows, len(held_out))

    def read_held_out(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        assert held_out is not None
        x, pad = held_out.read(_evenly_spaced(held_out, num_held_out)[start:stop])
        return torch.from_numpy(x), None if pad is None else torch.from_numpy(pad)

    num_tokens = len(prepared.tokens("train"))
    if packing == "packed" and num_tokens < text_width(prepared.tokenizer.vocabulary, config.length):
        raise UserError(
            f"the training text has {num_tokens:,} tokens, less than one row of length {config.length}; "
            "give more text, or a smaller length"
        )
    return TrainingData(
        resolved,
        prepared.tokenizer,
        loader,
        _fingerprint(prepared),
        len(rows),
        num_tokens,
        num_held_out,
        0 if held_out is None else len(held_out),
        read_held_out,
    )


def _fingerprint(prepared: Prepared) -> str:
    """A checksum over the checksums of the training shards."""
    return hashlib.sha256(json.dumps(prepared.manifest["splits"]["train"], sort_keys=True).encode()).hexdigest()


def _evenly_spaced(rows: Rows, num: int) -> list[int]:
    """The indices of `num` rows, evenly spaced over all rows."""
    return [index * len(rows) // num for index in range(num)]


def _open_or_prepare(
    config: Config, run: Path, saved: Config | None, verify: bool, report: Callable[[str], None]
) -> Prepared:
    """The prepared data; `verify` compares its checksums. A run that has started never prepares its data again."""
    source = config.data.name or config.data.path or config.data.hub
    run_data = run / "data"
    if not config.data.prepared and saved is None:
        if source:  # else `prepare` raises
            report(f"preparing {source} for tokenizer {config.tokenizer}")
        outcome = prepare(config, run_data, _every_ten_seconds(report))
        for line in (f"data {outcome.how}: {run_data}", *outcome.notes):
            report(line)
        return outcome.prepared
    if not config.data.prepared and saved is not None:
        if not is_prepared(run_data):
            raise UserError(
                f"{run} has started, but there is no prepared data in {run_data}; restore it, or give a folder with "
                "the same data: data.prepared=FOLDER"
            )
        if verify:
            _report_size(run_data, report)
            check_source(config, run_data, saved)
        return open_prepared(run_data, sums=verify)
    folder = user_path("data.prepared", config.data.prepared)
    if verify:
        _report_size(folder, report)
    prepared = open_prepared(folder, sums=verify)
    if source and prepared.manifest["source"] != source:
        raise UserError(
            f"data.prepared {config.data.prepared} was made from {prepared.manifest['source']}, but the config names "
            f"{source}; give the folder prepared from that text, or run adlm prepare"
        )
    return prepared


def _report_size(folder: Path, report: Callable[[str], None]) -> None:
    """Report that large shards are verified, which takes a while."""
    size = sum(file["bytes"] for entry in read_manifest(folder)["splits"].values() for file in entry["files"])
    if size > LARGE:
        report(f"comparing the checksums of {size / 1e9:.1f} GB of shards in {folder}")


def _every_ten_seconds(report: Callable[[str], None]) -> Callable[[PrepareProgress], None]:
    """A callback that reports the progress of the preparation at most every ten seconds."""
    reported_at = time.monotonic()

    def report_progress(progress: PrepareProgress) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at < 10:
            return
        reported_at = time.monotonic()
        share = f"{progress.bytes_read / progress.bytes_in_all:.0%} read, " if progress.bytes_in_all else ""
        report(f"preparing: {share}{progress.tokens:,} tokens")

    return report_progress


def _open_stream(config: Config, processes: Processes) -> TrainingData:
    """Batches directly from the source; the held-out rows are read into memory."""
    tokenizer, source, train = load_tokenizer(config.tokenizer), resolve_source(config.data), config.train
    resolved = replace(config, vocabulary=tokenizer.vocabulary, data=replace(config.data, packing=source.packing))
    stream = Stream(
        source, tokenizer, config.length, train.batch_size, rank=processes.rank, num_ranks=processes.num_ranks
    )
    try:
        held_out = list(islice(Stream(source, tokenizer, config.length, 1, "valid").batches(), train.valid_rows))
    except UserError:  # nothing is held out
        held_out = []

    def read_held_out(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        rows = held_out[start:stop]
        pads = [row.pad for row in rows if row.pad is not None]
        return torch.cat([row.x for row in rows]), torch.cat(pads) if pads else None

    fingerprint = hashlib.sha256(json.dumps(source_recipe(source), sort_keys=True).encode()).hexdigest()
    num_held_out = len(held_out)
    return TrainingData(resolved, tokenizer, stream, fingerprint, None, None, num_held_out, num_held_out, read_held_out)
