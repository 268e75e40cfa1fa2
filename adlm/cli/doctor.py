"""`adlm doctor`: check this machine: versions, devices, packages, data, and what each optional feature needs."""

import json
import sys
from dataclasses import asdict, dataclass

from rich.text import Text

from adlm.apps.doctor import FEATURES, Check, check_environment
from adlm.cli.console import Console
from adlm.request import Request, option

MARKS = {"ok": ("✓", "ok", "green"), "absent": ("-", "-", "yellow"), "broken": ("✗", "NO", "bold red")}
"""Mark, mark where the encoding lacks it, and style of each status."""
NAME_WIDTH = max(len(feature.name) for feature in FEATURES)


@dataclass(frozen=True)
class DoctorRequest(Request):
    """The options of `adlm doctor`."""

    example = """adlm doctor
  adlm doctor --json

The exit code is 1 if something that adlm cannot work without is broken, else 0."""

    json: bool = option("print JSON", False)


def run(request: DoctorRequest) -> int:
    checks: list[Check] = []
    console = Console()
    for check in check_environment():
        if not request.json:
            if not checks or checks[-1].section != check.section:
                console.print(check.section, style="bold")
            _print_check(console, check)
        checks.append(check)
    works = all(check.status != "broken" for check in checks)
    if request.json:
        sys.stdout.write(f"{json.dumps({'ok': works, 'checks': [asdict(check) for check in checks]})}\n")
    elif works:
        num_absent = sum(check.section == "features" and check.status == "absent" for check in checks)
        console.print(f"\nadlm works here; {num_absent or 'no'} optional feature{'s' * (num_absent != 1)} missing")
    else:
        console.print("\nadlm does not work here: see the lines marked as broken", style="bold red")
    return 0 if works else 1


def _print_check(console: Console, check: Check) -> None:
    mark, plain_mark, style = MARKS[check.status]
    shown = mark if console.encoding.startswith("utf") else plain_mark
    width = NAME_WIDTH if check.section == "features" else len("attention")
    line = Text.assemble("  ", (shown, style), f" {check.name:{width}}  {check.detail}")
    if check.install:
        line.append(f": {check.install}", style="bold")
    console.print(line, soft_wrap=True)
