"""Writes a trace to a file: JSON data, a self-contained HTML page, or an animated image. Does not depend on models.

The animated SVG image is for a README or a slide: tokens appear as they were sampled, anchors lit. It contains no
script. Without animation, or where the reader asks for reduced motion, it shows the final text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category, east_asian_width

from adlm.errors import UserError
from adlm.files import check_output, write_file
from adlm.tokens import decode_escaped, decode_side_by_side, tokens_bytes

if TYPE_CHECKING:
    from adlm.apps.trace.recording import Trace


TRACE_PLACE = "@@TRACE@@"
COLUMNS = 72  # characters per line
WIDTH, HEIGHT = 9.03, 30  # of a character and a line, in pixels, with a font of 15 pixels
MARGIN = 26
PLAY, HOLD = 9.0, 4.0  # seconds: the sampling run, and the final text after it

STYLE = """
text { font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #22252b; }
.card { fill: #fbfaf6; stroke: #e5e1d7; } .mask { fill: #e9e5db; } .lit { fill: #e28a0c; fill-opacity: .35; }
.anchor { fill: #a35f00; font-weight: 700; } .passing { fill: #ce2c68; } .small { font-size: 12px; fill: #6d6a63; }
.hidden { opacity: 0; }
@media (prefers-color-scheme: dark) {
  text { fill: #e9e6df; } .card { fill: #14161a; stroke: #2c3038; } .mask { fill: #2a2e36; }
  .lit { fill: #faac3e; } .anchor { fill: #faac3e; } .passing { fill: #ff6898; } .small { fill: #9a978f; }
}
@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""

Interval = tuple[float, float]
"""Start and end of a time in which something is visible, as shares of the sampling run."""


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
    data = as_json(trace)  # `<`, `>` and `&` occur only in strings, where the escapes mean the same
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return page_template().replace(TRACE_PLACE, data, 1)


def page_template() -> str:
    """The page without its trace, which replaces TRACE_PLACE. The studio fills it in too."""
    own = [line for line in read_asset("page.js").splitlines(keepends=True) if not line.startswith("import ")]
    script = re.sub(r"^export ", "", read_asset("viewer.js"), flags=re.MULTILINE) + "".join(own)  # as one module
    style = read_asset("viewer.css") + read_asset("page.css")
    policy = f"default-src 'none'; style-src {_policy_hash(style)}; script-src {_policy_hash(script)}; base-uri 'none'"
    page = read_asset("page.html")
    for name, content in {"POLICY": policy, "STYLE": style, "SCRIPT": script}.items():
        page = page.replace(f"@@{name}@@", content, 1)
    return page


def read_asset(name: str) -> str:
    """A file of the trace page."""
    return files("adlm.apps.trace").joinpath(name).read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(frozen=True)
class History:
    """What is at one position over time."""

    tokens: tuple[tuple[int, Interval], ...]
    """ids, and when they are there; the last one stays."""
    masked: tuple[Interval, ...]
    lit: tuple[Interval, ...]
    """When it is masked and the anchor network already predicts the token that will be drawn."""
    is_anchor: bool
    """Whether the anchor network's first guess was the token that stays."""


def as_animation(trace: "Trace") -> str:
    histories = [_history(trace, position) for position in range(len(trace.canvas))]
    pieces = tokens_bytes(trace.tokenizer, trace.last, trace.special_tokens)
    pieces = [b"" if position in trace.left_out else piece for position, piece in enumerate(pieces)]
    texts = decode_side_by_side(pieces)
    keyframes = Keyframes()
    body: list[str] = []
    line = 0
    for history, text, (column, line) in zip(histories, texts, _places(texts), strict=True):
        word = _printable(text).strip()
        if not word:
            continue
        column += len(text) - len(text.lstrip()) if column else 0
        body += _token(trace, history, word, MARGIN + column * WIDTH, MARGIN + line * HEIGHT, keyframes)
    width, height = round(2 * MARGIN + COLUMNS * WIDTH), 2 * MARGIN + (line + 2) * HEIGHT - 8
    bottom = height - MARGIN + 6
    name = escape(_printable(trace.info.name))
    what = escape(f"{trace.method}, {trace.info.sampler}, {trace.info.steps} steps")
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/" role="img"',
        f' viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-label="A text, sampled by {name}">',
        f"<metadata><dc:title>adlm</dc:title></metadata>\n<style>{STYLE}{keyframes}</style>",
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="12"/>',
        *body,
    ]
    if any(step.anchor for step in trace.steps):
        bold = '<tspan class="anchor">bold</tspan>'
        lines.append(f'<rect class="lit" x="{MARGIN}" y="{bottom - 11}" width="20" height="14" rx="4"/>')
        legend = f"and {bold}: first guess of the anchor network"
        lines.append(f'<text class="small" x="{MARGIN + 28}" y="{bottom}">{legend}</text>')
    lines.append(f'<text class="small" x="{width - MARGIN}" y="{bottom}" text-anchor="end">{what}</text>\n</svg>\n')
    return "\n".join(lines)


def _history(trace: "Trace", position: int) -> History:
    num = len(trace.steps) - 1
    times = {step.frame: number / num for number, step in enumerate(trace.steps)} if num else {0: 0.0}
    stays: list[tuple[int, Interval]] = []
    lit, is_anchor = [], False
    current, since = trace.canvas[position], 0.0
    for step in trace.steps:
        now = times[step.frame]
        if position not in step.changed:
            continue
        stays.append((current, (since, now)))
        if position in step.revealed:
            is_anchor = position in step.anchored
            if is_anchor and current == trace.mask_id:
                begins = min(time for frame, time in times.items() if frame >= step.anchored[position])
                lit.append((max(begins, since), now))
        current, since = step.changed[position][0], now
    stays.append((current, (since, 1.0)))
    tokens = tuple(stay for stay in stays if stay[0] != trace.mask_id)
    masked = tuple(interval for index, interval in stays if index == trace.mask_id)
    return History(tokens, masked, tuple(lit), is_anchor)


def _places(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Column and line of each token. Lines break before a token that begins with a space, and at newlines."""
    column = line = 0
    for text in texts:
        width = _columns(text.strip("\n"))
        if column and column + width > COLUMNS and (text[:1].isspace() or column + width > COLUMNS + 8):
            column, line = 0, line + 1
        yield column, line
        column += width - (len(text) - len(text.lstrip()) if not column else 0)
        if "\n" in text:
            column, line = 0, line + 1


def _columns(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _printable(text: str) -> str:
    """Without characters that XML forbids or that have no width of their own."""
    return "".join(" " if category(character).startswith("C") else character for character in text)


class Keyframes:
    """The visibilities that occur, each written once."""

    def __init__(self) -> None:
        self._names: dict[tuple[Interval, ...], str] = {}

    def name(self, visible: tuple[Interval, ...]) -> str:
        return self._names.setdefault(visible, f"k{len(self._names)}")

    def __str__(self) -> str:
        return "\n".join(f"@keyframes {name} {{ {_rules(visible)} }}" for visible, name in self._names.items())


def _rules(visible: tuple[Interval, ...]) -> str:
    """Opacity over time in percent of PLAY + HOLD, with short fades."""
    stops: list[tuple[float, int]] = [(0.0, int(visible[0][0] == 0))]
    for start, end in visible:
        begins, ends = (100 * PLAY / (PLAY + HOLD) * time for time in (start, end))
        if start > 0:
            stops += [(begins, 0), (begins + 1.2, 1)]
        if end < 1:
            stops += [(max(begins + 1.2, ends), 1), (ends + 1.2, 0)]
    stops.append((100.0, stops[-1][1]))
    return " ".join(f"{time:.2f}% {{ opacity: {opacity} }}" for time, opacity in stops)


def _token(trace: "Trace", history: History, word: str, x: float, y: float, keyframes: Keyframes) -> Iterator[str]:
    """The mask, the light and the tokens of one position, whose last token is `word`."""
    width = _columns(word) * WIDTH
    for kind, visible in (("mask", history.masked), ("lit", history.lit)):
        if visible:
            box = f'x="{x - 2:.1f}" y="{y - 2:.1f}" width="{width + 3:.1f}" height="22" rx="4"'
            yield f'<rect class="{kind} hidden" {box} style="{_animation(keyframes.name(visible))}"/>'
    for number, (index, interval) in enumerate(history.tokens):
        if number == len(history.tokens) - 1:
            kind, text = "anchor" if history.is_anchor else "token", word
        else:
            [piece] = tokens_bytes(trace.tokenizer, [index], special_tokens=True)
            kind, text = "passing hidden", _printable(decode_escaped(piece)).strip()[: len(word)]
        style = "" if interval == (0.0, 1.0) else f' style="{_animation(keyframes.name((interval,)))}"'
        yield f'<text class="{kind}" x="{x:.1f}" y="{y + 14:.1f}"{style}>{escape(text)}</text>'


def _animation(name: str) -> str:
    return f"animation: {name} {PLAY + HOLD:g}s infinite"


FORMATS = {".json": as_json, ".html": as_page, ".svg": as_animation}
