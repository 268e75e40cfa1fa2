"""Checks of sizes before work starts: lower bounds on the required memory against the memory of the device.

Only requests that cannot fit are user errors. The bounds are deliberately low: weights, gradients, optimizer state and
the largest tensors that must exist at the same time. A request that passes may still run out of memory later.
"""

import os
from functools import cache
from pathlib import Path

import torch

from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.methods.inputs import vocabulary_of
from adlm.models.transformer import num_parameters, on_meta

ID_BYTES = 8
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_network(config: Config, device: torch.device, shard: int = 1) -> int:
    """Bytes of a network's weights; a user error if they cannot fit, divided by `shard`."""
    model, size = config.model, 8 if config.train.precision == "float64" else 4
    weights = num_parameters(on_meta(method_of(config).build)) * size
    _check_fits(
        weights // shard,
        device,
        f"the weights of model.hidden {model.hidden}, model.blocks {model.blocks}, model.condition {model.condition} "
        f"and a vocabulary of {vocabulary_of(config).size} symbols",
        "lower one of them",
    )
    return weights


def check_training(
    config: Config, device: torch.device, num_ranks: int = 1, batch_option: str = "train.batch_size"
) -> None:
    """A user error if training cannot fit: weights, gradients, moments, EMA, one micro-batch, one batch.

    `batch_option` is the name of the batch size option in messages.
    """
    train, model, size = config.train, config.model, 8 if config.train.precision == "float64" else 4
    weights = check_network(config, device, train.shard)
    num_moments = 2 if train.optimizer == "adamw" else 1
    num_copies = 1 if train.lora_rank else 2 + num_moments + (train.ema > 0)  # weights, gradients, moments, EMA
    state = weights * num_copies // train.shard
    _check_fits(
        state,
        device,
        f"the weights, gradients{', EMA' if train.ema > 0 else ''} and moments of {weights // size:,} parameters",
        "lower model.hidden or model.blocks, or split them over more processes with train.shard",
    )
    rows = train.micro_batch or max(1, train.batch_size // num_ranks)
    # Saved for the backward pass, in bf16 at least: a block's input and, without recomputation, its qkv and MLP.
    activations = model.blocks * model.hidden * 2 * (1 if train.recompute else 8)
    _check_fits(
        state + rows * config.length * activations,
        device,
        f"a training step with {rows} sequences of {config.length} tokens at once",
        "lower train.micro_batch" if train.micro_batch else f"lower {batch_option}, or set train.micro_batch",
    )
    _check_fits(
        train.batch_size * config.length * ID_BYTES,
        torch.device("cpu"),
        f"one batch of {batch_option} {train.batch_size} sequences of {config.length} tokens",
        f"lower {batch_option} or length",
    )
    _check_fits(
        train.samples * config.length * vocabulary_of(config).size * size // 2,  # logits, in bf16 at least
        device,
        f"train.samples {train.samples} texts of {config.length} tokens at once",
        "lower train.samples",
    )


def check_sampling(
    config: Config,
    num_rows: int,
    length: int,
    device: torch.device,
    option: str = "num_samples",
    rows_at_once: int | None = None,
) -> None:
    """A user error if the ids of the samples cannot fit the host, or their hidden states the device.

    All `num_rows` are held on the host; batches of `rows_at_once`, by default all, are sampled on the device. `option`
    is the name of the option for the number of rows in messages.
    """
    at_once = num_rows if rows_at_once is None else min(num_rows, rows_at_once)
    request = f"{option} {num_rows} of length {length}"
    _check_fits(num_rows * length * ID_BYTES, torch.device("cpu"), request, f"lower {option} or length")
    window = min(length, config.length)
    hidden = window * config.model.hidden * 2 * 4  # the residual stream and qkv, in bf16 at least
    _check_fits(at_once * (2 * length * ID_BYTES + hidden), device, request, f"lower {option} or length")


@cache
def memory_of(device: torch.device) -> int:
    """Total memory of the device in bytes; for the CPU, at most the limit of the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_LIMITS):
        try:
            text = path.read_text()
        except OSError:
            continue
        if text.strip().isdigit():  # `max` where there is no limit
            found.append(int(text))
    return min(found)


def format_bytes(num_bytes: int) -> str:
    """1,536,000,000 -> 1.5 GB."""
    for power, unit in enumerate(("bytes", "kB", "MB", "GB", "TB", "PB")):
        if num_bytes < 1000 ** (power + 1) or unit == "PB":
            break
    number = num_bytes / 1000**power
    return f"{number:,.0f} {unit}" if number >= 100 or power == 0 else f"{number:.3g} {unit}"


def _check_fits(num_bytes: int, device: torch.device, request: str, remedy: str) -> None:
    memory = memory_of(device)
    if num_bytes > memory:
        where = f"{device} has" if device.type == "cuda" else "this machine has"
        raise UserError(
            f"{request}: at least {format_bytes(num_bytes)} of memory, and {where} {format_bytes(memory)}; {remedy}"
        )
