"""Samples of many canvases, one batch at a time. No files and no terminal output."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from adlm import __version__
from adlm.config.load import parse_overrides
from adlm.config.schema import ETA, Sampling
from adlm.distributed import device_name
from adlm.errors import UserError
from adlm.language_model import NO_TOKENIZER, LanguageModel
from adlm.model_summary import summarize_model
from adlm.models.transformer import weights_sha256
from adlm.samples_file import Provenance, Sample
from adlm.sampling.frame import Frame, last_frame
from adlm.tokens import Tokenizer

FrameFilter = Callable[[Iterator[Frame]], Iterator[Frame]]
"""Wraps the frames of a batch, to record or display them; yields them unchanged."""


@dataclass(frozen=True)
class SampleRequest:
    """A request for `num` samples of every canvas."""

    canvases: tuple[str, ...]
    """Texts with masks."""
    num: int
    seed: int
    sampling: Sampling
    batch: int

    @property
    def num_rows(self) -> int:
        return self.num * len(self.canvases)

    @property
    def first_row_only(self) -> "SampleRequest":
        """A request for row 0 only, in a batch of one, with the same random numbers."""
        return replace(self, canvases=self.canvases[:1], num=1, batch=1)

    def starts(self, rows: int) -> range:
        """The first row of each batch that remains to be sampled after `rows` rows.

        An incomplete batch is sampled again from its first row: rounding depends on the batch.
        """
        return range(rows - rows % self.batch if rows < self.num_rows else rows, self.num_rows, self.batch)


def sampling_config(lm: LanguageModel, words: Iterable[str], **flags: Any) -> Sampling:
    """The model's sampling config with overrides `sampling.option=value`, and command-line flags that are not None."""
    for word in words:
        if not word.startswith("sampling."):
            raise UserError(
                f"{word!r} is not a sampling option, and the other options of a trained model are fixed; give one such "
                "as sampling.top_p=0.9"
            )
    options = parse_overrides(words).get("sampling", {})
    for option, value in flags.items():
        if value is not None:
            if option in options:
                raise UserError(
                    f"--{option} {value} and sampling.{option}={options[option]} set the same option; give only one"
                )
            options[option] = value
    return lm.sampling(**options)


def check_request(lm: LanguageModel, request: SampleRequest) -> None:
    """Check every canvas without sampling: `run_sampler` checks its arguments before the first frame."""
    for name in ("num", "batch"):
        if getattr(request, name) < 1:
            raise UserError(f"--{name} {getattr(request, name)} must be at least 1")
    for text in request.canvases:
        canvas = lm.canvas([text])
        if lm.mask_id not in canvas.ids:
            raise UserError(f"{text!r} has no masks to fill in; write [MASK] for one token, [MASK*12] for twelve")
        lm.run_sampler(canvas, request.sampling, request.seed)


def sample_batch(
    lm: LanguageModel, request: SampleRequest, start: int, filters: Sequence[FrameFilter] = ()
) -> list[Sample]:
    """The samples of the batch that begins with row `start`."""
    tokenizer = tokenizer_of(lm)
    rows = range(start, min(start + request.batch, request.num_rows))
    canvas = lm.canvas([request.canvases[row // request.num] for row in rows])
    try:
        frames = lm.run_sampler(canvas, request.sampling, request.seed, start)
        for frame_filter in filters:
            frames = frame_filter(frames)
        texts = canvas.texts(last_frame(frames).ids)
    except torch.OutOfMemoryError:
        fewer = f"--batch {len(rows) // 2}" if len(rows) > 1 else "a shorter text"
        raise UserError(
            f"--batch {request.batch} of {canvas.ids.shape[1]} tokens does not fit the memory of the device; "
            f"try {fewer}"
        ) from None
    return [
        Sample(row, row // request.num, request.seed, tokenizer.decode(ids), ids)
        for row, ids in zip(rows, texts, strict=True)
    ]


def provenance_of(lm: LanguageModel, model: str, request: SampleRequest) -> Provenance:
    """What the samples depend on: the first line of their file."""
    device, sampling = next(lm.network.parameters()).device, request.sampling
    return Provenance(
        adlm=__version__,
        model=model,
        weights=weights_sha256(lm.network),
        method=lm.config.method,
        tokenizer=lm.config.tokenizer,
        length=lm.config.length,
        canvases=list(request.canvases),
        num=request.num,
        seed=request.seed,
        sampling=asdict(replace(sampling, eta=sampling.strength if sampling.sampler in ETA else None)),
        batch=request.batch,
        device=device_name(device),
        dtype=str(lm.frozen.dtype).removeprefix("torch."),
        tokenizer_sha256=tokenizer_of(lm).sha256,
        about=asdict(summarize_model(model, lm)),
    )


def tokenizer_of(lm: LanguageModel) -> Tokenizer:
    if lm.tokenizer is None:
        raise UserError(NO_TOKENIZER)
    return lm.tokenizer
