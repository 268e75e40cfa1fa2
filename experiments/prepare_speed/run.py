"""How long `adlm prepare` takes beside the tokenizers library's batch encoder alone, and how much memory it needs.

    python experiments/prepare_speed/run.py TEXT.xz tokenizer.json [--rounds 3]

They take turns, each in a process of its own, because a machine drifts. The encoder alone is given the text in
memory, split at blank lines, a thousand documents at a time, and its results are thrown away; encode_batch_fast is the
library's quicker call without offsets, which `adlm prepare` uses.
"""

import argparse
import json
import lzma
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path


def encoder_alone(text: Path, tokenizer: Path, fast: bool = False) -> None:
    from tokenizers import Tokenizer

    with lzma.open(text, "rt", encoding="utf-8") as file:
        documents = file.read().split("\n\n")
    engine = Tokenizer.from_file(str(tokenizer))
    encode = engine.encode_batch_fast if fast else engine.encode_batch
    started, cpu = time.monotonic(), time.process_time()
    for start in range(0, len(documents), 1000):
        encode(documents[start : start + 1000], add_special_tokens=False)
    print(json.dumps({"seconds": time.monotonic() - started, "cpu": time.process_time() - cpu}))


def prepared(text: Path, tokenizer: Path) -> None:
    """The whole command: reading, decompressing, hashing, encoding, writing, checksums."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["prepare", f"data.path={text}", "data.boundary=blank", f"tokenizer={tokenizer}", "length=1024"]
        started = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "adlm", *words, "--out", f"{folder}/out", "--json"],
            stdout=subprocess.PIPE,
        )
        out, _ = child.communicate()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        counts = json.loads(out)
        print(
            json.dumps(
                {
                    "seconds": time.monotonic() - started,
                    "cpu": usage.ru_utime + usage.ru_stime,
                    "memory_mb": usage.ru_maxrss / 1024,
                    "documents": counts["documents"],
                    "tokens": counts["tokens"],
                }
            )
        )


WORK = {"encode_batch": encoder_alone, "encode_batch_fast": partial(encoder_alone, fast=True), "adlm prepare": prepared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=WORK)
    arguments = parser.parse_args()
    if arguments.only:
        WORK[arguments.only](arguments.text, arguments.tokenizer)
        return
    seen: dict[str, list[dict]] = {name: [] for name in WORK}
    for number in range(arguments.rounds):
        for name in WORK:
            command = [sys.executable, __file__, str(arguments.text), str(arguments.tokenizer), "--only", name]
            answer = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
            seen[name].append(answer)
            print(
                f"round {number}  {name:18} " + "  ".join(f"{key} {value:,.1f}" for key, value in answer.items()),
                flush=True,
            )
    print(f"\n{os.cpu_count()} cores; medians of {arguments.rounds} rounds")
    medians = {name: statistics.median(row["seconds"] for row in rows) for name, rows in seen.items()}
    for name, seconds in medians.items():
        print(f"{name:18} {seconds:6.1f} s   {medians['adlm prepare'] / seconds:.2f} times")
    for name in ("encode_batch", "encode_batch_fast"):
        ratios = [
            ours["seconds"] / alone["seconds"] for ours, alone in zip(seen["adlm prepare"], seen[name], strict=True)
        ]
        print(f"adlm prepare / {name}, round by round: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
