"""Many samples of many canvases, batch by batch, each batch gone before the next. Knows no files and no screens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from adlm import __version__
from adlm.canvas import encode_canvas
from adlm.config.load import parse_overrides
from adlm.config.schema import ETA, Sampling
from adlm.distributed import device_name
from adlm.errors import UserError
from adlm.evaluation.model_summary import summarize_model
from adlm.language_model import LanguageModel
from adlm.models.transformer import weights_sha256
from adlm.samples_file import Provenance, Sample
from adlm.sampling.frame import Frame, last_frame
from adlm.tokens import Tokenizer

FrameFilter = Callable[[Iterator[Frame]], Iterator[Frame]]
"""Someone who looks at a batch's frames as they pass."""


@dataclass(frozen=True)
class SampleRequest:
    """What is asked of a model: `num` samples of every canvas."""

    canvases: tuple[str, ...]
    """Texts with holes."""
    num: int
    seed: int
    sampling: Sampling
    batch: int

    @property
    def num_rows(self) -> int:
        return self.num * len(self.canvases)

    @property
    def first_alone(self) -> "SampleRequest":
        """Only row 0, nobody beside it: the same draws."""
        return replace(self, canvases=self.canvases[:1], num=1, batch=1)

    def starts(self, rows: int) -> range:
        """The first rows of the batches that are left when so many rows are there.

        A batch of which some rows are there is walked whole again: in the same company they round the same.
        """
        return range(rows - rows % self.batch if rows < self.num_rows else rows, self.num_rows, self.batch)


def sampling_config(lm: LanguageModel, words: Iterable[str], **flags: Any) -> Sampling:
    """The model's sampling with knobs by `sampling.knob=value`, and others that an option of their own may have set."""
    for word in words:
        if not word.startswith("sampling."):
            raise UserError(
                f"{word!r} is no knob of sampling, and the rest of a model is settled; write sampling.top_p=0.9, say"
            )
    knobs = parse_overrides(words).get("sampling", {})
    for knob, value in flags.items():
        if value is not None:
            if knob in knobs:
                raise UserError(f"--{knob} {value} and sampling.{knob}={knobs[knob]} both say so; keep one")
            knobs[knob] = value
    return lm.sampling(**knobs)


def check_request(lm: LanguageModel, wanted: SampleRequest) -> None:
    """Every canvas has a walk; none is walked, because what a method or a sampler refuses, it refuses at once."""
    for name in ("num", "batch"):
        if getattr(wanted, name) < 1:
            raise UserError(f"--{name} {getattr(wanted, name)} must be at least 1")
    for text in wanted.canvases:
        if lm.mask_id not in encode_canvas(text, tokenizer_of(lm)):
            raise UserError(f"{text!r} has no hole to fill in; write [MASK] for one token, [MASK*12] for twelve")
        lm.run_sampler(lm.canvas([text]), wanted.sampling, wanted.seed)


def sample_batch(
    lm: LanguageModel, wanted: SampleRequest, start: int, through: Sequence[FrameFilter] = ()
) -> list[Sample]:
    """The samples of the batch that begins with row `start`."""
    tokenizer = tokenizer_of(lm)
    rows = range(start, min(start + wanted.batch, wanted.num_rows))
    canvas = lm.canvas([wanted.canvases[row // wanted.num] for row in rows])
    try:
        frames = lm.run_sampler(canvas, wanted.sampling, wanted.seed, start)
        for look in through:
            frames = look(frames)
        texts = canvas.texts(last_frame(frames).ids)
    except torch.OutOfMemoryError:
        fewer = f"--batch {len(rows) // 2}" if len(rows) > 1 else "a shorter text"
        raise UserError(
            f"--batch {wanted.batch} of {canvas.ids.shape[1]} tokens does not fit the memory of the device; try {fewer}"
        ) from None
    return [
        Sample(row, row // wanted.num, wanted.seed, tokenizer.decode(ids), ids)
        for row, ids in zip(rows, texts, strict=True)
    ]


def provenance_of(lm: LanguageModel, model: str, wanted: SampleRequest) -> Provenance:
    """What the samples depend on, as their file tells it."""
    device, sampling = next(lm.network.parameters()).device, wanted.sampling
    return Provenance(
        adlm=__version__,
        model=model,
        weights=weights_sha256(lm.network),
        method=lm.config.method,
        tokenizer=lm.config.tokenizer,
        length=lm.config.length,
        canvases=list(wanted.canvases),
        num=wanted.num,
        seed=wanted.seed,
        sampling=asdict(replace(sampling, eta=sampling.strength if sampling.sampler in ETA else None)),
        batch=wanted.batch,
        device=device_name(device),
        dtype=str(lm.frozen.dtype).removeprefix("torch."),
        tokenizer_sha256=tokenizer_of(lm).sha256,
        about=asdict(summarize_model(model, lm)),
    )


def tokenizer_of(lm: LanguageModel) -> Tokenizer:
    if lm.tokenizer is None:
        raise UserError(
            "text needs a tokenizer, and this model has none; in Python, lm.complete(canvas) works with ids"
        )
    return lm.tokenizer
