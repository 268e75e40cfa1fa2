"""One batch of 32 x 1024, one network: the fast compiled loss and gradient against the plain unfolded unchunked form.

python experiments/train_speed/same.py
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.diffusion.objectives import anchor_mask
from adlm.diffusion.times import BatchRng
from adlm.methods.adlm import Adlm
from adlm.models.heads import Scored
from adlm.training.build import compile_trunks
from adlm.training.metrics import zipf
from adlm.training.step import fast_attention

MASK = 50_257


def main() -> None:
    config = replace(resolve(["owt/adlm", "model.dropout=0.0"]), vocabulary=Vocabulary(MASK + 1, MASK))
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = Adlm(config).build()
    for name, weight in network.named_parameters():  # heads and modulations start at zero, where every form agrees
        if name.endswith("head.weight") or "modulation" in name:
            torch.nn.init.normal_(weight, std=0.02 if "head" in name else 0.1)
    draws = torch.Generator("cuda").manual_seed(0)
    x = zipf(config, 32, torch.Generator().manual_seed(0)).cuda()
    method = Adlm(config)
    noised = method.noise(x, None, BatchRng(draws), config.time.t_min)
    base = method.weight(noised)
    weight = base * method.masked_positions(noised.z, None)
    at_anchors = base * anchor_mask(x, config.anchor.tau, MASK + 1)
    print(f"masked {(weight != 0).float().mean():.4f}, anchors {(at_anchors != 0).float().mean():.4f} of all positions")

    def run(form: Callable[..., tuple[Scored, Scored]]) -> tuple[float, list[torch.Tensor]]:
        network.zero_grad()
        with torch.autocast("cuda", torch.bfloat16), fast_attention(x.device):
            scored, anchor_scored = form(noised.z, x, weight, at_anchors, MASK)
        loss = (scored.total + config.anchor.gamma * anchor_scored.total) / x.numel()
        torch.autograd.backward(loss)
        return loss.item(), [weight.grad.clone() for weight in network.parameters() if weight.grad is not None]

    plain_loss, plain = run(network.plain_score)
    rows = {"plain": (plain_loss, plain), "fast, eager": run(network.score)}
    print(compile_trunks(network))
    rows["fast, compiled"] = run(network.score)
    for name, (loss, gradient) in rows.items():
        apart = sum(float((a - b).norm() ** 2) for a, b in zip(gradient, plain, strict=True))
        size = sum(float(b.norm() ** 2) for b in plain)
        print(f"{name:15} loss {loss:.6f}  gradient apart by {(apart / size) ** 0.5:.2e} of its norm")


if __name__ == "__main__":
    main()
