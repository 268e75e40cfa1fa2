"""AdamW and the learning-rate schedule. Independent of losses and batches."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import AdamW

from adlm.config.schema import Train
from adlm.errors import UserError

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "trapezoid": lambda progress: min(1.0, (1 - progress) / 0.4),
}


def learning_rate(train: Train, step: int) -> float:
    """The learning rate after `step` updates: a linear warm-up from 0, then the schedule `train.decay`.

    cosine, linear and trapezoid reach 0 at `train.steps`. The rate of the very first update is 0, as in the published
    code.
    """
    warm_up = train.num_warm_up_steps
    if step < warm_up:
        return train.learning_rate * step / warm_up
    decaying = max(1, train.steps - warm_up)
    return train.learning_rate * DECAYS[train.decay](min(1.0, (step - warm_up) / decaying))


def check_warm_up(train: Train) -> None:
    """UserError if the warm-up does not end within the run. Checked by training only: a model loads regardless."""
    if train.num_warm_up_steps >= train.steps:
        raise UserError(
            f"train.warm_up_steps {train.num_warm_up_steps} does not end within train.steps {train.steps}: the "
            f"learning rate would never reach train.learning_rate; try train.warm_up_steps={train.steps // 10}"
        )


def build_optimizer(network: nn.Module, train: Train) -> AdamW:
    """AdamW over all weights; the weights of a bridge have `train.bridge_rate` times the learning rate.

    The fused kernel also clips the gradients, and skips the update if they are not finite (see `step.py`).
    """
    bridge = [weight for name, weight in network.named_parameters() if "bridge" in name.split(".")]
    in_bridge = set(bridge)
    rest = [weight for weight in network.parameters() if weight not in in_bridge]
    groups = [{"params": rest, "multiple": 1.0}, {"params": bridge, "multiple": train.bridge_rate}]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set `rate` times the group's multiple in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["multiple"]
