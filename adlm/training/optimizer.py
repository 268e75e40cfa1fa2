"""AdamW as the recipe has it, and the learning rate as a function of the step. Knows nothing of losses or batches."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import AdamW

from adlm.config.schema import Train
from adlm.errors import UserError

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "trapezoid": lambda done: min(1.0, (1 - done) / 0.4),
}


def learning_rate(train: Train, step: int) -> float:
    """The rate of the update after `step` others: from 0 in a line over the warm-up, then as `train.decay` says.

    cosine, linear and trapezoid reach 0 when all of `train.steps` are done. The very first rate is 0, as published.
    """
    warm_up = train.num_warm_up_steps
    if step < warm_up:
        return train.learning_rate * step / warm_up
    decaying = max(1, train.steps - warm_up)
    return train.learning_rate * DECAYS[train.decay](min(1.0, (step - warm_up) / decaying))


def check_warm_up(train: Train) -> None:
    """Refuse a warm-up that does not end within the run. Checked for training only: a trained model loads anyway."""
    if train.num_warm_up_steps >= train.steps:
        raise UserError(
            f"train.warm_up_steps {train.num_warm_up_steps} does not end within train.steps {train.steps}: the "
            f"learning rate would never reach train.learning_rate; try train.warm_up_steps={train.steps // 10}"
        )


def build_optimizer(network: nn.Module, train: Train) -> AdamW:
    """AdamW over all weights, those of a bridge at `train.bridge_rate` times the others' rate.

    Fused: one kernel reads weights, gradients and both moments, scales the gradients by what clips them, and leaves
    all as it was where they are not finite (`step.py`).
    """
    bridge = [weight for name, weight in network.named_parameters() if "bridge" in name.split(".")]
    at_the_bridge = set(bridge)
    others = [weight for weight in network.parameters() if weight not in at_the_bridge]
    groups = [{"params": others, "multiple": 1.0}, {"params": bridge, "multiple": train.bridge_rate}]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """`rate` for every group, times the group's own multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["multiple"]
