"""The sampler `speculative` of block-causal methods: a network as the model that drafts and verifies.

`sampling/speculative.py` has the algorithm. Here are its two models: one recomputes everything and works with a network
in training, the other reads new tokens only, with a KV cache, in one call. That call reads, after the cached text,

    [x_(n-1), d_1, ..., d_k]              the last known token and the drafts, causal: they are verified
    [x_(n-1), mask * b]                   an open block for the case that no draft is accepted,
    [d_1, mask * b], ..., [d_k, mask * b] and one for each number of accepted drafts

where block j attends to the text before d_j, as in training. Its first mask stands where the token after the accepted
drafts will be, so its outputs draft the k = b - 1 tokens after that one.

Shapes: B rows of L tokens, blocks of b tokens, k = b - 1 drafts, V symbols.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates, OpenTokens
from adlm.methods.inputs import eval_mode, vocabulary_of
from adlm.sampling.frame import Ending, Frame
from adlm.sampling.rng import RowRng
from adlm.sampling.speculative import (
    Drafts,
    SpeculativeModel,
    Verified,
    draw_drafts,
    sample_speculative,
    verify,
)


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
    vocabulary, num_drafts = vocabulary_of(config), config.model.block_length - 1
    model: SpeculativeModel
    if isinstance(network, FrozenNetwork):
        model = CachedDrafting(network, vocabulary.mask_id, num_drafts, sampling, canvas)
    else:
        model = recomputing_model(network, vocabulary.mask_id, num_drafts, sampling)
    drafts = Drafts.none(len(canvas), num_drafts, vocabulary.mask_id, vocabulary.size, canvas.device)
    return sample_speculative(model, canvas, vocabulary.mask_id, drafts, rng, pad, ending)


def recomputing_model(network: nn.Module, mask_id: int, num_drafts: int, sampling: Sampling) -> SpeculativeModel:
    """Row by row, and every token read again in every call: the plain form, and the test oracle."""
    block_length = num_drafts + 1

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
        logits = network(z, first_block=(num - 1) % block_length or None)
        return clean_log_beliefs(logits[0, num + 1 :], mask_id)

    def model(text: Tensor, known: Tensor, drafts: Drafts, uniforms: Tensor) -> Verified:
        prefixes = [text[row : row + 1, :num] for row, num in enumerate(known.tolist())]
        with eval_mode(network):
            read = [torch.cat([ids, drafts.tokens[row : row + 1]], dim=1) for row, ids in enumerate(prefixes)]
            log_p = torch.stack([causal_log_beliefs(ids, block_length) for ids in read])
            num_accepted, token, chance = verify(log_p, drafts, uniforms[:, :block_length], sampling)
            kept = [
                ids[:, : prefix.shape[1] + num]
                for ids, prefix, num in zip(read, prefixes, num_accepted.tolist(), strict=True)
            ]
            log_q = torch.stack([draft_log_beliefs(ids) for ids in kept])
        return Verified(num_accepted, token, chance, draw_drafts(log_q, uniforms[:, block_length:], sampling))

    return model


class CachedDrafting:
    """The same with a KV cache: one network call, in which verification and drawing are included."""

    def __init__(self, network: FrozenNetwork, mask_id: int, num_drafts: int, sampling: Sampling, canvas: Tensor):
        assert network.text_blocks is not None
        self.network, self.mask_id, self.num_drafts, self.sampling = network, mask_id, num_drafts, sampling
        self.hides_masks = network.text_blocks.hidden_id is not None
        self.canvas, device = canvas, canvas.device
        num_causal, per_block = num_drafts + 1, num_drafts + 2
        num_places = num_causal + num_causal * per_block
        block = (torch.arange(num_places, device=device) - num_causal).div(per_block, rounding_mode="floor")
        place = (torch.arange(num_places, device=device) - num_causal) % per_block
        causal = block < 0
        number = torch.where(causal, torch.arange(num_places, device=device), block)
        visible = causal & torch.where(causal[:, None], number[None] <= number[:, None], number[None] < block[:, None])
        visible |= ~causal & (block[None] == block[:, None])
        self.tokens = OpenTokens(visible, torch.where(causal, number, block + place))
        self.begins = num_causal + per_block * torch.arange(num_causal, device=device)
        """The first place of each open block."""
        self.cache = functools.cache(lambda: network.cache(len(canvas), canvas.shape[1] + num_places))

    def __call__(self, text: Tensor, known: Tensor, drafts: Drafts, uniforms: Tensor) -> Verified:
        network, cache = self.network, self.cache()
        if cache.filled == 0:  # tokens after the prompt of a shorter one are overwritten later
            num_prompt = int((text != self.mask_id).long().cumprod(dim=1).sum(dim=1).max())
            if num_prompt > 1:
                network.read(text[:, : num_prompt - 1], cache)
            cache.filled = text.shape[1]  # room for all that will be kept
        cache.position.copy_(known - 1)
        last = text.gather(1, known[:, None] - 1)
        causal = torch.cat([last, drafts.tokens], dim=1)
        masks = causal.new_full((*causal.shape, self.num_drafts + 1), self.mask_id)
        ids = torch.cat([causal, torch.cat([causal[..., None], masks], dim=2).flatten(1)], dim=1)
        unseen = ids == self.mask_id if self.hides_masks else None
        return network.read_open(
            self._verify_and_draft, ids, cache, self.tokens, drafts.tokens, drafts.chances, uniforms, unseen=unseen
        )

    def _verify_and_draft(self, hidden: HiddenStates, tokens: Tensor, chances: Tensor, uniforms: Tensor) -> Verified:
        num_causal, last = self.num_drafts + 1, hidden.last
        log_p = clean_log_beliefs(self.network.logits(last[:, :num_causal].flatten(0, 1)), self.mask_id)
        drafts = Drafts(tokens, chances)
        num_accepted, token, chance = verify(
            log_p.view(len(last), num_causal, -1), drafts, uniforms[:, :num_causal], self.sampling
        )
        places = self.begins[num_accepted][:, None] + 1 + torch.arange(self.num_drafts, device=last.device)
        rows = last.gather(1, places[..., None].expand(-1, -1, last.shape[-1])).flatten(0, 1)
        log_q = clean_log_beliefs(self.network.logits(rows), self.mask_id).view(len(last), self.num_drafts, -1)
        return Verified(num_accepted, token, chance, draw_drafts(log_q, uniforms[:, num_causal:], self.sampling))
