"""Steps as numbers: what a step reported enters the counters, and the counters become a line. Knows no files.

A report is read one step late, when its numbers have long arrived: nobody waits for a GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from adlm.config.schema import Config
from adlm.diffusion.objectives import anchor_gamma
from adlm.errors import UserError
from adlm.training.counters import Counters
from adlm.training.logbook import MetricsLine
from adlm.training.optimizer import learning_rate
from adlm.training.step import StepReport
from adlm.training.validation import ValidationResult

STEPS, TOKENS, NORM = "steps", "tokens", "gradient_norm"  # names in a window that are no parts of the loss


@dataclass(frozen=True)
class PendingReport:
    """A step, its report not read yet."""

    report: StepReport
    tokens: int
    """Of all processes."""


def add_report(counters: Counters, taken: PendingReport, config: Config, last: str) -> Counters:
    """The counters with what the step reported; too many steps that were not finite end the run."""
    report = taken.report
    names = ("loss", "nats", *report.parts)
    values = [report.total, report.nats, *report.parts.values(), report.norm, report.finite]
    *sums, norm, finite = torch.stack([value.detach().double() for value in values]).tolist()
    if not finite:
        counters = replace(counters, skipped=counters.skipped + 1, skipped_in_a_row=counters.skipped_in_a_row + 1)
        if counters.skipped_in_a_row > config.train.skip_limit:
            raise UserError(
                f"the loss or its gradient was not finite at {counters.skipped_in_a_row} steps in a row, the last of "
                f"them step {counters.step} (loss {sums[0]:.4g}, gradient norm {norm:.4g}), and train.skip_limit is "
                f"{config.train.skip_limit}; none of them moved the weights. {last[0].upper()}{last[1:]}. Try a lower "
                "train.learning_rate or a longer train.warm_up_steps in a new run"
            )
        return counters
    window = dict(counters.window)
    more = {name: value * taken.tokens for name, value in zip(names, sums, strict=True)}
    for name, value in {**more, NORM: norm, TOKENS: taken.tokens, STEPS: 1}.items():
        window[name] = window.get(name, 0) + value
    return replace(counters, skipped_in_a_row=0, window=window)


def metrics_line(
    counters: Counters, config: Config, measured: ValidationResult | None, clocks: Mapping[str, float | None]
) -> MetricsLine:
    """What a logged step says: means since the last line, a token or a step, and what was measured."""
    window, train = dict(counters.window), config.train
    line: dict[str, float | int | None] = {"step": counters.step}
    steps, tokens = window.pop(STEPS, 0), window.pop(TOKENS, 0)
    if steps:
        norm = window.pop(NORM) / steps
        line |= {name: value / tokens for name, value in window.items()}
        line["gradient_norm"] = norm
    if "anchor" in window:
        done = (counters.step - 1) / train.steps
        line["gamma"] = anchor_gamma(config.anchor.gamma, done, config.anchor.warm_up)
    line["learning_rate"] = learning_rate(train, counters.step - 1)
    line |= {"tokens": counters.tokens, "epoch": counters.epoch, "skipped": counters.skipped}
    if measured is not None:
        line |= {
            "valid_nats": measured.nats,
            "valid_stderr": measured.stderr,
            "valid_perplexity": perplexity(measured.nats),
            "valid_tokens": measured.tokens,
        }
    return {**line, **clocks}


def perplexity(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
