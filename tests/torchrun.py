"""A command by several processes, as torchrun starts them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def on_two(folder: Path, *words: object, first: str = "") -> subprocess.CompletedProcess[str]:
    """`adlm WORDS ...`; `first` is Python that each process runs before it."""
    return torchrun(folder, 2, 0, *words, first=first)


def torchrun(
    folder: Path, num: int, restarts: int, *words: object, first: str = ""
) -> subprocess.CompletedProcess[str]:
    """The same by `num` processes, which are restarted if one of them fails."""
    script = folder / "command.py"
    script.write_text(f"{first}\nimport sys\nfrom adlm.cli.main import main\nsys.exit(main(sys.argv[1:]))\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
    command += ["--max-restarts", str(restarts), str(script)]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=False, timeout=600)


def close(one: Any, other: Any, rel: float = 1e-6) -> bool:
    """The same JSON but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key], rel) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(*pair, rel) for pair in zip(one, other, strict=True))
    return bool(one == (pytest.approx(other, rel=rel) if isinstance(other, float) else other))
