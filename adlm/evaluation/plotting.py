"""What pictures share: where they go, how they look, and labels that stand on nothing else. Knows no figures."""

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

FORMS = (".png", ".svg", ".pdf")
INK, GREY, WARNING = "#222222", "#8a8a8a", "#a32020"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of Okabe and Ito: told apart by everyone."""
SMALL = 8
AROUND = (*product((1, -1), (0.6, -0.6)), (0, 1), (0, -1), (1, 0), (-1, 0), *product((1, -1), (2, -2)))
"""Where a label may stand beside its point, best first: a side and a height."""
DISTANCES = (7, 11, 16, 22)
"""From the point, in points of a printer."""
CROWD = 15  # pixels


def check_plot_path(path: Path, option: str, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """What would fail after hours fails now."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib, which is not installed; try pip install 'adlm[eval]'")
    if path.suffix not in FORMS:
        raise UserError(f"{option} {path} is no picture; one ends in {', '.join(FORMS)}")
    check_output(path, option, force, inputs)


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches, which belongs to no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def literal_text() -> Iterator[None]:
    """While a figure is drawn: names are no mathematics, and a character that the font lacks is no warning."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def save_figure(figure: Any, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=200, metadata=PLOT_METADATA[path.suffix])


def style_axes(axes: Any, grid: str = "both") -> None:
    """Two sides and a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, color=GREY)


def logarithmic(axes: Any, which: str, span: float) -> None:
    """With numbers as people write them, fewer where the largest is `span` times the smallest and that is much."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if span < 30 else (1, 3)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


@dataclass
class Labels:
    """Words on axes whose limits are settled, each where it covers neither a curve nor other words.

    `curves` are in data coordinates, (n, 2) each; a label stands beside one of the points that it may belong to.
    """

    axes: Any
    curves: Sequence[NDArray[np.float64]]
    _taken: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.axes.figure.draw_without_rendering()
        self._ink = np.concatenate([self._densely(curve) for curve in self.curves])

    def put(self, points: Sequence[tuple[float, float]], words: str, near: int = 0, **style: Any) -> None:
        """Words beside the first of the points where there is room: `near` by, in so many distances, or not at all."""
        best, least = None, float("inf")
        for point, place in self._places(points, DISTANCES[: near or None]):
            text = self._written(point, words, place, style)
            box = text.get_window_extent()
            text.remove()
            cost = self._covered(box)
            if cost < least:
                best, least = (point, place), cost
            if cost == 0:
                break
        if best is None or (near and least > 0):
            return
        text = self._written(best[0], words, best[1], style)
        self._taken.append(text.get_window_extent().padded(1))

    def crowded(self, point: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
        """Whether another point is so near that nobody could tell whose a label is."""
        here, *there = self.axes.transData.transform([point, *(each for each in others if each != point)])
        return any(np.hypot(*(each - here)) < CROWD for each in there)

    def _places(self, points: Sequence[tuple[float, float]], distances: Sequence[int]) -> Iterator[Any]:
        for distance in distances:
            for point in points:
                for side, height in AROUND:
                    yield point, (side * distance, height * distance, side)

    def _written(self, point: tuple[float, float], words: str, place: Any, style: dict[str, Any]) -> Any:
        across, up, side = place
        return self.axes.annotate(
            words,
            point,
            xytext=(across, up),
            textcoords="offset points",
            ha={1: "left", 0: "center", -1: "right"}[side],
            va="center" if side else ("bottom" if up > 0 else "top"),
            in_layout=False,
            **{"fontsize": SMALL, "color": INK} | style,
        )

    def _covered(self, box: Any) -> float:
        """How much the box hides; what reaches beyond the axes is worst."""
        frame, ink = self.axes.get_window_extent(), self._ink
        inside = (ink[:, 0] > box.x0) & (ink[:, 0] < box.x1) & (ink[:, 1] > box.y0) & (ink[:, 1] < box.y1)
        beyond = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
        return float(inside.sum() + 1000 * sum(box.overlaps(other) for other in self._taken) + 10_000 * beyond)

    def _densely(self, curve: NDArray[np.float64]) -> NDArray[np.float64]:
        """In pixels, a point for every two along it, and a disc about each of its own for the marker."""
        corners = self.axes.transData.transform(curve)
        disc = np.array([(dx, dy) for dx in (-5, 0, 5) for dy in (-5, 0, 5)])
        parts = [(corners[:, None] + disc).reshape(-1, 2)]
        for start, stop in pairwise(corners):
            num = max(2, int(np.hypot(*(stop - start)) / 2))
            parts.append(np.linspace(start, stop, num))
        return np.concatenate(parts)
