"""adlm and mdlm with a memory: masks also read what the network made of them in the row's last call.

The states that a head reads, of adlm the anchor head, hold what was predicted of a mask. With `model.memory` they are
added, through a linear map that starts at 0, to the embeddings of the masks of the next call. So a sampling step knows
what the steps before it expected, and not only what they revealed. docs/theory.md says what bound holds.

Other estimators than `path` and `order` see the model without its memory, which is a masked model like any other.

Shapes: B sequences, L tokens, d wide. `pad` is True at padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adlm.config.schema import Config
from adlm.diffusion.masking import last_revealed
from adlm.diffusion.times import BatchRng, grid
from adlm.inference.frozen import FrozenNetwork
from adlm.methods.adlm import Adlm
from adlm.methods.inputs import attention_pad, check_memory, eval_mode
from adlm.methods.masked_diffusion import FrozenOutput, MaskedDiffusion, NetworkOutput, NoisedBatch
from adlm.methods.mdlm import Mdlm
from adlm.methods.method import Loss
from adlm.models.transformer import LastCall
from adlm.sampling.frame import Denoiser, DenoiserOutput, Frame, NoisyRows, SamplingRun


@dataclass(frozen=True)
class Remembering(MaskedDiffusion):
    auto_class: ClassVar[str | None] = None

    def loss(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Loss:
        noised = replace(self.noise(x, pad, rng, self.config.time.t_min, given), labels=labels)
        return self.loss_at(network, x, replace(noised, last_call=self.last_call(noised, pad, rng)), pad, progress)

    def last_call(self, noised: NoisedBatch, pad: Tensor | None, rng: BatchRng) -> LastCall:
        """What the sampler has read in the call before: z_t with the tokens masked that this call has revealed.

        A share of the rows, and rows in which nothing is revealed yet, remember nothing.
        """
        z, sampling = noised.z, self.config.sampling
        masked = z == self.mask_id
        fixed = [each for each in (attention_pad(self.config, pad), noised.given) if each is not None]
        revealed = ~masked & ~torch.stack(fixed).any(dim=0) if fixed else ~masked
        alphas = self.schedule.alpha(grid(sampling.steps, sampling.t_end)).to(z.device)
        last = last_revealed(revealed, self.schedule.alpha(noised.t).to(z.device), alphas, rng)
        has_memory = rng.uniform((len(z),), z.device) < self.config.train.memory_share
        remembering = masked & (has_memory & last.any(dim=1))[:, None]
        return LastCall(z.masked_fill(last, self.mask_id), remembering)

    @torch.no_grad()
    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        """nats (B, L) whose expectation bounds -log p(x) of the ancestral sampler in `sampling.steps` steps.

        One path is drawn, with a network call for each step that reveals something.
        """
        return self.path_nats(network, x, pad, rng, given)

    def run_sampler(self, network: Any, run: SamplingRun) -> Iterator[Frame]:
        denoiser_of = frozen_memory_denoiser if isinstance(network, FrozenNetwork) else memory_denoiser
        frames = super().run_sampler(network, replace(run, denoiser=denoiser_of(network, self.mask_id)))
        return (frame for frame in frames)  # no `PositionsFirst`: the denoiser is that of these rows, no other may join


@dataclass(frozen=True)
class RememberingMdlm(Remembering, Mdlm):
    pass


@dataclass(frozen=True)
class RememberingAdlm(Remembering, Adlm):
    pass


def remembering(config: Config) -> type[Remembering]:
    """The form of the method that a config names whose network has a memory."""
    forms: dict[str, type[Remembering]] = {"mdlm": RememberingMdlm, "adlm": RememberingAdlm}
    check_memory(config, config.sampling)
    return forms[config.method]


class Memory:
    """The states of the last call of every row. From call to call the batch may lose its last rows."""

    def __init__(self, mask_id: int):
        self.mask_id = mask_id
        self._states: Tensor | None = None
        self._step: Tensor | None = None

    def at_masks(self, z: Tensor) -> Tensor | None:
        """(B, L, d), the states at the masks of z; 0 elsewhere, and in the first call of a row. None in that of all."""
        return None if self._states is None else self._states[: len(z)] * (z == self.mask_id)[..., None]

    def keep(self, states: Tensor, step: Tensor | None) -> None:
        """Keep the states (B, L, d) of this call, of rows that have reached another step (B,) than in the call before.

        A row at step -1 has reached none. Without steps all rows advance. With CUDA graphs the next call overwrites the
        states, so they are copied.
        """
        if step is None:
            self._states = states.clone()
            return
        before = -torch.ones_like(step) if self._step is None else self._step[: len(step)]
        states_before = torch.zeros_like(states) if self._states is None else self._states[: len(step)]
        advances = (step != before).to(states.device)
        self._states, self._step = torch.where(advances[:, None, None], states, states_before), step


def memory_denoiser(network: Any, mask_id: int) -> Denoiser:
    """The denoiser of rows whose network remembers its last call: the plain form."""
    memory = Memory(mask_id)

    def denoise(noisy: NoisyRows) -> DenoiserOutput:
        remembered = memory.at_masks(noisy.z)
        with torch.no_grad(), eval_mode(network):
            memory.keep(network.to_remember(noisy.z, None, noisy.pad, remembered), noisy.step)
        return NetworkOutput(network, noisy.z, None, noisy.pad, mask_id, {"memory": remembered})

    return denoise


def frozen_memory_denoiser(network: FrozenNetwork, mask_id: int) -> Denoiser:
    """`memory_denoiser` by a frozen network, with one pass a call."""
    memory = Memory(mask_id)

    def denoise(noisy: NoisyRows) -> DenoiserOutput:
        z, remembered = noisy.z, memory.at_masks(noisy.z)
        if remembered is None:  # zeros, so that all calls have one CUDA graph
            remembered = network.embedding.new_zeros(*z.shape, network.embedding.shape[1], dtype=network.dtype)
        hidden = network.hidden(z, None, noisy.pad, remembered)
        memory.keep(hidden.last if hidden.anchor is None else hidden.anchor, noisy.step)
        return FrozenOutput(network, hidden, mask_id)

    return denoise
