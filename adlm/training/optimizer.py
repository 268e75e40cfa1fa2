"""AdamW, Muon for the matrices of the blocks, clipping, and the learning rate of a step. No losses.

Nothing here synchronizes with the GPU.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from adlm.config.schema import Train
from adlm.errors import UserError
from adlm.models.lora import trained_parameters
from adlm.training.sharding import local_shard

MOMENTUM = 0.95  # of Muon
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's quintic iteration [Jordan et al., 2024]


class Muon(AdamW):
    """AdamW, but the matrices of groups with `parts` move along the nearest orthogonal matrix of their momentum.

    The update of an m x n matrix is scaled by 0.2 sqrt(max(m, n)), which gives it the size of AdamW's usual update
    [Liu et al., 2025], so that one learning rate and weight decay fit all weights.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["parts"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["parts"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Weights of one shape are updated together: few kernels, and one gathering where they are sharded."""
        scale, applied = self.grad_scale, self.found_inf == 0  # type: ignore[attr-defined]
        rate = group["lr"] * applied
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in group["params"]:
            if weight.grad is not None:
                by_shape[weight.shape].append(weight)
                if weight not in self.state:
                    self.state[weight] = new_moments(self, weight)
        for weights in by_shape.values():
            momenta = [self.state[weight]["momentum"] for weight in weights]
            momentum = torch.stack(momenta)
            gradients = torch.stack([weight.grad for weight in weights])  # type: ignore[misc]
            gradient = torch.where(applied, gradients / scale, momentum)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            torch._foreach_copy_([local_shard(each) for each in momenta], local_shard(momentum).unbind())
            update = rate * orthogonalized(gradient.lerp_(momentum, MOMENTUM), group["parts"])
            own = [local_shard(weight) for weight in weights]
            torch._foreach_mul_(own, 1 - rate * group["weight_decay"])
            torch._foreach_sub_(own, local_shard(update).unbind())


def orthogonalized(matrices: Tensor, parts: int = 1) -> Tensor:
    """(N, parts * m, n): each m x n matrix with singular values of about 1 (0.7 to 1.2), times 0.2 sqrt(max(m, n)).

    `parts` matrices are one below the other. Sharded ones are gathered first, and every process computes them all.
    """
    whole = matrices.full_tensor() if isinstance(matrices, DTensor) else matrices
    each = whole.view(len(whole) * parts, -1, whole.shape[-1])
    update = 0.2 * math.sqrt(max(each.shape[1:])) * _nearest_orthogonal(each).reshape(whole.shape)
    if isinstance(matrices, DTensor):
        return distribute_tensor(update, matrices.device_mesh, matrices.placements, src_data_rank=None)
    return update


def _nearest_orthogonal(matrices: Tensor) -> Tensor:
    """(N, m, n): U V^T of the singular value decomposition U S V^T, approximately, by matrix products alone."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-20)
    x = x.bfloat16() if x.is_cuda else x
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return (x.mT if is_tall else x).to(matrices.dtype)


def build_optimizer(network: nn.Module, train: Train) -> AdamW:
    """The optimizer of all trained weights. Those of a bridge have `train.bridge_rate` times the learning rate, those
    of a chain `train.chain_rate` times.

    `parts` of a group is the number of matrices that each weight stacks for Muon (query, key and value), 0 for AdamW.
    The fused kernel of AdamW also clips the gradients, and skips the update if they are not finite (`update_weights`).
    With `train.optimizer` muon, the matrices of the blocks are Muon's, the rest AdamW's: embeddings, heads, bridges,
    chains, modulations, norms and biases. Frozen weights are in no group. The factors of LoRA are matrices of the
    blocks.
    """
    named = trained_parameters(network)
    bridge, chain = (
        [weight for name, weight in named.items() if part in name.split(".")] for part in ("bridge", "chain")
    )
    matrices, stacked = [], []
    if train.optimizer == "muon":
        in_blocks = [
            (name.split("."), weight)
            for name, weight in named.items()
            if ".blocks." in name and is_matrix(name, weight)
        ]
        stacked = [weight for words, weight in in_blocks if words[-2:] == ["qkv", "weight"]]
        matrices = [weight for words, weight in in_blocks if words[-2:] != ["qkv", "weight"]]
        if not matrices:
            raise UserError("train.optimizer muon is for networks of our own; use adamw for models of transformers")
    chosen = {*bridge, *chain, *matrices, *stacked}
    rest = [weight for weight in named.values() if weight not in chosen]
    groups = [
        {"params": rest, "multiple": 1.0, "parts": 0},
        {"params": bridge, "multiple": train.bridge_rate, "parts": 0},
        {"params": chain, "multiple": train.chain_rate, "parts": 0},
        {"params": matrices, "multiple": 1.0, "parts": 1},
        {"params": stacked, "multiple": 1.0, "parts": 3},
    ]
    return (Muon if train.optimizer == "muon" else AdamW)(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True,
    )


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether a weight of a block multiplies every token, as norms, biases and modulations do not."""
    return weight.ndim == 2 and "modulation" not in name.split(".")


def new_moments(optimizer: AdamW, weight: Tensor) -> dict[str, Tensor]:
    """The state of a weight before its first update, as AdamW creates it; of a matrix of Muon its momentum."""
    if any(group["parts"] and any(weight is other for other in group["params"]) for group in optimizer.param_groups):
        return {"momentum": torch.zeros_like(weight)}
    moments = {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **moments}


def update_weights(optimizer: AdamW, norm: Tensor, finite: Tensor, clip: float) -> None:
    """A step on gradients divided by max(1, norm / clip); no update at all if they are not finite.

    Scale and flag are passed to the fused kernel as tensors, through the two attributes that torch's GradScaler uses:
    no extra pass over the gradients, and no synchronization with the device.
    """
    scale = (norm / clip).clamp(min=1) if clip > 0 else torch.ones_like(norm)
    optimizer.grad_scale, optimizer.found_inf = scale.float(), (~finite).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


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


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Set `rate` times the group's multiple in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["multiple"]
