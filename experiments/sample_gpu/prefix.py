"""What the cache itself is worth: AR small reads a whole text anew for every token, in a CUDA graph.

python experiments/sample_gpu/prefix.py
"""

import time
from dataclasses import replace

import torch

from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of

TOKENS = 200


def main() -> None:
    vocabulary = Vocabulary(size=50258, mask_id=50257, bos_id=50256, eos_id=50256, pad_id=50256)
    method = method_of(replace(resolve(["owt/ar"]), vocabulary=vocabulary))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    frozen = FrozenNetwork(method.build().to(device))
    for length in (1024, 512):
        text = torch.randint(50_000, (1, length), device=device)
        for _ in range(3):  # the first records the graph
            print(f"{length} tokens read anew: {1000 * seconds(frozen, text) / TOKENS:.3f} ms a token", flush=True)


def seconds(frozen: FrozenNetwork, text: torch.Tensor) -> float:
    finished = torch.cuda.synchronize if text.is_cuda else lambda: None
    finished()
    began = time.perf_counter()
    for place in range(TOKENS):
        frozen.logits(frozen.hidden(text).last[:, place])
    finished()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
