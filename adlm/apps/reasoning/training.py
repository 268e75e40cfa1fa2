"""`adlm reason train`: problems as a task of the training loop. Steps, metrics, checkpoints are those of adlm/training.

Shapes: B rows, L ids.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adlm.apps.reasoning.network import (
    BaseModel,
    ReasoningObjective,
    check_plain_causal,
    open_base,
    save_reasoning_model,
)
from adlm.apps.reasoning.problems import Problem, problem_parts, problem_set
from adlm.apps.reasoning.rows import (
    ALL_STEPS,
    WIDTH,
    EncodedProblem,
    Encoder,
    ReasoningMethod,
    Stage,
    collate,
    reason_of,
    reasoning_method,
    special_ids,
    stages_of,
)
from adlm.apps.reasoning.solve import Solver, score
from adlm.checkpoints.tensor_files import FullTensor
from adlm.config.schema import Config
from adlm.data.rows.loader import Batches, Position, TrainingBatch, shuffle
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.methods.inputs import eval_mode
from adlm.training.build import autocast_dtype
from adlm.training.metrics import ValidationResult
from adlm.training.run_folder import RunFolder
from adlm.training.step import TrainState, new_train_state, seed_of
from adlm.training.task import DataSize, Report

BPE_PROBLEMS = 2_000  # problems that a BPE tokenizer is trained on
GROUP = 16  # batches whose problems are sorted by length


def with_steps(config: Config) -> Config:
    """The config with `train.steps`: the epochs of all stages, in full batches."""
    epochs = sum(stage.epochs for stage in stages_of(config))
    parts = problem_parts(config.data)
    if "train" not in parts:
        raise UserError(
            f"data.name {config.data.name} has no training problems in data.root; add them, or generate some with "
            "data.problems=20000"
        )
    num = parts["train"].num_documents()
    batches = num // config.train.batch_size
    if not batches:
        raise UserError(
            f"train.batch_size {config.train.batch_size} is larger than the {num} training problems; give a smaller "
            "one, or more problems"
        )
    return replace(config, train=replace(config.train, steps=epochs * batches))


@dataclass(frozen=True)
class ReasoningBatches(Batches):
    """Epoch after epoch in full batches, each epoch shuffled anew; the rest of an epoch is left out.

    Of every `GROUP` batches the problems are sorted by length before they are divided, so that the questions of a batch
    need little padding, and the batches are shuffled.
    """

    problems: Sequence[EncodedProblem]
    encoder: Encoder
    method: ReasoningMethod
    stages: Sequence[Stage]
    batch_size: int
    seed: int

    def _batches(self, start: Position) -> Iterator[TrainingBatch]:
        per_epoch = len(self.problems) // self.batch_size
        epoch, number = start.epoch, start.row // self.batch_size
        while True:
            stage, begins = self._stage_at(epoch)
            first = number // GROUP * GROUP
            group = self._group(epoch, first, min(first + GROUP, per_epoch))
            for chosen in group[number - first :]:
                rows = [self.encoder.row(self.problems[index], self.method, stage) for index in chosen.tolist()]
                x, pad = collate(rows, self.encoder.ids, self.method, stage.slots, WIDTH)
                resets = begins and number == 0 and stage.reset_optimizer
                number += 1
                after = Position(epoch, number * self.batch_size) if number < per_epoch else Position(epoch + 1, 0)
                yield TrainingBatch(x, pad, after, resets)
            if number == per_epoch:
                epoch, number = epoch + 1, 0

    def _group(self, epoch: int, first: int, stop: int) -> list[NDArray[np.int64]]:
        """The problems of the batches [first, stop) of an epoch, which form a group."""
        positions = np.arange(first * self.batch_size, stop * self.batch_size)
        chosen = shuffle(positions, len(self.problems), self.seed, epoch)
        lengths = [len(self.problems[index].question) for index in chosen.tolist()]
        batches = chosen[np.argsort(lengths, kind="stable")].reshape(stop - first, self.batch_size)
        return list(batches[shuffle(np.arange(stop - first), stop - first, self.seed + 1 + first, epoch)])

    def _stage_at(self, epoch: int) -> tuple[Stage, bool]:
        """The stage of an epoch, and whether it begins there."""
        for stage in self.stages:
            if epoch < stage.epochs:
                return stage, epoch == 0
            epoch -= stage.epochs
        return self.stages[-1], False


@dataclass(frozen=True)
class ReasoningTask:
    """Problems, encoded for a model: see `training.task.TrainingTask`."""

    base: BaseModel
    encoder: Encoder
    problems: Sequence[EncodedProblem]
    held_out: Sequence[Problem]
    fingerprint: str

    @property
    def config(self) -> Config:
        return self.base.config

    @cached_property
    def stages(self) -> list[Stage]:
        return stages_of(self.config)

    @property
    def method(self) -> ReasoningMethod:
        return reasoning_method(self.config)

    @property
    def training(self) -> ReasoningBatches:
        train = self.config.train
        seed = seed_of(train.seed, "order")
        return ReasoningBatches(self.problems, self.encoder, self.method, self.stages, train.batch_size, seed)

    @property
    def size(self) -> DataSize:
        num_tokens = sum(len(p.question) + sum(map(len, p.steps)) + len(p.answer) for p in self.problems)
        return DataSize(len(self.problems), num_tokens, len(self.held_out), len(self.held_out))

    def build_state(self, processes: Processes, report: Report, resumes: bool) -> TrainState:
        train = self.config.train
        network = self.base.network.to(processes.device)
        if train.precision == "float64":
            network = network.double()
        objective = ReasoningObjective(self.config, self.encoder.ids)
        longest = 2 * (self.config.length + WIDTH)  # the longest question beside the longest answer, both padded
        return new_train_state(objective, network.train(), autocast_dtype(train, processes.device), max_length=longest)

    def validate(self, state: TrainState, processes: Processes) -> ValidationResult:
        """Held-out problems, solved as at inference, with the slots of the last stage."""
        with eval_mode(state.network):
            solver = Solver(self.config, state.network, self.base.tokenizer)
            nats, stderr, tokens = solver.answer_nats(self.held_out)
            accuracy = score(list(solver.solve(self.held_out)))
        return ValidationResult(nats, stderr, tokens, len(self.held_out), accuracy.share)

    def samples(self, state: TrainState, step: int, processes: Processes) -> str:
        with eval_mode(state.network):
            solver = Solver(self.config, state.network, self.base.tokenizer)
            solutions = list(solver.solve(self.held_out[: self.config.train.samples]))
        return "\n".join(f"{solution}\n" for solution in solutions)

    def save_model(self, weights: Mapping[str, Tensor], path: Path, full_tensor: FullTensor) -> None:
        save_reasoning_model(self.base, weights, path, full_tensor)


def open_reasoning_task(config: Config, run: RunFolder, processes: Processes, report: Report) -> ReasoningTask:
    """Read or generate the problems, encode them for the model, and check that they fit."""
    if processes.num_ranks > 1:
        raise UserError("`adlm reason train` runs in one process; start it without torchrun")
    parts = problem_parts(config.data)
    check_plain_causal(config, f"method {config.method}")
    if config.init:
        raise UserError(f"init {config.init} is for `adlm train`; a model to fine-tune goes by reason.base")
    for option in ("recompute", "unigram_start", "lora_rank"):
        if value := getattr(config.train, option):
            raise UserError(f"train.{option} {str(value).lower()} is for `adlm train`; leave it out")
    if config.train.precision == "float8":
        raise UserError("train.precision float8 is for `adlm train`; use train.precision=auto")
    report(f"problems: {', '.join(f'{part.name} ({split})' for split, part in parts.items())}")
    problems = list(parts["train"].problems())
    base = open_base(config, lambda: (problem.as_text() for problem in problems[:BPE_PROBLEMS]))
    source, ids = problem_set(config.data.name), special_ids(base.tokenizer)
    encoder = Encoder(base.tokenizer.encode_batch, source, ids, reason_of(config).misfits)
    held_out = list(parts["valid"].problems())[: config.train.valid_rows] if "valid" in parts else []
    encoded = encoder.encode(problems, "training problem")
    fingerprint = hashlib.sha256(parts["train"].fingerprint().encode()).hexdigest()
    task = ReasoningTask(base, encoder, encoded, held_out, fingerprint)
    for stage in task.stages:
        report(f"stage: {stage}")
    _check_num_steps(task)
    _check_room(task, encoded, "training problem")
    _check_room(task, replace(encoder, misfits="keep").encode(held_out), "validation problem")
    return task


def _check_num_steps(task: ReasoningTask) -> None:
    """A user error for more steps than the stages of an anchored method leave out."""
    last = task.stages[-1].left_out
    if task.encoder.misfits == "keep" or not task.method.labelled or last in (0, ALL_STEPS):
        return
    for number, problem in enumerate(task.problems, 1):
        if len(problem.steps) > last:
            raise UserError(
                f"training problem {number} has {len(problem.steps)} steps, and the last stage leaves out {last}; "
                "raise reason.slots and reason.epochs, or set reason.misfits=keep"
            )


def _check_room(task: ReasoningTask, problems: Sequence[EncodedProblem], what: str) -> None:
    """A user error for rows that the model has no room for."""
    config, longest = task.config, task.base.network.max_length
    room = config.length if longest is None else min(config.length, longest)
    for number, problem in enumerate(problems, 1):
        needed = max(len(task.encoder.row(problem, task.method, stage).ids) for stage in task.stages)
        if needed > room:
            owner = "length" if room == config.length else f"the model {reason_of(config).base}"
            raise UserError(
                f"{what} {number} takes {needed} tokens with its slots, and {owner} has room for {room}; give fewer "
                "reason.slots, another model or a larger length"
            )
