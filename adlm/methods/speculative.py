"""The sampler `speculative` of block-causal methods: a network as the model that drafts and verifies.

`sampling/speculative.py` has the algorithm. Here are its two models: one recomputes everything and works with a network
in training, the other reads new tokens only, with a KV cache, in one call. That call reads, after the cached text,

    [x_(n-1), d_1, ..., d_k]              the last known token and the drafts, causal: they are verified
    [x_(n-1), mask * b]                   an open block for the case that no draft is accepted,
    [d_1, mask * b], ..., [d_k, mask * b] and one for each number of accepted drafts

where block j attends to the text before d_j, as in training. Its first mask stands where the token after the accepted
drafts will be, so its outputs draft the k < b tokens after that one; with a chain, each draft depends on the token
before it. With k = 0 there are no open blocks, and a call reads and draws one token.

Shapes: B rows of L tokens, blocks of b tokens, k drafts, V symbols.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, KVCache, OpenTokens
from adlm.methods.inputs import eval_mode, vocabulary_of
from adlm.sampling.constrained import NextTokens
from adlm.sampling.frame import Ending, Frame
from adlm.sampling.rng import RowRng
from adlm.sampling.speculative import (
    DraftBeliefs,
    DraftedText,
    Drafts,
    SpeculativeModel,
    Unfilled,
    Verified,
    draft_beliefs,
    draw_and_keep,
    draw_drafts,
    sample_speculative,
    verify,
    without_chain,
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
    if sampling.drafts is not None and sampling.drafts >= config.model.block_length:
        raise UserError(
            f"sampling.drafts {sampling.drafts} must be below model.block_length {config.model.block_length}",
            "sampling.drafts",
        )
    if not sampling.verify and sampling.drafts == 0:
        raise UserError(
            "sampling.drafts 0 leaves sampling.verify false nothing to keep; use 1 or more", "sampling.drafts"
        )
    if not sampling.verify and not (config.model.chain and sampling.drafter == "denoiser"):
        raise UserError(
            f"sampling.verify false keeps drafts that depend on each other, and model.chain is {config.model.chain}, "
            f"sampling.drafter {sampling.drafter}; use true, or the denoiser of a model with a chain",
            "sampling.verify",
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
    holes: Sequence[ConstrainedHole] = (),
) -> Iterator[Frame]:
    """Samples from the causal model of a block-causal network, or what it drafts. The first token of rows is given.

    With constrained holes or `no_repeat` there are no drafts: each token is drawn from the causal model given that.
    """
    vocabulary = vocabulary_of(config)
    constrain = None
    if holes or sampling.no_repeat:
        constrain = NextTokens(holes, sampling.no_repeat, vocabulary.mask_id, pad)
    num_drafts = sampling.drafts if constrain is None else 0
    if num_drafts is None:
        num_drafts = config.model.block_length - 1 if canvas.is_cuda or not sampling.verify else 0
    unfilled = Unfilled.of(canvas, vocabulary.mask_id, pad, ending)
    drafts = Drafts.none(len(canvas), num_drafts, vocabulary.mask_id, vocabulary.size, canvas.device)
    model: SpeculativeModel
    if isinstance(network, FrozenNetwork) and constrain is not None:
        with network.lend_cache(len(canvas), canvas.shape[1] + 1) as cache:
            model = CachedConstrained(network, cache, unfilled, constrain, sampling)
            yield from sample_speculative(model, canvas, unfilled, drafts, rng)
    elif isinstance(network, FrozenNetwork):
        cached = CachedDrafting if sampling.verify else CachedChaining
        num_places = cached.num_places(num_drafts, config.model.block_length)
        with network.lend_cache(len(canvas), canvas.shape[1] + num_places) as cache:
            model = cached(network, cache, unfilled, num_drafts, sampling)
            yield from sample_speculative(model, canvas, unfilled, drafts, rng)
    else:
        plain = PlainDrafting(network, unfilled, config.model.block_length, num_drafts, sampling, constrain)
        model = plain.verified if sampling.verify else plain.unverified
        yield from sample_speculative(model, canvas, unfilled, drafts, rng)


class PlainDrafting:
    """Row by row, and every token read again in every call: the plain form, and the test oracle."""

    def __init__(
        self,
        network: nn.Module,
        unfilled: Unfilled,
        block_length: int,
        num_drafts: int,
        sampling: Sampling,
        constrain: NextTokens | None = None,
    ):
        self.network: Any = network
        self.constrain = constrain
        self.drafter: Any = network.anchor if sampling.drafter == "anchor" else network
        self.unfilled, self.block_length, self.num_drafts, self.sampling = unfilled, block_length, num_drafts, sampling
        self.mask_id = unfilled.mask_id

    @torch.no_grad()
    def verified(self, text: DraftedText, uniforms: Tensor) -> DraftedText:
        """Keeps what the causal model accepts, and one token more."""
        num_causal, drafts, prefixes = self.num_drafts + 1, text.drafts, self._prefixes(text)
        with eval_mode(self.network):
            read = [torch.cat([ids, drafts.tokens[row : row + 1]], dim=1) for row, ids in enumerate(prefixes)]
            log_p = torch.stack([self._causal_log_beliefs(ids, num_causal) for ids in read])
            if self.constrain is not None:
                log_p = self.constrain(log_p[:, 0], text.ids, text.known)[:, None]
            num_accepted, token, chance = verify(log_p, drafts, uniforms[:, :num_causal], self.sampling)
            kept = [
                ids[:, : prefix.shape[1] + num]
                for ids, prefix, num in zip(read, prefixes, num_accepted.tolist(), strict=True)
            ]
            if self.num_drafts:
                drafts = draw_drafts(self._beliefs(kept), token, uniforms[:, num_causal:], self.sampling)
        return self.unfilled.after(text, Verified(num_accepted, token, chance, drafts))

    @torch.no_grad()
    def unverified(self, text: DraftedText, uniforms: Tensor) -> DraftedText:
        """Draws one token from the causal model, and keeps all drafts after it."""
        prefixes = self._prefixes(text)
        with eval_mode(self.network):
            log_p = torch.cat([self._causal_log_beliefs(ids, 1) for ids in prefixes])
            return draw_and_keep(self.unfilled, text, log_p, self._beliefs(prefixes), uniforms, self.sampling)

    def _prefixes(self, text: DraftedText) -> list[Tensor]:
        return [text.ids[row : row + 1, :num] for row, num in enumerate(text.known.tolist())]

    def _causal_log_beliefs(self, ids: Tensor, num: int) -> Tensor:
        """(num, V), before each of the last num - 1 ids (1, n) and after the last."""
        extended = torch.cat([ids, ids[:, :1]], dim=1)
        return clean_log_beliefs(self.network.causal_logits(extended)[0, -num:], self.mask_id)

    def _beliefs(self, prefixes: list[Tensor]) -> DraftBeliefs:
        """In the drafts after the token that follows each prefix (1, n)."""
        drafter, length, states = self.drafter, self.block_length, []
        for ids in prefixes:
            num = ids.shape[1]
            z = torch.cat([ids, ids.new_full((1, length), self.mask_id)], dim=1)
            hidden = drafter.hidden(z, first_block=(num - 1) % length or None)
            states.append(hidden[0, num : num + self.num_drafts + 1])

        def chained(state: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
            return drafter.chain(state, before, drafter.embedding(tokens))  # type: ignore[no-any-return]

        def log_beliefs(states: Tensor) -> Tensor:
            return clean_log_beliefs(drafter.head(states), self.mask_id)

        return draft_beliefs(torch.stack(states), chained if drafter.chain else without_chain, log_beliefs)


def read_prompts(network: FrozenNetwork, cache: KVCache, text: DraftedText) -> bool:
    """Reads all but the last known token of every row, if none was read yet: the result says so.

    Tokens after the prompt of a shorter row are overwritten later.
    """
    if cache.filled:
        return False
    num_prompt = int(text.known.max())
    if num_prompt > 1:
        network.read(text.ids[:, : num_prompt - 1], cache)
    cache.filled = text.ids.shape[1]  # room for all that will be kept
    return True


class CachedDrafting:
    """The same with a KV cache. All of a call is one function of tensors, on CUDA one graph."""

    @staticmethod
    def num_places(num_drafts: int, block_length: int) -> int:
        """Places that a call reads of each row."""
        return (num_drafts + 1) * (block_length + 2) if num_drafts else 1

    def __init__(self, network: FrozenNetwork, cache: KVCache, unfilled: Unfilled, num_drafts: int, sampling: Sampling):
        assert network.text_blocks is not None
        self.network, self.cache, self.num_drafts, self.sampling = network, cache, num_drafts, sampling
        self.unfilled, self.mask_id, device = unfilled, unfilled.mask_id, unfilled.end.device
        self.hides_masks = network.text_blocks.hidden_id is not None
        self.block_length = network.text_blocks.block_length
        num_causal, per_block = num_drafts + 1, self.block_length + 1
        num_places = self.num_places(num_drafts, self.block_length)
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

    def __call__(self, text: DraftedText, uniforms: Tensor) -> DraftedText:
        read_prompts(self.network, self.cache, text)
        key = ("draft and verify", self.num_drafts, self.sampling, self.unfilled.eos_id)
        inputs = (*self.unfilled.tensors(), uniforms)
        return DraftedText.of(*self.network.replay_state(key, self._call, self.cache, text.tensors(), *inputs))

    def _call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        text, unfilled, uniforms = DraftedText.of(*tensors[:5]), self.unfilled.with_tensors(*tensors[5:8]), tensors[8]
        cache, ids, known, tokens = self.cache, text.ids, text.known, text.drafts.tokens
        cache.position.copy_(known - 1)
        places = causal = torch.cat([ids.gather(1, known[:, None] - 1), tokens], dim=1)
        if self.num_drafts:
            masks = causal.new_full((*causal.shape, self.block_length), self.mask_id)
            places = torch.cat([causal, torch.cat([causal[..., None], masks], dim=2).flatten(1)], dim=1)
        unseen = places == self.mask_id if self.hides_masks else None
        read = self._anchor_drafts if self.sampling.drafter == "anchor" else self._denoiser_drafts
        verified = self._verify_and_draft(*read(places, unseen), text.drafts, uniforms)
        return unfilled.after(text, verified).tensors()

    def _denoiser_drafts(self, places: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
        """The hidden states (B, k + 1, d) that verify, those of all places, which draft, and the beliefs of these."""
        last = self.network.read_open(places, self.cache, self.tokens, unseen).last
        return last[:, : self.num_drafts + 1], last, self.network.log_beliefs

    def _anchor_drafts(self, places: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
        """The same, with drafts of the anchor network; only what verifies goes through the denoiser."""
        network, num_causal = self.network, self.num_drafts + 1
        anchors = network.read_open_anchors(places, self.cache, self.tokens, unseen)
        causal = network.denoise_open(places[:, :num_causal], anchors.first(num_causal), self.cache, self.causal_tokens)
        return causal.last, anchors.hidden, network.anchor_log_beliefs

    def _verify_and_draft(
        self,
        verifying: Tensor,
        drafting: Tensor,
        to_log_beliefs: Callable[..., Tensor],
        drafts: Drafts,
        uniforms: Tensor,
    ) -> Verified:
        num_rows, num_causal, width = verifying.shape
        log_p = self.network.log_beliefs(verifying.flatten(0, 1), self.mask_id)
        num_accepted, token, chance = verify(
            log_p.view(num_rows, num_causal, -1), drafts, uniforms[:, :num_causal], self.sampling
        )
        if self.num_drafts == 0:
            return Verified(num_accepted, token, chance, drafts)
        places = self.begins[num_accepted][:, None] + torch.arange(num_causal, device=verifying.device)
        states = drafting.gather(1, places[..., None].expand(-1, -1, width))
        chained = without_chain if self.sampling.drafter == "anchor" else self.network.chained
        log_q = draft_beliefs(states, chained, functools.partial(to_log_beliefs, mask_id=self.mask_id))
        next_drafts = draw_drafts(log_q, token, uniforms[:, num_causal:], self.sampling)
        return Verified(num_accepted, token, chance, next_drafts)


class CachedConstrained:
    """A token a call, given the constraints on it, which are looked up on the host: the network is one CUDA graph."""

    def __init__(
        self, network: FrozenNetwork, cache: KVCache, unfilled: Unfilled, constrain: NextTokens, sampling: Sampling
    ):
        self.network, self.cache, self.unfilled, self.constrain, self.sampling = (
            network,
            cache,
            unfilled,
            constrain,
            sampling,
        )

    def __call__(self, text: DraftedText, uniforms: Tensor) -> DraftedText:
        read_prompts(self.network, self.cache, text)
        self.cache.position.copy_(text.known - 1)
        newest = text.ids.gather(1, text.known[:, None] - 1)
        log_p = self.constrain(
            self.network.replay(("next token",), self._log_p, self.cache, newest), text.ids, text.known
        )
        verified = verify(log_p[:, None], text.drafts, uniforms[:, :1], self.sampling)
        return self.unfilled.after(text, Verified(*verified, text.drafts))

    def _log_p(self, newest: Tensor) -> Tensor:
        last = self.network.read_open(newest, self.cache).last[:, 0]
        return self.network.log_beliefs(last, self.unfilled.mask_id)


class CachedChaining:
    """`PlainDrafting.unverified` with a KV cache: a call reads the tokens of the last one, and one open block."""

    @staticmethod
    def num_places(num_drafts: int, block_length: int) -> int:
        """Places that a call reads of each row."""
        return num_drafts + 2 + block_length

    def __init__(self, network: FrozenNetwork, cache: KVCache, unfilled: Unfilled, num_drafts: int, sampling: Sampling):
        assert network.text_blocks is not None
        self.network, self.cache, self.num_drafts, self.sampling = network, cache, num_drafts, sampling
        self.unfilled, self.text_blocks = unfilled, network.text_blocks

    def __call__(self, text: DraftedText, uniforms: Tensor) -> DraftedText:
        num_new = 1 if read_prompts(self.network, self.cache, text) else self.num_drafts + 1
        key = ("draft and keep", num_new, self.num_drafts, self.sampling, self.unfilled.eos_id)
        call, inputs = functools.partial(self._call, num_new), (*self.unfilled.tensors(), uniforms)
        return DraftedText.of(*self.network.replay_state(key, call, self.cache, text.tensors(), *inputs))

    def _call(self, num_new: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The last `num_new` known tokens of a row are not in the cache yet. What finished rows read is not used."""
        text, unfilled, uniforms = DraftedText.of(*tensors[:5]), self.unfilled.with_tensors(*tensors[5:8]), tensors[8]
        network, cache, mask_id, ids, known = self.network, self.cache, unfilled.mask_id, text.ids, text.known
        length, device = self.text_blocks.block_length, ids.device
        cache.position.copy_((known - num_new).clamp(min=0))
        new = ids.gather(1, cache.position[:, None] + torch.arange(num_new, device=device))
        places = torch.cat([new, new[:, -1:], new.new_full((len(new), length), mask_id)], dim=1)
        place = torch.arange(places.shape[1], device=device)
        is_open = place >= num_new
        visible = (place[None] <= place[:, None]) & ~is_open
        visible &= ~(is_open[:, None] & (place == num_new - 1))  # the open block begins with that token itself
        visible |= is_open[:, None] & is_open
        unseen = places == mask_id if self.text_blocks.hidden_id is not None else None
        open_tokens = OpenTokens(visible, torch.where(is_open, place - 1, place))
        last = network.read_open(places, cache, open_tokens, unseen).last
        log_p = network.log_beliefs(last[:, num_new - 1], mask_id)
        states = last[:, num_new : num_new + self.num_drafts + 1]
        log_q = draft_beliefs(states, network.chained, functools.partial(network.log_beliefs, mask_id=mask_id))
        return draw_and_keep(unfilled, text, log_p, log_q, uniforms, self.sampling).tensors()
