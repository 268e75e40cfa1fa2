"""How much memory each process takes to save: a checkpoint, and RUN/model.

    python experiments/checkpoints/memory.py --write

starts itself with 2, 4 and 8 processes (gloo, CPU) by torchrun, and writes results.jsonl.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from adlm.checkpoints.tensor_files import write_tensors
from adlm.config.load import resolve
from adlm.config.schema import Config
from adlm.distributed import Processes, gather
from adlm.methods import method_of
from adlm.tokens import load_tokenizer
from adlm.training.build import build_train_state
from adlm.training.metrics import Counters
from adlm.training.saving import Saving
from adlm.training.sharding import gather_to_main, training_processes

RESULTS = Path(__file__).with_name("results.jsonl")
SIZES = ("method=mdlm", "tokenizer=bytes", "length=64", "model.hidden=640", "model.heads=8", "model.blocks=12")


def memory(entry: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{entry}:")).split()[1])


def growth(action: Callable[[], object]) -> int:
    """By how many bytes the resident memory grows at most during an action."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system, or it would be used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def measure(config: Config, folder: Path, shard: int) -> None:
    """In every process: print a line for each action, in the main process."""
    with training_processes(config.train, print) as processes:
        state = build_train_state(method_of(config), processes, print)
        tensors = state.named_tensors()
        saving = Saving(folder / "checkpoints", processes, keep=1)

        def save() -> None:
            saving.start(tensors, Counters(step=1), None, {})
            saving.finish()

        def save_model() -> None:
            path = folder / "model.safetensors"
            weights = state.model_weights()
            gather_to_main(weights, processes, lambda full: write_tensors(weights, path, full_tensor=full))

        saving.start({"warm-up": torch.zeros(1)}, Counters(step=0), None, {})  # imports and threads
        saving.finish()
        actions = {"checkpoint": save, "RUN/model": save_model}
        parameters = sum(weight.numel() for weight in state.network.parameters())
        for name, action in actions.items():
            report(name, growth(action), parameters, processes, shard)


def report(name: str, grown: int, parameters: int, processes: Processes, shard: int) -> None:
    growths = gather([grown])
    if processes.is_main_process:
        bytes_each = [round(each / parameters, 2) for each in growths]
        line = {"processes": processes.num_ranks, "shard": shard, "parameters": parameters, "saved": name}
        sys.stdout.write(json.dumps(line | {"bytes_per_parameter": bytes_each}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--shard", type=int, default=0, help="for the processes that this starts")
    request = parser.parse_args()
    if "RANK" in os.environ:
        config = resolve([*SIZES, f"train.shard={request.shard}", "train.device=cpu"])
        config = replace(config, vocabulary=load_tokenizer("bytes").vocabulary)
        torch.set_num_threads(1)
        measure(config, Path(os.environ["FOLDER"]), request.shard)
        return
    lines = []
    for num, shard in ((2, 2), (2, 1), (4, 4), (4, 2), (8, 8)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
            command += [__file__, "--shard", str(shard)]
            environment = os.environ | {"FOLDER": folder, "OMP_NUM_THREADS": "1"}
            output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        sys.stdout.write(output)
        lines.append(output)
    if request.write:
        RESULTS.write_text("".join(lines))


if __name__ == "__main__":
    main()
