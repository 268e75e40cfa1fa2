"""`LanguageModel`, the object that `adlm.load` returns: sampling, infilling and scoring of texts or token ids.

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
from adlm.canvas import Canvas, check_holes, encode_canvas, hole_between, make_canvas
from adlm.checkpoints.exported import download_model, is_hub_name, load_exported
from adlm.checkpoints.model_folder import (
    ARCHITECTURE,
    CONFIG,
    ModelFolder,
    load_model_folder,
    network_of,
)
from adlm.checkpoints.published import read_checkpoint, to_model_folder
from adlm.config.load import BOX, BOX_FOLDER, validate_sampling
from adlm.config.options import suggestion
from adlm.config.schema import Config, SamplerName, Sampling
from adlm.data.rows.packing import padding_id, row_boundaries
from adlm.diffusion.times import BatchRng
from adlm.distributed import device_of
from adlm.errors import UserError
from adlm.files import reporting_os_errors
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.measurement import PerplexitySettings, measure_nats
from adlm.likelihood.standard_errors import perplexity_of, summarize
from adlm.likelihood.text_sets import rows_of_texts
from adlm.limits import check_sampling, whole_number
from adlm.methods import method_of
from adlm.methods.inputs import check_canvas, check_clean, check_ids, vocabulary_of
from adlm.methods.method import Method
from adlm.models.transformer import num_parameters
from adlm.sampling.frame import Frame, last_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import Tokenizer

ROWS_AT_ONCE = 32
NO_TOKENIZER = (
    "this model has no tokenizer, so it cannot read or write text; of a .ckpt, make a model folder with one by "
    "`adlm import FILE.ckpt --out FOLDER --tokenizer gpt2`, or, in Python, use lm.complete, which takes ids"
)


class SamplingOptions(TypedDict, total=False):
    """The fields of `adlm.config.schema.Sampling`, as keyword arguments."""

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
    """exp of the nats per token: an upper bound for diffusion models, exact for autoregressive ones.

    The two standard errors, Monte Carlo and over documents, are those of `adlm perplexity` (docs/evaluation.md).
    """

    value: float
    stderr: float | None
    """Monte Carlo standard error of `value`; 0 for autoregressive models, None with a single sample."""
    interval: tuple[float, float] | None
    """95% Monte Carlo confidence interval of `value`, by Student's t distribution: wide with few samples."""
    document_stderr: float | None
    """Standard error of `value` over documents (the texts); None where it cannot be estimated, as for a single text."""
    nats: float
    nats_stderr: float | None
    """Monte Carlo standard error of `nats`; `stderr` is this times `value`."""
    tokens: int
    """Number of tokens, including one end-of-text token per text."""


class FrozenCopy:
    """The frozen copy of a network for sampling, a `FrozenNetwork`, rebuilt when a weight has changed.

    A change is an increment of a weight's version counter, or another address: optimizer steps, `load_state_dict`,
    `to` and in-place operations all cause one, and comparing counters reads no weight. In-place writes to
    `weight.data` bypass the counter, as do changes of weights made in inference mode; call `refresh` after those.
    `batch` is that of `FrozenNetwork`.
    """

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch
        self._versions: list[tuple[int, int]] = []
        self._frozen: FrozenNetwork | None = None

    def get(self, network: nn.Module) -> FrozenNetwork:
        versions = [
            (weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in network.parameters()
        ]
        if self._frozen is None or versions != self._versions:
            self._versions, self._frozen = versions, FrozenNetwork(network, batch=self.batch)  # type: ignore[arg-type]
        return self._frozen

    def refresh(self) -> None:
        """Rebuild at the next `get`."""
        self._frozen = None


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A network, its config and its method. Calls with text need the `tokenizer`; calls with ids do not."""

    config: Config
    method: Method
    network: Any
    tokenizer: Tokenizer | None = None
    _frozen: FrozenCopy = field(default_factory=FrozenCopy, repr=False, compare=False)

    @property
    def mask_id(self) -> int:
        return vocabulary_of(self.config).mask_id

    def log_probs(self, z: Tensor, alpha: float | Tensor | None = None) -> Tensor:
        """log beliefs (B, L, V): of the clean token at each position; for causal models, of the next token.

        `alpha` is the fraction of visible tokens, one number or one per row (B,). Only time-conditioned networks use
        it; by default it is taken from the fraction of masks in each row. A `Frame` has `read` (as `z`) and `alpha`.
        """
        with _standard_mode():
            check_ids(z, self.config, "text z")
            alphas = self._alpha_per_row(alpha, len(z))
            return _check_not_nan(self.method.log_beliefs(self.network, z.to(self.device), alphas))

    def anchor_logits(self, z: Tensor, alpha: float | Tensor | None = None) -> Tensor:
        """The anchor network's logits (B, L, V)."""
        if not self.method.anchored:
            raise UserError(f"method {self.config.method} has no anchor network; adlm and a2r have one")
        with _standard_mode():
            check_ids(z, self.config, "text z")
            z = z.to(self.device)
            sigma = self.method.conditioning_sigma(z, self._alpha_per_row(alpha, len(z)))
            return _check_not_nan(self.network.anchor_logits(z, sigma))

    def bound(self, x: Tensor, pad: Tensor | None = None, seed: int = 0) -> Tensor:
        """nats (B, L): one unbiased sample of the bound on -log p(x), exact for causal models. `pad` marks padding."""
        with _standard_mode():
            check_clean(self.config, x, pad, "text x")
            x, pad = x.to(self.device), None if pad is None else pad.to(self.device)
            rng = BatchRng(torch.Generator().manual_seed(whole_number("seed", seed)))
            return _check_not_nan(self.method.bound(self.network, x, pad, rng))

    def perplexity(
        self, texts: str | list[str], samples: int = 4, estimator: str = "auto", seed: int = 0
    ) -> Perplexity:
        """Perplexity of the texts, each a document. Equal to `adlm perplexity --data` on a file with the same text.

        Documents are packed into rows of the model's length, framed by bos and eos, as in training. `samples` is the
        number of replicates, each of which scores a short text at many noise levels; `estimator` is auto, nelbo,
        any-order or published.
        """
        documents = _check_texts("texts", [texts] if isinstance(texts, str) else texts)
        settings = PerplexitySettings(estimator, whole_number("samples", samples, 1), seed=whole_number("seed", seed))
        with _standard_mode():
            rows = rows_of_texts(documents, self._require_tokenizer(), self.config.length)
            estimate = summarize(measure_nats(self.method, self.network, rows, settings))
        value, interval = estimate.perplexity, estimate.interval()
        return Perplexity(
            value=value,
            stderr=None if estimate.monte_carlo is None else value * estimate.monte_carlo,
            interval=None if interval is None else (perplexity_of(interval[0]), perplexity_of(interval[1])),
            document_stderr=None if estimate.over_documents is None else value * estimate.over_documents,
            nats=estimate.nats,
            nats_stderr=estimate.monte_carlo,
            tokens=estimate.tokens,
        )

    def complete(
        self, canvas: Tensor, num_samples: int = 1, seed: int = 0, **options: Unpack[SamplingOptions]
    ) -> Tensor:
        """ids (B * num_samples, L): the canvas (B, L) or (L,) with every mask id replaced, `num_samples` times per row.

        The options are the fields of `adlm.config.schema.Sampling`; they default to the model's config.
        """
        num_samples = whole_number("num_samples", num_samples, 1)
        rows = canvas[None] if isinstance(canvas, Tensor) and canvas.ndim == 1 else canvas
        sampling = self.sampling(**options)
        with _standard_mode():
            self._frames(Canvas(rows), sampling, seed)  # checked, not run: errors name the given row
            check_sampling(self.config, len(rows) * num_samples, rows.shape[1], self.device)
            frames = self._frames(Canvas(rows.repeat_interleave(num_samples, dim=0)), sampling, seed)
            return last_frame(frames).ids.to(rows.device)

    def sample(
        self,
        num: int = 1,
        length: int | None = None,
        seed: int = 0,
        *,
        prompt: str = "",
        suffix: str = "",
        special_tokens: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[str]:
        """`num` texts of `length` tokens that begin with `prompt` and end with `suffix`, as from `adlm sample`.

        `length` includes prompt and suffix and defaults to the longest that fits the model. bos, eos and pad count as
        tokens, but are removed from the text unless `special_tokens` is True.
        """
        num = whole_number("num", num, 1)
        _check_texts("prompt", [prompt]), _check_texts("suffix", [suffix])
        tokenizer = self._require_tokenizer()
        if length is None:
            length = self.max_text_length(encode_canvas(prompt, tokenizer))
        length = whole_number("length", length, 1, LONGEST_HOLE)
        check_sampling(self.config, num, length, self.device, "num", ROWS_AT_ONCE)
        return self._fill_texts([hole_between(prompt, suffix, length, tokenizer)] * num, seed, options, special_tokens)

    @overload
    def fill(
        self,
        text: str,
        seed: int = 0,
        *,
        num: None = None,
        special_tokens: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> str: ...
    @overload
    def fill(
        self, text: str, seed: int = 0, *, num: int, special_tokens: bool = False, **options: Unpack[SamplingOptions]
    ) -> list[str]: ...
    @overload
    def fill(
        self,
        text: list[str],
        seed: int = 0,
        *,
        num: int | None = None,
        special_tokens: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[str]: ...
    def fill(
        self,
        text: str | list[str],
        seed: int = 0,
        *,
        num: int | None = None,
        special_tokens: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> str | list[str]:
        """The text with its masks filled in: `[MASK]` is one token, `[MASK*12]` twelve. A list is sampled in batches.

        With `num`, a list of `num` samples of the text; of a list of texts, those of each text one after the other. The
        first sample of one text is the one without `num`.

        The given parts of the text do not change. For a prompt, put the mask last; for a suffix, first. bos, eos and
        pad are removed from the text unless `special_tokens` is True.
        """
        texts = _check_texts("text", [text] if isinstance(text, str) else text)
        if num is not None:
            num = whole_number("num", num, 1)
            length = max((len(encode_canvas(each, self._require_tokenizer())) for each in texts), default=0)
            check_sampling(self.config, num * len(texts), length, self.device, "num", ROWS_AT_ONCE)
            texts = [each for each in texts for _ in range(num)]
        filled = self._fill_texts(texts, seed, options, special_tokens)
        return filled[0] if isinstance(text, str) and num is None else filled

    def watch(self, canvas: str | Tensor, seed: int = 0, **options: Unpack[SamplingOptions]) -> Iterator[Frame]:
        """Every frame of one sampling run over a text with masks, or ids (B, L) or (L,). The first is the canvas.

        The tensors of a frame are copies: changing them does not affect the run.
        """
        if isinstance(canvas, str):
            return _copy_frames(self._frames(self.canvas([canvas]), self.sampling(**options), seed))
        rows = canvas[None] if isinstance(canvas, Tensor) and canvas.ndim == 1 else canvas
        ids = rows.clone() if isinstance(rows, Tensor) else rows
        return _copy_frames(self._frames(Canvas(ids), self.sampling(**options), seed))

    def canvas(self, texts: Sequence[str]) -> Canvas:
        """Texts with masks as one batch of ids, each after its `bos_prefix`, padded to one length."""
        for text in _check_texts("texts", texts):
            check_holes(text)
        rows = [encode_canvas(text, self._require_tokenizer()) for text in texts]
        if not rows:
            raise UserError("texts is empty; give at least one text with a hole, such as [MASK*12]")
        prefixes = [self.bos_prefix(row) for row in rows]
        prefixed = [prefix + row for prefix, row in zip(prefixes, rows, strict=True)]
        with _standard_mode():
            return make_canvas(prefixed, self.fill_id, [len(prefix) for prefix in prefixes])

    def bos_prefix(self, ids: Sequence[int]) -> list[int]:
        """[bos] for ids that begin with a given token, as in training (experiments/prompt_bos); else [].

        [] also where the ids begin with bos or with a mask (the model then samples bos there), where the vocabulary has
        no bos, and, for diffusion models, where bos would exceed the model's length. Windows of longer texts add bos
        themselves.
        """
        if not isinstance(ids, Sequence) or not all(isinstance(index, int) for index in ids[:1]):
            raise UserError(f"ids must be a list of whole numbers, not a {type(ids).__name__} of something else")
        bos, _ = row_boundaries(vocabulary_of(self.config))
        begins_with_token = len(ids) > 0 and ids[0] not in (self.mask_id, *bos)
        fits = len(bos) + len(ids) <= self.config.length
        return bos if begins_with_token and (fits or self.method.causal) else []

    def max_text_length(self, ids: Sequence[int]) -> int:
        """The largest number of tokens in a text that begins with these ids; its `bos_prefix` takes one position."""
        return self.config.length - len(self.bos_prefix(ids))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    def run_sampler(
        self,
        canvas: Canvas,
        sampling: Sampling,
        seed: int = 0,
        first_row: int = 0,
        rng_rows: Sequence[int] | None = None,
        rng_seeds: Sequence[int] | None = None,
    ) -> Iterator[Frame]:
        """The frames of one sampling run; `sample`, `fill`, `complete` and `watch` are easier to call.

        Row i of the canvas uses the RNG of (seed, first_row + i); `rng_rows` replaces the row numbers by others, and
        `rng_seeds` the seed by one for each row. Arguments are checked here, not at the first frame.
        """
        if not isinstance(canvas, Canvas):
            raise UserError(f"canvas must be an adlm.canvas.Canvas, not a {type(canvas).__name__}")
        rng_rows = _one_per_row("rng_rows", rng_rows, len(canvas.ids))
        rng_seeds = _one_per_row("rng_seeds", rng_seeds, len(canvas.ids))
        first_row = whole_number("first_row", first_row)
        return self._frames(canvas, validate_sampling(sampling), seed, first_row, rng_rows, rng_seeds)

    def _frames(
        self,
        canvas: Canvas,
        sampling: Sampling,
        seed: int,
        first_row: int = 0,
        rng_rows: Sequence[int] | None = None,
        rng_seeds: Sequence[int] | None = None,
    ) -> Iterator[Frame]:
        """The frames of one run with validated options; the canvas and the seed are checked here."""
        with _standard_mode():
            check_canvas(self.method, canvas.ids, sampling, canvas.pad, first_row)
            num_rows, length = canvas.ids.shape
            check_sampling(self.config, num_rows, length, self.device, "rows of the canvas")
            if self._frozen.batch is not None and num_rows > self._frozen.batch:
                raise UserError(f"the canvas has {num_rows} rows, and the fixed batch {self._frozen.batch}; split it")
            seed = whole_number("seed", seed)
            rng = RowRng(rng_seeds or seed, rng_rows or range(first_row, first_row + num_rows))
            pad = None if canvas.pad is None else canvas.pad.to(self.device)
            return _each_in_standard_mode(
                self.method.generate(self.frozen, canvas.ids.to(self.device), sampling, rng, pad)
            )

    def sampling(self, **options: Unpack[SamplingOptions]) -> Sampling:
        """The model's `Sampling` config with these options replaced. A new `sampler` resets `eta` to its default."""
        known = [field.name for field in fields(Sampling)]
        for option, value in options.items():
            if option not in known:
                raise UserError(f"there is no sampling option {option!r}{suggestion(option, known)}")
            options[option] = _to_python_scalar(f"sampling.{option}", value)  # type: ignore[literal-required]
        defaults = replace(self.config.sampling, eta=None) if "sampler" in options else self.config.sampling
        return validate_sampling(replace(defaults, **options))

    @property
    def frozen(self) -> FrozenNetwork:
        """The network prepared for sampling, with its current weights (see `refresh`)."""
        return self._frozen.get(self.network)

    def refresh(self) -> None:
        """Sample with the current weights after writing to `weight.data`, the one change that is not detected."""
        self._frozen.refresh()

    def with_fixed_batch(self, num_rows: int) -> "LanguageModel":
        """This model with all network calls padded to `num_rows` rows, so that a sample does not depend on other rows.

        Without it, a row's beliefs differ in their last bits between batch sizes, which may change a token. Canvases
        then have at most `num_rows` rows; those of causal models exactly `num_rows`, with equally long prompts.
        """
        return replace(self, _frozen=FrozenCopy(whole_number("num_rows", num_rows, 1)))

    @property
    def fill_id(self) -> int:
        """The id at padding positions of a canvas; attention ignores them."""
        return padding_id(vocabulary_of(self.config))

    def _alpha_per_row(self, alpha: float | Tensor | None, rows: int) -> Tensor | None:
        """(B,) in float64. Time-conditioned networks read sigma = -log alpha, so for them alpha must be above 0."""
        if alpha is None:
            return None
        try:
            alphas = torch.as_tensor(alpha, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UserError(f"alpha must be a number or a tensor of numbers, not a {type(alpha).__name__}") from None
        if alphas.shape not in ((), (rows,)):
            raise UserError(f"alpha of shape {tuple(alphas.shape)} must be one share, or one for each of {rows} rows")
        time_conditioned = self.config.model.time_conditioning
        valid = ((alphas > 0) if time_conditioned else (alphas >= 0)) & (alphas <= 1)
        if not valid.all():
            span = "above 0 and at most 1" if time_conditioned else "from 0 to 1"
            raise UserError(f"alpha {alphas[~valid].flatten()[0]:g} must be a share of visible tokens, {span}")
        return alphas.expand(rows)

    def __repr__(self) -> str:
        """One line; print `config` or `network` for the details."""
        config = self.config
        sizes = f"{num_parameters(self.network):,} parameters, {vocabulary_of(config).size:,} symbols"
        no_tokenizer = ", no tokenizer" if self.tokenizer is None else ""
        return f"LanguageModel({config.method}, {sizes}, length {config.length}, {self.device}{no_tokenizer})"

    def _fill_texts(self, texts: Sequence[str], seed: int, options: SamplingOptions, special_tokens: bool) -> list[str]:
        """The texts with their masks filled in, ROWS_AT_ONCE at a time. All are checked before any is sampled."""
        if not isinstance(special_tokens, bool):
            raise UserError(f"special_tokens must be True or False, not {special_tokens!r:.60}")
        tokenizer, sampling = self._require_tokenizer(), self.sampling(**options)
        starts = range(0, len(texts), ROWS_AT_ONCE)
        batches = [(start, self.canvas(texts[start : start + ROWS_AT_ONCE])) for start in starts]
        runs = [(canvas, self._frames(canvas, sampling, seed, start)) for start, canvas in batches]
        filled: list[str] = []
        for canvas, frames in runs:
            ids = last_frame(frames).ids
            filled += [tokenizer.decode(text, special_tokens) for text in canvas.texts(ids)]
        return filled

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(NO_TOKENIZER)
        return self.tokenizer


def load(path: str | Path = BOX, device: str | torch.device = "cpu") -> LanguageModel:
    """Load a model folder, a run folder, or a .ckpt checkpoint of the released code (its EMA weights, if any).

    Without a path, or by the name `box`, it loads the small model that the package holds; a folder box is "./box".

    Models that `adlm export` wrote are loaded from their folder, or by their name on the Hugging Face hub (owner/name).
    A .ckpt is loaded without tokenizer, for ids only; `adlm import --tokenizer` makes a model folder that has one.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise UserError(f"path must be the path of a model folder or a .ckpt file, not a {type(path).__name__}")
    source, torch_device = BOX_FOLDER if path == BOX else Path(path), device_of(device)
    with reporting_os_errors(source, f"{path} cannot be read"), _standard_mode():
        if source.is_dir():
            folder = source / "model" if (source / "model").is_dir() else source  # of a run folder, the model inside
            if (folder / ARCHITECTURE).exists() and not (folder / CONFIG).exists():
                return language_model(load_exported(folder), torch_device)
            if (folder / ARCHITECTURE).exists():
                raise UserError(f"{path} is a model of transformers, fine-tuned for reasoning; use `adlm reason eval`")
            return language_model(load_model_folder(folder), torch_device)
        if source.suffix == ".ckpt":
            return language_model(to_model_folder(read_checkpoint(source)), torch_device)
        if not source.exists() and is_hub_name(str(path)):
            return language_model(load_exported(download_model(str(path))), torch_device)
        remedy = "give a run folder such as runs/own, a model folder, or box, the small model that comes with adlm"
        absent = "" if source.exists() else ": there is nothing of that name"
        raise UserError(f"{path} is neither a model folder nor a .ckpt file{absent}; {remedy}")


def language_model(model: ModelFolder, device: torch.device | None = None) -> LanguageModel:
    """The LanguageModel of a model folder already in memory.

    On a CPU, weights of half precision become float32: many CPUs emulate half precision, which is far slower.
    """
    network = network_of(model.config, model.weights).to(device)
    like = next(network.parameters())
    if like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.float16):
        network = network.float()
    return LanguageModel(model.config, method_of(model.config), network, model.tokenizer)


@contextmanager
def _standard_mode() -> Iterator[None]:
    """Disable gradients and inference mode, and make the CPU the default device, whatever the caller has set.

    Inference tensors cannot be modified in place outside inference mode, where the next sampling step may run.
    """
    with (
        torch.inference_mode(False),
        torch.device("cpu") if _default_device_is_not_cpu() else nullcontext(),
        torch.no_grad(),
    ):
        yield


def _default_device_is_not_cpu() -> bool:
    return torch.get_default_device().type != "cpu"


def _each_in_standard_mode(frames: Iterator[Frame]) -> Iterator[Frame]:
    """The same frames, each computed in `_standard_mode`: a generator body runs in the torch mode of its consumer."""
    while True:
        other_mode = torch.is_inference_mode_enabled() or _default_device_is_not_cpu()
        with _standard_mode() if other_mode else nullcontext():
            frame = next(frames, None)
        if frame is None:
            return
        yield frame


def _copy_frames(frames: Iterator[Frame]) -> Iterator[Frame]:
    for frame in frames:
        yield Frame(*(None if each is None else each.clone() for each in vars(frame).values()))  # type: ignore[arg-type]


def _check_not_nan(values: Tensor) -> Tensor:
    """The values unchanged; UserError if any is NaN. -inf is a valid log-probability."""
    if values.sum(dim=-1).isnan().any():
        raise UserError("the model's log-probabilities are not numbers: its weights are damaged or its dtype overflows")
    return values


def _check_texts(name: str, texts: object) -> Sequence[str]:
    """The argument `name` unchanged; UserError unless it is a list of texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UserError(f"{name} must be a text or a list of texts, not a {type(texts).__name__}")
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{name} must be text, not a {type(text).__name__}")
    return texts


def _one_per_row(name: str, numbers: Sequence[int] | None, num_rows: int) -> list[int] | None:
    """An argument of whole numbers, one for each row of a canvas, or None."""
    if numbers is None:
        return None
    checked = [whole_number(name, each) for each in numbers]
    if len(checked) != num_rows:
        raise UserError(f"{name} has {len(checked)} numbers, and the canvas {num_rows} rows")
    return checked


def _to_python_scalar(name: str, value: object) -> object:
    """A sampling option as a Python number or string; NumPy and torch scalars are converted."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        with suppress(RuntimeError):  # on the meta device
            return value.item()
    if value is not None and not isinstance(value, (str, int, float)):
        raise UserError(f"{name} must be a number or a word, not a {type(value).__name__}")
    return value
