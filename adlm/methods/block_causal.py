"""Block-causal masked diffusion: MDLM and ADLM on blocks of text, each given the clean text before it.

log p(x) = sum over blocks of log p(block | text before), and each term has the bound of masked diffusion with a time of
its own. So the noise is that of MDLM on short rows, the blocks; only the network sees where they stand
(`models/text_blocks.py`). The first token of a row is given: packed rows begin with bos.

Shapes: B sequences, L tokens. `pad` is True at padding, which is at the end of rows.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates, OpenTokens, identity
from adlm.methods.adlm import Adlm
from adlm.methods.infilling import check_room, generate_arranged
from adlm.methods.inputs import (
    check_left_to_right,
    check_sampler,
    eval_mode,
    has_text_after_hole,
    not_pad,
    stop_id,
    vocabulary_of,
    with_first_token,
)
from adlm.methods.masked_diffusion import BoundNoise, MaskedDiffusion, NoisedBatch
from adlm.methods.mdlm import Mdlm
from adlm.methods.speculative import check_speculative, generate_speculative
from adlm.models.anchored import AnchoredTransformer
from adlm.models.text_blocks import BlockCut, TextBlocks
from adlm.models.transformer import Transformer
from adlm.registry import SAMPLERS
from adlm.sampling.frame import Denoiser, DenoiserOutput, Frame
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import OpenBlock, sample_blocks, sampler_of


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
        return NoisedBatch(cut.join(noised.z, x), t, s, importance, cut.first, given)

    def _at_tokens(self, cut: BlockCut, values: Tensor, x: Tensor) -> Tensor:
        """(B, L), the value (B n,) of each token's block; 1 at the first token, and in blocks without masks."""
        ones = torch.ones(x.shape, dtype=torch.float64, device=values.device)
        finite = torch.where(values.isfinite(), values, 1.0).double()
        return cut.join(finite[:, None].expand(-1, cut.index.shape[1]), ones)

    def conditioning(self, noised: NoisedBatch, pad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return None, pad

    def block_options(self, noised: NoisedBatch) -> dict[str, Any]:
        return {"first_block": noised.first_block}

    def causal_options(self, x: Tensor, pad: Tensor | None, given: Tensor | None) -> dict[str, Any]:
        weight = self.config.train.causal_weight
        return {"causal_weight": weight * self.predicted(x, pad, given).float()} if weight else {}

    # Exact likelihoods

    @torch.no_grad()
    def left_to_right_nats(self, network: Any, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), -log p(x) of the sampler left-to-right, exactly: the j-th tokens of all blocks in the j-th pass."""
        nats = torch.zeros(x.shape, device=x.device)
        with eval_mode(network):
            for z, where in self.left_to_right_passes(x, pad, given):
                nats = nats + self.score(network, z, x, where.float(), pad=pad).nats
        return nats

    def left_to_right_passes(
        self, x: Tensor, pad: Tensor | None, given: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each pass, the noisy ids (B, L), with all blocks masked from their j-th token on, and where that is."""
        number = torch.zeros(x.shape[1], dtype=torch.int64)
        for start, stop in self._cut(x).bounds:
            number[start:stop] = torch.arange(stop - start)
        number, predicted = number.to(x.device), self.predicted(x, pad, given)
        for step in range(int(number.max()) + 1):
            yield x.masked_fill(predicted & (number >= step), self.mask_id), predicted & (number == step)

    @torch.no_grad()
    def causal_nats(self, network: Any, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), -log p(x) of the causal model, the clean copy: what the sampler speculative draws from."""
        nothing, everything = torch.zeros(x.shape, device=x.device), self.predicted(x, pad, given).float()
        with eval_mode(network):
            scored = self.score(network, x, x, nothing, pad=pad, causal_weight=everything)
        assert scored.causal is not None
        return scored.causal.nats

    # Sampling: block after block

    @property
    def samplers(self) -> Sequence[str]:  # type: ignore[override]
        """All but the one for texts longer than a row: blocks go on to the end of any text."""
        return [name for name in SAMPLERS if name != "semi-autoregressive"]

    def check_run(self, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
        check_sampler(self, sampling)
        check_left_to_right(self.config, canvas, sampling, pad)
        if has_text_after_hole(canvas, self.mask_id, pad).any():
            check_room(canvas, self.mask_id, pad, self.config.length)
        if sampling.sampler == "speculative":
            check_speculative(self.config, sampling)

    def generate(
        self, network: Any, canvas: Tensor, sampling: Sampling, rng: RowRng, pad: Tensor | None = None
    ) -> Iterator[Frame]:
        """The sampler runs in one block after the other. A frozen network keeps the text before it in a KV cache.

        A canvas with text after a hole is rearranged, and its holes are filled one after the other.
        """
        if has_text_after_hole(canvas, self.mask_id, pad).any():
            hole_id, eos_id = self.config.model.hole_id, vocabulary_of(self.config).eos_id
            assert hole_id is not None, "see check_run"
            assert eos_id is not None
            whole = replace(sampling, stop_at_eos=False)  # the lengths of the holes are given
            return generate_arranged(
                lambda part, after: self.generate(network, part, whole, rng, after),
                with_first_token(self.config, canvas),
                self.mask_id,
                hole_id,
                eos_id,
                pad,
            )
        if sampling.sampler == "speculative":
            return generate_speculative(self.config, network, with_first_token(self.config, canvas), sampling, rng, pad)
        run = self.sampling_run(network, with_first_token(self.config, canvas), sampling, rng, pad)
        open_block: OpenBlock = lambda ids, start, pad: run.denoiser  # noqa: E731
        if isinstance(network, FrozenNetwork):
            open_block = CachedBlocks(network, self.mask_id, *canvas.shape).open
        return sample_blocks(
            sampler_of(sampling), run, self._cut(canvas).bounds, open_block, stop_id(self.config, sampling)
        )


class CachedBlocks:
    """The denoisers of text blocks: the open block attends to the keys and values of the finished ones.

    The tokens of a finished block enter the cache in the same network call that first reads the next block. With a
    fixed batch they have a call of their own: any row of the batch may be the first that reads the next block.
    """

    def __init__(self, network: FrozenNetwork, mask_id: int, num_rows: int, length: int):
        assert network.text_blocks is not None
        self.network, self.mask_id, self.text_blocks = network, mask_id, network.text_blocks
        self.cache = functools.cache(lambda: network.cache(num_rows, length))  # allocated when the first block opens
        self.tokens = functools.cache(self._tokens)

    def _tokens(self, num_kept: int, num: int) -> OpenTokens:
        """`num_kept` causal tokens, then an open block up to `num`."""
        visible = torch.ones(num, num, dtype=torch.bool, device=self.network.embedding.device).tril()
        visible[num_kept:, num_kept:] = True
        return OpenTokens(visible)

    def open(self, ids: Tensor, start: int, pad: Tensor | None) -> Denoiser:
        """The denoiser of the block from `start` to the end of ids (B, stop), the text of all rows so far."""
        network, cache = self.network, self.cache()
        most = self.text_blocks.block_length if network.batch is None else 0
        if start - 1 - cache.filled > most:  # a prompt
            network.read(ids[:, cache.filled : start - 1], cache)
        kept = start - 1 - cache.filled
        padding = pad

        def denoise(z: Tensor, alpha: Tensor | None, pad: Tensor | None, rows: Tensor | None = None) -> DenoiserOutput:
            """`padding` is that of all rows, `pad` of those in z."""
            nonlocal kept
            text = z if rows is None else ids.index_copy(0, rows, z)
            new, unseen = text[:, cache.filled :], None if padding is None else padding[:, cache.filled :]
            if self.text_blocks.hidden_id is not None:
                masked = new == self.mask_id
                unseen = masked if unseen is None else unseen | masked
            hidden = network.read_open(identity, new, cache, self.tokens(kept, new.shape[1]), unseen=unseen)
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
        return clean_log_beliefs(self.network.logits(self._rows_of(self.hidden.last, positions)), self.mask_id)

    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        assert self.hidden.anchor is not None
        rows = self._rows_of(self.hidden.anchor, positions)
        return clean_log_beliefs(self.network.anchor_logits(rows), self.mask_id)


@dataclass(frozen=True)
class BlockMdlm(BlockCausal, Mdlm):
    def build(self) -> Transformer:
        return Transformer(self.config.model, vocabulary_of(self.config).size, text_blocks=self.text_blocks)


@dataclass(frozen=True)
class BlockAdlm(BlockCausal, Adlm):
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
