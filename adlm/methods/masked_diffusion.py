"""The base class of the masked diffusion methods: bound, beliefs and sampling. What is trained is in the subclasses.

Shapes: B sequences, L tokens, V symbols. `pad` is True at padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adlm.config.schema import Config, Sampling
from adlm.data.rows.packing import row_boundaries
from adlm.diffusion.beliefs import subs
from adlm.diffusion.objectives import prior_nats
from adlm.diffusion.times import BatchRng
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import noising
from adlm.methods.denoising import as_denoiser
from adlm.methods.inputs import attention_pad, check_sampler, eval_mode, not_pad, vocabulary_of
from adlm.methods.method import Loss
from adlm.methods.noising import NoisedBatch
from adlm.models.transformer import Transformer
from adlm.sampling.frame import Frame, Row, SamplingRun
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sampler_of, steps_of


@dataclass(frozen=True)
class MaskedDiffusion:
    """One bidirectional network that restores masked tokens. Subclasses define `loss_at`.

    Networks are typed Any: each subclass takes the network that its own `build` makes.
    """

    config: Config
    exact: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    any_order: ClassVar[bool] = True
    samplers: ClassVar[Sequence[str] | None] = None

    def build(self) -> nn.Module:
        return Transformer(self.config.model, vocabulary_of(self.config).size)

    def predicted(self, x: Tensor, pad: Tensor | None) -> Tensor:
        return not_pad(x, pad)

    def loss(self, network: Any, x: Tensor, pad: Tensor | None, progress: float, rng: BatchRng) -> Loss:
        noised = noising.noise(self.config, x, pad, rng, self.config.time.t_min)
        return self.loss_at(network, x, noised, pad, progress)

    def loss_at(
        self, network: Any, x: Tensor, noised: NoisedBatch, pad: Tensor | None = None, progress: float = 1.0
    ) -> Loss:
        """The loss of a given noised batch."""
        raise NotImplementedError

    @torch.no_grad()
    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng) -> Tensor:
        """nats (B, L) whose expectation is the NELBO, both ends of the schedule included.

        Times cover all of (0, 1], with importance weights. A schedule with alpha_0 < 1 adds the cross-entropy of what
        is still masked at t = 0, one with alpha_1 > 0 adds `prior_nats`. Log-linear with eps 0 needs neither.
        """
        config, schedule = self.config, noising.schedule_of(self.config)
        with eval_mode(network):
            noised, importance = noising.noise_for_bound(config, x, pad, rng)
            nats = self.step_nats(network, x, noised, pad) * importance.float().to(x.device)[:, None]
            start = torch.zeros(len(x), dtype=torch.float64, device=rng.generator.device)
            if schedule.mask_chance(start[0]) > 0:
                at_start = NoisedBatch(noising.noise_at(config, x, pad, start, rng), start)
                nats = nats + self.masked_nats(network, x, at_start, pad)
            return (nats + prior_nats(schedule, vocabulary_of(config).num_clean)) * not_pad(x, pad)

    def step_nats(self, network: Any, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        """(B, L), the weighted terms of the bound for a noised batch."""
        return noising.weight(self.config, noised) * self.masked_nats(network, x, noised, pad)

    def masked_nats(self, network: Any, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        """-log p(x | z) at masked positions (B, L), 0 elsewhere."""
        weight = noising.masked_positions(self.config, noised.z, pad).float()
        mask_id = vocabulary_of(self.config).mask_id
        scored = network.score(noised.z, x, weight, mask_id, *self.conditioning(noised, pad))
        return scored.nats  # type: ignore[no-any-return]

    def conditioning(self, noised: NoisedBatch, pad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The network's inputs besides ids: sigma (B,) if it is time-conditioned, padding (B, L) it must ignore."""
        sigma = noising.conditioning_sigma(self.config, noised.t, noised.z.device)
        return sigma, attention_pad(self.config, pad)

    def log_beliefs(self, network: Any, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        return subs(self.logits(network, z, alpha), z, vocabulary_of(self.config).mask_id)

    @torch.no_grad()
    def logits(self, network: Any, z: Tensor, alpha: Tensor | None) -> Tensor:
        """(B, L, V), with dropout off."""
        with eval_mode(network):
            return network(z, noising.conditioning_sigma_of(self.config, z, alpha))  # type: ignore[no-any-return]

    def generate(
        self, network: Any, canvas: Tensor, sampling: Sampling, rng: RowRng, pad: Tensor | None = None
    ) -> Iterator[Frame]:
        """Samples with SUBS beliefs."""
        check_sampler(self, sampling)
        return sampler_of(sampling).sample(self.sampling_run(network, canvas, sampling, rng, pad))

    def sampling_run(
        self, network: nn.Module | FrozenNetwork, canvas: Tensor, sampling: Sampling, rng: RowRng, pad: Tensor | None
    ) -> SamplingRun:
        """The input of a sampler."""
        config, vocabulary = self.config, vocabulary_of(self.config)
        steps = steps_of(noising.schedule_of(config), sampling)
        bos, eos = row_boundaries(vocabulary)
        row = Row(config.length, tuple(bos), tuple(eos))
        return SamplingRun(as_denoiser(config, network), canvas, vocabulary.mask_id, steps, sampling, rng, pad, row)
