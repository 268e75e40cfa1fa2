"""The training loop: open the data, build or resume the state, train, validate, checkpoint.

Independent of the task (`task.py`), of any particular method and of the console: progress goes to a `Reporter`. Every
process runs this code; only the main process (rank 0) writes files and reports.
"""

import math
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from adlm.config.schema import Config, Train
from adlm.data.rows.loader import TrainingBatch
from adlm.diffusion.times import BatchSlice
from adlm.distributed import Processes, default_threads, device_name
from adlm.errors import UserError
from adlm.files import reporting_os_errors, write_file
from adlm.models.lora import trained_parameters
from adlm.models.transformer import num_parameters
from adlm.training import run_checkpoints, run_folder
from adlm.training.build import check_precision
from adlm.training.metrics import (
    Counters,
    MessageSink,
    Metrics,
    PendingReport,
    ThroughputMeter,
    ValidationResult,
    add_report,
    metrics_line,
)
from adlm.training.optimizer import check_warm_up, learning_rate, set_learning_rate
from adlm.training.run_checkpoints import Checkpoint
from adlm.training.run_folder import RunFolder
from adlm.training.saving import Saving
from adlm.training.sharding import gather_to_main, training_processes
from adlm.training.step import (
    MicroBatch,
    TrainState,
    count_tokens,
    generator_of,
    micro_batch_shape,
    reseed_dropout,
    train_step,
)
from adlm.training.stopping import Stop, explain_out_of_memory, stop_on_signals
from adlm.training.task import DataSize, OpenTask, TrainingTask
from adlm.training.text import open_text_task


@dataclass(frozen=True)
class RunStart:
    """Facts about a run that are reported before its first step."""

    device: str
    threads: int | None
    """CPU threads; None on a GPU."""
    num_parameters: int
    num_trained: int
    """Parameters that are not frozen: all of them without LoRA."""
    size: DataSize
    step: int
    """Steps already done: 0 for a new run."""
    exact: bool
    """Whether the validation loss is exact rather than an upper bound."""


class Reporter(MessageSink, Protocol):
    """Receives the progress of a run."""

    def start(self, start: RunStart) -> None: ...

    def step(self, step: int) -> None:
        """`step` steps are done."""
        ...


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended."""

    folder: Path
    counters: Counters
    measured: ValidationResult | None
    """Final validation; None where nothing is held out or the run was stopped early."""
    exact: bool
    """Whether the validation loss is exact rather than an upper bound."""
    signal: int = 0
    """The signal that stopped the run early; 0 where the run is complete."""


@dataclass(frozen=True)
class TrainContext:
    """Everything that stays the same from step to step."""

    config: Config
    processes: Processes
    run: RunFolder
    task: TrainingTask
    state: TrainState
    metrics: Metrics | None
    """None except in the main process."""
    reporter: Reporter | None
    """None except in the main process."""
    stop: Stop
    saving: Saving


def train(config: Config, out: Path, reporter: Reporter, open_task: OpenTask = open_text_task) -> TrainOutcome:
    """Train `config` into the folder `out`, resuming the run there if there is one."""
    with training_processes(config.train, reporter.info) as processes:
        main = processes.is_main_process
        report = reporter.info if main else (lambda message: None)
        with run_folder.open_run_folder(out) if main else nullcontext(RunFolder(out)) as run:
            micro_batch_shape(config.train, processes.num_ranks)
            check_precision(config, processes.device)
            config = _with_saved_options(config, run, processes)
            found = processes.on_main_process(lambda: run_checkpoints.find_checkpoint(run.checkpoints, report))
            latest: Checkpoint | None = processes.broadcast(found)
            if latest is not None:
                run_folder.check_steps(run, config, latest.counters.step)
            check_warm_up(config.train)
            previous: Mapping[str, Any] | None = None if run.config is None else run_folder.config_as_json(run.config)
            if latest is not None:
                previous = latest.config
            if previous is not None:
                run_folder.check_options(run, previous, config, include_data_options=False)
            task = open_task(config, run, processes, report)
            config = task.config
            changes = [] if previous is None else run_folder.check_options(run, previous, config)
            if latest is not None:
                run_folder.check_text(run, config, task.fingerprint)
            state = task.build_state(processes, report, resumes=latest is not None)
            counters = _resume(latest, state, report)
            if main:  # the first writes to the run: a rejected resume leaves the folder unchanged
                if previous is not None and latest is None:
                    report(f"{out} has no checkpoint yet; it starts again from step 1")
                for change in changes:
                    report(change)
                if previous is not None and (note := _rate_change(config.train, previous["train"], counters.step)):
                    report(note)
                run_folder.save_run(run, config, task.fingerprint)
                if latest is not None:
                    run_checkpoints.set_damaged_aside(latest)
                    run_checkpoints.prune_checkpoints(run.checkpoints, config.train.keep)
            metrics = Metrics(out, config, counters.step, reporter) if main else None
            try:
                saving = Saving(run.checkpoints, processes, config.train.keep)
                with stop_on_signals(report) as stop, saving:  # a signal before ends the process: setup can be redone
                    main_reporter = reporter if main else None
                    context = TrainContext(config, processes, run, task, state, metrics, main_reporter, stop, saving)
                    return _training_loop(context, counters)
            finally:
                if metrics is not None:
                    metrics.close()


def _with_saved_options(config: Config, run: RunFolder, processes: Processes) -> Config:
    """The config with warm-up and CPU threads resolved: as given, else as the run was started with, else the default.

    So extending a run does not lengthen its warm-up. The number of threads changes results in the last bits; with the
    same one a run resumes bit-identically.
    """
    train, saved = config.train, None if run.config is None else run.config.train
    warm_up_steps, threads = train.warm_up_steps, train.threads
    if warm_up_steps is None and saved is not None:
        warm_up_steps = saved.warm_up_steps
    if warm_up_steps is None:
        warm_up_steps = train.num_warm_up_steps
    if processes.device.type == "cpu":
        threads = processes.broadcast(threads or (saved and saved.threads) or default_threads())
        torch.set_num_threads(threads)
    return replace(config, train=replace(train, warm_up_steps=warm_up_steps, threads=threads))


def _rate_change(train: Train, previous: Mapping[str, Any], step: int) -> str:
    """A note if more steps than before raise the learning rate again, which had decayed; else empty."""
    if step == 0 or previous["steps"] >= train.steps:
        return ""
    before, now = learning_rate(replace(train, steps=previous["steps"]), step), learning_rate(train, step)
    if now <= before:
        return ""
    return (
        f"the learning rate had decayed to {before:.2g} and starts anew at {now:.2g} (train.decay {train.decay} of "
        f"{train.steps:,} steps), so the held-out bound may rise before it falls"
    )


def _resume(latest: Checkpoint | None, state: TrainState, report: Callable[[str], None]) -> Counters:
    """Load the checkpoint, if there is one, into the state."""
    if latest is None:
        return Counters()
    run_checkpoints.load_tensors(latest, state.named_tensors())
    if state.ema is not None:
        state.ema.num_updates.fill_(latest.counters.num_updates)
    report(f"resuming from step {latest.counters.step:,}: {latest.folder}")
    return latest.counters


def _training_loop(context: TrainContext, counters: Counters) -> TrainOutcome:
    """Steps until `train.steps` are done or a signal asks to stop.

    An example: train.steps 3, log_every 2, checkpoint_every 3.

        step 1  launched on the device; counters.step = 1, and its report is pending
        step 2  launched; while the device computes it, the report of step 1 is read; counters.step = 2
                2 is a multiple of log_every: the report of step 2 is read too, and a line with the mean of both written
        step 3  launched; nothing is pending; counters.step = 3
                3 is the last step: its report is read; validation, a line, RUN/model, then the checkpoint

    A signal during step 2 is seen before step 3: the processes sum (tokens, stopped, failed, saved), so all of them
    stop after the same step, read its report, write its checkpoint and return. The rerun command starts here with
    counters.step 2. Every random number is derived from the seed and the step, so it ends with the bytes of an
    uninterrupted run. By the same sum they learn that all have written their files of a checkpoint.
    """
    train, processes, task, first_step = context.config.train, context.processes, context.task, counters.step
    batches = task.training.batches(counters.position)
    meter = ThroughputMeter(counters, processes.device, context.state.flops_per_token, processes.num_ranks)
    pending: PendingReport | None = None  # the last step's report, which may still be computed on the device
    measured: ValidationResult | None = None
    if context.reporter is not None:
        start = RunStart(
            device=device_name(processes.device),
            threads=train.threads if processes.device.type == "cpu" else None,
            num_parameters=num_parameters(context.state.network),
            num_trained=sum(weight.numel() for weight in trained_parameters(context.state.network).values()),
            size=task.size,
            step=first_step,
            exact=context.state.method.exact,
        )
        context.reporter.start(start)
    while counters.step < train.steps:
        batch: TrainingBatch | UserError
        try:
            batch = next(batches)
        except UserError as error:  # all processes must know of it before one of them exits
            batch = error
        parts = [] if isinstance(batch, UserError) else _micro_batches(context, batch)
        num_tokens = count_tokens(context.state.method, parts)
        flags = (context.stop.signal != 0, isinstance(batch, UserError), context.saving.is_written)
        tokens, stopped, failed, saved = processes.sum([num_tokens, *flags])
        if saved == processes.num_ranks:
            context.saving.finish()
        if stopped or failed:
            return _stop_early(context, _add_pending(context, counters, pending), batch, failed > 0, first_step)
        assert isinstance(batch, TrainingBatch)
        if batch.resets_optimizer:
            context.state.optimizer.state.clear()
        report = _step(context, counters, parts, int(tokens))
        counters, pending = _add_pending(context, counters, pending), report
        step, total, after = counters.step + 1, counters.tokens + int(tokens), batch.after
        counters = replace(counters, step=step, epoch=after.epoch, row=after.row, tokens=total)
        if context.reporter is not None:
            context.reporter.step(counters.step)
        intervals = (train.log_every, train.valid_every, train.sample_every, train.checkpoint_every)
        if step == train.steps or _is_multiple(step, *intervals):
            counters, pending = _add_pending(context, counters, pending), None
            counters, measured = _validate_and_checkpoint(context, counters, meter)
            meter.start(counters)
    if counters.step == first_step:  # the run may have been killed after the checkpoint, before RUN/model was written
        _save_model(context, context.run.path / "model")
    return TrainOutcome(context.run.path, counters, measured or _validate(context), context.state.method.exact)


def _micro_batches(context: TrainContext, batch: TrainingBatch) -> list[MicroBatch]:
    """This process's part of the global batch, split into micro-batches."""
    train, processes = context.config.train, context.processes
    num, size = micro_batch_shape(train, processes.num_ranks)
    first_row = processes.rank * num * size
    return [
        MicroBatch(
            batch.x[start : start + size],
            None if batch.pad is None else batch.pad[start : start + size],
            BatchSlice(first_row + start, train.batch_size),
            None if batch.given is None else batch.given[start : start + size],
            None if batch.labels is None else batch.labels[start : start + size],
        )
        for start in range(0, num * size, size)
    ]


def _step(context: TrainContext, counters: Counters, parts: list[MicroBatch], tokens: int) -> PendingReport:
    """One optimizer step. All its randomness is derived from the seed and the step number."""
    train, state, processes = context.config.train, context.state, context.processes
    set_learning_rate(state.optimizer, learning_rate(train, counters.step))
    reseed_dropout(train.seed, counters.step, processes.rank, processes.num_ranks)
    with explain_out_of_memory(context.config, len(parts[0].x), counters.step, context.saving.describe_last):
        report = train_step(
            state,
            parts,
            tokens / processes.num_ranks,
            counters.step / train.steps,
            generator_of(train.seed, "noise", counters.step),
            processes.mean,
        )
    return PendingReport(report, tokens)


def _add_pending(context: TrainContext, counters: Counters, pending: PendingReport | None) -> Counters:
    if pending is None:
        return counters
    return add_report(counters, pending, context.config, context.saving.describe_last)


def _is_multiple(step: int, *intervals: int) -> bool:
    """Whether the step is a multiple of one of the intervals; 0 is never."""
    return any(interval > 0 and step % interval == 0 for interval in intervals)


def _validate_and_checkpoint(
    context: TrainContext, counters: Counters, meter: ThroughputMeter
) -> tuple[Counters, ValidationResult | None]:
    """Validate, log, sample and checkpoint, each if due. The checkpoint comes last, so that it includes the others."""
    train, state, step = context.config.train, context.state, counters.step
    timings = meter.read(counters)
    is_last, measured = step == train.steps, None
    if is_last or _is_multiple(step, train.valid_every):
        measured = _validate(context)
        counters = _save_if_best(context, counters, measured)
    if is_last or measured is not None or _is_multiple(step, train.log_every):
        if context.metrics is not None:
            context.metrics.write(metrics_line(counters, context.config, measured, timings))
        counters = replace(counters, window={})
    if (is_last and train.sample_every) or _is_multiple(step, train.sample_every):
        with state.with_ema():
            samples = context.task.samples(state, step, context.processes)
        if context.processes.is_main_process:
            folder = context.run.samples
            with reporting_os_errors(folder):
                folder.mkdir(exist_ok=True)
            write_file(folder / f"step-{step:08}.txt", samples)
    if is_last or _is_multiple(step, train.checkpoint_every):
        _save_checkpoint(context, counters, measured)
    return counters, measured


def _validate(context: TrainContext) -> ValidationResult | None:
    """The bound on the held-out rows, with the EMA weights."""
    if not context.task.size.num_held_out:
        return None
    with context.state.with_ema():
        return context.task.validate(context.state, context.processes)


def _save_if_best(context: TrainContext, counters: Counters, measured: ValidationResult | None) -> Counters:
    """Write RUN/best if the validation bound is the lowest so far."""
    if measured is None or (counters.best_nats is not None and measured.nats >= counters.best_nats):
        return counters
    if not math.isfinite(measured.nats):
        if context.reporter is not None:
            context.reporter.info(
                f"the bound on the held-out rows is {measured.nats} at step {counters.step:,}, so RUN/best is not "
                "updated; training continues"
            )
        return counters
    _save_model(context, context.run.path / "best")
    return replace(counters, best_nats=measured.nats, best_step=counters.step)


def _save_checkpoint(context: TrainContext, counters: Counters, measured: ValidationResult | None) -> None:
    """Write RUN/model and begin to save a checkpoint of this step, once that of an earlier step is out of memory."""
    context.saving.finish()
    if context.metrics is not None:
        context.metrics.sync()
    _save_model(context, context.run.path / "model")
    nats, config = None if measured is None else measured.nats, run_folder.config_as_json(context.config)
    context.saving.start(context.state.named_tensors(), counters, nats, config)


def _save_model(context: TrainContext, path: Path) -> None:
    """Write a model folder. A collective call: every process must make it."""
    weights = context.state.model_weights()
    gather_to_main(weights, context.processes, lambda full_tensor: context.task.save_model(weights, path, full_tensor))


def _stop_early(
    context: TrainContext, counters: Counters, batch: TrainingBatch | UserError, failed: bool, first_step: int
) -> TrainOutcome:
    """Checkpoint and stop, after a signal or because the data cannot be read."""
    context.saving.finish()
    path = context.run.checkpoints / run_checkpoints.checkpoint_name(counters.step)
    if counters.step and not context.processes.broadcast(path.is_dir()):
        _save_checkpoint(context, counters, None)
        context.saving.finish()
    elif counters.step and counters.step == first_step:
        _save_model(context, context.run.path / "model")
    if failed:
        problem = batch if isinstance(batch, UserError) else "another process could not read its text"
        saved = f"; the first {counters.step:,} steps are saved: restore the text and rerun the same command to resume"
        raise UserError(f"{problem}{saved if counters.step else ''}")
    return TrainOutcome(
        context.run.path, counters, None, context.state.method.exact, context.stop.signal or signal.SIGTERM
    )
