"""The checkpoints of the released ADLM and MDLM code, read as our weights. Knows their names for things.

A released .ckpt is a Lightning dictionary: `state_dict` with the networks under `backbone.` (the anchor network, or the
only one) and `denoiser.` (older files: `replica.`), and `ema` with a bare list of averaged weights in the same order.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm.config.schema import Model
from adlm.errors import UserError

# Their name -> ours, inside one network; applied in this order.
RENAMED = (
    (r"^vocab_embed\.embedding$", "embedding.weight"),
    (r"^vocab_embed\.0\.", "bridge."),
    (r"^sigma_map\.mlp\.0\.", "trunk.condition.inner."),
    (r"^sigma_map\.mlp\.2\.", "trunk.condition.outer."),
    (r"^output_layer\.linear\.", "head."),
    (r"^output_layer\.norm_final\.", "trunk.norm."),
    (r"^output_layer\.adaLN_modulation\.", "trunk.modulation."),
    (r"^blocks\.(\d+)\.", r"trunk.blocks.\1."),
    (r"\.attn_qkv\.", ".qkv."),
    (r"\.attn_out\.", ".out."),
    (r"\.mlp\.0\.", ".widen."),
    (r"\.mlp\.2\.", ".narrow."),
    (r"\.adaLN_modulation\.", ".modulation."),
)
ROTARY = "rotary_emb.inv_freq"  # a constant they save and we compute; it tells the width of a head


@dataclass(frozen=True)
class Published:
    """What a released checkpoint holds, under our names."""

    model: Model
    num_symbols: int
    weights: dict[str, Tensor]
    averaged: dict[str, Tensor] | None
    """The EMA weights, where the file has them."""


def read_published(path: Path) -> Published:
    """The weights of a released .ckpt whose contents are tensors and plain data; anything else is refused, not run."""
    state, shadow = _read(path)
    pair = any(_split(key)[0] == "denoiser" for key in state)
    weights = {_our_name(key, pair): value for key, value in state.items() if not key.endswith(ROTARY)}
    averaged = None
    if shadow is not None:
        if [value.shape for value in shadow] != [value.shape for value in weights.values()]:
            raise UserError(f"{path}: the list of averaged weights does not have the shapes of the weights")
        averaged = dict(zip(weights, shadow, strict=True))
    return Published(_model(state, weights, pair, path), _shape(weights, "head.weight", path)[0], weights, averaged)


def _read(path: Path) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(f"{path} cannot be read as a checkpoint of tensors and plain data: {reason}") from None
    state = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} has no `state_dict` of tensors, so it is not a released checkpoint")
    average = content.get("ema")
    return state, average.get("shadow_params") if isinstance(average, dict) else None


def _split(key: str) -> tuple[str, str]:
    """Which network a key is of, and its name there."""
    prefix, _, rest = key.partition(".")
    network = {"backbone": "anchor", "denoiser": "denoiser", "replica": "denoiser"}.get(prefix)
    if network is None:
        raise UserError(f"weight {key} belongs to no network we know: they are under backbone, denoiser or replica")
    return network, rest


def _our_name(key: str, pair: bool) -> str:
    network, name = _split(key)
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return f"{network}.{name}" if pair else name


def _model(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], pair: bool, path: Path) -> Model:
    """The sizes, read off the shapes."""
    first = "anchor." if pair else ""
    hidden = _shape(weights, f"{first}embedding.weight", path)[1]
    head_width = 2 * _shape(state, f"backbone.{ROTARY}", path)[0]
    modulation = weights.get(f"{first}trunk.modulation.weight")
    return Model(
        hidden=hidden,
        heads=hidden // head_width,
        blocks=_count_blocks(weights, f"{first}trunk."),
        denoiser_blocks=_count_blocks(weights, "denoiser.trunk."),
        bridge="logits",
        condition=Model.condition if modulation is None else modulation.shape[1],
    )


def _shape(weights: Mapping[str, Tensor], ending: str, path: Path) -> torch.Size:
    for name, value in weights.items():
        if name.endswith(ending):
            return value.shape
    raise UserError(f"{path} has no weight {ending}, so its sizes cannot be told")


def _count_blocks(weights: Mapping[str, Tensor], prefix: str) -> int:
    return len({found[0] for name in weights if (found := re.match(rf"{re.escape(prefix)}blocks\.\d+\.", name))})
