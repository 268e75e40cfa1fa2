"""Sampling speed: time and memory of sampling from fully masked canvases. Uses no dataset.

Shapes: B sequences, L tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from adlm.apps.bench.training_speed import SpeedProgress
from adlm.config.schema import Sampling
from adlm.diffusion.beliefs import subs
from adlm.distributed import device_name
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates, KVCache, Result
from adlm.language_model import LanguageModel
from adlm.methods.inputs import check_canvas
from adlm.methods.masked_diffusion import MaskedDiffusion, logits_everywhere
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Frame, last_frame
from adlm.sampling.reference import reference_transition, sample_reference
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sample_analytic, sampler_of


@dataclass(frozen=True)
class SamplingSpeed:
    """One measurement: a batch of B fully masked canvases of L tokens is sampled."""

    device: str
    dtype: str
    """Of the matrix products in the network."""
    graphs: bool
    """Whether CUDA graphs are used."""
    plain: bool
    """Whether the reference sampler and the training network were measured."""
    method: str
    sampler: str
    steps: int
    batch: int
    length: int
    network_calls: int
    """Of one sampling run."""
    seconds: float
    """Of one sampling run: the median."""
    seconds_per_sequence: float
    """`seconds` divided by the batch size."""
    milliseconds_a_call: float
    """Time of a run divided by its network calls; includes drawing tokens and everything else."""
    tokens_per_second: float
    peak_gib: float | None
    """Peak memory allocated on the GPU, including the weights; None on a CPU."""


class CountingNetwork(FrozenNetwork):
    """A frozen network that counts its calls."""

    calls = 0

    def hidden(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> HiddenStates:
        self.calls += 1
        return super().hidden(z, sigma, pad)

    def read_and(self, make: Callable[..., Result], ids: Tensor, cache: KVCache, *args: Tensor | None) -> Result:
        self.calls += 1
        return super().read_and(make, ids, cache, *args)


def measure_sampling(
    lm: LanguageModel,
    sampling: Sampling,
    batch: int,
    length: int,
    repeats: int,
    plain: bool,
    progress: SpeedProgress,
    seed: int = 0,
) -> SamplingSpeed:
    """Time `repeats` identical sampling runs, after an untimed one that captures the CUDA graphs.

    `plain` measures the reference: the training network computes all logits and every step samples the full posterior;
    autoregressive methods recompute the whole prefix. In bf16 on a GPU, like the optimized form.
    """
    device = next(lm.network.parameters()).device
    canvas = torch.full((batch, length), lm.mask_id, device=device)
    check_canvas(lm.method, canvas, sampling)
    network = lm.network if plain else CountingNetwork(lm.network)
    num_calls = _call_counter(network)
    max_steps = length if lm.method.exact else sampling.steps  # a sampler may skip steps

    def sample_once(number: int) -> float:
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if plain and device.type == "cuda" else nullcontext():
            frames = _sample(lm, network, canvas, sampling, RowRng(seed, range(batch)), plain)
            if device.type == "cpu":
                frames = _reporting_frames(frames, progress, number * max_steps, (repeats + 1) * max_steps)
            last_frame(frames)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    sample_once(0)
    calls = num_calls()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(sample_once(number) for number in range(1, repeats + 1))
    plain_dtype = torch.bfloat16 if device.type == "cuda" else next(lm.network.parameters()).dtype
    return SamplingSpeed(
        device=device_name(device),
        dtype=str(network.dtype if isinstance(network, FrozenNetwork) else plain_dtype).removeprefix("torch."),
        graphs=isinstance(network, FrozenNetwork) and network.graph_cache is not None,
        plain=plain,
        method=lm.config.method,
        sampler=sampling.sampler,
        steps=sampling.steps,
        batch=batch,
        length=length,
        network_calls=calls,
        seconds=seconds,
        seconds_per_sequence=seconds / batch,
        milliseconds_a_call=1e3 * seconds / calls,
        tokens_per_second=batch * length / seconds,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    )


def _reporting_frames(
    frames: Iterator[Frame], progress: SpeedProgress, num_done: int, total_steps: int
) -> Iterator[Frame]:
    """The same frames, with progress reports; the first step of the first run gives the estimate of the total time."""
    start = time.perf_counter()
    for number, frame in enumerate(frames):
        if number == 1 and num_done == 0:
            progress.begin(total_steps, total_steps * (time.perf_counter() - start))
        if number:
            progress.step(num_done + number)
        yield frame


def _call_counter(network: nn.Module | CountingNetwork) -> Callable[[], int]:
    """A function that returns the number of network calls so far."""
    if isinstance(network, CountingNetwork):
        return lambda: network.calls
    calls: list[None] = []
    network.register_forward_hook(lambda *_: calls.append(None))
    return lambda: len(calls)


def _sample(
    lm: LanguageModel,
    network: nn.Module | FrozenNetwork,
    canvas: Tensor,
    sampling: Sampling,
    rng: RowRng,
    plain: bool,
) -> Iterator[Frame]:
    method = lm.method
    samples_by_scores = sampling.sampler == "analytic" and not method.any_order
    if not plain or method.samplers is not None or samples_by_scores:  # these have no other form than the reference
        return method.generate(network, canvas, sampling, rng)
    if sampler_of(sampling).sample not in (sample_positions_first, sample_analytic):
        raise UserError(
            f"--plain samples the full posterior at every step, which sampling.sampler {sampling.sampler} does not "
            "have; try ancestral"
        )
    run = cast(MaskedDiffusion, method).sampling_run(network, canvas, sampling, rng, None)
    logits = logits_everywhere(network, method.conditioning_sigma, None)

    def beliefs(z: Tensor, alpha: Tensor) -> Tensor:
        return subs(logits(z, alpha), z, lm.mask_id)

    return sample_reference(run, reference_transition(beliefs, lm.mask_id, run.steps, sampling), beliefs)
