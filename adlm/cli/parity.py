"""`adlm parity`: compare this implementation with reference outputs of the released code."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console
from adlm.request import Request, option

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.apps.paper.parity import ParityReport


@dataclass(frozen=True)
class ParityRequest(Request):
    """The options of `adlm parity`."""

    example = "adlm parity tests/golden"

    folder: Path = option("folder with golden.json, its .npz arrays and .ckpt weights", positional=True)
    json: bool = option("print JSON", False)


def run(request: ParityRequest) -> int:
    from adlm.apps.paper.parity import compare

    report = compare(request.folder)
    if request.json:
        sys.stdout.write(f"{json.dumps(_to_json(report))}\n")
    else:
        _print_table(report)
    return 0 if report.ok else 1


def _to_json(report: "ParityReport") -> dict[str, object]:
    rows = [{**asdict(row), "ok": row.ok} for row in report.rows]
    for row in rows:
        row["error"] = row["error"] if math.isfinite(row["error"]) else None  # JSON has no NaN
    return {"ok": report.ok, "rows": rows, "unchecked": report.unchecked}


def _print_table(report: "ParityReport") -> None:
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
    for file, entries in groupby(report.unchecked, key=lambda entry: entry.partition(": ")[0]):
        names = ", ".join(entry.partition(": ")[2] for entry in entries)
        console.print(f"not checked: {file} {names}".rstrip(), style="dim")
