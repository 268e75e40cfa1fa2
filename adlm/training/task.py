"""What a run trains: the parts of training that depend on the kind of data. Text here, problems in apps/reasoning."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, replace_model_folder
from adlm.config.load import init_folder
from adlm.config.schema import Config
from adlm.data.rows.loader import Batches
from adlm.diffusion.times import BatchRng
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.files import reporting_os_errors, write_file
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.limits import check_training
from adlm.methods import method_of
from adlm.methods.adlm import Anchored
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.training.build import build_train_state
from adlm.training.data import TrainingData, log_frequencies, open_training_data, training_statistics
from adlm.training.metrics import ValidationResult
from adlm.training.run_folder import RunFolder
from adlm.training.seeds import generator_of, seed_of
from adlm.training.step import TrainState, micro_batch_shape

Report = Callable[[str], None]


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
    def num_rows(self) -> int | None:
        """Of the training data; None for a stream."""
        ...

    @property
    def num_tokens(self) -> int | None: ...

    @property
    def num_held_out(self) -> int:
        """Rows used for validation; 0 if nothing is held out."""
        ...

    @property
    def num_held_out_in_all(self) -> int:
        """Rows held out, of which `train.valid_rows` are used at most."""
        ...

    def build_state(self, processes: Processes, report: Report, resumes: bool) -> TrainState:
        """The state before the first step; of a run that `resumes`, its weights are replaced by the checkpoint's."""
        ...

    def validate(self, state: TrainState, processes: Processes) -> ValidationResult: ...

    def write_samples(self, state: TrainState, folder: Path, step: int, processes: Processes) -> None: ...

    def save_model(self, weights: dict[str, Tensor], path: Path) -> None:
        """Write the model folder, replacing an existing one."""
        ...


OpenTask = Callable[[Config, RunFolder, Processes, Report], TrainingTask]


@dataclass(frozen=True)
class TextTask(TrainingData):
    """Language modelling: rows of text, and any method."""

    def build_state(self, processes: Processes, report: Report, resumes: bool) -> TrainState:
        statistics = functools.cache(lambda: training_statistics(self, processes))
        method = method_of(self.config)
        if isinstance(method, Anchored):
            method = method.with_statistics(statistics)
        frequencies = log_frequencies(statistics().counts) if self.config.train.unigram_start else None
        weights = None if resumes or not self.config.init else self._initial_weights()
        return build_train_state(method, processes, report, frequencies, weights)

    def _initial_weights(self) -> dict[str, Tensor]:
        """The weights of the model `init`, whose tokenizer must be that of the prepared text."""
        init = self.config.init
        model = load_model_folder(init_folder(init))
        if model.tokenizer is not None and model.tokenizer.sha256 != self.tokenizer.sha256:
            raise UserError(
                f"init {init} has another tokenizer than the prepared text; leave out data.prepared and tokenizer=, or "
                f"prepare the text with `adlm prepare init={init} ...`"
            )
        return model.weights

    def validate(self, state: TrainState, processes: Processes) -> ValidationResult:
        """The mean bound per token over all held-out rows, a micro-batch per process at a time.

        Rows and noise are the same every time, so two validations of a run differ only in the weights. Every process
        takes part in every round, because gathering sharded weights is a collective operation; one without rows in the
        last round evaluates the last batch again and discards the result.
        """
        method, seed = method_of(self.config), self.config.train.seed
        estimator = ESTIMATORS[default_estimator(method)](method)
        nats, tokens, nats_squared, nats_tokens, tokens_squared, rows = (
            torch.zeros((), dtype=torch.float64) for _ in range(6)
        )
        batches = self.held_out_batches(micro_batch_shape(self.config.train, processes.num_ranks)[1])
        while round_batches := list(islice(batches, processes.num_ranks)):
            batch = round_batches[min(processes.rank, len(round_batches) - 1)]
            x = batch.x.to(processes.device)
            pad = None if batch.pad is None else batch.pad.to(processes.device)
            rng = BatchRng(generator_of(seed, "validation", batch.group), batch.batch_slice)
            row_nats = estimator(state.network, x, pad, rng).double().sum(dim=1).cpu()
            if processes.rank >= len(round_batches):
                continue
            row_tokens = (batch.is_counted & method.predicted(batch.x, batch.pad)).sum(dim=1).double()
            nats += row_nats.sum()
            tokens += row_tokens.sum()
            nats_squared += (row_nats * row_nats).sum()
            nats_tokens += (row_nats * row_tokens).sum()
            tokens_squared += (row_tokens * row_tokens).sum()
            rows += len(row_nats)
        sums = [float(value) for value in (nats, tokens, nats_squared, nats_tokens, tokens_squared, rows)]
        return _ratio_of_sums(*processes.sum(sums))

    def write_samples(self, state: TrainState, folder: Path, step: int, processes: Processes) -> None:
        """Write folder/step-00005000.txt with `train.samples` texts."""
        config, vocabulary, train = self.config, self.tokenizer.vocabulary, self.config.train
        canvas = torch.full((train.samples, config.length), vocabulary.mask_id, device=processes.device)
        if vocabulary.bos_id is None and self.num_held_out:
            canvas[:, 0] = self.read_held_out(0, 1)[0][0, 0]  # autoregressive methods need a first token
        rng = RowRng(seed_of(train.seed, "samples", step), range(train.samples))
        frame = last_frame(method_of(config).generate(state.network, canvas, config.sampling, rng))
        if processes.is_main_process:
            texts = [self.tokenizer.decode(row, special_tokens=False) for row in frame.ids.tolist()]
            content = "\n".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1))
            with reporting_os_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / f"step-{step:08}.txt", content)

    def save_model(self, weights: dict[str, Tensor], path: Path) -> None:
        """Model folders are shared, so the config leaves out the local path `data.prepared`."""
        config = replace(self.config, data=replace(self.config.data, prepared=""))
        replace_model_folder(ModelFolder(config, weights, self.tokenizer), path)


def open_text_task(config: Config, run: RunFolder, processes: Processes, report: Report) -> TextTask:
    task = TextTask(**vars(open_training_data(config, run, processes, report)))
    method_of(task.config)  # raises for an invalid config before it is saved as the run's config
    check_training(task.config, processes.device, processes.num_ranks)
    return task


def _ratio_of_sums(
    nats: float, tokens: float, nats_squared: float, nats_tokens: float, tokens_squared: float, rows: float
) -> ValidationResult:
    """mean = sum_i nats_i / sum_i tokens_i over rows i; variance = sum_i (nats_i - mean tokens_i)^2 / tokens^2."""
    mean = nats / tokens
    spread = max(0.0, nats_squared - 2 * mean * nats_tokens + mean * mean * tokens_squared)
    correction = rows / (rows - 1) if rows > 1 else math.inf
    stderr = math.sqrt(spread * correction) / tokens if rows > 1 else math.inf
    return ValidationResult(mean, stderr, int(tokens), int(rows))
