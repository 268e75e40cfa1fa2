"""What `adlm.load` returns: a model to ask, in text or in ids. Knows how to put its parts together, not how they work.

Shapes: B sequences, L tokens, V symbols.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from adlm.canvas import MAX_HOLE as LONGEST_HOLE
from adlm.canvas import Canvas, encode_canvas, hole_between, make_canvas
from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, network_of
from adlm.checkpoints.published import read_checkpoint, to_model_folder
from adlm.config.knobs import suggestion
from adlm.config.load import validate
from adlm.config.schema import Config, SamplerName, Sampling
from adlm.data.rows.packing import padding_id, row_frame
from adlm.distributed import device_of
from adlm.errors import UserError
from adlm.files import writing
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.estimate import perplexity_of, summarize
from adlm.likelihood.perplexity import PerplexitySettings, measure_nats
from adlm.likelihood.text_sets import rows_of_texts
from adlm.limits import check_sampling, whole_number
from adlm.methods import method_of
from adlm.methods.inputs import check_canvas, check_clean, check_ids, check_once, vocabulary_of
from adlm.methods.method import Method
from adlm.methods.noising import conditioning_sigma_of
from adlm.models.transformer import num_parameters
from adlm.sampling.frame import Frame, last_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import Tokenizer

ROWS_AT_ONCE = 32


class SamplingKnobs(TypedDict, total=False):
    """The knobs of `Sampling`, by keyword."""

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


@dataclass(frozen=True)
class Perplexity:
    """Of texts: exp of the nats per token, which are a bound unless the model is autoregressive."""

    value: float
    stderr: float | None
    """One standard error of the value by the random draws; 0 for autoregressive models, None with a single sample."""
    interval: tuple[float, float] | None
    """95% confidence interval of the value by the draws; wider than two errors where few samples are drawn."""
    document_stderr: float | None
    """One standard error of the value by the choice of texts; None where it is unknown, as for a single text."""
    nats: float
    nats_stderr: float | None
    tokens: int
    """Tokens of the texts, an end-of-text token for each included."""


class FrozenCache:
    """A network as it is now, ready to sample from; made anew when a weight has changed.

    Torch counts the changes it knows of. Of a write to `weight.data` it does not know, so sums are compared too: that
    is less work than the network has with ten tokens, and misses only what leaves every weight's sum as it was.
    """

    def __init__(self) -> None:
        self._weights: list[tuple[int, ...]] = []
        self._frozen: FrozenNetwork | None = None

    @torch.no_grad()
    def of(self, network: nn.Module) -> FrozenNetwork:
        weights = list(network.parameters())
        by_row = (weight.sum(dim=-1) for weight in weights)  # one sum of all would round small changes away
        sums = torch.stack([rows.sum(dtype=torch.float64) for rows in by_row]).tolist()
        versions = [0 if weight.is_inference() else weight._version for weight in weights]
        now = [(weight.data_ptr(), *its) for weight, *its in zip(weights, versions, sums, strict=True)]
        if self._frozen is None or now != self._weights:
            self._weights, self._frozen = now, FrozenNetwork(network)  # type: ignore[arg-type]
        return self._frozen


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A network with its method. Calls with text need the `tokenizer`, which is there where the folder has one."""

    config: Config
    method: Method
    network: Any
    tokenizer: Tokenizer | None = None
    _frozen: FrozenCache = field(default_factory=FrozenCache, repr=False, compare=False)

    @property
    def mask_id(self) -> int:
        return vocabulary_of(self.config).mask_id

    def log_probs(self, z: Tensor, alpha: float | Tensor | None = None) -> Tensor:
        """log beliefs (B, L, V): of the clean token at each place, or, left to right, of the token after it.

        `alpha`, the share of visible tokens, for all rows or for each (B,), matters only to a network that is told the
        noise; without it the share of masks in each row stands for the time. A `Frame` has both: `read` and `alpha`.
        """
        with ordinary_mode():
            check_ids(z, self.config, "text z")
            shares = self._shares(alpha, len(z))
            return _not_nan(self.method.log_beliefs(self.network, z.to(self.device), shares))

    def anchor_logits(self, z: Tensor, alpha: float | Tensor | None = None) -> Tensor:
        """The anchor network's logits (B, L, V)."""
        if not hasattr(self.network, "anchor_logits"):
            raise UserError(f"method {self.config.method} has no anchor network; adlm and a2r have one")
        with ordinary_mode():
            check_ids(z, self.config, "text z")
            there = z.to(self.device)
            sigma = conditioning_sigma_of(self.config, there, self._shares(alpha, len(z)))
            return _not_nan(self.network.anchor_logits(there, sigma))

    def bound(self, x: Tensor, pad: Tensor | None = None, seed: int = 0) -> Tensor:
        """nats (B, L): one unbiased draw of the bound on -log p(x); exact left to right."""
        with ordinary_mode():
            check_clean(self.config, x, pad, "text x")
            there_pad = None if pad is None else pad.to(self.device)
            generator = torch.Generator().manual_seed(whole_number("seed", seed))
            with check_once():
                return _not_nan(self.method.bound(self.network, x.to(self.device), there_pad, generator))

    def perplexity(
        self, texts: str | list[str], samples: int = 4, estimator: str = "auto", seed: int = 0
    ) -> Perplexity:
        """Perplexity of the texts, each a document: what `adlm perplexity --data` gives for a file with the same text.

        Documents are packed into rows of the model's length, each with its bos and eos, as in training. Short texts are
        scored at many noise levels for each of the `samples`.
        """
        given = _texts_of("texts", [texts] if isinstance(texts, str) else texts)
        recipe = PerplexitySettings(estimator, whole_number("samples", samples, 1), seed=whole_number("seed", seed))
        with ordinary_mode():
            rows = rows_of_texts(given, self._tokenizer(), self.config.length)
            found = summarize(measure_nats(self.method, self.network, rows, recipe))
        value, interval = found.perplexity, found.interval()
        return Perplexity(
            value=value,
            stderr=None if found.monte_carlo is None else value * found.monte_carlo,
            interval=None if interval is None else (perplexity_of(interval[0]), perplexity_of(interval[1])),
            document_stderr=None if found.over_documents is None else value * found.over_documents,
            nats=found.nats,
            nats_stderr=found.monte_carlo,
            tokens=found.tokens,
        )

    def complete(self, canvas: Tensor, num_samples: int = 1, seed: int = 0, **knobs: Unpack[SamplingKnobs]) -> Tensor:
        """ids (B * num_samples, L): each row of a canvas (B, L) or (L,) filled in, where it has the mask id.

        The knobs are those of `adlm.config.schema.Sampling`; where one is not given, the model's own config has it.
        """
        num_samples = whole_number("num_samples", num_samples, 1)
        rows = canvas[None] if isinstance(canvas, Tensor) and canvas.ndim == 1 else canvas
        sampling = self.sampling(**knobs)
        self.walk(Canvas(rows), sampling, seed)  # what cannot be walked is refused by its own row
        check_sampling(self.config, len(rows) * num_samples, rows.shape[1], self.device)
        with ordinary_mode():
            walk = self.walk(Canvas(rows.repeat_interleave(num_samples, dim=0)), sampling, seed)
            return last_frame(walk).ids.to(rows.device)

    def sample(
        self,
        num: int = 1,
        length: int | None = None,
        seed: int = 0,
        *,
        prompt: str = "",
        suffix: str = "",
        special_tokens: bool = False,
        **knobs: Unpack[SamplingKnobs],
    ) -> list[str]:
        """`num` texts of `length` tokens that begin with `prompt` and end with `suffix`, as `adlm sample` draws them.

        `length` counts the tokens of prompt and suffix too; without it, a text is as long as fits the model. bos, eos
        and pad count as tokens; they are left out of the text unless `special_tokens` is set.
        """
        num = whole_number("num", num, 1)
        _texts_of("prompt", [prompt]), _texts_of("suffix", [suffix])
        tokenizer = self._tokenizer()
        if length is None:
            length = self.room(encode_canvas(prompt, tokenizer))
        length = whole_number("length", length, 1, LONGEST_HOLE)
        check_sampling(self.config, num, length, self.device, "num", ROWS_AT_ONCE)
        return self._texts([hole_between(prompt, suffix, length, tokenizer)] * num, seed, knobs, special_tokens)

    @overload
    def fill(
        self, text: str, seed: int = 0, *, special_tokens: bool = False, **knobs: Unpack[SamplingKnobs]
    ) -> str: ...
    @overload
    def fill(
        self, text: list[str], seed: int = 0, *, special_tokens: bool = False, **knobs: Unpack[SamplingKnobs]
    ) -> list[str]: ...
    def fill(
        self, text: str | list[str], seed: int = 0, *, special_tokens: bool = False, **knobs: Unpack[SamplingKnobs]
    ) -> str | list[str]:
        """The text with its holes filled: `[MASK]` is one token, `[MASK*12]` twelve. Several texts walk side by side.

        A prompt is a text that ends with a hole, a suffix one that begins with one. What was given stays as it was.
        bos, eos and pad are left out of the text unless `special_tokens` is set.
        """
        texts = _texts_of("text", [text] if isinstance(text, str) else text)
        filled = self._texts(texts, seed, knobs, special_tokens)
        return filled[0] if isinstance(text, str) else filled

    def watch(self, canvas: str | Tensor, seed: int = 0, **knobs: Unpack[SamplingKnobs]) -> Iterator[Frame]:
        """Every state on the way from a text with holes, or ids (B, L) or (L,), to text; the first is the canvas.

        The tensors of a Frame are the caller's own: changing them does not change what follows.
        """
        if isinstance(canvas, str):
            return _copies(self.walk(self.canvas([canvas]), self.sampling(**knobs), seed))
        rows = canvas[None] if isinstance(canvas, Tensor) and canvas.ndim == 1 else canvas
        own = rows.clone() if isinstance(rows, Tensor) else rows
        return _copies(self.walk(Canvas(own), self.sampling(**knobs), seed))

    def canvas(self, texts: Sequence[str]) -> Canvas:
        """Texts with holes, side by side, each after its `opening`."""
        rows = [encode_canvas(text, self._tokenizer()) for text in _texts_of("texts", texts)]
        if not rows:
            raise UserError("texts is empty; give at least one text with a hole, such as [MASK*12]")
        openings = [self.opening(row) for row in rows]
        opened = [opening + row for opening, row in zip(openings, rows, strict=True)]
        with ordinary_mode():
            return make_canvas(opened, self.filling, [len(opening) for opening in openings])

    def opening(self, ids: Sequence[int]) -> list[int]:
        """What ids are read after: bos, as in training, where they begin with a word (experiments/prompt_bos).

        A mask that comes first becomes bos itself. A diffusion model reads a text that leaves no place for bos without
        it, and a longer one in windows that have their own.
        """
        if not isinstance(ids, Sequence) or not all(isinstance(index, int) for index in ids[:1]):
            raise UserError(f"ids must be a list of whole numbers, not a {type(ids).__name__} of something else")
        bos, _ = row_frame(vocabulary_of(self.config))
        given = len(ids) > 0 and ids[0] not in (self.mask_id, *bos)
        fits = len(bos) + len(ids) <= self.config.length
        return bos if given and (fits or self.left_to_right) else []

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens a text that begins with these ids can have."""
        return self.config.length - len(self.opening(ids))

    @property
    def left_to_right(self) -> bool:
        """Whether the first token of a row is given, and every other predicted from those before it."""
        return not self.method.predicted(torch.zeros(1, 1, dtype=torch.int64, device="cpu"), None).item()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    def walk(self, canvas: Canvas, sampling: Sampling, seed: int = 0, first_row: int = 0) -> Iterator[Frame]:
        """A canvas's walk; row i of it draws the numbers of (seed, first_row + i).

        What cannot be walked is refused at once, before the first frame is asked for.
        """
        if not isinstance(canvas, Canvas) or not isinstance(sampling, Sampling):
            raise UserError(
                f"canvas and sampling must be a Canvas and a Sampling, not a {type(canvas).__name__} and a "
                f"{type(sampling).__name__}"
            )
        first_row = whole_number("first_row", first_row)
        with ordinary_mode():
            check_canvas(self.config, canvas.ids, sampling, canvas.pad, first_row)
            num_rows, length = canvas.ids.shape
            check_sampling(self.config, num_rows, length, self.device, "rows of the canvas")
            draws = RowRng(whole_number("seed", seed), range(first_row, first_row + len(canvas.ids)))
            pad = None if canvas.pad is None else canvas.pad.to(self.device)
            return _each_in_ordinary_mode(
                self.method.generate(self.frozen, canvas.ids.to(self.device), sampling, draws, pad)
            )

    def sampling(self, **knobs: Unpack[SamplingKnobs]) -> Sampling:
        """The model's own sampling with these knobs instead; another sampler has a strength of its own."""
        known = [field.name for field in fields(Sampling)]
        for knob, value in knobs.items():
            if knob not in known:
                raise UserError(f"there is no sampling knob {knob!r}{suggestion(knob, known)}")
            knobs[knob] = _plain(f"sampling.{knob}", value)  # type: ignore[literal-required]
        own = replace(self.config.sampling, eta=None) if "sampler" in knobs else self.config.sampling
        return validate(replace(self.config, sampling=replace(own, **knobs))).sampling

    @property
    def frozen(self) -> FrozenNetwork:
        """The network as it is now, ready to sample from."""
        return self._frozen.of(self.network)

    @property
    def filling(self) -> int:
        """What stands past the end of a shorter row; it is never seen."""
        return padding_id(vocabulary_of(self.config))

    def _shares(self, alpha: float | Tensor | None, rows: int) -> Tensor | None:
        """(B,), in double precision. A network that is told the noise -log alpha is not told an infinite one."""
        if alpha is None:
            return None
        try:
            shares = torch.as_tensor(alpha, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UserError(f"alpha must be a number or a tensor of numbers, not a {type(alpha).__name__}") from None
        if shares.shape not in ((), (rows,)):
            raise UserError(f"alpha of shape {tuple(shares.shape)} must be one share, or one for each of {rows} rows")
        told = self.config.model.time_conditioning
        fits = ((shares > 0) if told else (shares >= 0)) & (shares <= 1)
        if not fits.all():
            least = "above 0 and at most 1" if told else "from 0 to 1"
            raise UserError(f"alpha {shares[~fits].flatten()[0]:g} must be a share of visible tokens, {least}")
        return shares.expand(rows)

    def __repr__(self) -> str:
        """One line: the config and the network have a thousand, and can be asked for by name."""
        config = self.config
        sizes = f"{num_parameters(self.network):,} parameters, {vocabulary_of(config).size:,} symbols"
        without = ", no tokenizer" if self.tokenizer is None else ""
        return f"LanguageModel({config.method}, {sizes}, length {config.length}, {self.device}{without})"

    def _texts(self, texts: Sequence[str], seed: int, knobs: SamplingKnobs, special_tokens: bool) -> list[str]:
        """Texts with holes, filled; whatever is wrong with one of them is told before anything is drawn."""
        if not isinstance(special_tokens, bool):
            raise UserError(f"special_tokens must be True or False, not {special_tokens!r:.60}")
        tokenizer, sampling = self._tokenizer(), self.sampling(**knobs)
        starts = range(0, len(texts), ROWS_AT_ONCE)
        parts = [(start, self.canvas(texts[start : start + ROWS_AT_ONCE])) for start in starts]
        for start, canvas in parts:
            self.walk(canvas, sampling, seed, start)
        filled: list[str] = []
        for start, canvas in parts:
            last = last_frame(self.walk(canvas, sampling, seed, start))
            filled += [tokenizer.decode(ids, special_tokens) for ids in canvas.texts(last.ids)]
        return filled

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it knows ids only; use complete, or save one beside it")
        return self.tokenizer


def load(path: str | Path, device: str | torch.device = "cpu") -> LanguageModel:
    """A model folder, the folder of a run, or a checkpoint of the released code (averaged weights, if any)."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise UserError(f"path must be the path of a model folder or a .ckpt file, not a {type(path).__name__}")
    place, where = Path(path), device_of(device)
    with writing(place, f"{path} cannot be read"), ordinary_mode():
        if place.is_dir():
            trained = place / "model"  # the folder of a run has its model there
            return language_model(load_model_folder(trained if trained.is_dir() else place), where)
        if place.suffix == ".ckpt":
            return language_model(to_model_folder(read_checkpoint(place)), where)
        absent = "" if place.exists() else ": there is nothing of that name"
        raise UserError(f"{path} is neither a model folder nor a .ckpt file{absent}")


def language_model(model: ModelFolder, device: torch.device | None = None) -> LanguageModel:
    """A folder's parts, put together."""
    network = network_of(model.config, model.weights)
    return LanguageModel(model.config, method_of(model.config), network.to(device), model.tokenizer)


@contextmanager
def ordinary_mode() -> Iterator[None]:
    """No gradients, no inference mode, new tensors on the CPU: whatever the caller has set for code of their own.

    Tensors made in inference mode could not be changed outside of it, in the next step of a sampling run.
    """
    with (
        torch.inference_mode(False),
        torch.device("cpu") if _default_is_elsewhere() else nullcontext(),
        torch.no_grad(),
    ):
        yield


def _default_is_elsewhere() -> bool:
    return torch.get_default_device().type != "cpu"


def _each_in_ordinary_mode(frames: Iterator[Frame]) -> Iterator[Frame]:
    """The same frames: a generator runs in the mode of whoever asks it for the next."""
    while True:
        unusual = torch.is_inference_mode_enabled() or _default_is_elsewhere()
        with ordinary_mode() if unusual else nullcontext():
            frame = next(frames, None)
        if frame is None:
            return
        yield frame


def _copies(frames: Iterator[Frame]) -> Iterator[Frame]:
    for frame in frames:
        yield Frame(*(None if each is None else each.clone() for each in vars(frame).values()))  # type: ignore[arg-type]


def _not_nan(values: Tensor) -> Tensor:
    """Log-probabilities, logits or nats as they are; -inf is one of them, NaN is none."""
    if values.sum(dim=-1).isnan().any():
        raise UserError("the model's log-probabilities are not numbers: its weights or its precision do not hold")
    return values


def _texts_of(name: str, texts: object) -> Sequence[str]:
    """An argument that must be texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UserError(f"{name} must be a text or a list of texts, not a {type(texts).__name__}")
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{name} must be text, not a {type(text).__name__}")
    return texts


def _plain(name: str, value: object) -> object:
    """A knob's value as Python has it; a number of numpy or torch is one too."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        with suppress(RuntimeError):  # on the meta device
            return value.item()
    if value is not None and not isinstance(value, (str, int, float)):
        raise UserError(f"{name} must be a number or a word, not a {type(value).__name__}")
    return value
