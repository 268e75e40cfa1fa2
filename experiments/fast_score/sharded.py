"""One process, one GPU: `score` with FSDP2 and bf16 autocast, blocks compiled, against the same without FSDP2.

python experiments/fast_score/sharded.py
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.methods.adlm import Adlm


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    config = replace(resolve(["owt/adlm", "model=tiny", "model.dropout=0.0"]), vocabulary=Vocabulary(50_258, 50_257))
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = Adlm(config).build()
        x = torch.randint(50_257, (8, 1024))
        z = torch.where(torch.rand(8, 1024) < 0.5, 50_257, x)
    torch.nn.init.normal_(network.anchor.head.weight, std=0.02)
    weight = (z == 50_257).float()
    with torch.autocast("cuda", torch.bfloat16):
        scored, anchor_scored = network.score(z, x, weight, weight, 50_257)
    assert network.denoiser is not None
    assert anchor_scored is not None
    print("autocast       ", scored.total.item() / x.numel(), anchor_scored.total.item() / x.numel())
    for trunk in (network.anchor.trunk, network.denoiser.trunk):
        for block in trunk.blocks:
            block.compile()
            fully_shard(block)
    fully_shard(network)
    register_fsdp_forward_method(network, "score")
    with torch.autocast("cuda", torch.bfloat16):
        scored, anchor_scored = network.score(z, x, weight, weight, 50_257)
    assert anchor_scored is not None
    torch.autograd.backward(scored.total + anchor_scored.total)
    print("FSDP2, compiled", scored.total.item() / x.numel(), anchor_scored.total.item() / x.numel())
    missing = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    print("weights without a gradient:", missing or "none")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
