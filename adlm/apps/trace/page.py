"""Writes a trace to a file: JSON data, a self-contained HTML page, or an animated image. Does not depend on models."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from adlm.apps.trace.animation import as_animation
from adlm.errors import UserError
from adlm.files import check_output, write_file

if TYPE_CHECKING:
    from adlm.apps.trace.recording import Trace


def write_trace(trace: "Trace", path: str | Path, force: bool = False) -> None:
    """Write the trace as data (.json), a page (.html) or an animated image (.svg).

    A file written by adlm is replaced, any other file only with `force`.
    """
    path = Path(path)
    check_trace_path(path, "trace", force)
    write_file(path, FORMATS[path.suffix](trace))


def check_trace_path(path: Path, option: str, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """Raise the user errors of `write_trace` before sampling starts."""
    if path.suffix not in FORMATS:
        raise UserError(f"{option} {path} must end in .json (data), .html (page) or .svg (animation)")
    check_output(path, option, force, inputs)


def as_json(trace: "Trace") -> str:
    return json.dumps(trace.to_dict(), separators=(",", ":")) + "\n"


def as_page(trace: "Trace") -> str:
    """A page that contains its style, script and trace. Its policy forbids loading anything or running other scripts.

    The trace is in a data block that no character of the trace can end, and the script inserts it only as text.
    """
    return page_template().replace(TRACE_PLACE, _escape_html(as_json(trace)), 1)


def page_template() -> str:
    """The page without its trace, which replaces TRACE_PLACE. The studio fills it in too."""
    style, script = read_asset("viewer.css") + read_asset("page.css"), _bundled_script()
    policy = f"default-src 'none'; style-src {_policy_hash(style)}; script-src {_policy_hash(script)}; base-uri 'none'"
    page = read_asset("page.html")
    for name, content in {"POLICY": policy, "STYLE": style, "SCRIPT": script}.items():
        page = page.replace(f"@@{name}@@", content, 1)
    return page


TRACE_PLACE = "@@TRACE@@"
FORMATS = {".json": as_json, ".html": as_page, ".svg": as_animation}


def _bundled_script() -> str:
    """page.js and the module that it imports as one module."""
    viewer, page = read_asset("viewer.js"), read_asset("page.js")
    own = [line for line in page.splitlines(keepends=True) if not line.startswith("import ")]
    return re.sub(r"^export ", "", viewer, flags=re.MULTILINE) + "".join(own)


def read_asset(name: str) -> str:
    """A file of the trace page."""
    return files("adlm.apps.trace").joinpath(name).read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape_html(data: str) -> str:
    """JSON without `<`, `>` and `&`: they occur only in strings, where the escapes mean the same."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
