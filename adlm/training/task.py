"""What a run trains: the parts of training that depend on the kind of data. Text here, problems in apps/reasoning."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, replace_model_folder
from adlm.config.load import init_folder
from adlm.config.schema import Config
from adlm.data.rows.loader import Batches
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.limits import check_training
from adlm.methods import method_of
from adlm.methods.anchored import Anchored
from adlm.training.build import build_train_state
from adlm.training.data import TrainingData, log_frequencies, open_training_data, training_statistics
from adlm.training.run_folder import RunFolder
from adlm.training.step import TrainState, micro_batch_shape
from adlm.training.validation import ValidationResult, validate, write_samples

Report = Callable[[str], None]


class Task(Protocol):
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


OpenTask = Callable[[Config, RunFolder, Processes, Report], Task]


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
        _, size = micro_batch_shape(self.config.train, processes.num_ranks)
        return validate(method_of(self.config), state.network, self, size, processes)

    def write_samples(self, state: TrainState, folder: Path, step: int, processes: Processes) -> None:
        write_samples(method_of(self.config), state.network, self, folder, step, processes)

    def save_model(self, weights: dict[str, Tensor], path: Path) -> None:
        """Model folders are shared, so the config leaves out the local path `data.prepared`."""
        config = replace(self.config, data=replace(self.config.data, prepared=""))
        replace_model_folder(ModelFolder(config, weights, self.tokenizer), path)


def open_text_task(config: Config, run: RunFolder, processes: Processes, report: Report) -> TextTask:
    task = TextTask(**vars(open_training_data(config, run, processes, report)))
    method_of(task.config)  # raises for an invalid config before it is saved as the run's config
    check_training(task.config, processes.device, processes.num_ranks)
    return task
