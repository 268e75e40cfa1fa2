"""What is to be sampled, and all checks of it that need no model. Imports no PyTorch, so that these take no time."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypedDict

from adlm.canvas import HOLE, MAX_HOLE, Canvas, Hole, check_holes, hole_name, least_tokens, num_masks
from adlm.config.load import parse_overrides, validate_sampling
from adlm.config.options import suggestion
from adlm.config.schema import SamplerName, Sampling
from adlm.constraints.kinds import ANY_TEXT, KINDS, Constraint
from adlm.errors import UserError, whole_number


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keyword arguments."""

    sampler: SamplerName
    steps: int
    eta: float
    t_on: float
    t_off: float
    alpha_on: float
    threshold: float
    stride: int
    t_end: float
    final: Literal["argmax", "draw"]
    temperature: float
    top_k: int
    top_p: float
    nucleus: Literal["crossing", "published"]
    repetition_penalty: float
    no_repeat: int
    anchor_every: int
    drafts: int | None
    verify: bool
    drafter: Literal["denoiser", "anchor"]
    candidates: int
    stop_at_eos: bool


@dataclass(frozen=True)
class SampleSettings:
    """What to fill in, how often and how: `texts`, or a `canvas` of ids, or one text from `prompt` to `suffix`.

    Settings that could be made are valid in themselves; `LanguageModel.plan` checks them against a model.
    """

    sampling: Sampling
    texts: Sequence[str] | None = None
    """Texts with holes, such as `[MASK*12]`."""
    canvas: Canvas | None = None
    """ids with mask ids."""
    prompt: str = ""
    suffix: str = ""
    length: int | None = None
    """Tokens of the text between prompt and suffix, both included; None is as many as the model allows."""
    num: int = 1
    """Samples of each text."""
    seed: int = 0
    batch: int | None = None
    """Rows sampled at once; None is all of them."""
    streamed: bool = False
    """Whether samples are used batch by batch, so that not all of them are in memory."""
    num_option: str = "num"
    """The name of `num` in messages."""
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    """What the text of named holes, such as `[MASK*12:name]`, must satisfy."""
    holes: Sequence[tuple[int, Hole]] = ()
    """Named holes of a `canvas` of ids, each with its row; those of texts are found there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num", whole_number(self.num_option, self.num, 1))
        object.__setattr__(self, "seed", whole_number("seed", self.seed))
        if self.batch is not None:
            object.__setattr__(self, "batch", whole_number("batch", self.batch, 1))
        if self.length is not None:
            object.__setattr__(self, "length", whole_number("length", self.length, 1, MAX_HOLE))
        object.__setattr__(self, "sampling", validate_sampling(self.sampling))
        if not isinstance(self.canvas, Canvas | None):
            raise UserError(f"canvas must be an adlm.canvas.Canvas, not a {type(self.canvas).__name__}", "canvas")
        if self.texts is not None:
            check_texts("texts", self.texts)
            if not self.texts:
                raise UserError("texts is empty; give at least one text with a hole, such as [MASK*12]", "texts")
        for name, text in (("prompt", self.prompt), ("suffix", self.suffix)):
            check_texts(name, [text])
            if HOLE.search(text):
                raise UserError(
                    f"{name} {text!r} contains a mask; pass the complete text with its masks to fill instead", name
                )
            check_holes(text, name)
        for text in self.texts or ():
            check_holes(text)
            if not num_masks(text):
                raise UserError(
                    f"the canvas {text!r:.200} has no masks to fill in; write [MASK] for one token, [MASK*12] for "
                    "twelve",
                    "texts",
                )
        self._check_copies()
        self._check_constraints()

    def _check_constraints(self) -> None:
        given: object = self.constraints
        if not isinstance(given, Mapping):
            raise UserError(
                f"constraints must be a dict from names of holes to constraints, not a {type(given).__name__}",
                "constraints",
            )
        names = {hole_name(hole) for text in self.texts or () for hole in HOLE.finditer(text)} - {""}
        names |= {hole.name for _, hole in self.holes}
        for name, constraint in self.constraints.items():
            if not isinstance(constraint, Constraint):
                raise UserError(
                    f"the constraint of hole {name} must be {KINDS}, not a {type(constraint).__name__}",
                    "constraints",
                )
            if name not in names:
                remedy = suggestion(str(name), sorted(names)) or f"; write one as [MASK*12:{name!s:.32}]"
                raise UserError(f"constraints names {name!r:.60}, and no hole has this name{remedy}", "constraints")

    def _check_copies(self) -> None:
        for text in self.texts or ():
            seen: dict[str, str] = {}
            for mark in HOLE.finditer(text):
                name = hole_name(mark)
                if name and seen.setdefault(name, mark[0]) != mark[0]:
                    raise UserError(
                        f"{seen[name]} and {mark[0]} have one name, so they are filled with the same tokens; give them "
                        "the same length, or another name",
                        "texts",
                    )

    @cached_property
    def all_constraints(self) -> dict[str, Constraint]:
        """Those given and, with any text allowed, those that the marks of holes imply: holes of one name have the same
        text, and `[MASK*3..8]` has a least length, by the empty name if it has none."""
        found = dict(self.constraints)
        for text in self.texts or ():
            marks = list(HOLE.finditer(text))
            names = Counter(hole_name(mark) for mark in marks)
            for mark in marks:
                name = hole_name(mark)
                if (name and names[name] > 1) or least_tokens(mark):
                    found.setdefault(name, ANY_TEXT)
        return found


def check_texts(name: str, texts: object) -> Sequence[str]:
    """The argument `name` unchanged; UserError unless it is a list of texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UserError(f"{name} must be a text or a list of texts, not a {type(texts).__name__}", name)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{name} must be text, not a {type(text).__name__}", name)
    return texts


def sampling_with(defaults: Sampling, options: Mapping[str, object], others: Sequence[str] = ()) -> Sampling:
    """The sampling options with some replaced, not yet validated. A new `sampler` resets `eta` to its default.

    `others` are further arguments of the call, which the message for an unknown option may suggest.
    """
    known = [field.name for field in fields(Sampling)]
    for option in options:
        if option not in known:
            meant = suggestion(option, [*known, *others])
            raise UserError(f"there is no sampling option {option!r}{meant}", f"sampling.{option}")
    plain: dict[str, Any] = {option: _to_python_scalar(option, value) for option, value in options.items()}
    return replace(replace(defaults, eta=None) if "sampler" in plain else defaults, **plain)


def parse_sampling(words: Iterable[str], **flags: Any) -> dict[str, Any]:
    """The sampling options of the words `sampling.option=value` of a command, and of flags that are not None."""
    for word in words:
        if not word.startswith("sampling."):
            raise UserError(
                f"{word!r} is not a sampling option, and the other options of a trained model are fixed; give one such "
                "as sampling.top_p=0.9"
            )
    options: dict[str, Any] = parse_overrides(words).get("sampling", {})
    for option, value in flags.items():
        if value is not None and option in options:
            raise UserError(
                f"--{option} {value} and sampling.{option}={options[option]} set the same option; give only one"
            )
        if value is not None:
            options[option] = value
    return options


def _to_python_scalar(option: str, value: Any) -> object:
    """A sampling option as a Python number or string; NumPy and torch scalars are converted."""
    if getattr(value, "ndim", None) == 0:
        with suppress(RuntimeError):  # on the meta device
            return value.item()
    if value is not None and not isinstance(value, (str, int, float)):
        option = f"sampling.{option}"
        raise UserError(f"{option} must be a number or a word, not a {type(value).__name__}", option)
    return value
