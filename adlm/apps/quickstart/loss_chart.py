"""The loss curves of several runs as an SVG drawing that takes its colours from the page's style sheet."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[Mapping[str, Any]]
"""The lines of a metrics.jsonl."""

LEFT, RIGHT, TOP, BOTTOM = 34, 68, 26, 44  # margins in pixels, for the labels of the axes and of the levels
ROOM = 0.06  # of the height, above the highest and below the lowest value


@dataclass(frozen=True)
class _Scale:
    """Maps tokens and nats to pixels."""

    tokens: float
    lowest: float
    highest: float
    width: int
    height: int

    def x(self, tokens: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * tokens / self.tokens

    def y(self, nats: float) -> float:
        share = (self.highest - nats) / (self.highest - self.lowest)
        return TOP + (self.height - TOP - BOTTOM) * share


def draw_loss_chart(curves: Mapping[str, Lines], levels: Mapping[str, float], width: int, height: int) -> str:
    """Training loss (faint) and held-out bound (points) of each run by training tokens, and levels to compare with.

    The elements of a run have the class `line-NAME`.
    """
    points = {
        name: {metric: _points(lines, metric) for metric in ("nats", "valid_nats")} for name, lines in curves.items()
    }
    every = [point for run in points.values() for found in run.values() for point in found]
    values = [nats for _, nats in every] + list(levels.values())
    room = max(max(values) - min(values), 0.1) * ROOM
    most = max((tokens for tokens, _ in every), default=1)
    scale = _Scale(most, min(values) - room, max(values) + room, width, height)
    names = ", ".join(name.upper() for name in curves)
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{html.escape(f"Loss of {names} in nats per token, by training tokens")}">',
        *_axes(scale),
        *_levels(scale, levels),
    ]
    for name, run in points.items():
        parts.append(f'<polyline class="line-{name} training" points="{_polyline(scale, run["nats"])}"/>')
    for name, run in points.items():
        held_out = run["valid_nats"]
        parts.append(f'<polyline class="line-{name}" points="{_polyline(scale, held_out)}"/>')
        parts += [
            f'<circle class="line-{name}" cx="{scale.x(tokens):.1f}" cy="{scale.y(nats):.1f}" r="3.5">'
            f"<title>{name.upper()} after {tokens:,} tokens: {nats:.4f} nats per held-out token</title></circle>"
            for tokens, nats in held_out
        ]
    return "".join([*parts, "</svg>"])


def _points(lines: Lines, metric: str) -> list[tuple[int, float]]:
    return [(line["tokens"], line[metric]) for line in lines if line.get(metric) is not None]


def _polyline(scale: _Scale, points: Sequence[tuple[int, float]]) -> str:
    return " ".join(f"{scale.x(tokens):.1f},{scale.y(nats):.1f}" for tokens, nats in points)


def _axes(scale: _Scale) -> list[str]:
    right, bottom = scale.width - RIGHT, scale.height - BOTTOM
    parts = []
    for nats in _ticks(scale.lowest, scale.highest, (scale.height - TOP - BOTTOM) // 45):
        y = scale.y(nats)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{nats:g}</text>')
    for tokens in _ticks(0, scale.tokens, (scale.width - LEFT - RIGHT) // 60):
        x, label = scale.x(tokens), _thousands(tokens)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append('<text x="0" y="12">nats per token</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{bottom + 38}" text-anchor="middle">training tokens</text>')
    return parts


def _levels(scale: _Scale, levels: Mapping[str, float]) -> list[str]:
    right = scale.width - RIGHT
    parts = []
    for name, nats in levels.items():
        y = scale.y(nats)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{right + 6}" y="{y + 4:.1f}">{html.escape(name)}</text>')
    return parts


def _ticks(lowest: float, highest: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers from `lowest` to `highest`, evenly spaced by 1, 2 or 5 times a power of ten."""
    rough = (highest - lowest) / max(most, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _thousands(number: float) -> str:
    """1.5M, 800k, 64."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"
