"""The text of a run: opened, or prepared first, and dealt out as batches. Knows nothing of networks or steps.

Held-out rows are taken in groups of `train.batch_size`; the draws of a group belong to it, so that the bound is the
same on any number of processes.
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
from adlm.data.rows.loader import Batches, Loader
from adlm.data.rows.packing import Rows, counted_positions, text_width
from adlm.data.rows.streaming import Stream
from adlm.data.sources.corpora import CORPORA
from adlm.data.sources.source import resolve_source, source_recipe
from adlm.data.sources.text_files import user_path
from adlm.diffusion.times import BatchSlice
from adlm.errors import UserError
from adlm.tokens import Tokenizer, load_tokenizer
from adlm.training.rng import seed_of
from adlm.training.run_folder import RunFolder
from adlm.training.sharding import Processes

LARGE = 10**9  # bytes of shards: reading more of them is said
COUNTED = 2**20  # tokens whose symbols are counted, about: enough for how often, and read in a moment
OWN = "tokenizer.json"  # what the knob `tokenizer` says where the prepared folder brought its own


@dataclass(frozen=True)
class HeldOut:
    """Some held-out rows, and which of their group they are."""

    x: Tensor
    pad: Tensor | None
    counted: Tensor
    """(B, L), True at the tokens that count in a mean per token."""
    group: int
    portion: BatchSlice


@dataclass(frozen=True)
class TrainingData:
    """What a run reads; `config` is the run's, with what only the text can say filled in."""

    config: Config
    tokenizer: Tokenizer
    training: Batches
    fingerprint: str
    """Of the text that is trained on: the same bytes have the same."""
    num_rows: int | None
    """Of the training text; empty for a stream, which nobody has counted."""
    num_tokens: int | None
    """Of the training text, before rows are cut."""
    num_held_out: int
    """Rows that are measured; 0 where nothing is held out."""
    read: Callable[[int, int], tuple[Tensor, Tensor | None]]
    """Held-out rows from one number to another."""

    def held_out(self, size: int) -> Iterator[HeldOut]:
        """All held-out rows in order, at most `size` at a time and never across two groups."""
        group_size, vocabulary = self.config.train.batch_size, self.tokenizer.vocabulary
        for start in range(0, self.num_held_out, group_size):
            stop = min(start + group_size, self.num_held_out)
            for first in range(start, stop, size):
                x, pad = self.read(first, min(first + size, stop))
                padding = None if pad is None else pad.numpy()
                counted = torch.from_numpy(counted_positions(x.numpy(), padding, vocabulary, self.config.data.packing))
                yield HeldOut(x, pad, counted, start // group_size, BatchSlice(first - start, stop - start))


def log_frequencies(supply: TrainingData, processes: Processes) -> Tensor:
    """(V,), log of how often each symbol stands in the first batches of training, one added to every count."""
    config = supply.config
    assert config.vocabulary is not None
    counts = torch.zeros(config.vocabulary.size)
    num_batches = -(-COUNTED // (config.train.batch_size * config.length))
    for batch in islice(supply.training.batches(), num_batches):
        text = batch.x if batch.pad is None else batch.x[~batch.pad]
        counts += torch.bincount(text.flatten(), minlength=len(counts))
    added = 1 + torch.tensor(processes.sum(counts.tolist()))
    return (added / added.sum()).log()


def open_training_data(
    config: Config, run: RunFolder, processes: Processes, say: Callable[[str], None]
) -> TrainingData:
    """The text that the config names. Without `data.prepared` a new run prepares it, once, into its own data/."""
    if config.data.streaming:
        return _streamed(config, processes)
    begun = processes.same(run.config)
    prepared = processes.after_the_first(lambda: _prepared(config, run.place, begun, processes.first, say))
    packing = config.data.packing or prepared.manifest["packing"]
    settled = replace(config, vocabulary=prepared.tokenizer.vocabulary, data=replace(config.data, packing=packing))
    if config.data.prepared:  # the model's config says which text it learnt, not only where its ids lay
        source, form = prepared.manifest["source"], prepared.manifest["recipe"]["form"]
        kind = "name" if source in CORPORA else "hub" if len(form) == 2 else "path"  # see `plan`: own files have three
        named = {kind: source, "prepared": str(prepared.folder.resolve())}  # a run may be resumed from anywhere
        settled = replace(settled, tokenizer=OWN, data=replace(settled.data, **named))
    rows = prepared.rows("train", config.length, packing, overlap=True)
    train = config.train
    order = seed_of(train.seed, "order")
    loader = Loader(rows, train.batch_size, order, processes.rank, processes.num_ranks)
    valid = next((split for split in ("valid", "test") if split in prepared.splits), None)
    held_out = None if valid is None else prepared.rows(valid, config.length, packing)
    num_held_out = 0 if held_out is None else min(train.valid_rows, len(held_out))

    def read(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        assert held_out is not None
        x, pad = held_out.read(_spread_out(held_out, num_held_out)[start:stop])
        return torch.from_numpy(x), None if pad is None else torch.from_numpy(pad)

    num_tokens = len(prepared.tokens("train"))
    if packing == "packed" and num_tokens < text_width(prepared.tokenizer.vocabulary, config.length):
        raise UserError(
            f"the text to train on has {num_tokens:,} tokens, which do not fill one row of length {config.length}; "
            "give more text, or a smaller length"
        )
    return TrainingData(
        settled, prepared.tokenizer, loader, _fingerprint(prepared), len(rows), num_tokens, num_held_out, read
    )


def _fingerprint(prepared: Prepared) -> str:
    """By the checksums of the shards."""
    return hashlib.sha256(json.dumps(prepared.manifest["splits"]["train"], sort_keys=True).encode()).hexdigest()


def _spread_out(rows: Rows, num: int) -> list[int]:
    """`num` rows, evenly over all of them."""
    return [index * len(rows) // num for index in range(num)]


def _prepared(config: Config, run: Path, begun: Config | None, first: bool, say: Callable[[str], None]) -> Prepared:
    """The prepared text, its checksums compared by the first process. A run that has begun never prepares it anew."""
    source = config.data.name or config.data.path or config.data.hub
    own = run / "data"
    if not config.data.prepared and begun is None:
        if source:  # or `prepare` refuses
            say(f"preparing {source} for tokenizer {config.tokenizer}")
        outcome = prepare(config, own, _every_ten_seconds(say))
        say(f"data {outcome.how}: {own}")
        return outcome.prepared
    if not config.data.prepared and begun is not None:
        if not is_prepared(own):
            raise UserError(
                f"{run} has begun, and there is no text in {own}; put it back, or give the folder of the same text: "
                "data.prepared=FOLDER"
            )
        if first:
            _say_size(own, say)
            check_source(config, own, begun)
        return open_prepared(own, sums=first)
    folder = user_path("data.prepared", config.data.prepared)
    if first:
        _say_size(folder, say)
    prepared = open_prepared(folder, sums=first)
    if source and prepared.manifest["source"] != source:
        raise UserError(
            f"data.prepared {config.data.prepared} was made from {prepared.manifest['source']}, and the run is to read "
            f"{source}; give the folder of that text, or prepare it"
        )
    return prepared


def _say_size(folder: Path, say: Callable[[str], None]) -> None:
    """Reading many shards to compare their checksums takes a while."""
    size = sum(file["bytes"] for entry in read_manifest(folder)["splits"].values() for file in entry["files"])
    if size > LARGE:
        say(f"comparing the checksums of {size / 1e9:.1f} GB of shards in {folder}")


def _every_ten_seconds(say: Callable[[str], None]) -> Callable[[PrepareProgress], None]:
    """Says how far the preparation is, but not more often."""
    said = time.monotonic()

    def report(progress: PrepareProgress) -> None:
        nonlocal said
        if time.monotonic() - said < 10:
            return
        said = time.monotonic()
        share = f"{progress.bytes_read / progress.bytes_in_all:.0%} read, " if progress.bytes_in_all else ""
        say(f"preparing: {share}{progress.tokens:,} tokens")

    return report


def _streamed(config: Config, processes: Processes) -> TrainingData:
    """Batches straight from the source; the first held-out rows are kept in memory."""
    tokenizer, plan, train = load_tokenizer(config.tokenizer), resolve_source(config.data), config.train
    settled = replace(config, vocabulary=tokenizer.vocabulary, data=replace(config.data, packing=plan.packing))
    stream = Stream(
        plan, tokenizer, config.length, train.batch_size, rank=processes.rank, num_ranks=processes.num_ranks
    )
    try:
        held_out = list(islice(Stream(plan, tokenizer, config.length, 1, "valid").batches(), train.valid_rows))
    except UserError:  # nothing is held out
        held_out = []

    def read(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        some = held_out[start:stop]
        pads = [batch.pad for batch in some if batch.pad is not None]
        return torch.cat([batch.x for batch in some]), torch.cat(pads) if pads else None

    fingerprint = hashlib.sha256(json.dumps(source_recipe(plan), sort_keys=True).encode()).hexdigest()
    return TrainingData(settled, tokenizer, stream, fingerprint, None, None, len(held_out), read)
