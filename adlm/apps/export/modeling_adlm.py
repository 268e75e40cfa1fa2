"""Masked diffusion, block-causal and autoregressive language models for `transformers`: beliefs, loss, sampling.

Shapes: B sequences, L tokens, V symbols (the mask is one of them). `pad` is True at padding.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput

from adlm.apps.export.configuration_adlm import AdlmConfig
from adlm.config.schema import Anchor, Model, Schedule, Time
from adlm.data.rows.anchor_rules import count, every, no_statistics, random
from adlm.diffusion.beliefs import clean_log_beliefs, subs
from adlm.diffusion.masking import mask_counted, mask_tokens, reveal_chance
from adlm.diffusion.objectives import anchor_weight, continuous_weight, discrete_weight
from adlm.diffusion.schedules import NoiseSchedule, sigma
from adlm.diffusion.times import BatchRng, draw_grid_times, draw_times, grid, importance_weight
from adlm.models.anchored import AnchoredTransformer
from adlm.models.heads import Head
from adlm.models.text_blocks import Layout, TextBlocks
from adlm.models.transformer import Transformer
from adlm.registry import SCHEDULES
from adlm.sampling.rng import categorical
from adlm.sampling.shaping import shape
from adlm.sampling.speculative import Drafts, draft_beliefs, draw_drafts, verify, without_chain

IGNORED = -100  # the label of a token that is not predicted, as everywhere in transformers
ANCHOR_RULES_OF_IDS = {"count": count, "all": every, "random": random}  # the rules that need no training text


class AdlmPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """The network of a config: an anchor network, a bridge and a denoiser if it is anchored, else one transformer."""

    config_class = AdlmConfig
    base_model_prefix = "network"
    _no_split_modules = ["Block", "LlamaBlock", "Gpt2Block"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: AdlmConfig):
        super().__init__(config)
        network, model, blocks = AnchoredTransformer if config.anchored else Transformer, Model(**config.model), None
        if model.block_length:
            blocks = TextBlocks(model.block_length, config.mask_token_id if model.masked_keys == "hidden" else None)
        self.network: AnchoredTransformer | Transformer = network(
            model, config.vocab_size, config.causal, modulated=not config.causal, text_blocks=blocks
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The networks initialize themselves in their constructors."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self._first_network().embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self._first_network().embedding = value

    def get_output_embeddings(self) -> Head:
        """The head of the denoiser, or of the only network."""
        return self.network.head

    def _first_network(self) -> Transformer:
        return self.network.anchor if isinstance(self.network, AnchoredTransformer) else self.network

    @property
    def _mask_id(self) -> int:
        return int(self.config.mask_token_id)

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule that the config names; its fields are the options of the same names."""
        options = Schedule(**self.config.schedule)
        schedule = SCHEDULES[options.name]
        return schedule(*(getattr(options, field.name) for field in fields(schedule)))  # type: ignore[no-any-return]

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def _check_ids(self, ids: Tensor, labels: Tensor | None = None) -> None:
        if ids.ndim != 2 or ids.shape[1] > self.config.length:
            raise ValueError(f"ids have shape {tuple(ids.shape)}, not (B, L) with L at most {self.config.length}")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels have shape {tuple(labels.shape)}, not that of the ids, {tuple(ids.shape)}")

    def _weighted_nats(
        self,
        z: Tensor,
        x: Tensor,
        weight: Tensor,
        anchor_weights: Tensor | None,
        noise_level: Tensor | None,
        pad: Tensor | None,
    ) -> Tensor:
        """Sum of weight * cross-entropy of x given z, plus that of the anchor network with its own weights (B, L)."""
        network: Any = self.network
        if not self.config.anchored:
            return network.score(z, x, weight, self._mask_id, noise_level, pad).total  # type: ignore[no-any-return]
        scored, at_anchors = network.score(z, x, weight, anchor_weights, self._mask_id, noise_level, pad)
        return scored.total if at_anchors is None else scored.total + at_anchors.total  # type: ignore[no-any-return]

    def _anchor_options(self) -> Anchor | None:
        """The options of the anchor term; None if the loss has none."""
        anchor = Anchor(**self.config.anchor)
        return anchor if self.config.anchored and anchor.gamma > 0 else None

    def _anchors(self, x: Tensor, pad: Tensor | None, anchor: Anchor) -> Tensor:
        """(B, L), True at the anchors of clean ids."""
        if anchor.rule not in ANCHOR_RULES_OF_IDS:
            raise ValueError(
                f"anchor rule {anchor.rule!r} needs the training text or another package; to train here, "
                "set config.anchor['rule'] = 'count', or config.anchor['gamma'] = 0 to train without anchors"
            )
        return ANCHOR_RULES_OF_IDS[anchor.rule](anchor, self.config.vocab_size, no_statistics)(x, pad)


def padding_of(attention_mask: Tensor | None) -> Tensor | None:
    """(B, L), True where the mask is 0; None if there is no padding."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask == 0


class AdlmForMaskedLM(AdlmPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """An ADLM or an MDLM. The network restores masked tokens: put `config.mask_token_id` where text is wanted.

    Rows of the training text begin with bos and end with eos, as far as the tokenizer has them.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> MaskedLMOutput:
        """`logits` (B, L, V) are log-probabilities of the clean token at each position, given `input_ids` (B, L).

        At a mask they are the model's beliefs, with -inf at the mask itself; a visible token is copied: 0 at that token
        and -inf elsewhere. Attention ignores positions where `attention_mask` is 0.

        With `labels` there is a `loss`, in nats per token. If `input_ids` contain no mask, they are clean text, and the
        loss is the training objective, ANELBO or NELBO, with masks drawn here by `generator` (default: torch's own);
        `labels` are then the same ids, or -100 at tokens that are given and never masked, such as a prompt. No logits
        are returned. If `input_ids` contain masks, the loss is the mean cross-entropy of the labels at the masks.
        """
        self._check_ids(input_ids, labels)
        pad = padding_of(attention_mask)
        masked = input_ids == self._mask_id
        if labels is not None and not masked.any():
            return MaskedLMOutput(loss=self._training_loss(input_ids, labels, pad, generator))
        log_probs = subs(self.network(input_ids, self._sigma_of(input_ids, pad), pad), input_ids, self._mask_id)
        loss = None
        if labels is not None:
            predicted = masked & (labels != IGNORED)
            loss = F.nll_loss(log_probs[predicted], labels[predicted])
        return MaskedLMOutput(loss=loss, logits=log_probs)

    def _training_loss(
        self, x: Tensor, labels: Tensor, pad: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The NELBO per predicted token; for anchored networks plus gamma times the anchor term.  [ADLM Eq. 7]

        With `time.weight` one, both terms have weight 1 in place of the NELBO's.
        """
        text = torch.ones_like(x, dtype=torch.bool) if pad is None else ~pad
        given = text & (labels == IGNORED)
        predicted = text & ~given
        if (labels != x)[predicted].any():
            raise ValueError("labels must be the input_ids, or -100: the network predicts a token at its own position")
        time, schedule = Time(**self.config.time), self.schedule
        rng = BatchRng(torch.default_generator if generator is None else generator)
        if time.steps:
            t, s = draw_grid_times(len(x), time.steps, rng, time.antithetic)
            weights = discrete_weight(schedule.alpha(s), schedule.alpha(t), time.steps, time.sigma)
        else:
            t_min = 0.0 if time.masks == "counted" else time.t_min
            t = draw_times(len(x), rng, t_min, time.antithetic, time.power, time.t_max)
            importance = importance_weight(t, t_min, time.power, time.t_max)
            if time.masks == "counted":
                z, t = mask_counted(x, predicted, t, self._mask_id, rng)
            weights = importance.to(t.device)
            if time.weight == "bound":
                weights = continuous_weight(schedule, t) * weights
        if time.masks == "independent":
            z = mask_tokens(x, schedule.mask_chance(t).float().to(x.device)[:, None], self._mask_id, rng)
        unattended = pad if self.config.data["pad"] == "masked" else None
        z = torch.where(given if unattended is None else given | unattended, x, z)
        base, masked = weights.float().to(x.device)[:, None], (z == self._mask_id) & text
        anchor, anchor_weights = self._anchor_options(), None
        if anchor is not None:
            anchors = self._anchors(x, pad, anchor) & predicted
            anchor_weights = anchor.gamma * anchor_weight(base, anchors, masked, anchor.positions)
        total = self._weighted_nats(z, x, base * masked, anchor_weights, self._sigma_at(t, x.device), unattended)
        return total / predicted.sum().clamp(min=1)

    @torch.no_grad()
    def sample(
        self,
        num: int = 1,
        length: int | None = None,
        steps: int | None = None,
        input_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ids (B, L) from ancestral sampling in `steps` steps: every mask replaced, given tokens unchanged.

        `input_ids` (L,) or (B, L) has the mask id where text is wanted, and each of its rows is sampled `num` times;
        without it, `num` rows of `length` masks (default: the model's length) are filled. The random numbers are drawn
        on the generator's device. A step without a reveal needs no network call.
        """
        for name, value in (("num", num), ("length", length), ("steps", steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if input_ids is None:
            input_ids = torch.full((1, length or self.config.length), self._mask_id)
        rows = input_ids[None] if input_ids.ndim == 1 else input_ids
        z = rows.to(self.device).repeat_interleave(num, dim=0)
        self._check_ids(z)
        source = torch.default_generator if generator is None else generator

        def uniforms(*shape: int) -> Tensor:
            return torch.rand(shape, generator=source, device=source.device, dtype=torch.float64).to(z.device)

        alpha = self.schedule.alpha(grid(steps or self.config.sampling["steps"]))
        with self._eval_mode():
            for alpha_t, alpha_s in itertools.pairwise(alpha):
                reveal = reveal_chance(alpha_s, alpha_t).clamp(0, 1).to(z.device)
                revealed = (z == self._mask_id) & (uniforms(*z.shape) < reveal)
                beliefs = self._beliefs_at(z, revealed, alpha_t)
                z[revealed] = categorical(beliefs, uniforms(len(beliefs)))
            left = z == self._mask_id  # only where the schedule has alpha_0 < 1
            z[left] = self._beliefs_at(z, left, alpha[-1]).argmax(dim=-1)
        return z

    def _beliefs_at(self, z: Tensor, where: Tensor, alpha: Tensor) -> Tensor:
        """Probabilities (N, V) of the clean tokens at the positions `where` (B, L); reads only the rows with any."""
        rows = where.any(dim=1)
        if not rows.any():
            return torch.zeros(0, self.config.vocab_size, device=z.device)
        level = None
        if self._is_time_conditioned:
            level = -torch.log(alpha).float().to(z.device).expand(int(rows.sum()))
        logits = self.network(z[rows], level)[where[rows]]
        return clean_log_beliefs(logits, self._mask_id).exp()

    def _sigma_of(self, z: Tensor, pad: Tensor | None) -> Tensor | None:
        """(B,) for time-conditioned networks, else None: sigma at t = the share of masks in each row."""
        if not self._is_time_conditioned:
            return None
        text = torch.ones_like(z, dtype=torch.bool) if pad is None else ~pad
        share = ((z == self._mask_id) & text).sum(dim=1).double() / text.sum(dim=1)
        return self._sigma_at(share, z.device)

    def _sigma_at(self, t: Tensor, device: torch.device) -> Tensor | None:
        return sigma(self.schedule, t).float().to(device) if self._is_time_conditioned else None

    @property
    def _is_time_conditioned(self) -> bool:
        return Model(**self.config.model).time_conditioning


class AdlmForCausalLM(AdlmPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """An autoregressive model, ar or a2r: `generate` works as for any causal model, without a KV cache.

    Rows of the training text begin with bos, which is not predicted: put it before a prompt.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
    ) -> CausalLMOutput:
        """`logits` (B, L, V) are log-probabilities of the token after each position, with -inf at the mask.

        With `labels`, the input_ids or -100 where a token is not predicted, `loss` is the training objective in nats
        per predicted token; the first token of a row is given. Then no logits are returned.
        """
        self._check_ids(input_ids, labels)
        pad = padding_of(attention_mask)
        if labels is not None:
            return CausalLMOutput(loss=self._training_loss(input_ids, labels, pad))
        return CausalLMOutput(logits=clean_log_beliefs(self.network(input_ids, None, pad), self._mask_id))

    def _training_loss(self, x: Tensor, labels: Tensor, pad: Tensor | None) -> Tensor:
        """The cross-entropy of the next token; for anchored networks plus gamma times that of the anchor network."""
        predicted = labels != IGNORED if pad is None else (labels != IGNORED) & ~pad
        predicted = predicted & (torch.arange(x.shape[1], device=x.device) > 0)
        if (labels != x)[predicted].any():
            raise ValueError("labels must be the input_ids, or -100; they are shifted here")
        anchor, anchor_weights = self._anchor_options(), None
        if anchor is not None:
            anchor_weights = anchor.gamma * (self._anchors(x, pad, anchor) & predicted)[:, 1:].float()
        unread = None if pad is None else pad[:, :-1]
        weight = predicted[:, 1:].float()
        total = self._weighted_nats(x[:, :-1], x[:, 1:], weight, anchor_weights, None, unread)
        return total / predicted.sum().clamp(min=1)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> dict[str, Tensor | None]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}


class KeyValueCache(TorchFunctionMode):
    """The keys and values of the text so far. While it is entered, one pass of the network attends to them too.

    The networks have no cache of their own: their calls of PyTorch's attention are extended here, layer by layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._number = self._num_kept = 0

    def begin(self, num_kept: int) -> "KeyValueCache":
        """The next pass appends its first `num_kept` tokens to the text."""
        self._number, self._num_kept = 0, num_kept
        return self

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.length = length
        self._layers = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self._layers]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        q, *new = args
        if self.length:
            new = [torch.cat(pair, dim=2) for pair in zip(self._layers[self._number], new, strict=True)]
        kept = tuple(each[:, :, : self.length + self._num_kept] for each in new)
        self._layers[self._number : self._number + 1] = [kept]
        self._number += 1
        return func(q, *new, **named)


LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""(ids (1, n) so far, log-probabilities (1, V) of the next token) -> these, changed."""
Uniforms = Callable[..., Tensor]
"""Uniform random numbers of a shape."""


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `sampling` in adlm's config that `AdlmForBlockCausalLM.sample` knows."""

    steps: int
    temperature: float
    top_k: int
    top_p: float
    nucleus: str
    repetition_penalty: float
    stop_at_eos: bool


class AdlmForBlockCausalLM(AdlmPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A block-causal ADLM or MDLM: it denoises one block of text after the other, each given the text before it.

    The same network is a causal model: the output at a token also predicts the next one. `sample` uses both. Rows of
    the training text begin with bos, which is not predicted: put it before a prompt.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
    ) -> CausalLMOutput:
        """`logits` (B, L, V) are the causal model's log-probabilities of the token after each position.

        With `labels`, -100 where a token is not counted, `loss` is their mean cross-entropy, to evaluate: training it
        alone would leave the denoiser behind. Padding comes after the text, where nothing is read by it.
        """
        self._check_ids(input_ids, labels)
        after = torch.cat([input_ids, input_ids[:, :1]], dim=1)  # some token, which no output reads
        log_probs = clean_log_beliefs(self.network.causal_logits(after)[:, 1:], self._mask_id)
        loss = None
        if labels is not None:
            loss = F.nll_loss(log_probs[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return CausalLMOutput(loss=loss, logits=log_probs)

    @torch.no_grad()
    def sample(
        self,
        input_ids: Tensor,
        sampler: str | None = None,
        steps: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    ) -> Tensor:
        """ids (B, L): every mask of `input_ids` replaced. Each row is a prompt, at least bos, followed by masks.

        `sampler` is ancestral, in `steps` steps per block, or speculative: the block drafts tokens and the causal model
        accepts or replaces them, so that the text has the causal model's distribution. Rows end at the first eos, after
        which they are filled with it; the defaults are those of the model's config.

        `logits_processor` and `prefix_allowed_tokens_fn` are those of transformers, for text of a given form: the text
        is then drawn token by token from the causal model.
        """
        given = {"steps": steps, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        chosen = self.config.sampling | {name: each for name, each in given.items() if each is not None}
        options = GenerateOptions(**{field.name: chosen[field.name] for field in fields(GenerateOptions)})
        name = sampler or ("speculative" if self.config.causal_weight and self._block_length > 1 else "ancestral")
        if name not in ("ancestral", "speculative"):
            raise ValueError(f"sampler {name!r} is not exported; use ancestral or speculative")
        if name == "speculative" and not (self.config.causal_weight and self._block_length > 1):
            raise ValueError("sampler speculative needs a model with train.causal_weight and blocks of several tokens")
        masked = input_ids == self._mask_id
        num_given = int((~masked[0]).sum())
        if input_ids.ndim != 2 or num_given == 0 or masked[:, :num_given].any() or not masked[:, num_given:].all():
            raise ValueError("each row of input_ids must be a prompt of one length, at least bos, and then masks")
        source = torch.default_generator if generator is None else generator

        def uniforms(*shape: int) -> Tensor:
            drawn = torch.rand(shape, generator=source, device=source.device, dtype=torch.float64)
            return drawn.to(self.device)

        has_processors = len(logits_processor) > 0 or prefix_allowed_tokens_fn is not None
        if has_processors and name != "speculative":
            raise ValueError("logits_processor and prefix_allowed_tokens_fn are for sampler speculative")
        fill = self._fill_speculative if name == "speculative" else self._fill_blocks
        rows = []
        with self._eval_mode():
            for number, row in enumerate(input_ids):
                if has_processors:
                    processors = list(logits_processor)
                    if prefix_allowed_tokens_fn is not None:
                        processors.append(partial(_keep_allowed, prefix_allowed_tokens_fn, number))
                    fill = partial(self._fill_processed, processors)
                rows.append(fill(row[None].to(self.device), num_given, options, uniforms))
        return torch.cat(rows)

    @property
    def _block_length(self) -> int:
        return int(self.config.model["block_length"])

    def _read(self, ids: Tensor, cache: KeyValueCache, visible: Tensor, positions: Tensor, num_kept: int) -> Tensor:
        """Hidden states (n, d) after the text in the cache and n tokens ids (n,); `visible` (n, n) is their attention.

        The first `num_kept` tokens are appended to the cache.
        """
        if Model(**self.config.model).masked_keys == "hidden":
            visible = visible & (ids != self._mask_id) | torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        before = torch.ones(len(ids), cache.length, dtype=torch.bool, device=ids.device)
        layout = Layout(positions, torch.cat([before, visible], dim=1)[None, None])
        network = self.network
        with cache.begin(num_kept):
            if isinstance(network, AnchoredTransformer):
                hidden = network._hidden(ids[None], None, None, layout=layout).denoiser
            else:
                hidden = network.trunk(network.embedding(ids[None]), layout=layout)
        cache.length += num_kept
        return hidden[0]

    def _fill_blocks(self, row: Tensor, num_given: int, options: GenerateOptions, uniforms: Uniforms) -> Tensor:
        """Ancestral sampling of one row (1, L), block by block."""
        z, cache, length = row[0].clone(), KeyValueCache(), self._block_length
        alpha = self.schedule.alpha(grid(options.steps))
        for start in range(1 + (num_given - 1) // length * length, len(z), length):
            stop = min(start + length, len(z))
            for alpha_t, alpha_s in [*itertools.pairwise(alpha), (alpha[-1], None)]:
                revealed = z[start:stop] == self._mask_id
                if alpha_s is not None:
                    chance = reveal_chance(alpha_s, alpha_t).clamp(0, 1).to(z.device)
                    revealed = revealed & (uniforms(stop - start) < chance)
                if not revealed.any():
                    continue
                num, kept = stop - cache.length, start - 1 - cache.length
                visible = torch.ones(num, num, dtype=torch.bool, device=z.device).tril()
                visible[kept:, kept:] = True  # the last token before the block, and the block
                positions = torch.arange(cache.length, stop, device=z.device)
                hidden = self._read(z[cache.length : stop], cache, visible, positions, kept)[kept:-1]
                log_beliefs = clean_log_beliefs(self.network.head(hidden[revealed]), self._mask_id)
                if alpha_s is None:  # where the schedule has alpha_0 < 1
                    z[start:stop][revealed] = log_beliefs.argmax(dim=-1)
                else:
                    z[start:stop][revealed] = categorical(shape(log_beliefs, options), uniforms(len(log_beliefs)))
            if _end_text(z, num_given, stop, self.config.eos_token_id if options.stop_at_eos else None):
                break
        return z[None]

    def _fill_speculative(self, row: Tensor, num_given: int, options: GenerateOptions, uniforms: Uniforms) -> Tensor:
        """Draft and verify in one row (1, L): see `verify`. A call reads the last known token and the drafts, and then
        an open block for every number of drafts that may be accepted."""
        z, cache, known, k = row[0].clone(), KeyValueCache(), num_given, self._block_length - 1
        device, eos_id = z.device, self.config.eos_token_id if options.stop_at_eos else None
        drafts = Drafts.none(1, k, self._mask_id, self.config.vocab_size, device)
        block = (torch.arange((k + 1) * (k + 3), device=device) - (k + 1)).div(k + 2, rounding_mode="floor")
        number, causal = torch.arange(len(block), device=device), block < 0
        among_causal = torch.where(causal[:, None], number[None] <= number[:, None], number[None] < block[:, None])
        visible = (causal & among_causal) | (~causal & (block[None] == block[:, None]))
        offsets = torch.where(causal, number, block + (number - (k + 1)) % (k + 2))
        if known > 1:
            before = torch.ones(known - 1, known - 1, dtype=torch.bool, device=device).tril()
            self._read(z[: known - 1], cache, before, torch.arange(known - 1, device=device), known - 1)
        while known < len(z):
            tokens = torch.cat([z[known - 1 : known], drafts.tokens[0]])
            blocks = torch.cat([tokens[:, None], tokens.new_full((k + 1, k + 1), self._mask_id)], dim=1).flatten()
            hidden = self._read(torch.cat([tokens, blocks]), cache, visible, known - 1 + offsets, k + 1)
            log_p = self._log_beliefs(hidden[: k + 1])
            accepted, token, _ = verify(log_p[None], drafts, uniforms(1, k + 1), options)
            num = int(accepted)
            cache.cut(known + num)
            new = torch.cat([drafts.tokens[0, :num], token])[: len(z) - known]
            z[known : known + len(new)] = new
            first, chained = k + 1 + num * (k + 2), self._chained if self.network.chain else without_chain
            log_q = draft_beliefs(hidden[None, first : first + k + 1], chained, self._log_beliefs)
            known, drafts = known + len(new), draw_drafts(log_q, token, uniforms(1, k), options)
            if _end_text(z, num_given, known, eos_id):
                break
        return z[None]

    def _fill_processed(
        self,
        processors: Sequence[LogitsProcessor],
        row: Tensor,
        num_given: int,
        options: GenerateOptions,
        uniforms: Uniforms,
    ) -> Tensor:
        """One row (1, L), token by token from the causal model after the processors."""
        z, cache, eos_id = row[0].clone(), KeyValueCache(), self.config.eos_token_id if options.stop_at_eos else None
        for known in range(num_given, len(z)):
            num = known - cache.length
            visible = torch.ones(num, num, dtype=torch.bool, device=z.device).tril()
            positions = torch.arange(cache.length, known, device=z.device)
            log_p = self._log_beliefs(self._read(z[cache.length : known], cache, visible, positions, num)[-1:])
            for processor in processors:
                log_p = processor(z[None, :known], log_p)
            z[known] = categorical(shape(log_p.log_softmax(dim=-1), options), uniforms(1))[0]
            if _end_text(z, num_given, known + 1, eos_id):
                break
        return z[None]

    def _log_beliefs(self, states: Tensor) -> Tensor:
        return clean_log_beliefs(self.network.head(states), self._mask_id)

    def _chained(self, state: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        assert self.network.chain is not None
        return self.network.chain(state, before, self.network.embedding(tokens))  # type: ignore[no-any-return]


def _keep_allowed(allowed: Callable[[int, Tensor], list[int]], row: int, ids: Tensor, log_p: Tensor) -> Tensor:
    """Log-probabilities (1, V) of the tokens that may follow ids (1, n) of a row, -inf at others."""
    kept = torch.tensor(allowed(row, ids[0]), device=log_p.device)
    return torch.full_like(log_p, -torch.inf).index_copy(1, kept, log_p[:, kept])


def _end_text(z: Tensor, num_given: int, num_known: int, eos_id: int | None) -> bool:
    """Whether the new text (L,) has an eos, with which the rest is filled then, in place."""
    if eos_id is None or not (z[num_given:num_known] == eos_id).any():
        return False
    z[num_given + int((z[num_given:] == eos_id).int().argmax()) :] = eos_id
    return True
