"""`adlm train` itself on one GPU: the paper's ADLM at length 1024, stopped by SIGTERM, resumed, then under FSDP2.

python experiments/train_gpu/run.py FOLDER

The text is 50,000 made-up words by Zipf's law, so the numbers to look at are speed, memory, and that nothing is lost.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh

from adlm.cli.main import main as adlm
from adlm.distributed import Processes
from adlm.training import train
from adlm.training.metrics import read_metrics

KNOBS = """owt/adlm data.name= data.packing=packed train.batch_size=32 train.warm_up_steps=20 train.log_every=20
train.valid_every=60 train.valid_rows=64 train.checkpoint_every=1000 train.sample_every=120 train.samples=1
sampling.steps=16 train.keep=1""".split()  # noqa: SIM905


def made_up(folder: Path) -> Path:
    """A prepared folder: 4M tokens of 50,000 words."""
    folder.mkdir(parents=True)
    words = {f"w{number}": number for number in range(50_000)} | {"[UNK]": 50_000, "<|endoftext|>": 50_001}
    engine = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["<|endoftext|>"])
    engine.save(str(folder / "tokenizer.json"))
    drawn = np.random.default_rng(0).zipf(1.2, 4_000_000) % 50_000
    lines = [" ".join(f"w{word}" for word in drawn[start : start + 800]) for start in range(0, len(drawn), 800)]
    (folder / "text.txt").write_text("\n".join(lines))
    words = [f"data.path={folder / 'text.txt'}", "data.boundary=line", f"tokenizer={folder / 'tokenizer.json'}"]
    assert adlm(["prepare", *words, "length=1024", "--out", str(folder / "prepared")]) == 0
    return folder / "prepared"


@contextmanager
def one_process_of_fsdp(overrides, report):
    """A mesh of one GPU, which the program itself would not bother to make."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(0)
    yield Processes(
        0, 1, torch.device("cuda", 0), init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
    )
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    prepared = made_up(folder)
    words = ["train", *KNOBS, f"data.prepared={prepared}", "train.steps=180"]
    out = folder / "run"

    def stop() -> None:
        while len(read_metrics(out / "metrics.jsonl")) < 4:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    print("stopped with", adlm([*words, "--out", str(out)]), flush=True)
    print("ended with", adlm([*words, "--out", str(out)]), flush=True)
    for line in read_metrics(out / "metrics.jsonl"):
        print(json.dumps(line))
    train.training_processes = one_process_of_fsdp
    sharded = folder / "sharded"
    print("FSDP2 ended with", adlm([*words, "train.steps=40", "--out", str(sharded)]), flush=True)
    print("FSDP2 resumed and ended with", adlm([*words, "train.steps=60", "--out", str(sharded)]), flush=True)
    for line in read_metrics(sharded / "metrics.jsonl"):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
