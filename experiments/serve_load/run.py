"""Load on `adlm serve` over loopback: concurrent clients against a server with batches, and one that serves row by row.

    python experiments/serve_load/run.py --clients 16 --seconds 15

A model with random weights (or --model FOLDER) is served by a process with --batch 1 and by one with --batch 4. Each
client sends one request after the other, from a fixed set of prompts and seeds that were first sent one by one.
Reported: median and 99th percentile of the seconds per request, completions per second, requests without an answer
(lost), answers that differ from the one given alone (wrong), refused requests (429), and the server's largest memory.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import torch

from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
from adlm.config.schema import Config, Model, Sampling
from adlm.methods import method_of
from adlm.tokens import load_tokenizer


def random_model(folder: Path) -> Path:
    """A small ADLM with random weights over bytes."""
    tokenizer = load_tokenizer("bytes")
    config = Config(
        tokenizer="bytes", vocabulary=tokenizer.vocabulary, length=64,
        model=Model(hidden=128, heads=4, blocks=4), sampling=Sampling(steps=32),
    )  # fmt: skip
    torch.manual_seed(0)
    network = method_of(config).build()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    save_model_folder(ModelFolder(config, network.state_dict(), tokenizer), folder)
    return folder


def requests(model: str, tokens: int) -> list[dict[str, object]]:
    prompts = ["The", "Fellow citizens", "In the year", "Of course"]
    return [
        {"model": model, "prompt": prompts[number % 4], "max_tokens": tokens, "seed": number} for number in range(12)
    ]


def answer_of(response: httpx.Response) -> list[str]:
    return [choice["text"] for choice in response.json()["choices"]]


async def load(address: str, bodies: list[dict[str, object]], clients: int, seconds: float) -> dict[str, object]:
    """The figures of one run of all clients."""
    durations: list[float] = []
    counts = {"lost": 0, "wrong": 0, "refused": 0}
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        alone = [answer_of(await http.post("/v1/completions", json=body)) for body in bodies]
        started = time.monotonic()

        async def client(number: int) -> None:
            turn = number
            while time.monotonic() - started < seconds:
                turn = (turn + 1) % len(bodies)
                begun = time.monotonic()
                try:
                    response = await http.post("/v1/completions", json=bodies[turn])
                except httpx.HTTPError:
                    counts["lost"] += 1
                    continue
                if response.status_code == 429:
                    counts["refused"] += 1
                    await asyncio.sleep(float(response.headers["retry-after"]))
                elif response.status_code != 200:
                    counts["lost"] += 1
                else:
                    durations.append(time.monotonic() - begun)
                    counts["wrong"] += answer_of(response) != alone[turn]

        await asyncio.gather(*(client(number) for number in range(clients)))
        elapsed = time.monotonic() - started
    median, last = np.percentile(durations, [50, 99])
    return {
        "answers": len(durations), **counts, "per_second": round(len(durations) / elapsed, 2),
        "p50_s": round(float(median), 3), "p99_s": round(float(last), 3),
    }  # fmt: skip


def measure(model: Path, batch: int, arguments: argparse.Namespace) -> dict[str, object]:
    command = [sys.executable, "-m", "adlm", "serve", str(model), "--port", "0", "--batch", str(batch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            address = line.split()[-1]
            bodies = requests(model.name, arguments.tokens)
            figures = asyncio.run(load(address, bodies, arguments.clients, arguments.seconds))
            status = Path(f"/proc/{server.pid}/status").read_text()
            memory = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
        finally:
            server.terminate()
    return {"batch": batch, "clients": arguments.clients, **figures, "memory_mb": memory // 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: random weights)")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--tokens", type=int, default=32, help="max_tokens of each request")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="batch sizes to compare")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or random_model(Path(folder) / "random")
        for batch in arguments.batch:
            print(json.dumps(measure(model, batch, arguments)), flush=True)


if __name__ == "__main__":
    main()
