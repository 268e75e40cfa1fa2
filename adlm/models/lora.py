"""Low-rank adaptation (LoRA): frozen weights W plus scale * B A, with trained B and A, and a trained row of the mask.

Layers of a network are replaced in place. A replaced layer has the attributes of the original, with `weight` computed,
so blocks, trunks and frozen copies work as they are. Independent of files and optimizers.

Shapes: rank r, V symbols, d wide; a layer maps d_in to d_out.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.models.heads import TiedHead

A, B, ROW = "lora_a", "lora_b", "trained_row"


class LowRankLinear(nn.Module):
    """(W + scale B A) h + bias: A (r, d_in) and B (d_out, r) are trained, W and the bias are not. [Hu et al., 2021]

    B starts at 0, so the layer starts as the original one.
    """

    float8 = False

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        self.frozen, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """W + scale B A."""
        return self.frozen + self.scale * (self.lora_b @ self.lora_a)

    def forward(self, h: Tensor) -> Tensor:
        """Without computing `weight`: its gradient, as large as W, is then not computed either."""
        return F.linear(h, self.frozen, self.bias) + self.scale * F.linear(F.linear(h, self.lora_a), self.lora_b)


class OneRowEmbedding(nn.Module):
    """An embedding of which one row is trained, that of the mask: a pretrained language model has none."""

    def __init__(self, embedding: nn.Embedding, index: int):
        super().__init__()
        self.index, self.frozen = index, embedding.weight
        self.trained_row = nn.Parameter(embedding.weight[index].detach().clone())

    @property
    def weight(self) -> Tensor:
        """(V, d), with the trained row; detached, so that a tied head stays frozen."""
        return _with_row(self.frozen, self.index, self.trained_row.detach())

    def forward(self, ids: Tensor) -> Tensor:
        return torch.where((ids == self.index)[..., None], self.trained_row, F.embedding(ids, self.frozen))


def _with_row(weight: Tensor, index: int, row: Tensor) -> Tensor:
    changed = weight.clone()
    changed[index] = row
    return changed


def add_lora(network: nn.Module, rank: int, scale: float, mask_id: int, norms: bool = False) -> None:
    """Freeze the network and add what is trained: low-rank updates of every linear layer of the blocks, the mask's row.

    Bridges, chains and memories, which a pretrained language model lacks, are trained in full; with `norms` the weights
    of the norms too.
    """
    network.requires_grad_(False)
    tied_heads: list[Any] = [layer for layer in network.modules() if isinstance(layer, TiedHead)]
    for name, layer in list(network.named_modules()):
        parent, _, child = name.rpartition(".")
        if isinstance(layer, nn.Embedding):
            embedding = OneRowEmbedding(layer, mask_id)
            setattr(network.get_submodule(parent), child, embedding)
            for head in tied_heads:
                if head._other[0] is layer:
                    head._other = (embedding,)
        elif isinstance(layer, nn.Linear) and ".blocks." in f".{name}":
            setattr(network.get_submodule(parent), child, LowRankLinear(layer, rank, scale))
    for name, weight in network.named_parameters():
        words = name.split(".")
        if {"bridge", "chain", "memory"} & set(words) or (norms and any("norm" in word for word in words)):
            weight.requires_grad_(True)


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name: all of them, except after `add_lora`."""
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


@torch.no_grad()
def start_from_adapter(network: nn.Module, adapter: Mapping[str, Tensor], scale: float) -> None:
    """Continue training an adapter that was trained with this `scale`, and with the rank of the network or a lower one.

    The function of the network is the adapter's: added columns of B are 0, and what the adapter lacks is the base's.
    """
    layers: dict[str, Any] = dict(network.named_modules())
    trained = trained_parameters(network)
    for name, value in adapter.items():
        layer, _, part = name.rpartition(".")
        weight = trained[name]
        saved = value.to(weight)
        if part == A:
            weight[: len(saved)] = saved
        elif part == B:
            weight[:, : saved.shape[1]] = saved * (scale / layers[layer].scale)
        else:
            weight.copy_(saved)


def merge(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float, mask_id: int) -> dict[str, Tensor]:
    """The weights of the network without LoRA layers, in float32 or float64: those of the base, changed by an adapter.

    `adapter` has the tensors of `trained_parameters`.
    """
    dtype = torch.promote_types(next(iter(base.values())).dtype, torch.float32)
    weights, own = ({name: value.to(dtype) for name, value in each.items()} for each in (base, adapter))
    for name, value in own.items():
        layer, _, part = name.rpartition(".")
        if part == A:
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * (own[f"{layer}.{B}"] @ value)
        elif part == ROW:
            weights[f"{layer}.weight"] = _with_row(weights[f"{layer}.weight"], mask_id, value)
        elif part != B:
            weights[name] = value
    return weights
