"""The checkpoints of the released ADLM, MDLM, SEDD, D3PM and AR code, read as our weights. Knows their names.

A released .ckpt is a Lightning dictionary: `state_dict` with the networks under `backbone.` (the anchor network, or the
only one) and `denoiser.` (older files: `replica.`), and `ema` with a bare list of averaged weights in the same order.
Around them lie pickled config and tokenizer objects, which are looked into and never made.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from adlm.checkpoints.model_folder import ModelFolder
from adlm.checkpoints.pickle_interpreter import ForeignObject, TensorRecord, describe_value
from adlm.checkpoints.torch_archive import Archive, open_archive
from adlm.config.load import validate
from adlm.config.schema import Config, Model, Sampling, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.tokens import Tokenizer

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
NETWORKS = {"backbone": "anchor", "denoiser": "denoiser", "replica": "denoiser"}
ROTARY = "rotary_emb.inv_freq"  # a constant they save and we compute; it tells the width of a head
PARAMETERIZATIONS = {"subs": "mdlm", "sedd": "sedd", "d3pm": "d3pm", "ar": "ar"}
HINTS = ("parameterization", "T", "length", "time_conditioning", "name_or_path")
HINTS_LOOKED_AT = 100_000
LARGEST_SIZE = 2**24  # of a vocabulary, a width, a length
BERT_SYMBOLS, BERT_MASK = 30_522, 103


@dataclass(frozen=True)
class PublishedCheckpoint:
    """What a released checkpoint holds, under our names."""

    method: str
    model: Model
    num_symbols: int
    weights: dict[str, Tensor]
    averaged: dict[str, Tensor] | None
    """The EMA weights, where the file has them."""
    step: int | None
    """Optimiser steps done."""
    hints: dict[str, Any]
    """What its pickled config says of parameterization, T, length and tokenizer, where it says it."""
    ignored: list[str]
    """What the file holds and we have no use for."""


def read_checkpoint(path: Path) -> PublishedCheckpoint:
    """Everything we use of a released .ckpt; nothing that it names is imported or run."""
    with open_archive(path) as archive:
        content = archive.content
        state = content.get("state_dict") if isinstance(content, dict) else None
        if (
            not isinstance(state, dict)
            or not state
            or not all(isinstance(value, TensorRecord) for value in state.values())
        ):
            raise UserError(f"{path} has no `state_dict` of tensors, so it is not a released checkpoint")
        known = {key: value for key, value in state.items() if _is_weight(key, path)}
        pair = any(NETWORKS[key.partition(".")[0]] == "denoiser" for key in known)
        used = {_our_name(key, pair): value for key, value in known.items() if not key.endswith(ROTARY)}
        if len(used) < sum(not key.endswith(ROTARY) for key in known):
            raise UserError(f"{path}: two weights come to the same name, and only one of them could be used")
        model = _model(known, used, pair, path)
        weights = {name: _finite(archive, name, value, path) for name, value in used.items()}
        averaged = _averaged(archive, content.get("ema"), used, path)
        hints = dict(_hints(content.get("hyper_parameters")))
        ignored = [f"state_dict {key}" for key in state if key not in known or key.endswith(ROTARY)]
        ignored += [describe_value(str(key)) for key in content if key not in ("state_dict", "ema", "global_step")]
        ignored += [f"an object of {name}, not made" for name in sorted(archive.foreign)]
    step = content.get("global_step")
    method = _method(used, pair, hints)
    size = _shape(used, "head.weight", 2, path)[0]
    return PublishedCheckpoint(
        method, model, size, weights, averaged, step if isinstance(step, int) else None, hints, ignored
    )


def _is_weight(key: Any, path: Path) -> bool:
    """Whether a tensor is a network's; a metric's is not, and anything else would be lost, so it is refused."""
    if not isinstance(key, str) or key != describe_value(key):
        raise UserError(f"{path}: weight {describe_value(str(key))} has a name that no network gives")
    prefix = key.partition(".")[0]
    if prefix in NETWORKS or prefix.endswith(("_metrics", "_metric")):
        return prefix in NETWORKS
    raise UserError(f"{path}: weight {key} belongs to no network we know: they are under {', '.join(NETWORKS)}")


def _our_name(key: str, pair: bool) -> str:
    prefix, _, name = key.partition(".")
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return f"{NETWORKS[prefix]}.{name}" if pair else name


def _finite(archive: Archive, name: str, noted: TensorRecord, path: Path) -> Tensor:
    if not noted.storage.dtype.is_floating_point:
        raise UserError(f"{path}: weight {name} is made of {noted.storage.dtype}, not of real numbers")
    value = archive.tensor(noted)
    if not value.isfinite().all():
        raise UserError(f"{path}: weight {name} holds a NaN or an infinity, so the model is broken")
    return value.float()


def _averaged(archive: Archive, ema: Any, used: Mapping[str, TensorRecord], path: Path) -> dict[str, Tensor] | None:
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if shadow is None:
        return None
    shapes = (
        [value.size if isinstance(value, TensorRecord) else None for value in shadow]
        if isinstance(shadow, list)
        else []
    )
    if shapes != [value.size for value in used.values()]:
        raise UserError(f"{path}: the list of averaged weights does not have the shapes of the weights")
    pairs = zip(used, shadow, strict=True)
    return {name: _finite(archive, f"{name} (averaged)", value, path) for name, value in pairs}


def _model(state: Mapping[str, TensorRecord], used: Mapping[str, TensorRecord], pair: bool, path: Path) -> Model:
    """The sizes, read off the shapes."""
    first = "anchor." if pair else ""
    hidden = _shape(used, f"{first}embedding.weight", 2, path)[1]
    head_width = 2 * _shape(state, f"backbone.{ROTARY}", 1, path)[0]
    condition = Model.condition
    if f"{first}trunk.modulation.weight" in used:
        condition = _shape(used, f"{first}trunk.modulation.weight", 2, path)[1]
    if hidden % head_width:
        raise UserError(f"{path}: width {hidden} is not made of heads {head_width} wide")
    return Model(
        hidden=hidden,
        heads=hidden // head_width,
        blocks=_count_blocks(used, f"{first}trunk."),
        denoiser_blocks=_count_blocks(used, "denoiser.trunk.") if pair else None,
        bridge="logits",
        condition=condition,
    )


def _shape(weights: Mapping[str, TensorRecord], ending: str, dimensions: int, path: Path) -> tuple[int, ...]:
    """The shape of a weight that tells a size."""
    for name, value in weights.items():
        if name.endswith(ending):
            if len(value.size) != dimensions or not all(0 < size <= LARGEST_SIZE for size in value.size):
                raise UserError(f"{path}: weight {ending} has shape {value.size}, which no network has")
            return value.size
    raise UserError(f"{path} has no weight {ending}, so its sizes cannot be told")


def _count_blocks(weights: Mapping[str, TensorRecord], prefix: str) -> int:
    """How many blocks there are; no block has fewer than six weights."""
    named = {found[1] for name in weights if (found := re.match(rf"{re.escape(prefix)}blocks\.(\d+)\.", name))}
    if not 0 < len(named) <= len(weights) // 6:
        raise UserError(f"its weights name {len(named)} blocks, which are too few or too bare for a network")
    return len(named)


def _method(used: Mapping[str, TensorRecord], pair: bool, hints: Mapping[str, Any]) -> str:
    """A pair is anchored and a network without time is causal; only the config tells MDLM, SEDD and D3PM apart."""
    timeless = not any("trunk.condition." in name for name in used)
    if pair:
        return "a2r" if timeless else "adlm"
    return "ar" if timeless else PARAMETERIZATIONS.get(str(hints.get("parameterization")), "mdlm")


def _hints(pickled: Any) -> Iterator[tuple[str, Any]]:
    """Plain values under telling keys, wherever in the pickled config they lie."""
    waiting, seen = [pickled], {id(pickled)}
    while waiting and len(seen) < HINTS_LOOKED_AT:
        value = waiting.pop()
        entries = list(itertools.islice(value.items(), HINTS_LOOKED_AT)) if isinstance(value, dict) else []
        for key, inner in entries:
            plain = _plain(inner)
            if key in HINTS and plain is not None:
                yield str(key), plain
        inside = [inner for _, inner in entries]
        if isinstance(value, ForeignObject):
            inside = value.data
        elif isinstance(value, (list, tuple)):
            inside = list(value[:HINTS_LOOKED_AT])
        for inner in inside:
            if isinstance(inner, (ForeignObject, list, tuple, dict)) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _plain(value: Any) -> str | int | bool | None:
    """A plain value, or the one that a config node wraps."""
    if isinstance(value, ForeignObject):
        states = [state for state in value.data if isinstance(state, dict)]
        value = states[-1].get("_val") if states else None
    if isinstance(value, str):
        return describe_value(value)
    return value if isinstance(value, int) and 0 <= value <= LARGEST_SIZE else None


def to_model_folder(
    published: PublishedCheckpoint,
    weights: str | None = None,
    tokenizer: Tokenizer | None = None,
    method: str | None = None,
    mask_id: int | None = None,
    length: int | None = None,
) -> ModelFolder:
    """A released checkpoint as a model folder. What its weights cannot tell can be said: method, mask id, length."""
    if weights == "ema" and published.averaged is None:
        raise UserError("--weights ema: the file has no averaged weights; use --weights raw")
    chosen = published.weights if weights == "raw" or published.averaged is None else published.averaged
    name = method or published.method
    hinted = published.hints.get("length")
    config = Config(
        method=name,  # type: ignore[arg-type]
        tokenizer="" if tokenizer is None else tokenizer.name,
        length=length or (hinted if isinstance(hinted, int) and hinted > 1 else Config.length),
        vocabulary=_vocabulary(published, tokenizer, mask_id),
        schedule=Schedule(eps=1e-3),
        time=Time(steps=_steps(name, published.hints.get("T"))),
        model=replace(published.model, time_conditioning=_is_told_the_time(name, published.hints)),
        sampling=Sampling(nucleus="published"),
    )
    return ModelFolder(validate(config), chosen, tokenizer)


def _is_told_the_time(method: str, hints: Mapping[str, Any]) -> bool:
    """As its config says, or as the released SEDD and D3PM are and the others are not."""
    hinted = hints.get("time_conditioning")
    return hinted if isinstance(hinted, bool) else method in ("sedd", "d3pm")


def _steps(method: str, hinted: Any) -> int:
    """T of the discrete-time methods; the released D3PM has 1,000 steps."""
    if method not in ("mdlm", "d3pm"):
        return 0
    return hinted if isinstance(hinted, int) and hinted > 0 else 1000 * (method == "d3pm")


def _vocabulary(published: PublishedCheckpoint, tokenizer: Tokenizer | None, mask_id: int | None) -> Vocabulary:
    if tokenizer is not None:
        if tokenizer.vocabulary.size != published.num_symbols:
            raise UserError(
                f"tokenizer {tokenizer.name} has {tokenizer.vocabulary.size} symbols and the weights have "
                f"{published.num_symbols}; it is not the one they were trained with"
            )
        return tokenizer.vocabulary
    usual = BERT_MASK if published.num_symbols == BERT_SYMBOLS else published.num_symbols - 1
    return Vocabulary(published.num_symbols, usual if mask_id is None else mask_id)
