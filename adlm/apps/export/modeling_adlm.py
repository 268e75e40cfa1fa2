"""Masked diffusion and autoregressive language models for `transformers`: beliefs, training loss and sampling.

Shapes: B sequences, L tokens, V symbols (the mask is one of them). `pad` is True at padding.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
from adlm.models.transformer import Transformer
from adlm.registry import SCHEDULES
from adlm.sampling.rng import categorical

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
        network = AnchoredTransformer if config.anchored else Transformer
        self.network: AnchoredTransformer | Transformer = network(
            Model(**config.model), config.vocab_size, config.causal, modulated=not config.causal
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
        return self.network._head if isinstance(self.network, AnchoredTransformer) else self.network.head

    def _first_network(self) -> Transformer:
        return self.network.anchor if isinstance(self.network, AnchoredTransformer) else self.network

    @property
    def _mask_id(self) -> int:
        return int(self.config.mask_token_id)

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
            scores = network.score(z, x, weight, self._mask_id, noise_level, pad)
        else:
            scores = network.score(z, x, weight, anchor_weights, self._mask_id, noise_level, pad)
        return sum((scored.total for scored in (scores.denoiser, scores.anchor) if scored is not None), z.new_zeros(()))

    def _anchor_options(self) -> Anchor | None:
        """The options of the anchor term; None if the loss has none."""
        anchor = Anchor(**self.config.anchor)
        return anchor if self.config.anchored and anchor.gamma > 0 else None

    def _anchors(self, x: Tensor, pad: Tensor | None, anchor: Anchor) -> Tensor:
        """(B, L), True at the anchors of clean ids."""
        if anchor.rule not in ANCHOR_RULES_OF_IDS:
            raise ValueError(
                f"anchor rule {anchor.rule!r} needs statistics of the training text or another package; to train here, "
                "set config.anchor['rule'] = 'count', or config.anchor['gamma'] = 0 to train without anchors"
            )
        return ANCHOR_RULES_OF_IDS[anchor.rule](anchor, self.config.vocab_size, no_statistics)(x, pad)


def padding_of(attention_mask: Tensor | None) -> Tensor | None:
    """(B, L), True where the mask is 0; None if there is no padding."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask == 0


class AdlmForMaskedLM(AdlmPreTrainedModel):
    """An ADLM or an MDLM. The network restores masked tokens: put `config.mask_token_id` where text is wanted.

    Rows of the training text begin with bos and end with eos, as far as the tokenizer has them.
    """

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule that the config names; its fields are the options of the same names."""
        options = Schedule(**self.config.schedule)
        schedule = SCHEDULES[options.name]
        return schedule(*(getattr(options, field.name) for field in fields(schedule)))  # type: ignore[no-any-return]

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
        """The NELBO per predicted token; for anchored networks plus gamma times the anchor term.  [ADLM Eq. 7]"""
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
            t = draw_times(len(x), rng, t_min, time.antithetic, time.power)
            importance = importance_weight(t, t_min, time.power)
            if time.masks == "counted":
                z, t = mask_counted(x, predicted, t, self._mask_id, rng)
            weights = continuous_weight(schedule, t) * importance.to(t.device)
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

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


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
