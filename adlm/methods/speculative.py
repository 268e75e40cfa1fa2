"""The sampler `speculative` of block-causal methods: a network as the model that drafts and verifies.

`sampling/speculative.py` has the algorithm. Here are its two models: one recomputes everything and works with a network
in training, the other reads new tokens only, with a KV cache, in one call. That call reads, after the cached text,

    [x_(n-1), d_1, ..., d_k]              the last known token and the drafts, causal: they are verified
    [x_(n-1), mask * b]                   an open block for the case that no draft is accepted,
    [d_1, mask * b], ..., [d_k, mask * b] and one for each number of accepted drafts

where block j attends to the text before d_j, as in training. Its first mask stands where the token after the accepted
drafts will be, so its outputs draft the k < b tokens after that one. With k = 0 there are no open blocks, and a call
reads and draws one token.

Shapes: B rows of L tokens, blocks of b tokens, k drafts, V symbols.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, OpenTokens
from adlm.methods.inputs import eval_mode, vocabulary_of
from adlm.sampling.frame import Ending, Frame
from adlm.sampling.rng import RowRng
from adlm.sampling.speculative import (
    DraftedText,
    Drafts,
    SpeculativeModel,
    Unfilled,
    Verified,
    draw_drafts,
    sample_speculative,
    verify,
)

ToLogits = Callable[[Tensor], Tensor]
"""Hidden states (N, d) -> logits (N, V)."""


def check_speculative(config: Config, sampling: Sampling) -> None:
    if config.train.causal_weight == 0:
        raise UserError(
            "sampling.sampler speculative checks drafts by next-token predictions, and this model was trained without: "
            "train.causal_weight is 0; try confidence",
            "sampling.sampler",
        )
    if config.model.block_length < 2:
        raise UserError(
            "sampling.sampler speculative drafts within a block, and model.block_length is 1; try ancestral"
        )
    if sampling.drafts is not None and sampling.drafts >= config.model.block_length:
        raise UserError(
            f"sampling.drafts {sampling.drafts} must be below model.block_length {config.model.block_length}",
            "sampling.drafts",
        )
    if sampling.drafter == "anchor" and not (config.method == "adlm" and config.model.num_denoiser_blocks):
        raise UserError(
            f"sampling.drafter anchor needs an anchor network and a denoiser, and {config.method} has no such pair; "
            "use denoiser",
            "sampling.drafter",
        )
    if sampling.repetition_penalty > 1:
        raise UserError(
            f"sampling.repetition_penalty {sampling.repetition_penalty} depends on tokens that speculative has not "
            "accepted yet; use 1.0, or another sampler",
            "sampling.repetition_penalty",
        )


def generate_speculative(
    config: Config,
    network: Any,
    canvas: Tensor,
    sampling: Sampling,
    rng: RowRng,
    pad: Tensor | None,
    ending: Ending | None,
) -> Iterator[Frame]:
    """Samples from the causal model of a block-causal network. The first token of every row is given."""
    vocabulary, num_drafts = vocabulary_of(config), sampling.drafts
    if num_drafts is None:
        num_drafts = config.model.block_length - 1 if canvas.is_cuda else 0
    unfilled = Unfilled.of(canvas, vocabulary.mask_id, pad, ending)
    model: SpeculativeModel
    if isinstance(network, FrozenNetwork):
        model = CachedDrafting(network, unfilled, num_drafts, sampling)
    else:
        model = recomputing_model(network, unfilled, config.model.block_length, num_drafts, sampling)
    drafts = Drafts.none(len(canvas), num_drafts, vocabulary.mask_id, vocabulary.size, canvas.device)
    return sample_speculative(model, canvas, unfilled, drafts, rng)


def recomputing_model(
    network: nn.Module, unfilled: Unfilled, block_length: int, num_drafts: int, sampling: Sampling
) -> SpeculativeModel:
    """Row by row, and every token read again in every call: the plain form, and the test oracle."""
    mask_id, num_causal = unfilled.mask_id, num_drafts + 1

    @torch.no_grad()
    def causal_log_beliefs(ids: Tensor, num: int) -> Tensor:
        """(num, V), before each of the last num - 1 ids (1, n) and after the last."""
        extended = torch.cat([ids, ids[:, :1]], dim=1)
        return clean_log_beliefs(network.causal_logits(extended)[0, -num:], mask_id)  # type: ignore[operator]

    @torch.no_grad()
    def draft_log_beliefs(ids: Tensor) -> Tensor:
        """(k, V), in the tokens after the next one, which follows the ids (1, n)."""
        num = ids.shape[1]
        z = torch.cat([ids, ids.new_full((1, block_length), mask_id)], dim=1)
        drafter = network.anchor if sampling.drafter == "anchor" else network
        logits = drafter(z, first_block=(num - 1) % block_length or None)  # type: ignore[operator]
        return clean_log_beliefs(logits[0, num + 1 : num + num_causal], mask_id)

    def model(text: DraftedText, uniforms: Tensor) -> DraftedText:
        drafts = text.drafts
        prefixes = [text.ids[row : row + 1, :num] for row, num in enumerate(text.known.tolist())]
        with eval_mode(network):
            read = [torch.cat([ids, drafts.tokens[row : row + 1]], dim=1) for row, ids in enumerate(prefixes)]
            log_p = torch.stack([causal_log_beliefs(ids, num_causal) for ids in read])
            num_accepted, token, chance = verify(log_p, drafts, uniforms[:, :num_causal], sampling)
            kept = [
                ids[:, : prefix.shape[1] + num]
                for ids, prefix, num in zip(read, prefixes, num_accepted.tolist(), strict=True)
            ]
            log_q = torch.stack([draft_log_beliefs(ids) for ids in kept])
        next_drafts = draw_drafts(log_q, uniforms[:, num_causal:], sampling)
        return unfilled.after(text, Verified(num_accepted, token, chance, next_drafts))

    return model


class CachedDrafting:
    """The same with a KV cache. All of a call is one function of tensors, on CUDA one graph."""

    def __init__(self, network: FrozenNetwork, unfilled: Unfilled, num_drafts: int, sampling: Sampling):
        assert network.text_blocks is not None
        self.network, self.unfilled, self.num_drafts, self.sampling = network, unfilled, num_drafts, sampling
        self.mask_id, device = unfilled.mask_id, unfilled.end.device
        self.hides_masks = network.text_blocks.hidden_id is not None
        self.block_length = network.text_blocks.block_length
        num_causal, per_block = num_drafts + 1, self.block_length + 1
        num_places = num_causal + (num_causal * per_block if num_drafts else 0)
        block = (torch.arange(num_places, device=device) - num_causal).div(per_block, rounding_mode="floor")
        place = (torch.arange(num_places, device=device) - num_causal) % per_block
        causal = block < 0
        number = torch.where(causal, torch.arange(num_places, device=device), block)
        visible = causal & torch.where(causal[:, None], number[None] <= number[:, None], number[None] < block[:, None])
        visible |= ~causal & (block[None] == block[:, None])
        self.tokens = OpenTokens(visible, torch.where(causal, number, block + place))
        self.causal_tokens = OpenTokens(visible[:num_causal, :num_causal])
        self.begins = num_causal + per_block * torch.arange(num_causal, device=device)
        """The first place of each open block."""
        num_rows, length = unfilled.masked.shape
        self.cache = functools.cache(lambda: network.cache(num_rows, length + num_places))

    def __call__(self, text: DraftedText, uniforms: Tensor) -> DraftedText:
        network, cache, drafts = self.network, self.cache(), text.drafts
        if cache.filled == 0:  # tokens after the prompt of a shorter one are overwritten later
            num_prompt = int(text.known.max())
            if num_prompt > 1:
                network.read(text.ids[:, : num_prompt - 1], cache)
            cache.filled = text.ids.shape[1]  # room for all that will be kept
        parts = (text.ids, text.chance, text.known, drafts.tokens, drafts.chances)
        return network.replay(self, self._call, cache, *parts, uniforms)

    def _call(
        self, ids: Tensor, chance: Tensor, known: Tensor, tokens: Tensor, chances: Tensor, uniforms: Tensor
    ) -> DraftedText:
        cache, text = self.cache(), DraftedText(ids, chance, known, Drafts(tokens, chances))
        cache.position.copy_(known - 1)
        places = causal = torch.cat([ids.gather(1, known[:, None] - 1), tokens], dim=1)
        if self.num_drafts:
            masks = causal.new_full((*causal.shape, self.block_length), self.mask_id)
            places = torch.cat([causal, torch.cat([causal[..., None], masks], dim=2).flatten(1)], dim=1)
        unseen = places == self.mask_id if self.hides_masks else None
        read = self._anchor_drafts if self.sampling.drafter == "anchor" else self._denoiser_drafts
        verified = self._verify_and_draft(*read(places, unseen), text.drafts, uniforms)
        return self.unfilled.after(text, verified)

    def _denoiser_drafts(self, places: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor, ToLogits]:
        """The hidden states (B, k + 1, d) that verify, those of all places, which draft, and the head of these."""
        last = self.network.read_open(places, self.cache(), self.tokens, unseen).last
        return last[:, : self.num_drafts + 1], last, self.network.logits

    def _anchor_drafts(self, places: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor, ToLogits]:
        """The same, with drafts of the anchor network; only what verifies goes through the denoiser."""
        network, num_causal = self.network, self.num_drafts + 1
        anchors = network.read_open_anchors(places, self.cache(), self.tokens, unseen)
        causal = network.denoise_open(
            places[:, :num_causal], anchors.first(num_causal), self.cache(), self.causal_tokens
        )
        return causal.last, anchors.hidden, network.anchor_logits

    def _verify_and_draft(
        self, verifying: Tensor, drafting: Tensor, draft_logits: ToLogits, drafts: Drafts, uniforms: Tensor
    ) -> Verified:
        num_rows, num_causal, width = verifying.shape
        log_p = clean_log_beliefs(self.network.logits(verifying.flatten(0, 1)), self.mask_id)
        num_accepted, token, chance = verify(
            log_p.view(num_rows, num_causal, -1), drafts, uniforms[:, :num_causal], self.sampling
        )
        if self.num_drafts == 0:
            return Verified(num_accepted, token, chance, drafts)
        places = self.begins[num_accepted][:, None] + 1 + torch.arange(self.num_drafts, device=verifying.device)
        rows = drafting.gather(1, places[..., None].expand(-1, -1, width)).flatten(0, 1)
        log_q = clean_log_beliefs(draft_logits(rows), self.mask_id).view(num_rows, self.num_drafts, -1)
        return Verified(num_accepted, token, chance, draw_drafts(log_q, uniforms[:, num_causal:], self.sampling))
