"""Kill -9 at random moments: are the shards those of an unbroken run?

    python experiments/prepare_kill/run.py TEXT.xz tokenizer.json [--kills 5]

An unbroken run is timed first; then one is killed at moments drawn from its length, started again each time, and the
sha256 of every shard is compared.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def shards(folder: Path) -> dict[str, str]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return {
        f"{split}/{file['name']}": file["sha256"]
        for split, entry in manifest["splits"].items()
        for file in entry["files"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    draws = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        words = [f"data.path={arguments.text}", "data.boundary=blank", f"tokenizer={arguments.tokenizer}", "--json"]
        command = [sys.executable, "-m", "adlm", "prepare", *words, "--out"]
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        started = time.monotonic()
        subprocess.run([*command, str(whole)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - started
        print(f"unbroken: {seconds:.0f} s", flush=True)
        for number in range(arguments.kills):
            run = subprocess.Popen([*command, str(broken)], stdout=subprocess.DEVNULL)
            time.sleep(draws.uniform(0.05, 0.5) * seconds)
            run.kill()
            run.wait()
            journal = broken.with_name("broken.preparing") / "journal.jsonl"
            kept = journal.read_text().count("\n") if journal.exists() else 0
            print(f"kill {number + 1}: {kept} commits kept, finished: {broken.exists()}", flush=True)
        started = time.monotonic()
        subprocess.run([*command, str(broken)], check=True, stdout=subprocess.DEVNULL)
        print(f"last run: {time.monotonic() - started:.0f} s")
        for name, digest in shards(whole).items():
            print(f"{name}  {digest[:16]}  {'same' if shards(broken)[name] == digest else 'DIFFERENT'}")
        assert shards(whole) == shards(broken)


if __name__ == "__main__":
    main()
