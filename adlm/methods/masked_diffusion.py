"""The base class of the masked diffusion methods: noise, bound, beliefs and sampling. Subclasses define the loss.

Samplers call a network as a denoiser (`as_denoiser`), in which it ignores padding: a row is sampled as it would be
alone.

Shapes: B sequences, L tokens, N positions, V symbols. `pad` is True at padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from adlm.config.schema import Sampling
from adlm.constraints.holes import ConstrainedHole
from adlm.diffusion import schedules
from adlm.diffusion.beliefs import clean_log_beliefs, subs
from adlm.diffusion.masking import mask_counted, mask_tokens
from adlm.diffusion.objectives import continuous_weight, discrete_weight, prior_nats
from adlm.diffusion.schedules import NoiseSchedule
from adlm.diffusion.times import BatchRng, draw_grid_times, draw_times, importance_weight
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates
from adlm.methods.inputs import attention_pad, check_sampler, eval_mode, not_pad, vocabulary_of
from adlm.methods.method import Loss, Method
from adlm.models.heads import Planner, Scored
from adlm.models.transformer import NO_OPTIONS, LastCall, ScoreOptions, Transformer
from adlm.registry import SCHEDULES
from adlm.sampling.frame import Denoiser, DenoiserOutput, Frame, KnownText, NoisyRows, Row, SamplingRun, last_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import check_stride, sampler_of, steps_of


@dataclass(frozen=True)
class NoisedBatch:
    """A batch after the forward process: the input of a masked diffusion network."""

    z: Tensor
    """(B, L), noisy ids."""
    t: Tensor
    """(B,), the time of each sequence, or (B, L), that of each token, in double precision."""
    s: Tensor | None = None
    """Like t, the end of the step from t in discrete time; None in continuous time."""
    importance: Tensor | None = None
    """Like t, the uniform density of t over the one it was drawn from, in double precision; None is 1."""
    first_block: int | None = None
    """Block-causal methods: the length of the first text block; None is that of the others."""
    given: Tensor | None = None
    """(B, L), True at tokens that are given, such as prompts: never masked; None is nowhere."""
    labels: Tensor | None = None
    """(B, L), True at the anchors of methods that read labels; None for others."""
    stale: Tensor | None = None
    """(B, L), the noisier ids that an anchor network has read last; None if it reads z."""
    last_call: LastCall | None = None
    """What a network with memory has read in the call before (`methods/memory.py`)."""
    order: "DrawnOrder | None" = None
    """How the masks were drawn, if not by chance (`methods/rates.py`)."""


@dataclass(frozen=True)
class DrawnOrder:
    """An order in which tokens were revealed."""

    log_rates: Tensor
    """(B, L), log rates of the tokens, by which it was drawn; with a gradient if they are learnt."""
    log_chance: Tensor | None
    """(B,), its log probability, for learnt rates."""
    expected: Tensor | None
    """(B,), for learnt rates, what the text costs, predicted without knowing the order; in nats per token."""


@dataclass(frozen=True)
class BoundNoise:
    """The noise of one sample of the bound."""

    noised: NoisedBatch
    importance: Tensor
    """Like t, the uniform density of t over the one it was drawn from."""
    start: Tensor | None
    """(B, L), noisy ids at t = 0; None if the schedule masks nothing there."""


@dataclass(frozen=True)
class MaskedDiffusion(Method):
    """One bidirectional network that restores masked tokens. Subclasses define `loss_at`.

    Networks are typed Any: each subclass takes the network that its own `build` makes.
    """

    def build(self) -> nn.Module:
        return Transformer(self.config.model, vocabulary_of(self.config).size)

    @property
    def mask_id(self) -> int:
        return vocabulary_of(self.config).mask_id

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The schedule that the config names; its fields are the options of the same names."""
        schedule, options = SCHEDULES[self.config.schedule.name], self.config.schedule
        return schedule(*(getattr(options, field.name) for field in fields(schedule)))  # type: ignore[no-any-return]

    # The training objective

    def predicted(self, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        return _maskable(x, pad, given)

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
        return self.loss_at(network, x, noised, pad, progress)

    def loss_at(
        self, network: Any, x: Tensor, noised: NoisedBatch, pad: Tensor | None = None, progress: float = 1.0
    ) -> Loss:
        """The loss of a given noised batch."""
        raise NotImplementedError

    def loss_options(self, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> ScoreOptions:
        """`score_options`, with what the loss has and the bound has not."""
        options, train = self.score_options(noised), self.config.train
        return replace(options, planner=Planner(train.planner, train.planner_temperature)) if train.planner else options

    def loss_of(self, scored: Scored, weight: Tensor, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Loss:
        """The denoiser's term of the loss, and the other terms of block-causal networks that were scored.

        `weight` (B, L) is that of the bound, for `Loss.nats`; the weight of the loss is in `scored.total`.
        """
        is_bound = self.config.time.weight == "bound" and not self.config.train.planner
        term = "nelbo" if is_bound else "cross_entropy"
        total, parts = scored.total, {term: scored.total.detach()}
        for name, other in (("causal", scored.causal), ("chain", scored.chained)):
            if other is not None:
                total, parts = total + other.total, parts | {name: other.nats.sum()}
        if scored.misalignment is not None:
            total = total + scored.misalignment
            parts = parts | {"align": scored.misalignment.detach() / self.config.train.align_weight}
        return Loss(total, weight * scored.nats, self.predicted(x, pad, noised.given).sum(), parts)

    def noise(
        self, x: Tensor, pad: Tensor | None, rng: BatchRng, t_min: float, given: Tensor | None = None
    ) -> NoisedBatch:
        """z_t ~ q(z_t | x) at one random time t per sequence. Padding is masked only if the network attends to it."""
        time = self.config.time
        if time.steps:
            t, s = draw_grid_times(len(x), time.steps, rng, time.antithetic)
            return NoisedBatch(self.noise_at(x, pad, t, rng, given), t, s, given=given)
        if time.masks == "counted":
            share = draw_times(len(x), rng, 0.0, time.antithetic, time.power)
            z, t = mask_counted(x, _maskable(x, pad, given), share, self.mask_id, rng)
            return NoisedBatch(z, t, importance=importance_weight(share, 0.0, time.power), given=given)
        t = draw_times(len(x), rng, t_min, time.antithetic, time.power, time.t_max)
        importance = importance_weight(t, t_min, time.power, time.t_max)
        return NoisedBatch(self.noise_at(x, pad, t, rng, given), t, importance=importance, given=given)

    def noise_at(self, x: Tensor, pad: Tensor | None, t: Tensor, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        """z_t ~ q(z_t | x) (B, L) at given times t (B,)."""
        return self._masked(x, pad, given, self.schedule.mask_chance(t), rng)

    def _masked(self, x: Tensor, pad: Tensor | None, given: Tensor | None, chance: Tensor, rng: BatchRng) -> Tensor:
        """x (B, L), each token that may be masked with the chance (B,) of its row."""
        z = mask_tokens(x, chance.float().to(x.device)[:, None], self.mask_id, rng)
        for kept in (attention_pad(self.config, pad), given):
            z = z if kept is None else torch.where(kept, x, z)
        return z

    def weight(self, noised: NoisedBatch) -> Tensor:
        """(B, 1) or (B, L), the weight of the cross-entropies in the bound, in float32."""
        schedule, time = self.schedule, self.config.time
        if noised.s is None:
            weights = continuous_weight(schedule, noised.t)
        else:
            weights = discrete_weight(schedule.alpha(noised.s), schedule.alpha(noised.t), time.steps, time.sigma)
        if noised.importance is not None:
            weights = weights * noised.importance.to(weights.device)
        return per_token(weights.float().to(noised.z.device))

    def training_and_bound_weight(self, noised: NoisedBatch) -> tuple[Tensor, Tensor]:
        """Like `weight`, those of the cross-entropies in the training loss and in the bound.

        With `time.weight` one, w(t) is 1 in the loss: the expectation over uniform t of the sum of the cross-entropies
        at masks. Times of another density keep their importance weights. Counted masks have the same objective up to
        a factor: n tokens have 0, ..., n masks equally often if t is uniform in (0, 1], and 1, ..., n if counted.
        """
        bound = self.weight(noised)
        if self.config.time.weight == "bound":
            return bound, bound
        if noised.importance is None:
            return torch.ones_like(bound), bound
        return per_token(noised.importance.float().to(noised.z.device)), bound

    def masked_positions(self, z: Tensor, pad: Tensor | None) -> Tensor:
        """(B, L), True at masks outside the padding."""
        return (z == self.mask_id) & not_pad(z, pad)

    def conditioning(self, noised: NoisedBatch, pad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The network's inputs besides ids: sigma (B,) if it is time-conditioned, padding (B, L) it must ignore."""
        return self._sigma_at(noised.t, noised.z.device), attention_pad(self.config, pad)

    def score_options(self, noised: NoisedBatch) -> ScoreOptions:
        """What else `score` needs of the noise."""
        return ScoreOptions(noised.stale, noised.last_call, first_block=noised.first_block)

    # The bound

    @torch.no_grad()
    def bound(self, network: Any, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> Tensor:
        """nats (B, L) whose expectation is the NELBO, both ends of the schedule included.

        Times cover all of (0, 1], with importance weights. A schedule with alpha_0 < 1 adds the cross-entropy of what
        is still masked at t = 0, one with alpha_1 > 0 adds `prior_nats`. Log-linear with eps 0 needs neither.
        """
        noise = self.noise_for_bound(x, pad, rng, given)
        with eval_mode(network):
            return self.bound_at(network, x, noise, pad) * self.predicted(x, pad, given)

    def bound_at(self, network: Any, x: Tensor, noise: BoundNoise, pad: Tensor | None) -> Tensor:
        """(B, L), the nats of `bound` for given noise; to be ignored at padding and at tokens that are never masked."""
        nats = self.step_nats(network, x, noise.noised, pad) * per_token(noise.importance.float().to(x.device))
        if noise.start is not None:
            at_start = NoisedBatch(noise.start, torch.zeros(len(x), dtype=torch.float64))
            nats = nats + self.masked_nats(network, x, at_start, pad)
        return nats + prior_nats(self.schedule, vocabulary_of(self.config).num_clean)

    def noise_for_bound(self, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> BoundNoise:
        """The noise of one sample of the bound, at random times."""
        noised, importance = self._noise_by_importance(x, pad, rng, given)
        start = torch.zeros(len(x), dtype=torch.float64, device=rng.generator.device)
        masks_at_start = bool(self.schedule.mask_chance(start[0]) > 0)
        return BoundNoise(noised, importance, self.noise_at(x, pad, start, rng, given) if masks_at_start else None)

    def _noise_by_importance(
        self, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None
    ) -> tuple[NoisedBatch, Tensor]:
        """A noised batch for the bound and its importance weights (B,).

        Before t0 = 2 / L a row has about one mask or none, and one mask contributes 1/t, so uniform times would give an
        estimate of infinite variance. Therefore times below t0 get twice their uniform share, distributed as t0 u^2:
        the weighted contribution of one mask then grows as 1 / sqrt(t). Later times are uniform. In discrete time all
        times are uniform: no step is so early that it matters.
        """
        if self.config.time.steps:
            return self.noise(x, pad, rng, 0.0, given), torch.ones(len(x), dtype=torch.float64)
        u = draw_times(len(x), rng, antithetic=self.config.time.antithetic)
        t0 = min(0.25, 2 / x.shape[1])
        is_early, share = u <= 2 * t0, u / (2 * t0)
        slope = (1 - t0) / (1 - 2 * t0)
        t = torch.where(is_early, t0 * share**2, t0 + slope * (u - 2 * t0))
        noised = NoisedBatch(self.noise_at(x, pad, t, rng, given), t, given=given)
        return noised, torch.where(is_early, share, slope)

    def step_nats(self, network: Any, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        """(B, L), the weighted terms of the bound for a noised batch."""
        return self.weight(noised) * self.masked_nats(network, x, noised, pad)

    def masked_nats(self, network: Any, x: Tensor, noised: NoisedBatch, pad: Tensor | None) -> Tensor:
        """-log p(x | z) at masked positions (B, L), 0 elsewhere."""
        weight = self.masked_positions(noised.z, pad).float()
        sigma, unattended = self.conditioning(noised, pad)
        return self.score(network, noised.z, x, weight, sigma, unattended, self.score_options(noised)).nats

    def score(
        self,
        network: Any,
        z: Tensor,
        x: Tensor,
        weight: Tensor,
        sigma: Tensor | None = None,
        pad: Tensor | None = None,
        options: ScoreOptions = NO_OPTIONS,
    ) -> Scored:
        """The cross-entropy of x given z where `weight` (B, L) is not 0; of a pair, the denoiser's."""
        scored = network.score(z, x, weight, mask_id=self.mask_id, sigma=sigma, pad=pad, options=options)
        return scored[0] if self.anchored else scored  # type: ignore[no-any-return]

    def counted_noise(self, x: Tensor, pad: Tensor | None, rng: BatchRng, given: Tensor | None = None) -> NoisedBatch:
        """A number of masks uniform in 1, ..., n, then that many of the row's n tokens; t is their share."""
        z, t = mask_counted(x, _maskable(x, pad, given), draw_times(len(x), rng), self.mask_id, rng)
        return NoisedBatch(z, t, given=given)

    # The likelihood of a sampler

    @torch.no_grad()
    def sampler_nats(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        sampling: Sampling,
        rng: RowRng,
        given: Tensor | None = None,
    ) -> Tensor:
        """(B, L), -log p(x | path) of a sampler: it runs with the tokens of x in place of drawn ones, in float64.

        The path says which positions are revealed at which step; the tokens of one step are drawn independently. In an
        order that is a function of the visible tokens there is one path, and this is -log p(x). The path of `ancestral`
        is drawn from `rng` and does not depend on x: the expectation over paths is an upper bound on -log p(x), by
        Jensen's inequality.
        """
        canvas = x.masked_fill(self.predicted(x, pad, given), self.mask_id)
        if pad is not None:
            canvas = canvas.masked_fill(pad, vocabulary_of(self.config).padding_id)
        text = KnownText(x, torch.zeros(x.shape, dtype=torch.float64, device=x.device))
        run = self.sampling_run(network, canvas, sampling, rng, pad)
        last_frame(self.run_sampler(network, replace(run, text=text)))
        return text.nats

    def path_nats(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        rng: BatchRng,
        given: Tensor | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """(B, L), `sampler_nats` of `ancestral` in `steps` steps, by default `sampling.steps`, for a path a row.

        Batches are cut without changing the paths: all have the seed that is drawn here, and rows their numbers.
        """
        seed = int(torch.randint(2**62, (), generator=rng.generator, device=rng.generator.device))
        first, own = rng.slice_of(len(x)).first, self.config.sampling
        sampling = Sampling(steps=steps or own.steps, t_end=own.t_end, final="draw", anchor_every=own.anchor_every)
        return self.sampler_nats(network, x, pad, sampling, RowRng(seed, range(first, first + len(x))), given)

    # Beliefs and sampling

    def log_beliefs(self, network: Any, z: Tensor, alpha: Tensor | None = None) -> Tensor:
        return subs(self.logits(network, z, alpha), z, self.mask_id)

    @torch.no_grad()
    def logits(self, network: Any, z: Tensor, alpha: Tensor | None) -> Tensor:
        """(B, L, V), with dropout off."""
        with eval_mode(network):
            return network(z, self.conditioning_sigma(z, alpha))  # type: ignore[no-any-return]

    def conditioning_sigma(self, z: Tensor, alpha: Tensor | None, pad: Tensor | None = None) -> Tensor | None:
        if not self.config.model.time_conditioning:
            return None
        if alpha is not None:
            return -torch.log(alpha).float().to(z.device)
        share = self.masked_positions(z, pad).sum(dim=1).double() / not_pad(z, pad).sum(dim=1)
        return self._sigma_at(share, z.device)

    def _sigma_at(self, t: Tensor, device: torch.device) -> Tensor | None:
        """sigma_t (B,) for time-conditioned networks, else None."""
        time_conditioning = self.config.model.time_conditioning
        return schedules.sigma(self.schedule, t).float().to(device) if time_conditioning else None

    def check_run(self, canvas: Tensor, sampling: Sampling, pad: Tensor | None) -> None:
        check_sampler(self, sampling)
        if sampling.stop_at_eos:
            raise UserError(
                f"sampling.stop_at_eos true is for models that write from left to right, and {self.config.method} "
                "reveals whole rows; use false, or a block-causal model",
                "sampling.stop_at_eos",
            )
        if sampler_of(sampling).long_texts:
            check_stride(sampling, self._row)

    def generate(
        self,
        network: Any,
        canvas: Tensor,
        sampling: Sampling,
        rng: RowRng,
        pad: Tensor | None = None,
        holes: Sequence[ConstrainedHole] = (),
    ) -> Iterator[Frame]:
        """Samples with SUBS beliefs."""
        run = self.sampling_run(network, canvas, sampling, rng, pad)
        return self.run_sampler(network, replace(run, holes=tuple(holes)))

    def run_sampler(self, network: Any, run: SamplingRun) -> Iterator[Frame]:
        """The frames of a run of this network."""
        return sampler_of(run.sampling).sample(run)

    def sampling_run(
        self, network: Any, canvas: Tensor, sampling: Sampling, rng: RowRng, pad: Tensor | None
    ) -> SamplingRun:
        """The input of a sampler."""
        denoiser, steps = as_denoiser(network, self.mask_id, self.conditioning_sigma), steps_of(self.schedule, sampling)
        return SamplingRun(denoiser, canvas, self.mask_id, steps, sampling, rng, pad, self._row)

    @property
    def _row(self) -> Row:
        bos, eos = vocabulary_of(self.config).row_boundaries
        return Row(self.config.length, tuple(bos), tuple(eos))


def _maskable(x: Tensor, pad: Tensor | None, given: Tensor | None) -> Tensor:
    """(B, L), True at text that is not given."""
    return not_pad(x, pad) if given is None else not_pad(x, pad) & ~given


def per_token(values: Tensor) -> Tensor:
    """(B, 1) or (B, L), to broadcast over tokens: values of sequences (B,) or of tokens (B, L)."""
    return values if values.ndim == 2 else values[:, None]


@dataclass(frozen=True)
class FrozenOutput:
    """The output of a frozen network for one state: each head runs only at the requested positions."""

    network: FrozenNetwork
    hidden: HiddenStates
    mask_id: int

    def log_beliefs(self, positions: Tensor) -> Tensor:
        return self.network.log_beliefs(self.hidden.last.flatten(0, 1)[positions], self.mask_id)

    def log_rates(self, positions: Tensor) -> Tensor:
        states = self.hidden.last if self.hidden.anchor is None else self.hidden.anchor
        return self.network.log_rates(states.flatten(0, 1)[positions])

    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        assert self.hidden.anchor is not None
        return self.network.anchor_log_beliefs(self.hidden.anchor.flatten(0, 1)[positions], self.mask_id)


@dataclass(frozen=True)
class NetworkOutput:
    """The output of a network in training: a sharded one can only be called as a whole, so all logits are computed."""

    network: nn.Module
    z: Tensor
    sigma: Tensor | None
    pad: Tensor | None
    mask_id: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the network takes."""

    @torch.no_grad()
    def log_beliefs(self, positions: Tensor) -> Tensor:
        with eval_mode(self.network):
            logits = self.network(self.z, self.sigma, self.pad, **self.options)
            return clean_log_beliefs(logits.flatten(0, 1)[positions], self.mask_id)

    @torch.no_grad()
    def anchor_log_beliefs(self, positions: Tensor) -> Tensor:
        with eval_mode(self.network):
            read, memory = self.options.get("stale", self.z), self.options.get("memory")
            logits = self.network.anchor_logits(read, self.sigma, self.pad, memory)  # type: ignore[operator]
            return clean_log_beliefs(logits.flatten(0, 1)[positions], self.mask_id)

    @torch.no_grad()
    def log_rates(self, positions: Tensor) -> Tensor:
        with eval_mode(self.network):
            log_rates: Tensor = self.network.log_rates(self.z, self.sigma, self.pad)  # type: ignore[operator]
            return log_rates.flatten()[positions]


SigmaFunction = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]
"""(z (B, L), alpha (B,) or None, pad) -> sigma (B,) of a time-conditioned network, else None."""


def as_denoiser(network: nn.Module | FrozenNetwork, mask_id: int, sigma_of: SigmaFunction) -> Denoiser:
    """The network as a function from noisy ids to beliefs."""

    def denoise(noisy: NoisyRows) -> DenoiserOutput:
        z, pad = noisy.z, noisy.pad
        sigma = sigma_of(z, noisy.alpha, pad)
        if isinstance(network, FrozenNetwork):
            return FrozenOutput(network, network.hidden(z, sigma, pad), mask_id)
        return NetworkOutput(network, z, sigma, pad, mask_id)

    return denoise


def logits_everywhere(
    network: nn.Module | FrozenNetwork, sigma_of: SigmaFunction, pad: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """(z, alpha) -> logits (B, L, V), for reference sampling; dropout off and no gradient."""

    @torch.no_grad()
    def logits(z: Tensor, alpha: Tensor) -> Tensor:
        sigma = sigma_of(z, alpha, pad)
        if isinstance(network, FrozenNetwork):
            return network.logits(network.hidden(z, sigma, pad).last.flatten(0, 1)).view(*z.shape, -1)
        with eval_mode(network):
            return network(z, sigma, pad)  # type: ignore[no-any-return]

    return logits
