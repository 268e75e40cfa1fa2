"""What a run trains: the parts of training that depend on the kind of data. Text here, problems in apps/reasoning.

Text is prepared if necessary, opened, and read in batches. Held-out rows are read in groups of `train.batch_size`, each
with its own noise seed, so that the validation bound is the same for any number of processes.

Shapes: B sequences, L tokens, V symbols.
"""

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from adlm.bases.description import folder_template
from adlm.chat.template import PLAIN_TEMPLATE
from adlm.checkpoints.adapter import (
    Adapter,
    LoraBase,
    base_of_run,
    check_files_of,
    initial_weights,
    is_adapter,
    open_model,
    read_adapter,
    replace_adapter,
)
from adlm.checkpoints.model_folder import ModelFolder, replace_model_folder
from adlm.config.load import init_folder, init_template
from adlm.config.schema import Config, Vocabulary
from adlm.data.prepare.prepare import PrepareProgress, check_source, prepare, template_sha256
from adlm.data.prepare.prepared import Prepared, is_prepared, open_prepared, read_manifest
from adlm.data.rows.anchor_rules import SymbolStatistics, count_symbols, symbol_texts
from adlm.data.rows.holes import Rearrangement
from adlm.data.rows.loader import Batches, Loader, Stream
from adlm.data.rows.packing import PAIRS, counted_positions, text_width
from adlm.data.sources.corpora import CORPORA
from adlm.data.sources.source import resolve_source, source_recipe
from adlm.data.sources.text_files import user_path
from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.limits import check_training
from adlm.methods import method_of
from adlm.methods.adlm import Anchored
from adlm.methods.inputs import check_canvas, given_option
from adlm.methods.rates import Rated
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import Tokenizer, load_tokenizer
from adlm.training.build import build_train_state
from adlm.training.metrics import ValidationResult
from adlm.training.run_folder import RunFolder
from adlm.training.step import TrainState, generator_of, micro_batch_shape, seed_of

LARGE = 10**9  # bytes of shards: verifying more than this is reported
SAMPLED_TOKENS = 2**20  # about how many tokens the frequencies of symbols are estimated from
PREPARED_TOKENIZER = "tokenizer.json"  # the option `tokenizer` of a run whose prepared folder has its own tokenizer

ANY_VOCABULARY = Vocabulary(size=2**31 - 1, mask_id=0, bos_id=1, eos_id=2)  # while the tokenizer is not known

Report = Callable[[str], None]


@dataclass(frozen=True)
class DataSize:
    """How much data a run has."""

    num_rows: int | None
    """Of the training data; None for a stream."""
    num_tokens: int | None
    """Of the training data, before it is cut into rows; None for a stream."""
    num_held_out: int
    """Rows used for validation; 0 if nothing is held out."""
    num_held_out_in_all: int
    """Rows held out; for a stream those that are read, at most `train.valid_rows`."""


class TrainingTask(Protocol):
    """The data of a run, opened, and what is done with it outside the training step."""

    @property
    def config(self) -> Config:
        """The run's config with the options that depend on the data filled in."""
        ...

    @property
    def training(self) -> Batches: ...

    @property
    def fingerprint(self) -> str:
        """A checksum of the training data."""
        ...

    @property
    def size(self) -> DataSize: ...

    def build_state(self, processes: Processes, report: Report, resumes: bool) -> TrainState:
        """The state before the first step; of a run that `resumes`, its weights are replaced by the checkpoint's."""
        ...

    def validate(self, state: TrainState, processes: Processes) -> ValidationResult: ...

    def samples(self, state: TrainState, step: int, processes: Processes) -> str:
        """Generated texts, `train.samples` of them."""
        ...

    def save_model(self, weights: dict[str, Tensor], path: Path) -> None:
        """Write the model folder, replacing an existing one."""
        ...


OpenTask = Callable[[Config, RunFolder, Processes, Report], TrainingTask]


@dataclass(frozen=True)
class HeldOutBatch:
    """Held-out rows of one group."""

    x: Tensor
    pad: Tensor | None
    given: Tensor | None
    is_counted: Tensor
    """(B, L), True at the tokens of the text, over which the mean per token is taken."""
    group: int
    batch_slice: BatchSlice
    """Which rows of the group these are."""


@dataclass(frozen=True)
class TextTask:
    """Language modelling: rows of text, and any method. See `TrainingTask`."""

    config: Config
    tokenizer: Tokenizer
    training: Batches
    fingerprint: str
    """A checksum of the training text."""
    size: DataSize
    read_held_out: Callable[[int, int], tuple[Tensor, Tensor | None, Tensor | None]]
    """x, pad and given tokens of the held-out rows [start, stop)."""
    base: LoraBase | None = None
    """Of a run with LoRA."""
    chat_template: str | None = None
    """That of the model `init`, or by which pairs were written."""

    def held_out_batches(self, size: int) -> Iterator[HeldOutBatch]:
        """All held-out rows in order, at most `size` at a time and never across two groups."""
        group_size, vocabulary = self.config.train.batch_size, self.tokenizer.vocabulary
        for start in range(0, self.size.num_held_out, group_size):
            stop = min(start + group_size, self.size.num_held_out)
            for first in range(start, stop, size):
                x, pad, given = self.read_held_out(first, min(first + size, stop))
                padding = None if pad is None else pad.numpy()
                counted = counted_positions(x.numpy(), padding, vocabulary, self.config.data.packing)
                rows_of_group = BatchSlice(first - start, stop - start)
                yield HeldOutBatch(x, pad, given, torch.from_numpy(counted), start // group_size, rows_of_group)

    def build_state(self, processes: Processes, report: Report, resumes: bool) -> TrainState:
        statistics = functools.cache(lambda: self._statistics(processes))
        method = method_of(self.config)
        if isinstance(method, Anchored):
            method = method.with_statistics(statistics)
        if self.config.model.memory:
            report("held-out nats are those without memory, in one pass; adlm perplexity measures those with it")
        frequencies = None
        if self.config.train.unigram_start:
            counts = 1 + statistics().counts  # add-one smoothing
            frequencies = (counts / counts.sum()).log()
        anchor_table = None
        if isinstance(method, Rated) and self.config.rates.rule == "anchors":
            anchor_table = method.anchor_table(statistics)
        weights, adapter = None, None
        if self.config.init and (self.base is not None or not resumes):  # checkpoints have no frozen weights
            weights = self._initial_weights()
        if self.base is not None and not resumes:
            adapter = self._initial_adapter()
        return build_train_state(method, processes, report, frequencies, anchor_table, weights, adapter)

    def _initial_adapter(self) -> Adapter | None:
        """The adapter `init`, which LoRA continues to train; None if `init` is none."""
        folder, train = init_folder(self.config.init), self.config.train
        if folder is None or not is_adapter(folder):
            return None
        adapter = read_adapter(folder)
        saved = adapter.config.train
        if train.lora_rank < saved.lora_rank:
            raise UserError(
                f"train.lora_rank {train.lora_rank} is below the {saved.lora_rank} of init {self.config.init}; give at "
                f"least train.lora_rank={saved.lora_rank}, or 0 to train all weights"
            )
        return adapter

    def _statistics(self, processes: Processes) -> SymbolStatistics:
        """Counted in the first training batches of all processes."""
        train, num_symbols = self.config.train, self.tokenizer.vocabulary.size
        sampled = SAMPLED_TOKENS // self.config.length + 1
        num_batches = -(-min(sampled, self.size.num_rows or sampled) // train.batch_size)  # at most one epoch
        batches = ((batch.x, batch.pad) for batch in islice(self.training.batches(), num_batches))
        *numbers, num_rows = count_symbols(batches, num_symbols)
        counts, rows = (torch.tensor(processes.sum(found.tolist())) for found in numbers)
        return SymbolStatistics(symbol_texts(self.tokenizer), counts, rows, int(processes.sum([num_rows])[0]))

    def _initial_weights(self) -> dict[str, Tensor]:
        """The weights of the model `init`, with LoRA of its base; its tokenizer must be that of the prepared text."""
        init = self.config.init
        model = open_model(init) if self.base is None else self.base.model
        if model.tokenizer is not None and model.tokenizer.sha256 != self.tokenizer.sha256:
            raise UserError(
                f"init {init} has another tokenizer than the prepared text; leave out data.prepared and tokenizer=, or "
                f"prepare the text with `adlm prepare init={init} ...`"
            )
        return initial_weights(model, self.config)

    def validate(self, state: TrainState, processes: Processes) -> ValidationResult:
        """The mean bound per token over all held-out rows, a micro-batch per process at a time.

        Rows and noise are the same every time, so two validations of a run differ only in the weights. Every process
        takes part in every round, because gathering sharded weights is a collective operation; one without rows in the
        last round evaluates the last batch again and discards the result. A network with memory is measured without
        it, in one pass: with it the bound takes a pass for each step of the sampler.
        """
        config, seed = self.config, self.config.train.seed
        method = method_of(replace(config, model=replace(config.model, memory=False)))
        estimator = ESTIMATORS[default_estimator(method)](method)
        nats, tokens, nats_squared, nats_tokens, tokens_squared, rows = (
            torch.zeros((), dtype=torch.float64) for _ in range(6)
        )
        batches = self.held_out_batches(micro_batch_shape(self.config.train, processes.num_ranks)[1])
        while round_batches := list(islice(batches, processes.num_ranks)):
            batch = round_batches[min(processes.rank, len(round_batches) - 1)]
            x = batch.x.to(processes.device)
            pad, given = (None if each is None else each.to(processes.device) for each in (batch.pad, batch.given))
            rng = BatchRng(generator_of(seed, "validation", batch.group), batch.batch_slice)
            row_nats = estimator(state.network, x, pad, rng, **given_option(given)).double().sum(dim=1).cpu()
            if processes.rank >= len(round_batches):
                continue
            predicted = method.predicted(batch.x, batch.pad, **given_option(batch.given))
            row_tokens = (batch.is_counted & predicted).sum(dim=1).double()
            nats += row_nats.sum()
            tokens += row_tokens.sum()
            nats_squared += (row_nats * row_nats).sum()
            nats_tokens += (row_nats * row_tokens).sum()
            tokens_squared += (row_tokens * row_tokens).sum()
            rows += len(row_nats)
        sums = [float(value) for value in (nats, tokens, nats_squared, nats_tokens, tokens_squared, rows)]
        return _ratio_of_sums(*processes.sum(sums))

    def samples(self, state: TrainState, step: int, processes: Processes) -> str:
        config, vocabulary, train = self.config, self.tokenizer.vocabulary, self.config.train
        canvas, pad = torch.full((train.samples, config.length), vocabulary.mask_id), None
        if config.data.format == "pairs" and self.size.num_held_out:  # the first answers to held-out prompts
            x, pad, given = self.read_held_out(0, min(train.samples, self.size.num_held_out))
            assert pad is not None
            assert given is not None
            canvas = torch.where((~given).cumsum(dim=1) > 0, vocabulary.mask_id, x).where(~pad, x)
        elif vocabulary.bos_id is None and self.size.num_held_out:
            canvas[:, 0] = self.read_held_out(0, 1)[0][0, 0]  # autoregressive methods need a first token
        canvas, pad = canvas.to(processes.device), None if pad is None else pad.to(processes.device)
        rng = RowRng(seed_of(train.seed, "samples", step), range(len(canvas)))
        method = method_of(config)
        check_canvas(method, canvas, config.sampling, pad)
        network = state.network
        if config.model.block_length and processes.num_ranks == 1:
            network = FrozenNetwork(network)  # a KV cache: hundreds of calls on a row of text otherwise
        frame = last_frame(method.generate(network, canvas, config.sampling, rng, pad))
        texts = [self.tokenizer.decode(row, special_tokens=False) for row in frame.ids.tolist()]
        return "\n".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1))

    def save_model(self, weights: dict[str, Tensor], path: Path) -> None:
        """Model folders are shared, so the config leaves out the local path `data.prepared`."""
        config = replace(self.config, data=replace(self.config.data, prepared=""))
        if self.base is None:
            replace_model_folder(ModelFolder(config, weights, self.tokenizer, chat_template=self.chat_template), path)
        else:
            tokenizer = None if self.tokenizer.is_same(self.base.model.tokenizer) else self.tokenizer
            template = None if self.chat_template == self.base.model.chat_template else self.chat_template
            replace_adapter(Adapter(replace(config, init=self.base.name), weights, tokenizer, template), path)


def _ratio_of_sums(
    nats: float, tokens: float, nats_squared: float, nats_tokens: float, tokens_squared: float, rows: float
) -> ValidationResult:
    """mean = sum_i nats_i / sum_i tokens_i over rows i; variance = sum_i (nats_i - mean tokens_i)^2 / tokens^2."""
    mean = nats / tokens
    spread = max(0.0, nats_squared - 2 * mean * nats_tokens + mean * mean * tokens_squared)
    correction = rows / (rows - 1) if rows > 1 else math.inf
    stderr = math.sqrt(spread * correction) / tokens if rows > 1 else math.inf
    return ValidationResult(mean, stderr, int(tokens), int(rows))


def open_text_task(config: Config, run: RunFolder, processes: Processes, report: Report) -> TextTask:
    """The text that the config names. Without `data.prepared`, a new run first prepares it in RUN/data."""
    if config.train.lora_rank and not config.init:
        raise UserError(
            f"train.lora_rank {config.train.lora_rank} needs a model to start from; add init=MODEL, or "
            "train.lora_rank=0 to train all weights"
        )
    # wrong options and a damaged base are refused before text is prepared
    method_of(replace(config, vocabulary=config.vocabulary or ANY_VOCABULARY))
    # a run that has started needs only the base of LoRA
    base = base_of_run(config.init) if config.train.lora_rank else None
    if config.init and base is None and run.config is None:
        check_files_of(config.init)
    template = _chat_template(config, run)
    if config.data.streaming:
        task = _open_stream(config, processes)
    else:
        task = _open_rows(config, template or PLAIN_TEMPLATE, run, processes, report)
    if task.config.data.format == "pairs":
        template = template or PLAIN_TEMPLATE
        if config.train.infill:
            raise UserError(f"train.infill {config.train.infill} rearranges running text; data.format pairs needs 0")
        if config.train.random_length:
            raise UserError(
                f"train.random_length {config.train.random_length} cuts running text, and answers end where they end; "
                "data.format pairs needs 0"
            )
    task = replace(task, chat_template=template)
    if base is not None:
        resolved = replace(task.config, train=replace(config.train, base_sha256=base.sha256))
        task = replace(task, base=base, config=resolved)
    method_of(task.config)  # raises for an invalid config before it is saved as the run's config
    check_training(task.config, processes.device, processes.num_ranks)
    return task


def _chat_template(config: Config, run: RunFolder) -> str | None:
    """That of the model `init`, which a run that has started need not have any more."""
    if not config.init or run.config is None:
        return init_template(config.init) if config.init else None
    template = folder_template(run.path / "model")
    with suppress(UserError):
        template = template or init_template(config.init)
    return template


def _open_rows(config: Config, template: str, run: RunFolder, processes: Processes, report: Report) -> TextTask:
    """`template` is the chat template by which pairs are written."""
    saved = processes.broadcast(run.config)
    prepared = processes.main_process_first(
        lambda: _open_or_prepare(config, template, run.path, saved, processes.is_main_process, report)
    )
    if config.data.format == "pairs" and not prepared.has_answers:
        raise UserError(
            f"data.prepared {config.data.prepared} holds running text, and data.format is pairs; prepare pairs with "
            "`adlm prepare data.format=pairs ...`, or leave data.format out"
        )
    if config.data.labels not in ("none", prepared.labels):
        raise UserError(
            f"data.prepared {config.data.prepared} has labels {prepared.labels}, and data.labels is "
            f"{config.data.labels}; prepare it with `adlm prepare data.labels={config.data.labels} ...`"
        )
    packing = PAIRS if prepared.has_answers else config.data.packing or prepared.manifest["packing"]
    data = replace(config.data, packing=packing, format="pairs" if prepared.has_answers else "text")
    data = replace(data, labels=prepared.labels)
    resolved = replace(config, vocabulary=prepared.tokenizer.vocabulary, data=data)
    if config.data.prepared:  # record the source of the text in the config, not only the folder of its shards
        source, form = prepared.manifest["source"], prepared.manifest["recipe"]["form"]
        kind = "name" if source in CORPORA else "hub" if len(form) == 2 else "path"  # the recipe of files has 3 entries
        options = {kind: source, "prepared": str(prepared.folder.resolve())}  # absolute, to resume from any folder
        resolved = replace(resolved, tokenizer=PREPARED_TOKENIZER, data=replace(resolved.data, **options))
    if config.train.random_length and packing.startswith("padded"):
        raise UserError(
            f"train.random_length {config.train.random_length} cuts packed rows, and those of data.packing {packing} "
            "have the lengths of their documents, which eos ends; use data.packing=packed, or train.random_length=0"
        )
    rows = prepared.rows("train", config.length, packing, overlap=True)
    for note in rows.notes():
        report(note)
    train = config.train
    order_seed = seed_of(train.seed, "order")
    rearrangement = None
    if train.infill:
        hole_id, eos_id = config.model.hole_id, prepared.tokenizer.vocabulary.eos_id
        assert hole_id is not None  # BlockCausal checks both
        assert eos_id is not None
        rearrangement = Rearrangement(train.infill, hole_id, eos_id)
    method = method_of(resolved)
    reads_labels = isinstance(method, Anchored) and method.reads_labels
    if reads_labels and prepared.labels == "none":
        raise UserError(
            f"anchor.rule {config.anchor.rule} needs labels, and {prepared.folder} has none; prepare the text with "
            "data.labels=python, or use another rule"
        )
    if reads_labels and train.infill:
        raise UserError(
            f"train.infill {train.infill} rearranges rows, and labels are those of rows as they are; anchor.rule "
            f"{config.anchor.rule} needs train.infill=0"
        )
    loader = Loader(
        rows,
        train.batch_size,
        order_seed,
        processes.rank,
        processes.num_ranks,
        rearrangement=rearrangement,
        random_length=train.random_length,
        reads_labels=reads_labels,
    )
    valid = next((split for split in ("valid", "test") if split in prepared.splits), None)
    held_out = None if valid is None else prepared.rows(valid, config.length, packing)
    num_held_out = 0 if held_out is None else min(train.valid_rows, len(held_out))

    def read_held_out(start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert held_out is not None
        numbers = [index * len(held_out) // num_held_out for index in range(start, stop)]  # evenly spaced
        ids, padding = held_out.read(numbers)
        pad, given = (None if each is None else torch.from_numpy(each) for each in (padding, held_out.given(numbers)))
        return torch.from_numpy(ids), pad, given

    num_tokens = len(prepared.tokens("train"))
    if packing == "packed" and num_tokens < text_width(prepared.tokenizer.vocabulary, config.length):
        raise UserError(
            f"the training text has {num_tokens:,} tokens, less than one row of length {config.length}; "
            "give more text, or a smaller length"
        )
    return TextTask(
        resolved,
        prepared.tokenizer,
        loader,
        _checksum(prepared.manifest["splits"]["train"]),  # over the checksums of the training shards
        DataSize(len(rows), num_tokens, num_held_out, 0 if held_out is None else len(held_out)),
        read_held_out,
    )


def _checksum(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _open_or_prepare(
    config: Config, template: str, run: Path, saved: Config | None, verify: bool, report: Report
) -> Prepared:
    """The prepared data; `verify` compares its checksums. A run that has started never prepares its data again."""
    source = config.data.name or config.data.path or config.data.hub
    run_data = run / "data"
    if not config.data.prepared and saved is None:
        if source:  # else `prepare` raises
            report(f"preparing {source} for tokenizer {config.tokenizer}")
        outcome = prepare(config, run_data, _every_ten_seconds(report), chat_template=template)
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
    if prepared.has_answers and prepared.manifest["recipe"]["chat_template"] != template_sha256(template):
        of_init = f"init={config.init} " if config.init else ""
        raise UserError(
            f"data.prepared {config.data.prepared} was written by another chat template than the model's; prepare it "
            f"with `adlm prepare {of_init}data.format=pairs ...`"
        )
    return prepared


def _report_size(folder: Path, report: Report) -> None:
    """Report that large shards are verified, which takes a while."""
    size = sum(file["bytes"] for entry in read_manifest(folder)["splits"].values() for file in entry["files"])
    if size > LARGE:
        report(f"comparing the checksums of {size / 1e9:.1f} GB of shards in {folder}")


def _every_ten_seconds(report: Report) -> Callable[[PrepareProgress], None]:
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


def _open_stream(config: Config, processes: Processes) -> TextTask:
    """Batches directly from the source; the held-out rows are read into memory."""
    if config.train.infill:
        raise UserError(
            f"train.infill {config.train.infill} rearranges prepared rows; use data.streaming=false, or train.infill=0"
        )
    if config.train.random_length:
        raise UserError(
            f"train.random_length {config.train.random_length} cuts prepared rows; use data.streaming=false, or "
            "train.random_length=0"
        )
    method = method_of(replace(config, vocabulary=config.vocabulary or ANY_VOCABULARY))
    if isinstance(method, Anchored) and method.reads_labels:
        raise UserError(f"anchor.rule {config.anchor.rule} needs the labels of prepared text; use data.streaming=false")
    tokenizer, source, train = load_tokenizer(config.tokenizer), resolve_source(config.data), config.train
    resolved = replace(config, vocabulary=tokenizer.vocabulary, data=replace(config.data, packing=source.packing))
    stream = Stream(
        source, tokenizer, config.length, train.batch_size, rank=processes.rank, num_ranks=processes.num_ranks
    )
    try:
        held_out = list(islice(Stream(source, tokenizer, config.length, 1, "valid").batches(), train.valid_rows))
    except UserError:  # nothing is held out
        held_out = []

    def read_held_out(start: int, stop: int) -> tuple[Tensor, Tensor | None, None]:
        rows = held_out[start:stop]
        pads = [row.pad for row in rows if row.pad is not None]
        return torch.cat([row.x for row in rows]), torch.cat(pads) if pads else None, None

    fingerprint = _checksum(source_recipe(source))
    size = DataSize(None, None, len(held_out), len(held_out))
    return TextTask(resolved, tokenizer, stream, fingerprint, size, read_held_out)
