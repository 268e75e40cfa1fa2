"""One training step's forward and backward of ADLM small, folded and chunked, against the plain form on the same batch.

On a GPU, under bf16 autocast: seconds, peak memory, and how far the two losses and gradients are apart.

    python experiments/fast_score/measure.py --batch 8 16 32 --json result.json
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from adlm.config.load import resolve
from adlm.config.schema import Config, Vocabulary
from adlm.diffusion.objectives import anchor_mask
from adlm.diffusion.times import BatchRng
from adlm.methods.adlm import Adlm
from adlm.methods.inputs import vocabulary_of
from adlm.models.anchored import AnchoredTransformer
from adlm.models.heads import Scored

Form = Callable[..., tuple[Scored, Scored]]


def batch(config: Config, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zipf tokens, their noising, and both weights, as `Adlm.loss` forms them."""
    draws, vocabulary = torch.Generator("cuda").manual_seed(0), vocabulary_of(config)
    chances = 1 / torch.arange(1, vocabulary.size, device="cuda")
    x = torch.multinomial(chances.expand(rows, -1), config.length, replacement=True, generator=draws)
    method = Adlm(config)
    noised = method.noise(x, None, BatchRng(draws), config.time.t_min)
    weight = method.weight(noised)
    masked = method.masked_positions(noised.z, None)
    return x, noised.z, weight * masked, weight * anchor_mask(x, config.anchor.tau, vocabulary.size)


def step(network: AnchoredTransformer, form: Form, parts: tuple[Tensor, ...], mask_id: int) -> Tensor:
    x, z, weight, anchor_weight = parts
    network.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        scored, anchor_scored = form(z, x, weight, anchor_weight, mask_id)
        loss = (scored.total + 3e-3 * anchor_scored.total) / x.numel()
    torch.autograd.backward(loss)
    return loss.detach()


def timed(network: AnchoredTransformer, form: Form, parts: tuple[Tensor, ...], mask_id: int) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step(network, form, parts, mask_id)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return {
        "loss": loss.item(),
        "seconds": statistics.median(seconds[3:]),
        "tokens_per_second": parts[0].numel() / statistics.median(seconds[3:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = replace(resolve(["owt/adlm", "model.dropout=0.0"]), vocabulary=Vocabulary(50_258, 50_257))
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = Adlm(config).build()
    for head in (network.anchor.head, network.denoiser.head if network.denoiser else network.anchor.head):
        torch.nn.init.normal_(head.weight, std=0.02)  # heads start at zero, where every form agrees
    rows = []
    for size in arguments.batch:
        parts = batch(config, size)
        row: dict[str, object] = {"batch": size}
        gradients = {}
        for name, form in (("fast", network.score), ("plain", network.plain_score)):
            try:
                row[name] = timed(network, form, parts, 50_257)
            except torch.OutOfMemoryError:
                row[name] = "out of memory"
                continue
            gradients[name] = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        if len(gradients) == 2:
            apart = sum(float((a - b).norm() ** 2) for a, b in zip(*gradients.values(), strict=True))
            size_of = sum(float(b.norm() ** 2) for b in gradients["plain"])
            row["gradient_gap"] = (apart / size_of) ** 0.5
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
