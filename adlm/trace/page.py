"""Writes a trace to a file: JSON data, a self-contained HTML page, or an animated image. Does not depend on models."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from adlm.errors import UserError
from adlm.files import check_output, write_file
from adlm.trace.animation import as_animation
from adlm.trace.recording import Trace


def write_trace(trace: Trace, path: str | Path, force: bool = False) -> None:
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


def as_json(trace: Trace) -> str:
    return json.dumps(trace.to_dict(), separators=(",", ":")) + "\n"


def as_page(trace: Trace) -> str:
    """A page that contains its style, script and trace. Its policy forbids loading anything or running other scripts.

    The trace is in a data block that no character of the trace can end, and the script inserts it only as text.
    """
    style, script = _read_asset("page.css"), _read_asset("page.js")
    policy = f"default-src 'none'; style-src {_policy_hash(style)}; script-src {_policy_hash(script)}; base-uri 'none'"
    contents = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "TRACE": _escape_html(as_json(trace))}
    page = _read_asset("page.html")
    for name in ("POLICY", "STYLE", "SCRIPT", "TRACE"):  # the trace last, so that no placeholder in it is replaced
        page = page.replace(f"@@{name}@@", contents[name], 1)
    return page


FORMATS = {".json": as_json, ".html": as_page, ".svg": as_animation}


def _read_asset(name: str) -> str:
    return files("adlm.trace").joinpath(name).read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape_html(data: str) -> str:
    """JSON without `<`, `>` and `&`: they occur only in strings, where the escapes mean the same."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
