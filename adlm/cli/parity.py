"""`adlm parity`: compare this implementation with reference outputs of the released code.

The comparison itself is one of the tests, tests/parity/comparison.py, and needs a clone of the repository.
"""

import importlib.util
import json
import math
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console
from adlm.errors import UserError
from adlm.request import Request, option

COMPARISON = Path(__file__).parents[2] / "tests" / "parity" / "comparison.py"


@dataclass(frozen=True)
class ParityRequest(Request):
    """The options of `adlm parity`."""

    example = "adlm parity tests/parity/golden"

    folder: Path = option("folder with golden.json, its .npz arrays and .ckpt weights", positional=True)
    json: bool = option("print JSON", False)


def run(request: ParityRequest) -> int:
    if not COMPARISON.is_file():
        raise UserError(
            "adlm parity is part of the tests, which an installed package leaves out; run it in a clone of the "
            "repository or in the unpacked source distribution, where tests/parity is"
        )
    spec = importlib.util.spec_from_file_location("adlm_parity", COMPARISON)
    assert spec is not None
    assert spec.loader is not None
    comparison = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(comparison)
    report = comparison.compare(request.folder)
    if request.json:
        rows = [{**asdict(row), "ok": row.ok} for row in report.rows]
        for row in rows:
            row["error"] = row["error"] if math.isfinite(row["error"]) else None  # JSON has no NaN
        sys.stdout.write(f"{json.dumps({'ok': report.ok, 'rows': rows, 'unchecked': report.unchecked})}\n")
    else:
        _print_table(report)
    return 0 if report.ok else 1


def _print_table(report: Any) -> None:
    table = Table("compared", "error", "tolerance", "", box=None, pad_edge=False)
    for row in report.rows:
        kind = " relative" if row.relative else ""
        verdict = Text("agrees", "green") if row.ok else Text("DIFFERS", "bold red")
        table.add_row(row.name, f"{row.error:.1e}", f"{row.tolerance:.0e}{kind}", verdict)
    console = Console()
    console.print(table)
    num_failed = sum(not row.ok for row in report.rows)
    console.print(
        f"\n{len(report.rows)} compared by largest absolute error (losses: relative error), "
        f"{num_failed or 'none'} out of tolerance",
    )
    for file, entries in groupby(report.unchecked, key=lambda entry: str(entry).partition(": ")[0]):
        names = ", ".join(entry.partition(": ")[2] for entry in entries)
        console.print(f"not checked: {file} {names}".rstrip(), style="dim")
