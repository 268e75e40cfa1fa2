"""Validation of what methods are given: ids, canvas, padding, sampling options. Also vocabulary and padding helpers.

Shapes: B sequences, L tokens. `pad` is True at padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling, Vocabulary
from adlm.errors import UserError
from adlm.methods.method import Method
from adlm.sampling.samplers import sampler_of


def vocabulary_of(config: Config) -> Vocabulary:
    if config.vocabulary is None:
        raise UserError(
            "the vocabulary is not set yet: give vocabulary.size and vocabulary.mask_id, or take them from the "
            "tokenizer: replace(config, vocabulary=adlm.tokens.load_tokenizer(config.tokenizer).vocabulary)"
        )
    return config.vocabulary


def check_clean(
    config: Config, x: Tensor, pad: Tensor | None, what: str = "text", max_length: int | None = None
) -> None:
    """Checks that x (B, L) are ids, no longer than the model or `max_length`, without masks outside the padding."""
    vocabulary = vocabulary_of(config)
    check_ids(x, config, what, max_length)
    if pad is not None:
        _check_pad(pad, x)
    masks = int(((x == vocabulary.mask_id) & not_pad(x, pad)).sum())
    if masks:
        raise UserError(
            f"the {what} holds the mask id {vocabulary.mask_id} at {masks} of {x.numel()} positions; "
            "clean text must not contain it: the method adds the masks"
        )


def text_of_row(canvas: Tensor, row: int) -> str:
    """What messages call the text of a row of the canvas."""
    return "the text of the canvas" if len(canvas) == 1 else f"row {row} of the canvas"


def check_canvas(
    method: Method, canvas: Tensor, sampling: Sampling, pad: Tensor | None = None, row_by_row: bool = False
) -> None:
    """Checks that the method can fill in a canvas with these options; `Method.generate` trusts it.

    `row_by_row` is whether each row is sampled alone: then long ones may have unequal lengths.
    """
    config, mask_id = method.config, vocabulary_of(method.config).mask_id
    _check_are_ids(canvas, config, "canvas")
    if pad is not None:
        _check_pad(pad, canvas)
        if ((canvas == mask_id) & pad).any():
            raise UserError(f"the canvas has the mask id {mask_id} in its padding; fill padding with another id")
    if canvas.shape[1] > config.length:
        _check_long_canvas(method, canvas, sampling, pad, row_by_row)
    to_fill = canvas == mask_id
    if config.model.block_length and config.model.hole_id is not None:
        to_fill |= canvas == config.model.hole_id  # holes of unknown length
    complete = ~to_fill.any(dim=1)
    if complete.any():
        raise UserError(
            f"row {int(complete.nonzero()[0])} of the canvas has no mask id {mask_id}: there is nothing to fill in; "
            "put the mask, in a text [MASK], where text is wanted"
        )
    method.check_run(canvas, sampling, pad)


def _check_long_canvas(
    method: Method, canvas: Tensor, sampling: Sampling, pad: Tensor | None, row_by_row: bool
) -> None:
    """Checks that a canvas longer than the model can be sampled with a sliding window."""
    if method.cached:
        return
    if sampler_of(sampling).long_texts:
        if pad is not None and not row_by_row:
            raise UserError("rows of unequal lengths cannot share windows; sample long texts of one length at a time")
        return
    row, length = 0 if pad is None else int(pad.sum(dim=1).argmin()), method.config.length
    remedy = ", or use sampling.sampler=semi-autoregressive" if _works_with(method, "semi-autoregressive") else ""
    raise UserError(
        f"{text_of_row(canvas, row)} is {canvas.shape[1]} tokens long and the model was made for length {length}; "
        f"shorten it{remedy}"
    )


def check_sampler(method: Method, sampling: Sampling) -> None:
    """Checks that the sampler works with the method."""
    sampler, name = sampling.sampler, method.config.method
    if not _works_with(method, sampler):
        raise UserError(
            f"sampling.sampler {sampler} does not work with method {name}; use {' or '.join(method.samplers or ())}",
            "sampling.sampler",
        )
    if sampler_of(sampling).block_causal and not method.config.model.block_length:
        raise UserError(
            f"sampling.sampler {sampler} needs a block-causal model, and model.block_length is 0; try confidence",
            "sampling.sampler",
        )
    if sampling.no_repeat and not method.constrained:
        raise UserError(
            f"sampling.no_repeat {sampling.no_repeat} is not for models with method {name}; use 0",
            "sampling.no_repeat",
        )
    if sampler_of(sampling).anchored and not method.anchored:
        raise UserError(
            f"sampling.sampler {sampler} needs an anchor network, and {name} has none; try confidence",
            "sampling.sampler",
        )
    if sampler_of(sampling).rated and method.config.rates.rule == "none":
        raise UserError(
            f"sampling.sampler {sampler} needs a model that predicts rates, and rates.rule is none; try ancestral",
            "sampling.sampler",
        )
    check_anchor_every(method.config, sampling)
    if method.config.model.memory:
        check_memory(method.config, sampling)
    model = method.config.model
    infills = model.block_length and model.hole_id is not None and method.config.train.causal_weight
    if sampling.candidates > 1 and not infills:
        raise UserError(
            f"sampling.candidates {sampling.candidates} chooses a fill by next-token predictions, and only "
            "block-causal models with model.hole_id and train.causal_weight have them; use 1",
            "sampling.candidates",
        )


def check_constraints(method: Method, sampling: Sampling) -> None:
    """A user error if the method or the sampler cannot fill constrained holes."""
    if not method.constrained:
        raise UserError(
            f"steps of method {method.config.method} are not draws from a product of beliefs, which constraints need; "
            "use another model, such as box",
            "constraints",
        )
    if not sampler_of(sampling).constrained:
        raise UserError(
            f"sampling.sampler {sampling.sampler} draws tokens without regard to constraints; use ancestral or "
            "confidence",
            "sampling.sampler",
        )
    if not sampling.verify and sampling.sampler == "speculative":
        raise UserError(
            "sampling.verify false keeps drafts, which are drawn without regard to constraints; use true",
            "sampling.verify",
        )


def check_anchor_every(config: Config, sampling: Sampling) -> None:
    """A user error if the anchor network is to run less often than the denoiser, and cannot."""
    every, option = sampling.anchor_every, "sampling.anchor_every"
    if every == 1:
        return
    if config.method != "adlm" or not config.model.num_denoiser_blocks:
        kind = f"method {config.method}" if config.method != "adlm" else "model.denoiser_blocks 0"
        raise UserError(f"{option} {every} is for adlm with a denoiser, and this is {kind}; use {option}=1", option)
    if config.model.time_conditioning:
        raise UserError(
            f"{option} {every} gives the two networks ids of two times, and model.time_conditioning true tells them "
            f"one; use {option}=1 or model.time_conditioning=false",
            option,
        )
    if config.rates.rule != "none":
        raise UserError(
            f"{option} {every} is for steps of a time grid, and rates.rule {config.rates.rule} has none; use "
            f"{option}=1 or rates.rule=none",
            option,
        )
    if sampling.sampler == "speculative":
        raise UserError(f"{option} {every} is for samplers with steps, and speculative has none; use 1", option)
    if sampler_of(sampling).long_texts:
        raise UserError(
            f"{option} {every} is for texts of one row, and {sampling.sampler} slides a window; use 1, or ancestral",
            option,
        )


def check_memory(config: Config, sampling: Sampling) -> None:
    """A user error if a network with memory cannot remember its last call."""
    refused = {
        f"method {config.method}": config.method not in ("adlm", "mdlm"),
        f"model.block_length {config.model.block_length}": config.model.block_length > 0,
        "model.time_conditioning true": config.model.time_conditioning,
        f"rates.rule {config.rates.rule}": config.rates.rule != "none",
        f"sampling.anchor_every {sampling.anchor_every}": sampling.anchor_every > 1,
        f"sampling.sampler {sampling.sampler}, which slides a window": sampler_of(sampling).long_texts,
    }
    for other, is_given in refused.items():
        if is_given:
            raise UserError(
                f"model.memory true is for adlm and mdlm that read a whole row at every step, and there is {other}; "
                "change that, or use model.memory=false",
                "model.memory",
            )


def has_text_after_hole(canvas: Tensor, mask_id: int, pad: Tensor | None) -> Tensor:
    """(B,), True where a row gives a token after a mask."""
    masked = canvas == mask_id
    return (masked[:, :-1] & ~masked[:, 1:] & not_pad(canvas, pad)[:, 1:]).any(dim=1)


def check_left_to_right(config: Config, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
    """Checks that the canvas is a prompt followed by masks, with a bos for a masked first token."""
    vocabulary = vocabulary_of(config)
    if sampling.stop_at_eos and vocabulary.eos_id is None:
        raise UserError(
            "sampling.stop_at_eos true needs an end-of-text token, and vocabulary.eos_id is empty; use false",
            "sampling.stop_at_eos",
        )
    masked = canvas == vocabulary.mask_id
    later = has_text_after_hole(canvas, vocabulary.mask_id, pad)
    if later.any() and config.model.hole_id is None:
        raise UserError(
            f"{text_of_row(canvas, int(later.nonzero()[0]))} gives a token after a mask, and {config.method} writes "
            "from left to right without looking ahead; give the prompt first, or use a model of whole rows, such as box"
        )
    if masked[:, 0].any() and vocabulary.bos_id is None:
        raise UserError(
            f"the canvas begins with a mask, and {config.method} needs a first token: vocabulary.bos_id is empty, so "
            "give one"
        )


def stop_id(config: Config, sampling: Sampling) -> int | None:
    """The token that ends a text; None if none does."""
    return vocabulary_of(config).eos_id if sampling.stop_at_eos else None


def with_first_token(config: Config, canvas: Tensor) -> Tensor:
    """The canvas with bos in place of a masked first token; see `check_left_to_right`."""
    vocabulary = vocabulary_of(config)
    masked = canvas[:, :1] == vocabulary.mask_id
    if not masked.any():
        return canvas
    assert vocabulary.bos_id is not None
    return torch.cat([torch.where(masked, vocabulary.bos_id, canvas[:, :1]), canvas[:, 1:]], dim=1)


def _works_with(method: Method, sampler: str) -> bool:
    return method.samplers is None or sampler in method.samplers


def check_ids(ids: Any, config: Config, what: str, max_length: int | None = None) -> None:
    """Checks that `ids` is a tensor (B, L) of ids, no longer than the model or `max_length`."""
    _check_are_ids(ids, config, what)
    longest = max_length or config.length
    if ids.shape[1] > longest:
        raise UserError(
            f"the {what} is {ids.shape[1]} tokens long and the model was made for length {longest}; shorten it"
        )


def _check_are_ids(ids: Any, config: Config, what: str) -> None:
    vocabulary = vocabulary_of(config)
    if not isinstance(ids, Tensor):
        raise UserError(
            f"the {what} must be a torch tensor of int64 ids (sequences, length), not a {type(ids).__name__}"
        )
    if ids.device.type == "meta" or ids.layout != torch.strided:
        raise UserError(f"the {what} must be a dense tensor in memory, not one on {ids.device} of layout {ids.layout}")
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise UserError(
            f"the {what} must be int64 ids of shape (sequences, length), not {str(ids.dtype).removeprefix('torch.')} "
            f"of shape {tuple(ids.shape)}"
        )
    outside = (ids < 0) | (ids >= vocabulary.size)
    if outside.any():
        raise UserError(
            f"the {what} holds id {int(ids[outside][0])}, outside the vocabulary of {vocabulary.size} symbols; "
            "was it made with another tokenizer?"
        )


def _check_pad(pad: Any, x: Tensor) -> None:
    is_wrong = not isinstance(pad, Tensor) or pad.dtype != torch.bool or pad.shape != x.shape
    if is_wrong or pad.device.type == "meta" or pad.layout != torch.strided:
        raise UserError(f"pad must be a boolean tensor of the text's shape {tuple(x.shape)}, True at padding")
    if pad.all():
        raise UserError("pad is True everywhere: there is no text in this batch")


def attention_pad(config: Config, pad: Tensor | None) -> Tensor | None:
    """The padding that the network must not attend to, or None."""
    return pad if config.data.pad == "masked" else None


def end_of_row(method: Method) -> list[int]:
    """What a network that reads both sides is given after a text: eos, with which all rows of its training end.

    Without it the network expects eos in place of the last token. Others never read it.
    """
    return [] if method.cached else vocabulary_of(method.config).row_boundaries[1]


def not_pad(x: Tensor, pad: Tensor | None) -> Tensor:
    """(B, L), True at text."""
    return torch.ones_like(x, dtype=torch.bool) if pad is None else ~pad


def given_option(given: Tensor | None, labels: Tensor | None = None) -> dict[str, Tensor]:
    """The arguments `given` and `labels` of a method, left out where they are None: not every method knows them."""
    options = {"given": given, "labels": labels}
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Puts the network in eval mode inside the block and restores its mode after."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
