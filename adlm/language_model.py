"""`LanguageModel`, the object that `adlm.load` returns: sampling, infilling and scoring of texts or token ids.

Shapes: B sequences, L tokens, V symbols.
"""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from adlm.canvas import (
    Canvas,
    Hole,
    encode_canvas,
    encode_holes,
    hole_between,
    make_canvas,
    open_hole_names,
    refuse_open_holes,
)
from adlm.checkpoints.model_folder import (
    ARCHITECTURE,
    CONFIG,
    ModelFolder,
    load_model_folder,
    network_of,
)
from adlm.config.load import BOX, model_source, validate_sampling
from adlm.config.options import unknown_choice_error
from adlm.config.schema import Config, Sampling
from adlm.constraints.binding import bind_constraints, check_between
from adlm.constraints.holes import ConstrainedHole
from adlm.constraints.kinds import Constraint
from adlm.diffusion.times import BatchRng
from adlm.distributed import device_of
from adlm.errors import UserError, whole_number
from adlm.files import reporting_os_errors
from adlm.hub import download_model
from adlm.inference.frozen import FrozenCopy, FrozenNetwork
from adlm.limits import check_sampling
from adlm.methods import method_of
from adlm.methods.inputs import check_canvas, check_clean, check_constraints, check_ids, end_of_row, vocabulary_of
from adlm.methods.method import Method
from adlm.models.transformer import num_parameters
from adlm.sampling.frame import Frame, last_frame
from adlm.sampling.hole_lengths import texts_of_known_length
from adlm.sampling.rng import RowRng
from adlm.sampling.settings import SampleSettings, SamplingOptions, check_texts, sampling_with
from adlm.tokens import Tokenizer

if TYPE_CHECKING:
    from adlm.likelihood.choices import ChoiceOptions, ChoiceScores

ROWS_AT_ONCE = 32
NO_TOKENIZER = (
    "this model has no tokenizer, so it cannot read or write text; of a .ckpt, make a model folder with one by "
    "`adlm import FILE.ckpt --out FOLDER --tokenizer gpt2`, or, in Python, use lm.complete, which takes ids"
)


@dataclass(frozen=True)
class Perplexity:
    """exp of the nats per token: for diffusion models an upper bound or, of some estimators, exact; exact for others.

    The two standard errors, Monte Carlo and over documents, are those of `adlm perplexity` (docs/evaluation.md).
    """

    value: float
    stderr: float | None
    """Monte Carlo standard error of `value`; 0 where the likelihood is exact, None with a single sample."""
    interval: tuple[float, float] | None
    """95% Monte Carlo confidence interval of `value`, by Student's t distribution: wide with few samples."""
    document_stderr: float | None
    """Standard error of `value` over documents (the texts); None where it cannot be estimated, as for a single text."""
    nats: float
    nats_stderr: float | None
    """Monte Carlo standard error of `nats`; `stderr` is this times `value`."""
    tokens: int
    """Number of tokens, including one end-of-text token per text."""


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A network, its config and its method. Calls with text need the `tokenizer`; calls with ids do not."""

    config: Config
    method: Method
    network: Any
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    """In Jinja's language, as the files of pretrained models have it; `adlm.chat.template` renders it."""
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
        self,
        texts: str | list[str],
        samples: int = 4,
        estimator: str = "auto",
        seed: int = 0,
        *,
        order: str | None = None,
        order_steps: int | None = None,
    ) -> Perplexity:
        """Perplexity of the texts, each a document. Equal to `adlm perplexity --data` on a file with the same text.

        Documents are packed into rows of the model's length, framed by bos and eos, as in training. `samples` is the
        number of replicates, each of which scores a short text at many noise levels; `estimator`, `order` and
        `order_steps` are those of `adlm perplexity`.
        """
        from adlm.likelihood.measurement import measure_nats
        from adlm.likelihood.settings import ESTIMATOR_LINES, MAX_REPLICATES, MAX_STEPS, PerplexitySettings
        from adlm.likelihood.standard_errors import perplexity_of, summarize  # here: sampling needs none of these
        from adlm.likelihood.text_sets import rows_of_texts

        documents = check_texts("texts", [texts] if isinstance(texts, str) else texts)
        if estimator not in tuple(ESTIMATOR_LINES):  # checked here too: a message without the dashes of an option
            raise UserError(unknown_choice_error("estimator", estimator, ESTIMATOR_LINES), "estimator")
        num_samples = whole_number("samples", samples, 1, MAX_REPLICATES)
        if order is not None and not isinstance(order, str):
            raise UserError(f"order must be the name of a sampler, not a {type(order).__name__}", "order")
        steps = None if order_steps is None else whole_number("order_steps", order_steps, 1, MAX_STEPS)
        settings = PerplexitySettings(
            estimator, num_samples, whole_number("seed", seed), order=order, order_steps=steps
        )
        with _standard_mode():
            rows = rows_of_texts(documents, self.require_tokenizer(), self.config.length)
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

    @overload
    def choose(self, text: str, choices: Sequence[str], **options: "Unpack[ChoiceOptions]") -> "ChoiceScores": ...
    @overload
    def choose(
        self, text: list[str], choices: Sequence[str], **options: "Unpack[ChoiceOptions]"
    ) -> "list[ChoiceScores]": ...
    def choose(
        self, text: str | list[str], choices: Sequence[str], **options: "Unpack[ChoiceOptions]"
    ) -> "ChoiceScores | list[ChoiceScores]":
        """How probable each choice is in the hole of a text, such as "The film was [MASK].", or of each text of a list.

        How many masks the hole has does not matter. The options, with their defaults, are normalise="none", prior=None,
        score=None, samples=64, seed=0 and batch=None: those of `adlm choose` (docs/evaluation.md).
        """
        from adlm.likelihood.choices import choice_settings, score_choices  # here: sampling does not need it

        texts = check_texts("text", [text] if isinstance(text, str) else text)
        settings = choice_settings(options)
        with _standard_mode():
            found = score_choices(self.method, self.network, self.require_tokenizer(), texts, choices, settings)
        return found[0] if isinstance(text, str) else found

    def complete(
        self, canvas: Tensor, num_samples: int = 1, seed: int = 0, **options: Unpack[SamplingOptions]
    ) -> Tensor:
        """ids (B * num_samples, L): the canvas (B, L) or (L,) with every mask id replaced, `num_samples` times per row.

        The options are the fields of `adlm.config.schema.Sampling`; they default to the model's config.
        """
        sampling = sampling_with(self.config.sampling, options)
        settings = SampleSettings(
            sampling, canvas=_canvas_of_ids(canvas), num=num_samples, seed=seed, num_option="num_samples"
        )
        with _standard_mode():
            return last_frame(self.plan(settings).frames()).ids.to(canvas.device)

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

        `length` includes prompt and suffix and defaults to the longest that fits the model; with a suffix, models that
        fill holes of unknown length decide themselves. bos, eos and pad count as tokens, but are removed from the text
        unless `special_tokens` is True.
        """
        arguments = ("num", "length", "seed", "prompt", "suffix", "special_tokens")
        sampling = sampling_with(self.config.sampling, options, arguments)
        settings = SampleSettings(
            sampling, prompt=prompt, suffix=suffix, length=length, num=num, seed=seed, batch=ROWS_AT_ONCE
        )
        return self._write(settings, special_tokens)

    @overload
    def fill(
        self,
        text: str,
        seed: int = 0,
        *,
        num: None = None,
        special_tokens: bool = False,
        constraints: Mapping[str, Constraint] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> str: ...
    @overload
    def fill(
        self,
        text: str,
        seed: int = 0,
        *,
        num: int,
        special_tokens: bool = False,
        constraints: Mapping[str, Constraint] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[str]: ...
    @overload
    def fill(
        self,
        text: list[str],
        seed: int = 0,
        *,
        num: int | None = None,
        special_tokens: bool = False,
        constraints: Mapping[str, Constraint] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[str]: ...
    def fill(
        self,
        text: str | list[str],
        seed: int = 0,
        *,
        num: int | None = None,
        special_tokens: bool = False,
        constraints: Mapping[str, Constraint] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> str | list[str]:
        """The text with its masks filled in: `[MASK]` is one token, `[MASK*12]` twelve. A list is sampled in batches.

        Block-causal models trained to infill also fill holes of unknown length: `[MASK*..12]` has at most twelve
        tokens, `[MASK*]` at most a quarter of the model's length. So do others where a constraint says what fits.

        With `num`, a list of `num` samples of the text; of a list of texts, those of each text one after the other. The
        first sample of one text is the one without `num`.

        The given parts of the text do not change. For a prompt, put the mask last; for a suffix, first. bos, eos and
        pad are removed from the text unless `special_tokens` is True.

        `constraints` say what named holes must be filled with, such as {"day": adlm.Regex("[0-9]{4}-[0-9]{2}")} for
        `[MASK:day]`: `Choices`, `Regex`, `JsonSchema`, `Words`, `Characters` or `AllOf`. They always hold
        (docs/constraints.md). Holes of one name are filled with the same tokens.
        """
        texts = check_texts("text", [text] if isinstance(text, str) else text)
        arguments = ("seed", "num", "special_tokens", "constraints")
        sampling = validate_sampling(sampling_with(self.config.sampling, options, arguments))
        num_each = 1 if num is None else num
        if not texts:
            return []
        settings = SampleSettings(
            sampling, texts, num=num_each, seed=seed, batch=ROWS_AT_ONCE, constraints=constraints or {}
        )
        filled = self._write(settings, special_tokens)
        return filled[0] if isinstance(text, str) and num is None else filled

    def _write(self, settings: SampleSettings, special_tokens: bool) -> list[str]:
        """The texts that settings ask for, some rows at a time. All are checked before any is sampled."""
        if not isinstance(special_tokens, bool):
            raise UserError(f"special_tokens must be True or False, not {special_tokens!r:.60}")
        tokenizer = self.require_tokenizer()
        batches = self.plan(settings).batches(settings.batch)
        return [tokenizer.decode(ids, special_tokens) for batch in batches for ids in batch.filled()]

    def watch(self, canvas: str | Tensor, seed: int = 0, **options: Unpack[SamplingOptions]) -> Iterator[Frame]:
        """Every frame of one sampling run over a text with masks, or ids (B, L) or (L,). The first is the canvas.

        The tensors of a frame are copies: changing them does not affect the run.
        """
        sampling = sampling_with(self.config.sampling, options)
        given: Any = {"texts": [canvas]} if isinstance(canvas, str) else {"canvas": _canvas_of_ids(canvas)}
        frames = self.plan(SampleSettings(sampling, **given, seed=seed)).frames()
        copies = ([None if each is None else each.clone() for each in vars(frame).values()] for frame in frames)
        return (Frame(*each) for each in copies)  # type: ignore[arg-type]

    def plan(self, settings: SampleSettings, rng: RowRng | None = None) -> "Run":
        """The sampling run of settings, after every check of them against this model; `Run.frames` trusts them.

        `sample`, `fill`, `complete`, `watch`, `adlm sample` and `adlm serve` all begin here. `rng` replaces the RNG of
        (seed, row number) by others, one for each row. For whole rows with constrained holes of unknown length, their
        lengths are drawn here, by network calls after all checks of the constraints.
        """
        with _standard_mode():
            texts, length = settings.texts or (), settings.length
            if settings.texts is None and settings.canvas is None:
                tokenizer, prompt, suffix = self.require_tokenizer(), settings.prompt, settings.suffix
                if length is None and suffix and self.open_id is not None:
                    texts = [f"{prompt}[MASK*]{suffix}"]
                else:
                    length = self.max_text_length(encode_canvas(prompt, tokenizer)) if length is None else length
                    texts = [hole_between(prompt, suffix, length, tokenizer)]
            constraints, num = settings.all_constraints, settings.num
            if constraints:
                check_constraints(self.method, settings.sampling)
                if self.open_id is None and not self.method.causal and any(map(open_hole_names, texts)):
                    rng = _rng_of(len(texts) * num, settings.seed, rng)
                    texts, num = self._texts_of_known_length(texts, settings.constraints, rng), 1
            canvas = settings.canvas or self.canvas(texts, constraints, closed=settings.texts is not None)
            one_text_a_batch = settings.batch is not None and settings.num % settings.batch == 0
            check_canvas(self.method, canvas.ids, settings.sampling, canvas.pad, one_text_a_batch)
            holes = self._constrained_holes(settings, texts, canvas) if constraints else ()
            num_rows, length = len(canvas.ids) * num, canvas.ids.shape[1]
            at_once = min(num_rows, settings.batch or num_rows)
            held, option = (at_once, "batch") if settings.streamed else (num_rows, settings.num_option)
            check_sampling(self.config, held, length, self.device, option, at_once)
            rng = _rng_of(num_rows, settings.seed, rng)
            fixed = self._frozen.batch
            if fixed is not None and at_once > fixed:
                raise UserError(f"the canvas has {num_rows} rows, and the fixed batch {fixed}; split it")
            return Run(self, canvas, settings.sampling, rng, num, tuple(texts), holes)

    def _texts_of_known_length(
        self, texts: Sequence[str], constraints: Mapping[str, Constraint], rng: RowRng
    ) -> list[str]:
        """The text of every sample: the lengths of holes with constraints are drawn if the text leaves them open."""

        def encode(text: str) -> tuple[list[int], list[Hole]]:
            prefix, ids, holes = self._encode(text, constraints)
            return [*prefix, *ids], [replace(hole, start=len(prefix) + hole.start) for hole in holes]

        def beliefs(ids: list[int]) -> Tensor:
            return self.method.log_beliefs(self.network, torch.tensor([ids], device=self.device))[0]

        tokenizer, length = self.require_tokenizer(), self.config.length
        return texts_of_known_length(texts, constraints, tokenizer, length, encode, beliefs, rng)

    def _constrained_holes(
        self, settings: SampleSettings, texts: Sequence[str], canvas: Canvas
    ) -> tuple[ConstrainedHole, ...]:
        """The holes that have constraints; a user error for one that cannot be satisfied."""
        if canvas.ids.shape[1] > self.config.length:
            raise UserError(
                f"constraints need a text that the model reads as a whole, and this one is {canvas.ids.shape[1]} "
                f"tokens long; shorten it to {self.config.length}",
                "constraints",
            )
        tokenizer, constraints, holes = self.require_tokenizer(), settings.all_constraints, [*settings.holes]
        of_text = cache(lambda text: self._encode(text, constraints)[2])
        for row, text in enumerate(texts):
            holes += [(row, replace(hole, start=canvas.starts[row] + hole.start)) for hole in of_text(text)]
        if self.method.cached:
            check_between(holes, constraints, stop_at_eos=settings.sampling.stop_at_eos)
        return bind_constraints(holes, constraints, tokenizer, vocabulary_of(self.config).eos_id)

    def canvas(self, texts: Sequence[str], constraints: Container[str] = (), closed: bool = True) -> Canvas:
        """Texts with masks as one batch of ids, each after its `bos_prefix`, padded to one length.

        `constraints` are the names of constrained holes: bos stands before one that begins a text, not in it. `closed`
        texts that begin or end with a hole have bos before it or eos after it, if they fit: a network that reads both
        sides would else write them into the hole.
        """
        rows = [self._encode(text, constraints, closed) for text in check_texts("texts", texts)]
        if not rows:
            raise UserError("texts is empty; give at least one text with a hole, such as [MASK*12]")
        with _standard_mode():
            return make_canvas(
                [[*prefix, *ids] for prefix, ids, _ in rows], self.fill_id, [len(prefix) for prefix, *_ in rows]
            )

    def _encode(
        self, text: str, constraints: Container[str], closed: bool = True
    ) -> tuple[list[int], list[int], list[Hole]]:
        """The `bos_prefix` of a text, its ids and its holes; for `closed` see `canvas`."""
        open_id, vocabulary = self.open_id, vocabulary_of(self.config)
        bos, _ = vocabulary.row_boundaries
        constrained = constraints if self.method.causal and vocabulary.eos_id is not None else ()
        if all(name in constrained for name in open_hole_names(text)):
            open_id = self.mask_id  # a constraint ends such a hole by eos
        elif open_id is None:
            refuse_open_holes(text, allowed=constrained)
        ids, holes = encode_holes(text, self.require_tokenizer(), open_id, self.config.length)
        prefix, end = self.bos_prefix(ids), end_of_row(self.method) if closed else []
        room = self.config.length - len(ids)
        if holes and holes[0].start == 0 and (holes[0].name in constraints or (end and room > 0)):
            prefix = bos
        if ids[-1:] == [self.mask_id] and room >= len(prefix) + len(end):
            ids += end
        return prefix, ids, holes

    def bos_prefix(self, ids: Sequence[int]) -> list[int]:
        """[bos] for ids that begin with a given token, as in training (experiments/prompt_bos); else [].

        [] also where the ids begin with bos or with a mask (the model then samples bos there), where the vocabulary has
        no bos, and, for models of whole rows, where bos would exceed their length: windows of longer texts add it.
        """
        if not isinstance(ids, Sequence) or not all(isinstance(index, int) for index in ids[:1]):
            raise UserError(f"ids must be a list of whole numbers, not a {type(ids).__name__} of something else")
        bos, _ = vocabulary_of(self.config).row_boundaries
        begins_with_token = len(ids) > 0 and ids[0] not in (self.mask_id, *bos)
        fits = len(bos) + len(ids) <= self.config.length
        return bos if begins_with_token and (fits or self.method.cached) else []

    def max_text_length(self, ids: Sequence[int]) -> int:
        """The largest number of tokens in a text that begins with these ids; its `bos_prefix` takes one position."""
        return self.config.length - len(self.bos_prefix(ids))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    def sampling(self, **options: Unpack[SamplingOptions]) -> Sampling:
        """The model's `Sampling` config with these options replaced. A new `sampler` resets `eta` to its default."""
        return validate_sampling(sampling_with(self.config.sampling, options))

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
        then have at most `num_rows` rows; of models with a KV cache exactly `num_rows`, with equally long prompts.
        """
        return replace(self, _frozen=FrozenCopy(whole_number("num_rows", num_rows, 1)))

    @property
    def open_id(self) -> int | None:
        """The id at the masks of holes of unknown length; None for models that cannot fill such holes."""
        model, eos_id = self.config.model, vocabulary_of(self.config).eos_id
        return model.hole_id if model.block_length and eos_id is not None else None

    @property
    def fill_id(self) -> int:
        """The id at padding positions of a canvas; attention ignores them."""
        return vocabulary_of(self.config).padding_id

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

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; a user error if the model has none."""
        if self.tokenizer is None:
            raise UserError(NO_TOKENIZER)
        return self.tokenizer


@dataclass(frozen=True)
class Run:
    """A checked sampling run over the rows of a canvas, each `num` times; `LanguageModel.plan` makes it.

    Row i is a sample of canvas row i // num, drawn with the RNG of row i.
    """

    lm: LanguageModel
    canvas: Canvas
    sampling: Sampling
    rng: RowRng
    num: int = 1
    texts: tuple[str, ...] = ()
    """The texts with holes of the canvas; () where it was given as ids."""
    holes: tuple[ConstrainedHole, ...] = ()
    """Those of the canvas whose text is constrained."""

    def frames(self) -> Iterator[Frame]:
        """The frames of all rows at once, from the first step on; the same for every call."""
        with _standard_mode():
            return _each_in_standard_mode(self.generate())

    def generate(self) -> Iterator[Frame]:
        """The frames as the method yields them, to be used in one torch mode only."""
        lm, canvas = self.lm, self.canvas
        if self.num > 1:
            canvas = canvas.take([row // self.num for row in range(len(self.rng))])
        ids, pad = canvas.ids.to(lm.device), None if canvas.pad is None else canvas.pad.to(lm.device)
        if not self.holes:  # not every method takes them
            return lm.method.generate(lm.frozen, ids, self.sampling, self.rng[:], pad)
        holes = self._holes_of(range(len(self.rng)))
        return lm.method.generate(lm.frozen, ids, self.sampling, self.rng[:], pad, holes)

    def _holes_of(self, rows: range) -> tuple[ConstrainedHole, ...]:
        """The constrained holes of some samples, in a batch of these alone."""
        of_row: dict[int, list[ConstrainedHole]] = {}
        for hole in self.holes:
            of_row.setdefault(hole.row, []).append(hole)
        return tuple(
            replace(hole, row=number) for number, row in enumerate(rows) for hole in of_row.get(row // self.num, ())
        )

    def batches(self, size: int | None, first: int = 0) -> Iterator["Run"]:
        """Runs of `size` rows each, or of all of them, from row `first` on."""
        num_rows = len(self.rng)
        for start in range(first, num_rows, size or num_rows):
            rows = range(num_rows)[start : start + (size or num_rows)]
            canvas = self.canvas.take([row // self.num for row in rows])
            yield Run(self.lm, canvas, self.sampling, self.rng[rows.start : rows.stop], holes=self._holes_of(rows))

    def filled(self, frames: Iterator[Frame] | None = None) -> list[list[int]]:
        """The ids of each row's text, without leading bos, padding and what is left of holes of unknown length.

        `frames` are those of this run, perhaps displayed or recorded on their way.
        """
        canvas = self.canvas.take([row // self.num for row in range(len(self.rng))])
        last = last_frame(self.frames() if frames is None else frames)
        if last.open is None:
            return canvas.texts(last.ids)
        left_out = last.open & (last.ids == vocabulary_of(self.lm.config).eos_id)
        return [[index for index in row if index >= 0] for row in canvas.texts(last.ids.masked_fill(left_out, -1))]


def load(path: str | Path = BOX, device: str | torch.device = "cpu") -> LanguageModel:
    """Load a model folder, a run folder, or a .ckpt checkpoint of the released code (its EMA weights, if any).

    Without a path, or by the name `box`, it loads the small model that the package holds; a folder box is "./box".
    `smollm2` is a larger one, whose base weights `adlm fetch smollm2` gets. A pretrained .gguf file is loaded as the
    causal model that it is.

    Models that `adlm export` wrote are loaded from their folder, or by their name on the Hugging Face hub (owner/name).
    A .ckpt is loaded without tokenizer, for ids only; `adlm import --tokenizer` makes a model folder that has one.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise UserError(f"path must be the path of a model folder or a .ckpt file, not a {type(path).__name__}")
    source, torch_device = model_source(path), device_of(device)
    with reporting_os_errors(source, f"{path} cannot be read"), _standard_mode():
        is_folder, is_exported = source.is_dir(), (source / ARCHITECTURE).exists()
        if is_folder and not is_exported:
            return language_model(load_model_folder(source), torch_device)
        if is_exported and (source / CONFIG).exists():
            raise UserError(f"{path} is a model of transformers, fine-tuned for reasoning; use `adlm reason eval`")
        if not is_folder and source.suffix == ".ckpt":
            from adlm.checkpoints.published import read_checkpoint, to_model_folder

            return language_model(to_model_folder(read_checkpoint(source)), torch_device)
        if not is_folder and source.suffix == ".gguf":
            from adlm.checkpoints.base_weights import causal_model, read_base

            return language_model(causal_model(read_base(str(path))), torch_device)
        from adlm.checkpoints.exported import load_exported

        return language_model(load_exported(source if is_folder else download_model(str(path))), torch_device)


def language_model(model: ModelFolder, device: torch.device | None = None) -> LanguageModel:
    """The LanguageModel of a model folder already in memory.

    On a CPU, weights of half precision become float32: many CPUs emulate half precision, which is far slower.
    """
    network = network_of(model.config, model.weights).to(device)
    like = next(network.parameters())
    if like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.float16):
        network = network.float()
    return LanguageModel(model.config, method_of(model.config), network, model.tokenizer, model.chat_template)


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


def _rng_of(num_rows: int, seed: int, rng: RowRng | None) -> RowRng:
    """The RNG of so many rows: the given one, or that of a seed."""
    if rng is not None and len(rng) != num_rows:
        raise UserError(f"rng has {len(rng)} rows, and the canvas {num_rows}; give one for each", "rng")
    return RowRng(seed, range(num_rows)) if rng is None else rng


def _canvas_of_ids(ids: Any) -> Canvas:
    """The canvas of ids (B, L) or (L,), copied: the caller may change them during the run."""
    return Canvas((ids[None] if ids.ndim == 1 else ids).clone() if isinstance(ids, Tensor) else ids)


def _check_not_nan(values: Tensor) -> Tensor:
    """The values unchanged; UserError if any is NaN. -inf is a valid log-probability."""
    if values.sum(dim=-1).isnan().any():
        raise UserError("the model's log-probabilities are not numbers: its weights are damaged or its dtype overflows")
    return values
