"""What a run trains: the parts of training that depend on the kind of data. Text here, problems in apps/reasoning.

Text is prepared if necessary, opened, and read in batches. Held-out rows are read in groups of `train.batch_size`, each
with its own noise seed, so that the validation bound is the same for any number of processes.

Shapes: B sequences, L tokens, V symbols.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from adlm.checkpoints.adapter import (
    Adapter,
    LoraBase,
    initial_weights,
    is_adapter,
    open_model,
    read_adapter,
    replace_adapter,
)
from adlm.checkpoints.model_folder import ModelFolder, replace_model_folder
from adlm.checkpoints.tensor_files import FullTensor
from adlm.config.load import init_folder
from adlm.config.schema import Config
from adlm.data.rows.anchor_rules import SymbolStatistics, count_symbols, symbol_texts
from adlm.data.rows.loader import Batches
from adlm.data.rows.packing import counted_positions
from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.methods import method_of
from adlm.methods.adlm import Anchored
from adlm.methods.inputs import check_canvas, given_option
from adlm.methods.rates import Rated
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import Tokenizer
from adlm.training.build import build_train_state
from adlm.training.metrics import ValidationResult
from adlm.training.run_folder import RunFolder
from adlm.training.step import TrainState, generator_of, micro_batch_shape, seed_of

SAMPLED_TOKENS = 2**20  # about how many tokens the frequencies of symbols are estimated from

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

    def save_model(self, weights: Mapping[str, Tensor], path: Path, full_tensor: FullTensor) -> None:
        """On the main process: write the model folder, replacing an existing one."""
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

    def _initial_weights(self) -> Mapping[str, Tensor]:
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

    def save_model(self, weights: Mapping[str, Tensor], path: Path, full_tensor: FullTensor) -> None:
        """Model folders are shared, so the config leaves out the local path `data.prepared`."""
        config = replace(self.config, data=replace(self.config.data, prepared=""))
        if self.base is None:
            model = ModelFolder(config, weights, self.tokenizer, chat_template=self.chat_template)
            replace_model_folder(model, path, full_tensor)
        else:
            tokenizer = None if self.tokenizer.is_same(self.base.model.tokenizer) else self.tokenizer
            template = None if self.chat_template == self.base.model.chat_template else self.chat_template
            adapter = Adapter(replace(config, init=self.base.name), weights, tokenizer, template)
            replace_adapter(adapter, path, full_tensor)


def _ratio_of_sums(
    nats: float, tokens: float, nats_squared: float, nats_tokens: float, tokens_squared: float, rows: float
) -> ValidationResult:
    """mean = sum_i nats_i / sum_i tokens_i over rows i; variance = sum_i (nats_i - mean tokens_i)^2 / tokens^2."""
    mean = nats / tokens
    spread = max(0.0, nats_squared - 2 * mean * nats_tokens + mean * mean * tokens_squared)
    correction = rows / (rows - 1) if rows > 1 else math.inf
    stderr = math.sqrt(spread * correction) / tokens if rows > 1 else math.inf
    return ValidationResult(mean, stderr, int(tokens), int(rows))
