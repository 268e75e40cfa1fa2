"""How many tokens a second the loader gives, and how long a training step waits for it.

    python experiments/loader_speed/run.py PREPARED [--batch 512] [--length 1024]

First as fast as it can; then for a consumer of 20 times the tokens that the largest model trains on in a second on one
GPU (305 thousand). Each step's wait is measured: from the request for a batch until it is there.
"""

import argparse
import os
import statistics
import time
from itertools import islice
from pathlib import Path

from adlm.data.prepare.prepared import open_prepared
from adlm.data.rows.loader import Loader

GPU = 305_000  # tokens a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    started = time.monotonic()
    rows = open_prepared(arguments.prepared).rows("train", arguments.length, overlap=True)
    print(f"opened, checksums and all, in {time.monotonic() - started:.2f} s: {len(rows):,} rows of {rows.length}")
    tokens = arguments.batch * arguments.length
    loader = Loader(rows, arguments.batch)
    rates = []
    batches = loader.batches()
    next(batches)
    for _ in range(5):
        started = time.monotonic()
        for _batch in islice(batches, 20):
            pass
        rates.append(20 * tokens / (time.monotonic() - started))
    rate = statistics.median(rates)
    cores = os.cpu_count()
    print(f"as fast as it goes: {rate / 1e6:.1f} million tokens/s, {rate / GPU:.0f} times one GPU ({cores} cores)")
    batches = loader.batches()
    next(batches)
    pause = tokens / (20 * GPU)
    waits = []
    for _ in range(60):
        time.sleep(pause)
        started = time.monotonic()
        next(batches)
        waits.append(1e3 * (time.monotonic() - started))
    print(
        f"a step every {1e3 * pause:.0f} ms (20 GPUs' worth) waits {statistics.median(waits):.3f} ms in the median, "
        f"{max(waits):.3f} ms at most"
    )


if __name__ == "__main__":
    main()
