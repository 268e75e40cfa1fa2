"""Load on `adlm serve` over loopback: concurrent clients, disturbed by bad ones, against one client at a time.

    python experiments/serve_load/run.py                       # 64 clients for 60 s on servers with --batch 1, 4 and 8
    python experiments/serve_load/run.py --clients 8 --seconds 5 --alone 5 --batch 4
    python experiments/serve_load/run.py --config owt/adlm --batch 1 16 64      # of the size in the paper, on a GPU

A model with random weights (or --model FOLDER) is served by a process of its own. First one client sends the requests
of `bodies` one after the other: completions, infills and streams with different samplers, options and lengths. Its
answers are the ones expected later. Then all clients do the same at once, while others read streams slowly, disconnect
in the middle, and send bodies that are too large or malformed.

Reported: answers per second, median and 99th percentile of the seconds per request, requests without an answer (lost),
answers that differ from the one given alone (wrong; the JSON says in what), refused requests (429), what bad clients
got that they should not have got (unexpected), and the server's memory. Last, the seconds of a request of four tokens
alone, and one second after a request for many long completions, which is then given up. --out is the file for the
figures as JSON; --table a Markdown file whose lines between the two `serve_load` comments are replaced.
"""

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from adlm import code_commit
from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
from adlm.config.load import resolve
from adlm.methods import method_of
from adlm.tokens import load_tokenizer

Body = dict[str, Any]
BAD_CLIENT_SECONDS = 0.5  # between two requests of a bad client
MARKER = "<!-- serve_load -->"


# An ADLM of 128 wide blocks over bytes, for a CPU
SMALL_CONFIG = ("tokenizer=bytes", "length=64", "model.hidden=128", "model.heads=4", "model.blocks=4")


def random_model(folder: Path, words: Sequence[str]) -> Path:
    """A model with random weights: presets and overrides, as for `adlm train`."""
    config = resolve([*words, "sampling.steps=32"])
    tokenizer = load_tokenizer(config.tokenizer)
    config = replace(config, vocabulary=tokenizer.vocabulary)
    torch.manual_seed(0)
    network = method_of(config).build()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    save_model_folder(ModelFolder(config, network.state_dict(), tokenizer), folder)
    return folder


def bodies(model: str) -> list[Body]:
    """Requests with padded lengths of 32 and 64 tokens; one in eight has a sampler whose rows cannot join others."""
    kinds: list[Body] = [
        {"prompt": "Fellow citizens", "max_tokens": 32},
        {"prompt": "The", "max_tokens": 24, "temperature": 0.7},
        {"prompt": "In the year", "suffix": " of the Union.", "max_tokens": 20, "top_p": 0.9},
        {"prompt": "Of course", "max_tokens": 16, "stream": True},
        {"prompt": "The [MASK*12] was [MASK*8].", "sampler": "remdm-cap", "steps": 48},
        {"prompt": "It", "max_tokens": 40, "stream": True, "temperature": 0.9},
        {"prompt": "Never", "max_tokens": 12, "sampler": "remdm-loop", "logprobs": 0},
        {"prompt": "We", "max_tokens": 24, "sampler": "confidence", "steps": 16},
    ]
    return [{"model": model, **kind, "seed": seed} for seed in range(2) for kind in kinds]


@dataclass
class Figures:
    """What the clients of one run saw."""

    seconds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """Wrong answers by what differs and by request."""
    memory_mb: list[int] = field(default_factory=list)

    def as_dict(self, elapsed: float) -> dict[str, Any]:
        median, last = np.percentile(self.seconds, [50, 99])
        names = ("refused", "bad_clients", "unexpected")
        memory = self.memory_mb
        return {
            "seconds": round(elapsed, 1),
            "answers": len(self.seconds),
            "lost": self.counts["lost"],
            "wrong": self.wrong.total(),
            **({"wrong_answers": dict(self.wrong)} if self.wrong else {}),
            **{name: self.counts[name] for name in names},
            "per_second": round(len(self.seconds) / elapsed, 2),
            "p50_s": round(float(median), 3),
            "p99_s": round(float(last), 3),
            "memory_mb": {"start": memory[0], "middle": memory[len(memory) // 2], "end": memory[-1]},
        }


def answer_of(response: httpx.Response) -> list[Any]:
    """The text and log-probabilities of each choice; of a stream, of its one choice."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [(choice["text"], choice["logprobs"]) for choice in response.json()["choices"]]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    if events[-1] != "[DONE]":
        return ["a stream without its end"]
    return [("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]), None)]


def difference_of(answer: list[Any], expected: list[Any]) -> str:
    """What differs; empty if nothing does."""
    if answer == expected:
        return ""
    return "log-probabilities" if [each[0] for each in answer] == [each[0] for each in expected] else "text"


@dataclass
class Load:
    """The clients of one run."""

    http: httpx.AsyncClient
    requests: list[Body]
    expected: list[list[Any]]
    end: float
    figures: Figures = field(default_factory=Figures)

    async def client(self, number: int) -> None:
        """One request after the other, beginning with request `number`."""
        counts = self.figures.counts
        for turn in itertools.count(number):
            if time.monotonic() >= self.end:
                return
            index, begun = turn % len(self.requests), time.monotonic()
            try:
                response = await self.http.post("/v1/completions", json=self.requests[index])
            except httpx.HTTPError:
                counts["lost"] += 1
                continue
            if response.status_code == 429:
                counts["refused"] += 1
                await asyncio.sleep(float(response.headers["retry-after"]))
            elif response.status_code != 200:
                counts["lost"] += 1
            else:
                self.figures.seconds.append(time.monotonic() - begun)
                if difference := difference_of(answer_of(response), self.expected[index]):
                    self.figures.wrong[f"{difference} of {json.dumps(self.requests[index])}"] += 1

    async def bad_client(self, misbehave: Callable[[], Awaitable[bool]]) -> None:
        """Misbehaves again and again; the result says whether the server did what it should."""
        while time.monotonic() < self.end:
            self.figures.counts["bad_clients"] += 1
            try:
                as_expected = await misbehave()
            except (httpx.HTTPError, OSError):
                as_expected = False
            self.figures.counts["unexpected"] += not as_expected
            await asyncio.sleep(BAD_CLIENT_SECONDS)

    async def read_slowly(self) -> bool:
        """A stream read at 400 bytes a second for three seconds, then to its end."""
        index = next(number for number, body in enumerate(self.requests) if body.get("stream"))
        async with self.http.stream("POST", "/v1/completions", json=self.requests[index]) as response:
            read, begun = b"", time.monotonic()
            async for part in response.aiter_raw(20):
                read += part
                if time.monotonic() - begun < 3:
                    await asyncio.sleep(0.05)
        whole = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=read)
        return answer_of(whole) == self.expected[index]

    async def disconnect(self) -> bool:
        """Leaves a quarter of a second after sending a request for four long completions."""
        body = json.dumps({**self.requests[0], "n": 4, "steps": 1000, "seed": None, "stream": True}).encode()
        url = self.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        await asyncio.sleep(0.25)
        writer.transport.abort()
        return (await self.http.get("/health")).status_code == 200

    async def send_too_much(self) -> bool:
        body = {**self.requests[0], "prompt": "x" * (1 << 21)}
        return (await self.http.post("/v1/completions", json=body)).status_code == 413

    async def send_nonsense(self) -> bool:
        statuses = [
            (await self.http.post("/v1/completions", content=content)).status_code
            for content in (b'{"model": ', b"\xff" * 100, b"[" * 5000, b'{"model": "random", "steps": -1}')
        ]
        return statuses == [400] * 4


async def measure_memory(pid: int, figures: Figures, end: float) -> None:
    """Resident memory of the server, in MB, once a second."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        figures.memory_mb.append(int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) // 1000)  # type: ignore[index]
        if time.monotonic() >= end:
            return
        await asyncio.sleep(1)


async def run_clients(address: str, pid: int, requests: list[Body], arguments: argparse.Namespace) -> list[Body]:
    """The figures of one client, then of all of them."""
    unlimited = httpx.Limits(max_connections=None)
    results = []
    async with httpx.AsyncClient(base_url=address, timeout=280, limits=unlimited) as http:
        expected = [answer_of(await http.post("/v1/completions", json=body)) for body in requests]
        for clients, seconds in ((1, arguments.alone), (arguments.clients, arguments.seconds)):
            started = time.monotonic()
            load = Load(http, requests, expected, started + seconds)
            async with asyncio.TaskGroup() as group:
                group.create_task(measure_memory(pid, load.figures, load.end))
                workers = [group.create_task(load.client(number)) for number in range(clients)]
                if clients > 1:
                    bad = (load.read_slowly, load.disconnect, load.send_too_much, load.send_nonsense)
                    for misbehave in bad:
                        group.create_task(load.bad_client(misbehave))
                await asyncio.wait(workers)
                elapsed = time.monotonic() - started
            results.append({"clients": clients, **load.figures.as_dict(elapsed)})
    return results


async def measure_short_requests(
    address: str, model: str, long_requests: Sequence[tuple[int, int]] = ((4, 256), (16, 1024))
) -> Body:
    """Seconds of a request of four tokens, alone and while a long request (n, steps) is sampled."""
    figures: Body = {}
    async with httpx.AsyncClient(base_url=address, timeout=280) as http:

        async def seconds() -> float:
            begun = time.monotonic()
            body = {"model": model, "prompt": "The", "max_tokens": 4, "seed": 0}
            (await http.post("/v1/completions", json=body)).raise_for_status()
            return round(time.monotonic() - begun, 3)

        await seconds()
        figures["alone_s"] = sorted([await seconds() for _ in range(5)])[2]
        for n, steps in long_requests:
            body = {"model": model, "max_tokens": 60, "n": n, "steps": steps, "sampler": "remdm-cap"}
            long = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.sleep(1)
            figures[f"behind_n{n}_steps{steps}_s"] = await seconds()
            figures[f"n{n}_steps{steps}_was_running"] = not long.done()
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            await asyncio.sleep(3)  # until the server notices
    return figures


def measure(model: Path, batch: int, arguments: argparse.Namespace) -> list[Body]:
    command = [sys.executable, "-m", "adlm", "serve", str(model), "--port", "0", "--batch", str(batch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[-1]
            results = asyncio.run(run_clients(address, server.pid, bodies(model.name), arguments))
            results[-1]["short_requests"] = asyncio.run(measure_short_requests(address, model.name))
        finally:
            server.terminate()
    return [{"batch": batch, **result} for result in results]


def table_of(results: list[Body]) -> str:
    lines = [
        "| `--batch` | clients | answers | lost | wrong | answers/s | times one client | p50 | p99 | memory, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    alone = {result["batch"]: result["per_second"] for result in results if result["clients"] == 1}
    for each in results:
        times = each["per_second"] / alone[each["batch"]]
        memory = ", ".join(str(value) for value in each["memory_mb"].values())
        lines.append(
            f"| {each['batch']} | {each['clients']} | {each['answers']} | {each['lost']} | {each['wrong']} | "
            f"{each['per_second']:.2f} | {times:.1f} | {each['p50_s']:.2f} s | {each['p99_s']:.2f} s | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: random weights)")
    parser.add_argument("--config", nargs="+", default=SMALL_CONFIG, help="presets and overrides of the random model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the load")
    parser.add_argument("--alone", type=float, default=20, help="seconds of one client alone, before the load")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8], help="batch sizes to compare")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--table", type=Path, help="Markdown file with two `serve_load` comments")
    arguments = parser.parse_args()
    results: list[Body] = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or random_model(Path(folder) / "random", arguments.config)
        for batch in arguments.batch:
            results += measure(model, batch, arguments)
            for result in results[-2:]:
                print(json.dumps(result), flush=True)
    table = table_of(results)
    print(table)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"commit": code_commit(), "results": results}, indent=1) + "\n")
    if arguments.table is not None:
        before, _, after = arguments.table.read_text().split(MARKER)
        arguments.table.write_text(f"{before}{MARKER}\n{table}\n{MARKER}{after}")


if __name__ == "__main__":
    main()
