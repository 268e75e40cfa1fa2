"""Metrics of a run: counters, throughput, a logged step's line and its destinations (a file, TensorBoard, W&B).

A line of metrics.jsonl is one logged step. A resumed run first removes the lines of later steps, so that the file is
what an uninterrupted run would have written, except for timings. The report of a step is read after the next step is
launched, so that the CPU does not wait for the GPU.

Tokens per second, peak memory and MFU depend on the machine: repeating or resuming a run does not reproduce them.

Shapes: B sequences, L tokens.
"""

import importlib.util
import json
import math
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from adlm.config.load import to_mapping
from adlm.config.schema import Config
from adlm.data.rows.loader import Position
from adlm.diffusion.objectives import anchor_gamma
from adlm.errors import UserError
from adlm.files import METRICS_LIMIT, read_bytes, reporting_os_errors, scan_metrics, write_file
from adlm.files import read_metrics as read_metrics
from adlm.likelihood.standard_errors import perplexity_of
from adlm.methods.adlm import Anchored
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import MaskedDiffusion
from adlm.methods.method import Method
from adlm.training.gpus import GPUS
from adlm.training.optimizer import is_matrix, learning_rate
from adlm.training.sharding import blocks_of
from adlm.training.step import StepReport

RULES_WITH_SHARE = ("rare", "frequent", "tf-idf", "random")
"""Anchor rules that choose `anchor.share` of the tokens."""


@dataclass(frozen=True)
class Counters:
    """State of a run after `step` steps. Stored in checkpoints, so that a resumed run continues exactly."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    """With `epoch`, the position of the next batch: see `data.rows.loader.Position`."""
    tokens: int = 0
    """Tokens trained on, over all processes."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_nats: float | None = None
    """The lowest validation bound so far."""
    best_step: int | None = None
    window: Mapping[str, float] = field(default_factory=dict)
    """Sums since the last logged line: of each loss term over tokens, of the gradient norm over steps."""

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights."""
        return self.step - self.skipped

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.row)


def parse_counters(raw: Mapping[str, Any]) -> Counters:
    """Counters from JSON; TypeError if they are invalid."""
    counters = Counters(**raw)
    counts = (counters.step, counters.epoch, counters.row, counters.tokens, counters.skipped, counters.skipped_in_a_row)
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(counters.window, dict):
        raise TypeError("its counters are not numbers")
    return counters


@dataclass(frozen=True)
class ValidationResult:
    """Nats per token of the text, over `tokens` tokens in `rows` rows.

    The nats of the rows' bos and eos are included in the sum, but the tokens themselves are not counted.
    """

    nats: float
    stderr: float
    """Standard error of the mean over rows and noise, as if rows were independent; rows of one document are not."""
    tokens: int
    rows: int
    accuracy: float | None = None
    """Share of the problems that are solved, in runs on problems."""


MetricsLine = Mapping[str, float | int | None]

# Metrics that depend on the machine, and differ when the same run is repeated.
TIMING_METRICS = ("seconds_per_step", "tokens_per_second", "mfu", "memory_gib")


class MessageSink(Protocol):
    """Takes metrics lines and messages."""

    def info(self, message: str) -> None:
        """A message of one line."""
        ...

    def write(self, line: MetricsLine) -> None:
        """The metrics of a logged step."""
        ...

    def close(self) -> None: ...


class Metrics:
    """Writes lines to metrics.jsonl, the reporter and, if the config says so, TensorBoard and W&B.

    `step` steps of the run are done. `sync` is called before a checkpoint, so the file is never behind it.
    """

    def __init__(self, folder: Path, config: Config, step: int, reporter: MessageSink):
        self.path = folder / "metrics.jsonl"
        self._sinks: list[MessageSink | TensorBoard | Wandb] = [reporter]
        if config.train.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", step))
        if config.train.wandb != "off":
            self._sinks.append(Wandb(folder, config))
        _truncate(self.path, step, reporter.info)
        with reporting_os_errors(self.path):
            self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: MetricsLine) -> None:
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}
        with reporting_os_errors(self.path):
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")  # JSON has neither infinities nor NaN
            self._file.flush()
        for sink in self._sinks:
            sink.write(line)

    def sync(self) -> None:
        with reporting_os_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        with suppress(OSError):  # a full disk was reported by `write`
            self._file.close()


def _truncate(path: Path, step: int, report: Callable[[str], None]) -> None:
    """Remove the lines after a step and invalid lines; a file with invalid lines is first copied to *.damaged."""
    lines, num_damaged = scan_metrics(path)
    if num_damaged:
        content, copy, number = read_bytes(path, METRICS_LIMIT), path.with_name(f"{path.name}.damaged"), 1
        while copy.exists() and read_bytes(copy, METRICS_LIMIT) != content:  # keep earlier, different copies
            number += 1
            copy = path.with_name(f"{path.name}.damaged-{number}")
        write_file(copy, content)
        report(f"{path} has {num_damaged} damaged line(s), which are removed; the original is copied to {copy}")
    text = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step)
    if not path.exists() or read_bytes(path, METRICS_LIMIT) != text.encode():
        write_file(path, text)


def _require_package(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{option} needs the package {package}, which is not installed; try pip install {package}")


class TensorBoard:
    """TensorBoard events in the run folder; on resuming, events of later steps are purged."""

    def __init__(self, folder: Path, step: int):
        _require_package("tensorboard", "train.tensorboard true")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: MetricsLine) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; `offline` writes into the run folder only. A resumed run keeps its id."""

    def __init__(self, folder: Path, config: Config):
        _require_package("wandb", f"train.wandb {config.train.wandb}")
        wandb: Any = importlib.import_module("wandb")
        id_file = folder / "wandb-id"
        if not id_file.is_file():
            write_file(id_file, secrets.token_hex(4))
        self._run = wandb.init(
            project="adlm",
            name=folder.name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            mode=config.train.wandb,
            dir=str(folder),
            config=to_mapping(config),
        )

    def write(self, line: MetricsLine) -> None:
        self._run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def close(self) -> None:
        self._run.finish()


STEPS, TOKENS, NORM = "steps", "tokens", "gradient_norm"  # entries of Counters.window that are not loss terms


@dataclass(frozen=True)
class PendingReport:
    """The report of a step that has not been read from the device yet."""

    report: StepReport
    tokens: int
    """Over all processes."""


def add_report(counters: Counters, pending: PendingReport, config: Config, resume_hint: Callable[[], str]) -> Counters:
    """Add the report of a step to the counters; UserError after too many consecutive steps that were not finite."""
    report = pending.report
    names = ("loss", "nats", *report.parts)
    values = [report.total, report.nats, *report.parts.values(), report.gradient_norm, report.finite]
    *means, norm, finite = torch.stack([value.detach().double() for value in values]).tolist()
    if not finite:
        counters = replace(counters, skipped=counters.skipped + 1, skipped_in_a_row=counters.skipped_in_a_row + 1)
        if counters.skipped_in_a_row > config.train.skip_limit:
            hint = resume_hint()
            raise UserError(
                f"the loss or its gradient was not finite at {counters.skipped_in_a_row} steps in a row, the last of "
                f"them step {counters.step} (loss {means[0]:.4g}, gradient norm {norm:.4g}), and train.skip_limit is "
                f"{config.train.skip_limit}; none of them changed the weights. {hint[0].upper()}{hint[1:]}"
                f". Try a lower train.learning_rate or a longer train.warm_up_steps in a new run"
            )
        return counters
    window = dict(counters.window)
    sums = {name: value * pending.tokens for name, value in zip(names, means, strict=True)}
    for name, value in {**sums, NORM: norm, TOKENS: pending.tokens, STEPS: 1}.items():
        window[name] = window.get(name, 0) + value
    return replace(counters, skipped_in_a_row=0, window=window)


def metrics_line(
    counters: Counters, config: Config, measured: ValidationResult | None, timings: Mapping[str, float | None]
) -> MetricsLine:
    """The metrics of a logged step: means since the last line, per token or per step, and the validation result."""
    window, train = dict(counters.window), config.train
    line: dict[str, float | int | None] = {"step": counters.step}
    steps, tokens = window.pop(STEPS, 0), window.pop(TOKENS, 0)
    if steps:
        norm = window.pop(NORM) / steps
        line |= {name: value / tokens for name, value in window.items()}
        line["gradient_norm"] = norm
    if "anchor" in window:
        progress = (counters.step - 1) / train.steps
        anchor = config.anchor
        if (gamma := anchor_gamma(anchor.gamma, progress, anchor.warm_up, anchor.until)) is not None:
            line["gamma"] = gamma
        else:  # the term ended since the last line
            del line["anchor"], line["anchor_share"]
    line["learning_rate"] = learning_rate(train, counters.step - 1)
    line |= {"tokens": counters.tokens, "epoch": counters.epoch, "skipped": counters.skipped}
    if measured is not None:
        line |= {
            "valid_nats": measured.nats,
            "valid_stderr": measured.stderr,
            "valid_perplexity": perplexity_of(measured.nats),
            "valid_tokens": measured.tokens,
        }
        if measured.accuracy is not None:
            line["valid_accuracy"] = measured.accuracy
    return {**line, **timings}


def flops_per_token(method: Method, network: nn.Module, device: torch.device) -> float | None:
    """FLOPs per token of a training step, for the MFU; None if the device's peak is unknown."""
    return None if datasheet_flops(device) is None else training_flops(method, network)


def training_flops(method: Method, network: nn.Module, recomputed: bool = False) -> float:
    """FLOPs per token of the matrix products and attention of a training step, from the shapes of the network.

    A product takes 2 FLOPs per weight and token in the forward pass and 4 in the backward pass, or 2 if the weight is
    frozen; attention 4 L d and, as its backward pass computes the scores anew, 10 L d. With `recomputed` the second
    forward pass of `train.recompute` counts too. Not counted are the product of the folded bridge, planners, and the
    first pass of networks with memory. The network may be on the meta device, sharded and compiled.
    """
    config, blocks, places, again = method.config, blocks_of(network), places_per_token(method.config), int(recomputed)
    matrices = [weight for block in blocks for name, weight in block.named_parameters() if is_matrix(name, weight)]
    products = sum(weight.numel() * ((6 if weight.requires_grad else 4) + 2 * again) for weight in matrices)
    attention = (14 + 4 * again) * len(blocks) * config.length * places * config.model.hidden
    head = 6 * vocabulary_of(config).size * config.model.hidden
    return places * (products + attention) + sum(scored_shares(method)) * head


def places_per_token(config: Config) -> float:
    """What a network reads of a row, per token: block-causal ones two copies, and a token before each block."""
    return 2 + 1 / config.model.block_length if config.model.block_length else 1


def scored_shares(method: Method) -> list[float]:
    """The shares of the tokens at which heads are scored in training: one for each cross-entropy.

    Masks are counted at their mean over times; anchors of rules without a share as 0.7 of the tokens, what the rule
    `count` with tau 5 finds in rows of 1,024.
    """
    config, share = method.config, 1.0
    if isinstance(method, MaskedDiffusion):
        times = torch.linspace(config.time.t_min, config.time.t_max, 101, dtype=torch.float64)
        share = float(method.schedule.mask_chance(times).mean())
    shares = [share] * (1 + (config.model.chain > 0)) + [1.0] * (config.train.causal_weight > 0)
    if isinstance(method, Anchored) and config.anchor.gamma > 0:
        rule = config.anchor.rule
        anchors = config.anchor.share if rule in RULES_WITH_SHARE else 1.0 if rule == "all" else 0.7
        anchors *= share if config.anchor.positions == "masked" else 1
        shares += [anchors] * (1 + (config.model.second_anchor_head > 0))
    return shares


def datasheet_flops(device: torch.device) -> float | None:
    """The datasheet's peak dense bf16 FLOP/s; None for unlisted devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * gpu.tflops for gpu in GPUS.values() if gpu.device in name), None)


def zipf(config: Config, batch: int, generator: torch.Generator) -> Tensor:
    """Random clean ids (B, L), P(k-th symbol) proportional to 1/k: tokens repeat, so that some of them are anchors."""
    vocabulary = vocabulary_of(config)
    weights = 1 / torch.arange(1, vocabulary.size)  # all symbols but the mask
    rank = torch.multinomial(weights.expand(batch, -1), config.length, replacement=True, generator=generator)
    return rank + (rank >= vocabulary.mask_id)


def count_flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products and attention of a step."""

    def addmm_flops(bias: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * int(a[0]) * int(a[1]) * int(b[1])  # torch's own formula does not accept addmm with a dtype

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: addmm_flops}) as counter:
        step()
    return int(counter.get_total_flops())


class ThroughputMeter:
    """Rates since the last `start`."""

    def __init__(self, counters: Counters, device: torch.device, flops_per_token: float | None, num_devices: int):
        self.device, self.flops_per_token, self.num_devices = device, flops_per_token, num_devices
        self.start(counters)

    def start(self, counters: Counters) -> None:
        """Start timing here; time before it, such as validation, is excluded."""
        self.seconds, self.step, self.tokens = time.monotonic(), counters.step, counters.tokens

    def read(self, counters: Counters) -> dict[str, float | None]:
        """Metrics since the last start, over all processes."""
        steps, seconds = counters.step - self.step, time.monotonic() - self.seconds
        if not steps:
            return {}
        rate = (counters.tokens - self.tokens) / max(seconds, 1e-9)
        timings = {"seconds_per_step": seconds / steps, "tokens_per_second": rate}
        peak = datasheet_flops(self.device)
        if peak is not None and self.flops_per_token is not None:
            timings["mfu"] = rate * self.flops_per_token / (peak * self.num_devices)
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:  # peak of the process, in bytes on macOS and kilobytes elsewhere
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {**timings, "memory_gib": memory / 2**30}
