"""Shared parts of plots: output files, style, and labels that avoid curves and each other. No results."""

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.errors import UserError
from adlm.files import PLOT_METADATA, check_output, replacing

INK, GREY, WARNING = "#222222", "#8a8a8a", "#a32020"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The colour-blind safe palette of Okabe and Ito."""
SMALL = 8
LABEL_DIRECTIONS = (*product((1, -1), (0.6, -0.6)), (0, 1), (0, -1), (1, 0), (-1, 0), *product((1, -1), (2, -2)))
"""Directions (x, y) from a point to its label, best first."""
LABEL_DISTANCES = (7, 11, 16, 22)
"""Distances of a label from its point, in printer's points, best first."""
CROWDED = 15  # pixels


def check_plot_path(path: Path, option: str, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """Check that the plot can be written, before anything is computed for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    if path.suffix not in PLOT_METADATA:
        raise UserError(f"{option} {path} is not a plot file; it must end in {', '.join(PLOT_METADATA)}")
    check_output(path, option, force, inputs)


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure without a display, with its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def literal_text() -> Iterator[None]:
    """Draw text literally: no mathtext, no warnings about characters missing from the font."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def save_figure(figure: Any, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=200, metadata=PLOT_METADATA[path.suffix])


def style_axes(axes: Any, grid: str = "both") -> None:
    """Left and bottom spines only, and a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, color=GREY)


def logarithmic(axes: Any, which: str, span: float) -> None:
    """A log scale with plain numbers at the ticks; fewer ticks for a large `span`, the ratio of largest to smallest."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if span < 30 else (1, 3)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


@dataclass
class LabelPlacer:
    """Places labels on axes with fixed limits, where they cover neither curves nor other labels.

    `curves` are in data coordinates, (n, 2) each.
    """

    axes: Any
    curves: Sequence[NDArray[np.float64]]
    _boxes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.axes.figure.draw_without_rendering()
        self._ink = np.concatenate([self._curve_pixels(curve) for curve in self.curves])

    def put(self, points: Sequence[tuple[float, float]], label: str, near: int = 0, **style: Any) -> None:
        """Place a label next to one of the points, where it covers least.

        With `near`, only the first `near` distances are tried, and the label is omitted if it would cover anything.
        """
        best, lowest_cost = None, float("inf")
        for point, offset in self._candidates(points, LABEL_DISTANCES[: near or None]):
            text = self._annotate(point, label, offset, style)
            box = text.get_window_extent()
            text.remove()
            cost = self._cost(box)
            if cost < lowest_cost:
                best, lowest_cost = (point, offset), cost
            if cost == 0:
                break
        if best is None or (near and lowest_cost > 0):
            return
        text = self._annotate(best[0], label, best[1], style)
        self._boxes.append(text.get_window_extent().padded(1))

    def crowded(self, point: tuple[float, float], points: Sequence[tuple[float, float]]) -> bool:
        """Whether another of the points is so near that a label would be ambiguous."""
        pixel, *other_pixels = self.axes.transData.transform([point, *(other for other in points if other != point)])
        return any(np.hypot(*(other - pixel)) < CROWDED for other in other_pixels)

    def _candidates(self, points: Sequence[tuple[float, float]], distances: Sequence[int]) -> Iterator[Any]:
        for distance in distances:
            for point in points:
                for x, y in LABEL_DIRECTIONS:
                    yield point, (x * distance, y * distance, x)

    def _annotate(self, point: tuple[float, float], label: str, offset: Any, style: dict[str, Any]) -> Any:
        dx, dy, side = offset
        return self.axes.annotate(
            label,
            point,
            xytext=(dx, dy),
            textcoords="offset points",
            ha={1: "left", 0: "center", -1: "right"}[side],
            va="center" if side else ("bottom" if dy > 0 else "top"),
            in_layout=False,
            **{"fontsize": SMALL, "color": INK} | style,
        )

    def _cost(self, box: Any) -> float:
        """How much the box covers: pixels of curves, other labels, and worst, space outside the axes."""
        frame, ink = self.axes.get_window_extent(), self._ink
        inside = (ink[:, 0] > box.x0) & (ink[:, 0] < box.x1) & (ink[:, 1] > box.y0) & (ink[:, 1] < box.y1)
        outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
        return float(inside.sum() + 1000 * sum(box.overlaps(other) for other in self._boxes) + 10_000 * outside)

    def _curve_pixels(self, curve: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points in pixels: one every two pixels along the curve, and a 3 x 3 grid at each vertex for its marker."""
        corners = self.axes.transData.transform(curve)
        disc = np.array([(dx, dy) for dx in (-5, 0, 5) for dy in (-5, 0, 5)])
        parts = [(corners[:, None] + disc).reshape(-1, 2)]
        for start, stop in pairwise(corners):
            num = max(2, int(np.hypot(*(stop - start)) / 2))
            parts.append(np.linspace(start, stop, num))
        return np.concatenate(parts)
