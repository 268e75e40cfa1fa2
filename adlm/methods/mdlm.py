"""MDLM: one bidirectional network restores masked tokens, trained with the NELBO.  [ADLM Eq. 4]

Shapes: B sequences, L tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adlm.methods.masked_diffusion import MaskedDiffusion, NoisedBatch
from adlm.methods.method import Loss
from adlm.models.transformer import Transformer


@dataclass(frozen=True)
class Mdlm(MaskedDiffusion):
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

    def loss_at(
        self, network: Transformer, x: Tensor, noised: NoisedBatch, pad: Tensor | None = None, progress: float = 1.0
    ) -> Loss:
        """The NELBO's weight, or 1 (`time.weight`), times the cross-entropy at masks; the same at any `progress`."""
        training, bound = self.training_and_bound_weight(noised)
        masked = self.masked_positions(noised.z, pad)
        options = self.loss_options(x, noised, pad)
        scored = network.score(noised.z, x, training * masked, self.mask_id, *self.conditioning(noised, pad), options)
        return self.loss_of(scored, bound * masked, x, noised, pad)
