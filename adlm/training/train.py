"""The recipe of a run, for every method: text in, model folder out, and nothing lost on the way.

Knows no method by name and no console: what happens is told to a Screen. Every process runs this; the first one writes.
"""

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from adlm.checkpoints.model_folder import ModelFolder, replace_model_folder
from adlm.config.schema import Config
from adlm.data.rows.loader import Batch
from adlm.diffusion.times import BatchSlice
from adlm.distributed import device_name
from adlm.errors import UserError
from adlm.limits import check_training
from adlm.methods import method_of
from adlm.models.transformer import num_parameters
from adlm.training import checkpoint as snapshot
from adlm.training import run_folder
from adlm.training.data import TrainingData, log_frequencies, open_training_data
from adlm.training.metrics import (
    Counters,
    MetricsLine,
    MetricsLogger,
    PendingReport,
    add_report,
    metrics_line,
    open_metrics,
)
from adlm.training.optimizer import check_warm_up, learning_rate, set_learning_rate
from adlm.training.rng import generator_of, reseed_dropout
from adlm.training.run_folder import RunFolder
from adlm.training.samples import write_samples
from adlm.training.sharding import Processes, default_threads, micro_batches, training_processes
from adlm.training.step import MicroBatch, count_tokens, train_step
from adlm.training.stopping import Stop, explain_out_of_memory, stop_on_signals
from adlm.training.throughput import ThroughputMeter
from adlm.training.train_state import TrainState, build
from adlm.training.validation import ValidationResult, validate


@dataclass(frozen=True)
class RunStart:
    """What a run is about to do."""

    device: str
    threads: int | None
    """CPU threads; empty on a GPU."""
    num_parameters: int
    num_rows: int | None
    """Of the training text; empty for a stream."""
    num_tokens: int | None
    num_held_out: int
    """Rows that are measured."""
    step: int
    """Where it stands: 0, or where it is resumed."""
    exact: bool
    """Whether held-out nats are exact, and not an upper bound."""


class Reporter(Protocol):
    """Who reads along."""

    def say(self, sentence: str) -> None: ...

    def start(self, start: RunStart) -> None: ...

    def step(self, step: int) -> None:
        """So many steps are done."""
        ...

    def write(self, line: MetricsLine) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended."""

    folder: Path
    counters: Counters
    measured: ValidationResult | None
    """Nats of held-out rows at the end; empty where nothing is held out or the run was stopped."""
    exact: bool
    """Whether those nats are exact, and not an upper bound."""
    signal: int = 0
    """That stopped it before its end; 0 where it came to its end."""


@dataclass(frozen=True)
class TrainContext:
    """All that stays the same from step to step."""

    config: Config
    processes: Processes
    run: RunFolder
    supply: TrainingData
    trainee: TrainState
    logbook: MetricsLogger | None
    """The first process's."""
    screen: Reporter | None
    """The first process's."""
    stop: Stop


def train(config: Config, out: Path, screen: Reporter) -> TrainOutcome:
    """Train what the config says into the folder `out`, from where a run there has got to."""
    with training_processes(config.train) as processes:
        say = screen.say if processes.first else _nothing
        with run_folder.held(out) if processes.first else nullcontext(RunFolder(out)) as run:
            micro_batches(config.train, processes.num_ranks)
            check_warm_up(config.train)
            config = _with_threads(_with_warm_up(config, run), run, processes)
            found = _found(run, processes, say)
            before = _before(run, found)
            if before is not None:
                run_folder.check_knobs(run, before, config, of_text=False)
            supply = open_training_data(config, run, processes, say)
            config = supply.config
            method_of(config)  # what it refuses must not be kept as the run's config
            check_training(config, processes.device, processes.num_ranks)
            changes = [] if before is None else run_folder.check_knobs(run, before, config)
            if found is not None:
                run_folder.check_text(run, supply.fingerprint)
                run_folder.check_steps(run, config, found.counters.step)
            frequencies = log_frequencies(supply, processes) if config.train.unigram_start else None
            trainee = build(config, processes, say, frequencies)
            counters = _resume(found, trainee, processes, say)
            if processes.first:  # nothing was written before this line: a refused resume leaves the run as it was
                for change in changes:
                    say(change)
                run_folder.keep(run, config, supply.fingerprint)
                if found is not None:
                    snapshot.tidy(found, config.train.keep)
            logbook = open_metrics(out, config, counters.step, screen) if processes.first else None
            try:
                with stop_on_signals(
                    say
                ) as stop:  # what came before can be cut off at any moment: it is resumed or redone
                    watching = screen if processes.first else None
                    shop = TrainContext(config, processes, run, supply, trainee, logbook, watching, stop)
                    return _training_loop(shop, counters)
            finally:
                if logbook is not None:
                    logbook.close()


def _nothing(sentence: str) -> None:
    pass


def _with_warm_up(config: Config, run: RunFolder) -> Config:
    """The config with its warm-up steps written out: those asked for, those the run began with, or the default.

    So extending a run does not warm up again.
    """
    begun = run.config
    wanted = config.train.warm_up_steps
    if wanted is None and begun is not None:
        wanted = begun.train.warm_up_steps
    steps = config.train.num_warm_up_steps if wanted is None else wanted
    return replace(config, train=replace(config.train, warm_up_steps=steps))


def _with_threads(config: Config, run: RunFolder, processes: Processes) -> Config:
    """The config with the CPU threads of the run: those asked for, those it began with, or the default.

    They change results in the last bits, so a run keeps them, and resumes to the bits of an unbroken one.
    """
    if processes.device.type != "cpu":
        return config
    begun = run.config
    wanted = config.train.threads or (begun.train.threads if begun is not None else None)
    threads = processes.same(wanted or default_threads())
    torch.set_num_threads(threads)
    return replace(config, train=replace(config.train, threads=threads))


def _found(run: RunFolder, processes: Processes, say: Callable[[str], None]) -> snapshot.Checkpoint | None:
    """The snapshot to resume from."""
    found = snapshot.find_checkpoint(run.snapshots, say) if processes.first else None
    return cast(snapshot.Checkpoint | None, processes.same(found))


def _before(run: RunFolder, found: snapshot.Checkpoint | None) -> Mapping[str, Any] | None:
    """The config that the run was trained with so far, or was begun with; None for a new run."""
    if found is not None:
        return found.config
    begun = run.config
    return None if begun is None else run_folder.mapping_of(begun)


def _resume(
    found: snapshot.Checkpoint | None, trainee: TrainState, processes: Processes, say: Callable[[str], None]
) -> Counters:
    """The trainee as the snapshot has it, or as it was built."""
    if found is None:
        return Counters()
    tensors = snapshot.tensors_of(trainee.network, trainee.optimizer, trainee.average)
    snapshot.load_tensors(found, tensors, processes)
    if trainee.average is not None:
        trainee.average.num_updates.fill_(found.counters.num_updates)
    say(f"going on from step {found.counters.step:,}: {found.folder}")
    return found.counters


def _training_loop(shop: TrainContext, counters: Counters) -> TrainOutcome:
    """Step after step to the end, or until told to stop."""
    config, processes, began = shop.config, shop.processes, counters.step
    batches = shop.supply.training.batches(counters.position)
    clock = ThroughputMeter(counters, processes.device, shop.trainee.flop_a_token, processes.num_ranks)
    taken: PendingReport | None = None  # the last step, its report not read yet
    measured: ValidationResult | None = None
    if shop.screen is not None:
        shop.screen.start(_start(shop, counters.step))
    while counters.step < config.train.steps:
        batch = _next(batches)
        tokens, stopped, failed = processes.sum(
            [_num_tokens(shop, batch), shop.stop.signal != 0, isinstance(batch, UserError)]
        )
        if stopped or failed:
            return _stop_early(shop, _with_report(shop, counters, taken), batch, failed > 0, began)
        assert isinstance(batch, Batch)
        now = _step(shop, counters, batch, int(tokens))
        counters = _with_report(shop, counters, taken)
        counters, taken = _counted(counters, batch, int(tokens)), now
        if shop.screen is not None:
            shop.screen.step(counters.step)
        if _due(config, counters.step):
            counters, taken = _with_report(shop, counters, taken), None
            counters, measured = _validate_and_checkpoint(shop, counters, clock)
            clock.start(counters)
    if counters.step == began:  # RUN/model may be older than the snapshot: the process can end between the two
        _save_model(shop, shop.run.place / "model")
    return TrainOutcome(shop.run.place, counters, measured or _measured(shop), shop.trainee.method.exact)


def _start(shop: TrainContext, step: int) -> RunStart:
    config, supply = shop.config, shop.supply
    return RunStart(
        device_name(shop.processes.device),
        config.train.threads if shop.processes.device.type == "cpu" else None,
        num_parameters(shop.trainee.network),
        supply.num_rows,
        supply.num_tokens,
        supply.num_held_out,
        step,
        shop.trainee.method.exact,
    )


def _next(batches: Iterator[Batch]) -> Batch | UserError:
    """The next batch, or why there is none: the other processes must hear of it before anybody leaves."""
    try:
        return next(batches)
    except UserError as error:
        return error


def _micro_batches(shop: TrainContext, batch: Batch) -> list[MicroBatch]:
    """This process's share of a global batch in its parts, each with its place in the whole."""
    train, processes = shop.config.train, shop.processes
    num, size = micro_batches(train, processes.num_ranks)
    first = processes.rank * num * size
    return [
        MicroBatch(
            batch.x[start : start + size],
            None if batch.pad is None else batch.pad[start : start + size],
            BatchSlice(first + start, train.batch_size),
        )
        for start in range(0, num * size, size)
    ]


def _num_tokens(shop: TrainContext, batch: Batch | UserError) -> int:
    return 0 if isinstance(batch, UserError) else count_tokens(shop.trainee.method, _micro_batches(shop, batch))


def _step(shop: TrainContext, counters: Counters, batch: Batch, tokens: int) -> PendingReport:
    """One optimiser step, every draw of it fixed by its number."""
    train, trainee, processes = shop.config.train, shop.trainee, shop.processes
    parts = _micro_batches(shop, batch)
    set_learning_rate(trainee.optimizer, learning_rate(train, counters.step))
    reseed_dropout(train.seed, counters.step, processes.rank, processes.num_ranks)
    with explain_out_of_memory(shop.config, len(parts[0].x), counters.step, snapshot.describe_last(shop.run.snapshots)):
        report = train_step(
            trainee.method,
            trainee.network,
            trainee.optimizer,
            trainee.average,
            parts,
            tokens / processes.num_ranks,
            counters.step / train.steps,
            generator_of(train.seed, "noise", counters.step),
            trainee.lowered,
            processes.mean,
        )
    return PendingReport(report, tokens)


def _counted(counters: Counters, batch: Batch, tokens: int) -> Counters:
    return replace(
        counters,
        step=counters.step + 1,
        epoch=batch.after.epoch,
        row=batch.after.row,
        tokens=counters.tokens + tokens,
    )


def _with_report(shop: TrainContext, counters: Counters, taken: PendingReport | None) -> Counters:
    if taken is None:
        return counters
    return add_report(counters, taken, shop.config, snapshot.describe_last(shop.run.snapshots))


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


def _due(config: Config, step: int) -> bool:
    """Whether anything but training is to be done after this step."""
    train = config.train
    intervals = (train.log_every, train.valid_every, train.sample_every, train.snapshot_every)
    return step == train.steps or any(_every(interval, step) for interval in intervals)


def _validate_and_checkpoint(
    shop: TrainContext, counters: Counters, clock: ThroughputMeter
) -> tuple[Counters, ValidationResult | None]:
    """Measure, write down, sample and save, each where it is due. A snapshot comes last: it holds all that was done."""
    train, step = shop.config.train, counters.step
    clocks = clock.read(counters)
    last, measured = step == train.steps, None
    if last or _every(train.valid_every, step):
        measured = _measured(shop)
        counters = _with_best(shop, counters, measured)
    if last or measured is not None or _every(train.log_every, step):
        if shop.logbook is not None:
            shop.logbook.write(metrics_line(counters, shop.config, measured, clocks))
        counters = replace(counters, window={})
    if last or _every(train.sample_every, step):
        write_samples(shop.trainee, shop.supply, shop.run.samples, step, shop.processes)
    if last or _every(train.snapshot_every, step):
        _save(shop, counters, measured)
    return counters, measured


def _measured(shop: TrainContext) -> ValidationResult | None:
    """The bound on held-out rows, with the weights that are kept."""
    if not shop.supply.num_held_out:
        return None
    _, size = micro_batches(shop.config.train, shop.processes.num_ranks)
    with shop.trainee.with_ema():
        return validate(shop.trainee.method, shop.trainee.network, shop.supply, size, shop.processes)


def _with_best(shop: TrainContext, counters: Counters, measured: ValidationResult | None) -> Counters:
    """Keep a model that is better than all before it."""
    if measured is None or (counters.best_nats is not None and measured.nats >= counters.best_nats):
        return counters
    if not math.isfinite(measured.nats):
        if shop.screen is not None:
            shop.screen.say(
                f"the bound on the held-out rows is {measured.nats} at step {counters.step:,}, so RUN/best stays as it "
                "is; training goes on"
            )
        return counters
    _save_model(shop, shop.run.place / "best")
    return replace(counters, best_nats=measured.nats, best_step=counters.step)


def _save(shop: TrainContext, counters: Counters, measured: ValidationResult | None) -> None:
    """A snapshot to go on from, and the model folder of this moment."""
    trainee, processes, snapshots = shop.trainee, shop.processes, shop.run.snapshots
    if shop.logbook is not None:
        shop.logbook.metrics.sync()
    tensors = snapshot.tensors_of(trainee.network, trainee.optimizer, trainee.average)
    nats, config = None if measured is None else measured.nats, run_folder.mapping_of(shop.config)
    snapshot.save_checkpoint(snapshots, tensors, counters, nats, config, processes)
    if processes.first:
        snapshot.prune_checkpoints(snapshots, shop.config.train.keep)
    _save_model(shop, shop.run.place / "model")


def _save_model(shop: TrainContext, place: Path) -> None:
    """Write the model folder. It is shared, so its config does not name the folder of this machine's shards."""
    weights = shop.trainee.model_weights()
    if shop.processes.first:
        config = replace(shop.config, data=replace(shop.config.data, prepared=""))
        replace_model_folder(ModelFolder(config, weights, shop.supply.tokenizer), place)


def _stop_early(
    shop: TrainContext, counters: Counters, batch: Batch | UserError, failed: bool, began: int
) -> TrainOutcome:
    """Leave before the end, by a signal or because there is no more text to read: whole, and saved."""
    place = shop.run.snapshots / snapshot.checkpoint_name(counters.step)
    if counters.step and not shop.processes.same(place.is_dir()):
        _save(shop, counters, None)
    elif counters.step and counters.step == began:
        _save_model(shop, shop.run.place / "model")
    if failed:
        problem = batch if isinstance(batch, UserError) else "another process could not read its text"
        saved = (
            f"; the {counters.step:,} steps done are saved, and the same command resumes from there once the text is "
            "as it was when the run began"
        )
        raise UserError(f"{problem}{saved if counters.step else ''}")
    return TrainOutcome(shop.run.place, counters, None, shop.trainee.method.exact, shop.stop.signal or signal.SIGTERM)
