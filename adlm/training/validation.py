"""What is computed of a network during training: the validation bound and a few samples. Independent of the method.

All processes take part, because gathering sharded weights is a collective operation. Rows and noise of the validation
are the same every time, so two validations of a run differ only in the weights.
"""

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from adlm.diffusion.times import BatchRng
from adlm.distributed import Processes
from adlm.files import reporting_os_errors, write_file
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.methods.inputs import check_canvas, vocabulary_of
from adlm.methods.method import Method
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.training.data import TrainingData
from adlm.training.seeds import generator_of, seed_of


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


def validate(method: Method, network: Any, data: TrainingData, size: int, processes: Processes) -> ValidationResult:
    """The mean bound per token over all held-out rows, `size` rows per process at a time.

    Every process takes part in every round; one without rows in the last round evaluates the last batch again and
    discards the result.
    """
    seed, estimator = method.config.train.seed, ESTIMATORS[default_estimator(method)](method)
    nats, tokens, nats_squared, nats_tokens, tokens_squared, rows = (
        torch.zeros((), dtype=torch.float64) for _ in range(6)
    )
    batches = data.held_out_batches(size)
    while round_batches := list(islice(batches, processes.num_ranks)):
        batch = round_batches[min(processes.rank, len(round_batches) - 1)]
        x = batch.x.to(processes.device)
        pad = None if batch.pad is None else batch.pad.to(processes.device)
        rng = BatchRng(generator_of(seed, "validation", batch.group), batch.batch_slice)
        row_nats = estimator(network, x, pad, rng).double().sum(dim=1).cpu()
        if processes.rank >= len(round_batches):
            continue
        row_tokens = (batch.is_counted & method.predicted(batch.x, batch.pad)).sum(dim=1).double()
        nats += row_nats.sum()
        tokens += row_tokens.sum()
        nats_squared += (row_nats * row_nats).sum()
        nats_tokens += (row_nats * row_tokens).sum()
        tokens_squared += (row_tokens * row_tokens).sum()
        rows += len(row_nats)
    sums = processes.sum([float(value) for value in (nats, tokens, nats_squared, nats_tokens, tokens_squared, rows)])
    return _ratio_of_sums(*sums)


def _ratio_of_sums(
    nats: float, tokens: float, nats_squared: float, nats_tokens: float, tokens_squared: float, rows: float
) -> ValidationResult:
    """mean = sum_i nats_i / sum_i tokens_i over rows i; variance = sum_i (nats_i - mean tokens_i)^2 / tokens^2."""
    mean = nats / tokens
    spread = max(0.0, nats_squared - 2 * mean * nats_tokens + mean * mean * tokens_squared)
    correction = rows / (rows - 1) if rows > 1 else math.inf
    stderr = math.sqrt(spread * correction) / tokens if rows > 1 else math.inf
    return ValidationResult(mean, stderr, int(tokens), int(rows))


def write_samples(
    method: Method, network: Any, data: TrainingData, folder: Path, step: int, processes: Processes
) -> None:
    """Write folder/step-00005000.txt with `train.samples` texts."""
    config = method.config
    vocabulary, train = vocabulary_of(config), config.train
    canvas = torch.full((train.samples, config.length), vocabulary.mask_id, device=processes.device)
    if vocabulary.bos_id is None and data.num_held_out:
        canvas[:, 0] = data.read_held_out(0, 1)[0][0, 0]  # autoregressive methods need a first token
    rng = RowRng(seed_of(train.seed, "samples", step), range(train.samples))
    check_canvas(method, canvas, config.sampling)
    frame = last_frame(method.generate(network, canvas, config.sampling, rng))
    if processes.is_main_process:
        texts = [data.tokenizer.decode(row, special_tokens=False) for row in frame.ids.tolist()]
        content = "\n".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1))
        with reporting_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"step-{step:08}.txt", content)
