"""The git commit of this code."""

import subprocess
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"


@cache
def code_commit() -> str:
    """The short git commit of this code; "unknown" for an installed package, also one inside another repository."""
    is_tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return (is_tracked and _git("rev-parse", "--short", "HEAD")) or UNKNOWN


def _git(*arguments: str) -> str:
    """The output of a git command in this folder; empty if it fails or there is no git."""
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
