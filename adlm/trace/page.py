"""A trace as a file: data, or one page that shows it and needs nothing else. Knows nothing of models."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from adlm.errors import UserError
from adlm.files import check_output, write_file
from adlm.trace.recording import Trace


def write_trace(trace: Trace, path: str | Path, force: bool = False) -> None:
    """Write the trace as its suffix says: .json the data, .html the page.

    What adlm wrote before is replaced, any other file only with `force`.
    """
    place = Path(path)
    check_trace_place(place, "trace", force)
    write_file(place, FORMS[place.suffix](trace))


def check_trace_place(place: Path, option: str, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """What `write_trace` would refuse, said before the walk."""
    if place.suffix not in FORMS:
        raise UserError(f"{option} {place} must end in .json (data) or .html (a page to look at)")
    check_output(place, option, force, inputs)


def as_json(trace: Trace) -> str:
    return json.dumps(trace.plain(), separators=(",", ":")) + "\n"


def as_page(trace: Trace) -> str:
    """One page with style, script and trace in it. It may load nothing and run no script but its own.

    The trace stands in a block of data: no character of it can end that block, and the script puts text on the page
    only as text.
    """
    style, script = _part("page.css"), _part("page.js")
    policy = f"default-src 'none'; style-src {_hashed(style)}; script-src {_hashed(script)}; base-uri 'none'"
    slots = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "TRACE": _inert(as_json(trace))}
    page = _part("page.html")
    for name in ("POLICY", "STYLE", "SCRIPT", "TRACE"):  # the trace last, so that nothing in it is taken for a slot
        page = page.replace(f"@@{name}@@", slots[name], 1)
    return page


FORMS = {".json": as_json, ".html": as_page}


def _part(name: str) -> str:
    return files("adlm.trace").joinpath(name).read_text(encoding="utf-8")


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(data: str) -> str:
    """JSON in which no `<`, `>` or `&` is left: in strings alone can they be, and there an escape means the same."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
