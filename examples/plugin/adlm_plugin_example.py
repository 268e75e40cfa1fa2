"""Two methods, a bridge, a noise schedule, a sampler, an anchor rule and a corpus for adlm, in a package of their own.

See docs/extending.md.

After `pip install examples/plugin` the names in its pyproject.toml work in every command:

    adlm train own method=unweighted model.bridge=residual schedule.name=quadratic data.name=haiku ...
    adlm train own anchor.rule=long-words ...
    adlm train judge method=later-tokens ...
    adlm sample RUN sampling.sampler=remask-late
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.config.schema import Anchor, Sampling
from adlm.data.rows.anchor_rules import AnchorRule, GetStatistics
from adlm.data.sources.corpora import Corpus
from adlm.diffusion.masking import reveal_chance
from adlm.diffusion.schedules import NoiseSchedule
from adlm.diffusion.times import BatchRng
from adlm.methods.adlm import Adlm
from adlm.methods.ar import Ar
from adlm.methods.inputs import vocabulary_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.methods.method import Loss
from adlm.models.anchored import AnchoredTransformer
from adlm.models.bridges import Bridge
from adlm.models.transformer import Transformer
from adlm.sampling.events import sample_positions_first
from adlm.sampling.samplers import Sampler
from adlm.sampling.steps import Steps


@dataclass(frozen=True)
class Unweighted(Adlm):
    """Trained with the plain cross-entropy at masked positions, as BERT is. Bound and sampling are those of ADLM."""

    def loss_at(
        self,
        network: AnchoredTransformer,
        x: Tensor,
        noised: NoisedBatch,
        pad: Tensor | None = None,
        progress: float = 1.0,
    ) -> Loss:
        masked = self.masked_positions(noised.z, pad).float()
        mask_id = vocabulary_of(self.config).mask_id
        scored, _ = network.score(noised.z, x, masked, None, mask_id, *self.conditioning(noised, pad))
        nats = self.weight(noised) * scored.nats
        parts = {"cross_entropy": scored.total.detach()}
        return Loss(scored.total, nats, self.predicted(x, pad, noised.given).sum(), parts)


@dataclass(frozen=True)
class LaterTokens(Ar):
    """Trained with more weight on later tokens, which have more context. Likelihood and sampling are those of AR."""

    def loss(
        self,
        network: Transformer,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
    ) -> Loss:
        predicted = self.predicted(x, pad, given)
        weight = predicted[:, 1:] * torch.linspace(0.5, 1.5, x.shape[1] - 1, device=x.device)
        scored = network.score(x[:, :-1], x[:, 1:], weight, vocabulary_of(self.config).mask_id)
        nats = F.pad(scored.nats * predicted[:, 1:], (1, 0))
        return Loss(scored.total, nats, predicted.sum(), {"weighted_nll": scored.total.detach()})


class ResidualBridge(Bridge):
    """The anchor network's hidden states plus an MLP of them."""

    def __init__(self, num_symbols: int, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        return hidden + self.mlp(hidden)


@dataclass(frozen=True)
class Quadratic:
    """alpha_t = 1 - t^2. A field named eps, sigma_min or sigma_max would receive the option of that name."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t**2

    def alpha_prime(self, t: Tensor) -> Tensor:
        return -2 * t

    def mask_chance(self, t: Tensor) -> Tensor:
        return t**2


def late_steps(schedule: NoiseSchedule, t: Tensor, sampling: Sampling) -> Steps:
    """Tokens are remasked with probability sampling.eta, but only in the second half: before, there is little text."""
    alpha_t, alpha_s = schedule.alpha(t[:-1]), schedule.alpha(t[1:])
    sigma = torch.where(t[:-1] <= 0.5, sampling.strength, 0.0).to(t).minimum((1 - alpha_s) / alpha_t.clamp(min=1e-12))
    return Steps(t, alpha_t, alpha_s, reveal_chance(alpha_s, alpha_t, sigma).clamp(0, 1), sigma)


REMASK_LATE = Sampler(sample_positions_first, late_steps)


def long_words(anchor: Anchor, num_symbols: int, statistics: GetStatistics) -> AnchorRule:
    """Tokens of at least six letters."""
    is_long = torch.tensor([len(text.strip()) >= 6 for text in statistics().texts])
    return lambda x, pad: is_long.to(x.device)[x] if pad is None else is_long.to(x.device)[x] & ~pad


HAIKU = Corpus("Haiku, one text file each", folders=("haiku",), files={"train": ("*.txt",)}, held_out=True)
