"""How many tokens a second are streamed from files that were not prepared, and in how much memory.

    python experiments/loader_speed/stream.py FOLDER [--tokenizer base:smollm2] [--batch 32] [--length 1024]

The folder holds text files, such as .jsonl. Measured are the time to the first batch, the rate of what follows, by how
much the peak memory of the process grows over all of it, and the time to the first batch of a run that resumes there.
"""

import argparse
import os
import resource
import time
from itertools import islice
from pathlib import Path

from adlm.config.schema import Data
from adlm.data.rows.loader import START, Position, Stream
from adlm.data.sources.source import resolve_source
from adlm.tokens import load_tokenizer


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", default="base:smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=200)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    source = resolve_source(Data(path=str(arguments.folder), streaming=True))
    stream, before = Stream(source, tokenizer, arguments.length, arguments.batch), peak_mebibytes()

    def first_batch(position: Position) -> float:
        started = time.monotonic()
        batches = stream.batches(position)
        next(batches)
        seconds = time.monotonic() - started
        batches.close()  # type: ignore[attr-defined]
        return seconds

    print(f"{len(source.parts)} files, the first batch after {first_batch(START):.2f} s")
    started, used = time.monotonic(), time.process_time()
    for batch in islice(stream.batches(), arguments.batches):
        position = batch.after
    seconds, used = time.monotonic() - started, time.process_time() - used
    tokens = arguments.batches * arguments.batch * arguments.length
    print(
        f"{tokens:,} tokens of {position.epoch:,} documents: {tokens / seconds / 1e3:,.0f} thousand tokens/s, "
        f"{tokens / used / 1e3:,.0f} thousand for each second of a core ({os.cpu_count()} cores)"
    )
    print(f"peak memory grew by {peak_mebibytes() - before:.0f} MiB")
    print(f"resumed after {first_batch(position):.2f} s")


if __name__ == "__main__":
    main()
