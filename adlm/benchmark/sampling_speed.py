"""How fast a model samples: whole walks from nothing but masks, timed. Knows no text.

Shapes: B sequences, L tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adlm.benchmark.training_speed import SpeedProgress
from adlm.config.schema import Sampling
from adlm.diffusion.beliefs import subs
from adlm.distributed import device_name
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork, HiddenStates, KVCache, Result
from adlm.language_model import LanguageModel
from adlm.methods.denoising import logits_everywhere
from adlm.methods.inputs import check_canvas
from adlm.methods.masked_diffusion import schedule_of
from adlm.sampling.events import sample_positions_first
from adlm.sampling.frame import Frame, last_frame
from adlm.sampling.reference import reference_transition, sample_reference
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import SAMPLERS, sample_analytic
from adlm.sampling.steps import steps_of


@dataclass(frozen=True)
class SamplingSpeed:
    """One measurement: B canvases of L masks become text, side by side."""

    device: str
    dtype: str
    """Of products in the network."""
    graphs: bool
    """Whether CUDA graphs are replayed."""
    plain: bool
    method: str
    sampler: str
    steps: int
    batch: int
    length: int
    network_calls: int
    """Of one walk."""
    seconds: float
    """Of one walk: the median."""
    seconds_per_sequence: float
    """The same, shared out over its rows."""
    milliseconds_a_call: float
    """A walk's time by its network calls: drawing and all else included."""
    tokens_per_second: float
    peak_gib: float | None
    """Most memory ever held at once on the device, weights included."""


class Counted(FrozenNetwork):
    """A frozen network that counts how often it is read."""

    calls = 0

    def hidden(self, z: Tensor, sigma: Tensor | None = None, pad: Tensor | None = None) -> HiddenStates:
        self.calls += 1
        return super().hidden(z, sigma, pad)

    def read_and(self, make: Callable[..., Result], ids: Tensor, cache: KVCache, *given: Tensor | None) -> Result:
        self.calls += 1
        return super().read_and(make, ids, cache, *given)


def measure_sampling(
    lm: LanguageModel,
    sampling: Sampling,
    batch: int,
    length: int,
    repeats: int,
    plain: bool,
    watch: SpeedProgress,
    seed: int = 0,
) -> SamplingSpeed:
    """The same walk over and over, after one that is not timed: it records what is replayed later.

    `plain` calls the network as it is trained, all of its logits: step by step through the full posterior or, left to
    right, with all that was read read again. In bf16 on a GPU, like the fast form.
    """
    device = next(lm.network.parameters()).device
    canvas = torch.full((batch, length), lm.mask_id, device=device)
    check_canvas(lm.config, canvas, sampling)
    network = lm.network if plain else Counted(lm.network)
    count = _counter(network)
    most = length if lm.method.exact else sampling.steps  # steps of a walk, where none is left out

    def once(number: int) -> float:
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if plain and device.type == "cuda" else nullcontext():
            frames = _walk(lm, network, canvas, sampling, RowRng(seed, range(batch)), plain)
            last_frame(_watched(frames, watch, number * most, (repeats + 1) * most) if device.type == "cpu" else frames)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once(0)
    calls = count()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(once(number) for number in range(1, repeats + 1))
    lowered = torch.bfloat16 if device.type == "cuda" else next(lm.network.parameters()).dtype
    return SamplingSpeed(
        device=device_name(device),
        dtype=str(network.dtype if isinstance(network, FrozenNetwork) else lowered).removeprefix("torch."),
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


def _watched(frames: Iterator[Frame], watch: SpeedProgress, done: int, most: int) -> Iterator[Frame]:
    """The same frames; after the first step of the first walk, how long all of them take at the most."""
    start = time.perf_counter()
    for number, frame in enumerate(frames):
        if number == 1 and done == 0:
            watch.begin(most, most * (time.perf_counter() - start))
        if number:
            watch.step(done + number)
        yield frame


def _counter(network: nn.Module | Counted) -> Callable[[], int]:
    """How often the network was called so far."""
    if isinstance(network, Counted):
        return lambda: network.calls
    calls: list[None] = []
    network.register_forward_hook(lambda *_: calls.append(None))
    return lambda: len(calls)


def _walk(
    lm: LanguageModel,
    network: nn.Module | FrozenNetwork,
    canvas: Tensor,
    sampling: Sampling,
    draws: RowRng,
    plain: bool,
) -> Iterator[Frame]:
    own = {"ar", "a2r", "d3pm"} | ({"sedd"} if sampling.sampler == "analytic" else set())  # whose walk is plain anyway
    if not plain or lm.config.method in own:
        return lm.method.generate(network, canvas, sampling, draws)
    if (
        SAMPLERS[sampling.sampler] not in (sample_positions_first, sample_analytic)
        or sampling.sampler == "semi-autoregressive"
    ):
        raise UserError(
            f"--plain is the full posterior at every step, and sampling.sampler {sampling.sampler} has none; try "
            "ancestral"
        )
    steps, mask_id = steps_of(schedule_of(lm.config), sampling), lm.mask_id
    logits = logits_everywhere(lm.config, network, None)

    def beliefs(z: Tensor, alpha: Tensor) -> Tensor:
        return subs(logits(z, alpha), z, mask_id)

    one_step = reference_transition(beliefs, mask_id, steps, sampling)
    return sample_reference(one_step, beliefs, canvas, mask_id, steps, sampling, draws)
