"""Block-causal masked diffusion: MDLM and ADLM on blocks of text, each given the clean text before it.

log p(x) = sum over blocks of log p(block | text before), and each term has the bound of masked diffusion with a time of
its own. So the noise is that of MDLM on short rows, the blocks; only the network sees where they stand
(`models/text_blocks.py`). The first token of a row is given: packed rows begin with bos.

Shapes: B sequences, L tokens. `pad` is True at padding, which is at the end of rows.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.config.schema import Config, Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import AnchorStates, FrozenNetwork, HiddenStates, KVCache, OpenTokens
from adlm.methods.adlm import Adlm, Refreshes, stale_denoiser
from adlm.methods.infilling import Candidates, check_room, generate_arranged
from adlm.methods.inputs import (
    check_left_to_right,
    check_sampler,
    eval_mode,
    has_text_after_hole,
    not_pad,
    vocabulary_of,
    with_first_token,
)
from adlm.methods.masked_diffusion import BoundNoise, MaskedDiffusion, NoisedBatch
from adlm.methods.mdlm import Mdlm
from adlm.methods.speculative import check_speculative, generate_speculative
from adlm.models.anchored import AnchoredTransformer
from adlm.models.chain import chained_tokens
from adlm.models.text_blocks import BlockCut, TextBlocks
from adlm.models.transformer import ScoreOptions, Transformer
from adlm.registry import SAMPLERS
from adlm.sampling.frame import Denoiser, DenoiserOutput, Ending, Frame, NoisyRows, SamplingRun
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import OpenBlock, WriteText, sample_blocks, sample_long, sampler_of

SCORED_AT_ONCE = 1024
"""Tokens whose beliefs are in memory at a time when candidates are compared."""


@dataclass(frozen=True)
class BlockCausal(MaskedDiffusion):
    """Mixed into a masked diffusion method, before it."""

    cached: ClassVar[bool] = True
    auto_class: ClassVar[str | None] = "AutoModelForCausalLM"

    def __post_init__(self) -> None:
        if self.config.model.time_conditioning:
            raise UserError(
                f"model.time_conditioning true gives a row one time, and with model.block_length "
                f"{self.config.model.block_length} every block has its own; use model.time_conditioning=false"
            )

        needed = {"model.hole_id": self.config.model.hole_id, "vocabulary.eos_id": vocabulary_of(self.config).eos_id}
        missing = [option for option, index in needed.items() if index is None]
        if self.config.train.infill and missing:
            raise UserError(
                f"train.infill {self.config.train.infill} needs an id that stands for missing tokens and one that ends "
                f"them, and {missing[0]} is empty; set it, or train.infill=0"
            )

    @cached_property
    def text_blocks(self) -> TextBlocks:
        model = self.config.model
        return TextBlocks(model.block_length, self.mask_id if model.masked_keys == "hidden" else None)

    def predicted(self, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), True at every token of the text except the first and those that are given."""
        counted, given = not_pad(x, pad).clone(), self._given(x, given)
        counted[:, 0] = False
        return counted if given is None else counted & ~given

    # Noise: that of the blocks as rows

    def noise(
        self, x: Tensor, pad: Tensor | None, rng: BatchRng, t_min: float, given: Tensor | None = None
    ) -> NoisedBatch:
        cut = self._cut(x, rng if self.config.train.random_blocks else None)
        blocks, block_pad, block_given = self._split(cut, x, pad, given)
        noised = super().noise(blocks, block_pad, cut.rng(rng), t_min, block_given)
        return self._joined(cut, noised, x, given)

    def counted_noise(self, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> NoisedBatch:
        cut = self._cut(x)
        blocks, block_pad, block_given = self._split(cut, x, pad, given)
        noised = super().counted_noise(blocks, block_pad, cut.rng(rng), block_given)
        return self._joined(cut, noised, x, given)

    def noise_for_bound(self, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> BoundNoise:
        cut = self._cut(x)
        blocks, block_pad, block_given = self._split(cut, x, pad, given)
        noise = super().noise_for_bound(blocks, block_pad, cut.rng(rng), block_given)
        importance = self._at_tokens(cut, noise.importance, x)
        start = None if noise.start is None else cut.join(noise.start, x)
        return BoundNoise(self._joined(cut, noise.noised, x, given), importance, start)

    def _noise_by_importance(
        self, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None
    ) -> tuple[NoisedBatch, Tensor]:
        """x are blocks already, so `noise` must be that of rows."""
        if self.config.time.steps:
            return super().noise(x, pad, rng, 0.0, given), torch.ones(len(x), dtype=torch.float64)
        return super()._noise_by_importance(x, pad, rng, given)

    def _given(self, x: Tensor, given: Tensor | None) -> Tensor | None:
        """(B, L), True at given tokens, to which those belong that stand for missing ones."""
        hole_id = self.config.model.hole_id
        if hole_id is None:
            return given
        return x == hole_id if given is None else given | (x == hole_id)

    def _split(
        self, cut: BlockCut, x: Tensor, pad: Tensor | None, given: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The blocks of rows x as rows (B n, b), their padding and given tokens."""
        given = self._given(x, given)
        return cut.split(x), cut.split_pad(x, pad), None if given is None else cut.split(given)

    def _cut(self, x: Tensor, rng: BatchRng | None = None) -> BlockCut:
        """The blocks of rows x; the length of the first is drawn if there is an RNG."""
        first = None
        if rng is not None:
            generator = rng.generator
            drawn = torch.randint(self.config.model.block_length, (), generator=generator, device=generator.device)
            first = 1 + int(drawn)
        return self.text_blocks.cut(x.shape[1], first)

    def _joined(self, cut: BlockCut, noised: NoisedBatch, x: Tensor, given: Tensor | None) -> NoisedBatch:
        """The noise of blocks (B n, b) as that of rows x (B, L), with a time for every token."""
        t, s, importance = (
            None if each is None else self._at_tokens(cut, each, x) for each in (noised.t, noised.s, noised.importance)
        )
        assert t is not None
        stale = None if noised.stale is None else cut.join(noised.stale, x)
        return NoisedBatch(cut.join(noised.z, x), t, s, importance, cut.first, given, stale=stale)

    def _at_tokens(self, cut: BlockCut, values: Tensor, x: Tensor) -> Tensor:
        """(B, L), the value (B n,) of each token's block; 1 at the first token, and in blocks without masks."""
        ones = torch.ones(x.shape, dtype=torch.float64, device=values.device)
        finite = torch.where(values.isfinite(), values, 1.0).double()
        return cut.join(finite[:, None].expand(-1, cut.index.shape[1]), ones)

    def conditioning(self, noised: NoisedBatch, pad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return None, pad

    def loss_options(self, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> ScoreOptions:
        train, predicted = self.config.train, self.predicted(x, pad, noised.given)
        options = self.score_options(noised)
        if train.causal_weight:
            options = replace(options, causal_weight=train.causal_weight * predicted.float())
        if self.config.model.chain and train.chain_weight:
            masked = noised.z == self.mask_id
            cut = self.text_blocks.cut(x.shape[1], noised.first_block)
            chained = chained_tokens(masked if pad is None else masked | pad, cut) & predicted
            weight = train.chain_weight * chained.float()
            options = replace(options, chain_weight=weight, chain_target=train.chain_target)
        if train.align_weight:  # the mean over the masked tokens of a row, which counts as often as it has tokens
            masked = self.masked_positions(noised.z, pad).float()
            each = predicted.sum(dim=1, keepdim=True) / masked.sum(dim=1, keepdim=True).clamp(min=1)
            options = replace(options, align_weight=train.align_weight * masked * each)
        return options

    # Exact likelihoods

    @torch.no_grad()
    def left_to_right_nats(self, network: Any, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), -log p(x) of the sampler left-to-right, exactly: the j-th tokens of all blocks in the j-th pass."""
        nats = torch.zeros(x.shape, device=x.device)
        with eval_mode(network):
            for noised, where in self.left_to_right_passes(x, pad, given):
                options = self.score_options(noised)
                nats = nats + self.score(network, noised.z, x, where.float(), None, pad, options).nats
        return nats

    def left_to_right_passes(
        self, x: Tensor, pad: Tensor | None, given: Tensor | None = None
    ) -> Iterator[tuple[NoisedBatch, Tensor]]:
        """Of each pass, ids with all blocks masked from their j-th token on, and where (B, L) that token is."""
        number = torch.zeros(x.shape[1], dtype=torch.int64)
        for start, stop in self._cut(x).bounds:
            number[start:stop] = torch.arange(stop - start)
        number, predicted = number.to(x.device), self.predicted(x, pad, given)
        every, stale = self.config.sampling.anchor_every, None
        for step in range(int(number.max()) + 1):
            z = x.masked_fill(predicted & (number >= step), self.mask_id)
            if every > 1 and step % every == 0:
                stale = z
            t = torch.ones(len(x), dtype=torch.float64)
            yield NoisedBatch(z, t, stale=stale), predicted & (number == step)

    @torch.no_grad()
    def causal_nats(self, network: Any, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), -log p(x) of the causal model, the clean copy: what the sampler speculative draws from."""
        nothing, everything = torch.zeros(x.shape, device=x.device), self.predicted(x, pad, given).float()
        with eval_mode(network):
            scored = self.score(network, x, x, nothing, None, pad, ScoreOptions(causal_weight=everything))
        assert scored.causal is not None
        return scored.causal.nats

    @torch.no_grad()
    def chained_nats(self, network: Any, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), -log p(x) of drafts that nobody verifies, exactly: the first token of each block by the causal model,
        the others by the chain."""
        if given is not None and given.any():
            raise UserError("estimator chained is for running text, and here tokens are given; use causal")
        predicted, nothing = self.predicted(x, pad), torch.zeros(x.shape, device=x.device)
        z = x.masked_fill(predicted, self.mask_id)
        chained = chained_tokens(z == self.mask_id if pad is None else (z == self.mask_id) | pad, self._cut(x))
        weights = ScoreOptions(causal_weight=(predicted & ~chained).float(), chain_weight=(predicted & chained).float())
        with eval_mode(network):
            scored = self.score(network, z, x, nothing, None, pad, weights)
        assert scored.causal is not None
        assert scored.chained is not None
        return scored.causal.nats + scored.chained.nats

    # Sampling: block after block

    @property
    def samplers(self) -> Sequence[str]:  # type: ignore[override]
        """All but the one for texts longer than a row: all of them go on, see `sample_long`."""
        return [name for name in SAMPLERS if name != "semi-autoregressive"]

    def check_run(self, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
        check_sampler(self, sampling)
        canvas, is_open = self._with_masks(canvas)
        check_left_to_right(self.config, canvas, sampling, pad)
        check_room(with_first_token(self.config, canvas), is_open, self.mask_id, pad, self.config.length)
        has_candidates = sampling.candidates > 1 and has_text_after_hole(canvas, self.mask_id, pad).any()
        if has_candidates and sampling.sampler not in ("speculative", "left-to-right", "ancestral"):
            raise UserError(
                f"sampling.candidates {sampling.candidates} needs the probability of each fill, and sampling.sampler "
                f"{sampling.sampler} has none; use 1, or speculative, left-to-right or ancestral",
                "sampling.candidates",
            )
        if sampling.sampler == "speculative":
            check_speculative(self.config, sampling)

    def generate(
        self,
        network: Any,
        canvas: Tensor,
        sampling: Sampling,
        rng: RowRng,
        pad: Tensor | None = None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        """The sampler runs in one block after the other. A frozen network keeps the text before it in a KV cache.

        A canvas with text after a hole is rearranged, and its holes are filled one after the other. Holes of unknown
        length have hole ids in place of mask ids, as many as they may have tokens.
        """
        canvas, is_open = self._with_masks(canvas)
        canvas = with_first_token(self.config, canvas)
        masked, after_hole = canvas == self.mask_id, has_text_after_hole(canvas, self.mask_id, pad)
        may_end = masked & (is_open | ~after_hole[:, None]) if sampling.stop_at_eos else masked & is_open
        hole_id, eos_id = self.config.model.hole_id, vocabulary_of(self.config).eos_id

        def writing(rng: RowRng) -> WriteText:
            write = functools.partial(self._write, network, sampling, rng)
            return functools.partial(sample_long, write, self.mask_id, self._row)

        write = writing(rng)
        if after_hole.any():
            assert hole_id is not None, "see check_run"
            assert eos_id is not None
            candidates, num = None, sampling.candidates
            if num > 1:
                log_p = functools.partial(self._text_log_p, network, canvas.device)
                candidates = Candidates(num, log_p, rng)
                write = writing(rng.candidates(num))
            frames = generate_arranged(write, canvas, may_end, self.mask_id, hole_id, eos_id, pad, candidates, holes)
        else:
            ending = Ending(eos_id, may_end) if eos_id is not None and may_end.any() else None
            frames = write(canvas, ending, pad, holes)
        return (replace(frame, open=is_open) for frame in frames) if is_open.any() else frames

    @torch.no_grad()
    def _text_log_p(self, network: Any, device: torch.device, texts: list[list[int]], starts: list[int]) -> Tensor:
        """(N,), log probabilities by the causal copy of what each text has from its start on."""
        ids = pad_sequence([torch.tensor(text, device=device) for text in texts], batch_first=True)
        if isinstance(network, FrozenNetwork):
            states = network.read(ids, network.cache(*ids.shape)).last[:, :-1]
            log_beliefs = functools.partial(network.log_beliefs, mask_id=self.mask_id)
        else:
            with eval_mode(network):
                states = network.causal_logits(ids)[:, 1:]
            log_beliefs = functools.partial(clean_log_beliefs, mask_id=self.mask_id)
        first, stop = (torch.tensor(each, device=device)[:, None] for each in (starts, [len(text) for text in texts]))
        place = torch.arange(1, ids.shape[1], device=device)
        scored = (place >= first) & (place < stop)
        log_p = torch.zeros(scored.shape, dtype=torch.float64, device=device)
        parts = (torch.split(each, SCORED_AT_ONCE) for each in (states[scored], ids[:, 1:][scored]))
        log_p[scored] = torch.cat(
            [log_beliefs(rows).gather(1, tokens[:, None])[:, 0].double() for rows, tokens in zip(*parts, strict=True)]
        )
        return log_p.sum(dim=1)

    def _with_masks(self, canvas: Tensor) -> tuple[Tensor, Tensor]:
        """The canvas with masks in its holes of unknown length, and (B, L), True there."""
        hole_id = self.config.model.hole_id
        is_open = torch.zeros_like(canvas, dtype=torch.bool) if hole_id is None else canvas == hole_id
        return canvas.masked_fill(is_open, self.mask_id), is_open

    def _write(
        self,
        network: Any,
        sampling: Sampling,
        rng: RowRng,
        canvas: Tensor,
        ending: Ending | None,
        pad: Tensor | None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        """The frames of a canvas that is a prompt and then masks in every row."""
        if sampling.sampler == "speculative":
            return generate_speculative(self.config, network, canvas, sampling, rng, pad, ending, holes)
        run = replace(self.sampling_run(network, canvas, sampling, rng, pad), holes=tuple(holes))
        return self.run_sampler(network, run, ending)

    def run_sampler(self, network: Any, run: SamplingRun, ending: Ending | None = None) -> Iterator[Frame]:
        canvas, sampling, bounds = run.canvas, run.sampling, self._cut(run.canvas).bounds
        open_block: OpenBlock = lambda ids, start, pad: run.denoiser  # noqa: E731
        if sampling.anchor_every > 1:
            open_block = lambda ids, start, pad: stale_denoiser(network, self.mask_id, sampling.anchor_every)  # noqa: E731
        with network.lend_cache(*canvas.shape) if isinstance(network, FrozenNetwork) else nullcontext() as cache:
            if cache is not None:
                open_block = CachedBlocks(network, self.mask_id, cache, anchor_every=sampling.anchor_every).open
            yield from sample_blocks(sampler_of(sampling), run, bounds, open_block, ending)


class CachedBlocks:
    """The denoisers of text blocks: the open block attends to the keys and values of the finished ones.

    The tokens of a finished block enter the cache in the same network call that first reads the next block. With a
    fixed batch they have a call of their own: any row of the batch may be the first that reads the next block.
    The anchor network runs every `anchor_every` steps.
    """

    def __init__(self, network: FrozenNetwork, mask_id: int, cache: KVCache, *, anchor_every: int):
        assert network.text_blocks is not None
        self.network, self.mask_id, self.text_blocks = network, mask_id, network.text_blocks
        self.anchor_every, self.cache = anchor_every, cache
        self.tokens = functools.cache(self._tokens)

    def _tokens(self, num_kept: int, num: int) -> OpenTokens:
        """`num_kept` causal tokens, then an open block up to `num`."""
        visible = torch.ones(num, num, dtype=torch.bool, device=self.network.embedding.device).tril()
        visible[num_kept:, num_kept:] = True
        return OpenTokens(visible)

    def _read(self, ids: Tensor, unseen: Tensor | None, num_kept: int) -> HiddenStates:
        cache, tokens = self.cache, self.tokens(num_kept, ids.shape[1])

        def read(ids: Tensor, unseen: Tensor | None) -> HiddenStates:
            return self.network.read_open(ids, cache, tokens, unseen)

        return self.network.replay(("block", num_kept), read, cache, ids, unseen)

    def _read_anchors(self, ids: Tensor, unseen: Tensor | None, num_kept: int) -> AnchorStates:
        cache, tokens = self.cache, self.tokens(num_kept, ids.shape[1])

        def read(ids: Tensor, unseen: Tensor | None) -> AnchorStates:
            return self.network.read_open_anchors(ids, cache, tokens, unseen)

        return self.network.replay(("anchors", num_kept), read, cache, ids, unseen).copy()

    def _denoise(self, ids: Tensor, unseen: Tensor | None, anchors: AnchorStates, num_kept: int) -> HiddenStates:
        cache, tokens = self.cache, self.tokens(num_kept, ids.shape[1])

        def read(ids: Tensor, unseen: Tensor | None, *parts: Tensor) -> HiddenStates:
            return self.network.denoise_open(ids, AnchorStates(*parts), cache, tokens, unseen)

        parts = (anchors.ids, anchors.hidden, anchors.bridged)
        return self.network.replay(("denoiser", num_kept), read, cache, ids, unseen, *parts)

    def open(self, ids: Tensor, start: int, pad: Tensor | None) -> Denoiser:
        """The denoiser of the block from `start` to the end of ids (B, stop), the text of all rows so far."""
        network, cache = self.network, self.cache
        most = self.text_blocks.block_length if network.batch is None else 0
        if start - 1 - cache.filled > most:  # a prompt
            network.read(ids[:, cache.filled : start - 1], cache)
        kept = start - 1 - cache.filled
        refreshes = Refreshes(self.anchor_every)
        anchors: AnchorStates | None = None

        def unseen_in(new: Tensor) -> Tensor | None:
            unseen = None if pad is None else pad[:, cache.filled :]
            if self.text_blocks.hidden_id is None:
                return unseen
            masked = new == self.mask_id
            return masked if unseen is None else unseen | masked

        def denoise(noisy: NoisyRows) -> DenoiserOutput:
            nonlocal kept, anchors
            z, rows = noisy.z, noisy.rows
            text = z if rows is None else ids.index_copy(0, rows, z)
            new = text[:, cache.filled :]
            if self.anchor_every == 1:
                hidden = self._read(new, unseen_in(new), kept)
            else:
                due = refreshes.due(len(z), noisy.step)
                if anchors is None or due.any():
                    read = new
                    if anchors is not None:
                        is_due = due.to(z.device)
                        if rows is not None:
                            is_due = is_due.new_zeros(len(ids)).index_copy(0, rows, is_due)
                        read = torch.where(is_due[:, None], new, anchors.ids)
                    anchors = self._read_anchors(read, unseen_in(read), kept)
                hidden = self._denoise(new, unseen_in(new), anchors, kept)
                anchors = anchors.after(kept) if kept else anchors
            output = OpenBlockOutput(network, hidden, self.mask_id, rows, ids.shape[1], start, kept)
            cache.filled += kept
            cache.position += kept
            kept = 0
            return output

        return denoise


@dataclass(frozen=True)
class OpenBlockOutput:
    """The output for one state of an open block; positions are those of the text up to the end of the block."""

    network: FrozenNetwork
    hidden: HiddenStates
    """Of `num_kept` tokens of the text, then of the last token before the block, then of the block."""
    mask_id: int
    rows: Tensor | None
    length: int
    start: int
    num_kept: int

    def _rows_of(self, hidden: Tensor, positions: Tensor) -> Tensor:
        row = torch.div(positions, self.length, rounding_mode="floor")
        place = positions - row * self.length - self.start + self.num_kept
        return hidden[row if self.rows is None else self.rows[row], place]

    def log_beliefs(self, positions: Tensor) -> Tensor:
        return self.network.log_beliefs(self._rows_of(self.hidden.last, positions), self.mask_id)

    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        assert self.hidden.anchor is not None
        return self.network.anchor_log_beliefs(self._rows_of(self.hidden.anchor, positions), self.mask_id)


@dataclass(frozen=True)
class BlockMdlm(BlockCausal, Mdlm):
    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size, text_blocks=self.text_blocks)


@dataclass(frozen=True)
class BlockAdlm(BlockCausal, Adlm):
    def __post_init__(self) -> None:
        BlockCausal.__post_init__(self)
        Adlm.__post_init__(self)

    def build(self) -> AnchoredTransformer:
        return AnchoredTransformer(self.config.model, vocabulary_of(self.config).size, text_blocks=self.text_blocks)


def block_causal(config: Config) -> type[BlockCausal]:
    """The block-causal form of the method that a config names."""
    forms: dict[str, type[BlockCausal]] = {"mdlm": BlockMdlm, "adlm": BlockAdlm}
    if config.method not in forms:
        raise UserError(
            f"model.block_length {config.model.block_length} is for adlm and mdlm, not {config.method}; leave it out",
            "model.block_length",
        )
    return forms[config.method]
