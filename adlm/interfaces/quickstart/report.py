"""The quickstart's findings as report.json and as one page that needs nothing else. Measures nothing."""

import html
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adlm.places import write_whole


@dataclass(frozen=True)
class Trained:
    """One model's row of the table."""

    nats: float
    stderr: float
    parameters: int
    steps: int
    tokens: int
    seconds: float
    """Of training, preparing and measuring not counted."""


@dataclass(frozen=True)
class Findings:
    adlm: Trained
    mdlm: Trained
    difference: float
    """Of the bounds, adlm minus mdlm, on the same rows and draws."""
    difference_stderr: float
    unigram_nats: float
    bigram_nats: float
    held_out_tokens: int
    samples: tuple[str, ...]
    canvas: str
    """The sentence with gaps, and what was put there."""
    infilled: str
    seconds: float
    """Of everything."""
    commit: str
    text: str
    """What was read."""

    @property
    def verdict(self) -> str:
        """What the numbers say, and no more."""
        if abs(self.difference) < 2 * self.difference_stderr:
            return "The two bounds cannot be told apart."
        better, worse = ("ADLM", "MDLM") if self.difference < 0 else ("MDLM", "ADLM")
        return (
            f"{better}'s bound is lower than {worse}'s by {abs(self.difference):.4f} ± {self.difference_stderr:.4f} "
            "nats a token on the same text and draws."
        )


Curves = dict[str, list[dict[str, Any]]]
"""The lines of each run's metrics.jsonl."""


def write_report(folder: Path, findings: Findings, curves: Curves) -> None:
    figure = _drawn(findings, curves)
    for form in ("svg", "png"):
        figure.savefig(folder / f"curves.{form}", format=form, dpi=120)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    drawn = picture.getvalue()
    write_whole(folder / "report.json", json.dumps(asdict(findings), indent=1, ensure_ascii=False))
    write_whole(folder / "report.html", _page(findings, drawn[drawn.index("<svg") :]))


def _drawn(findings: Findings, curves: Curves) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, colour in (("adlm", "tab:orange"), ("mdlm", "tab:blue")):
        lines = curves[name]
        trained = [(line["tokens"], line["nats"]) for line in lines if line.get("nats") is not None]
        axes.plot(*zip(*trained, strict=True), color=colour, alpha=0.25, linewidth=1)
        held = [line for line in lines if line.get("valid_nats") is not None]
        axes.plot(
            [line["tokens"] for line in held],
            [line["valid_nats"] for line in held],
            color=colour,
            marker="o",
            markersize=4,
            label=f"{name.upper()}, held out (faint: in training)",
        )
    for nats, name in ((findings.unigram_nats, "unigrams"), (findings.bigram_nats, "bigrams")):
        axes.axhline(nats, color="grey", linestyle=":", linewidth=1)
        axes.annotate(name, (0.995, nats), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("bound, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


STYLE = """
body { font: 16px/1.5 Georgia, serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .9rem .25rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid #999; font-weight: normal; }
pre { white-space: pre-wrap; font: inherit; background: #f6f4ee; padding: .8rem 1rem; }
svg { width: 100%; height: auto; }
.note { color: #666; font-size: .9rem; }
"""


def _page(findings: Findings, picture: str) -> str:
    rows = "".join(
        f"<tr><td>{name}</td><td>{row.nats:.4f} ± {row.stderr:.4f}</td><td>{math.exp(row.nats):.1f}</td>"
        f"<td>{row.parameters:,}</td><td>{row.tokens:,}</td><td>{row.seconds:.0f} s</td></tr>"
        for name, row in (("ADLM", findings.adlm), ("MDLM", findings.mdlm))
    )
    counted = "".join(
        f"<tr><td>{name}</td><td>{nats:.4f}</td><td>{math.exp(nats):.1f}</td></tr>"
        for name, nats in (("unigrams", findings.unigram_nats), ("bigrams", findings.bigram_nats))
    )
    samples = "".join(f"<pre>{html.escape(text)}</pre>" for text in findings.samples)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>adlm quickstart</title><style>{STYLE}</style>
<h1>adlm quickstart</h1>
<p>Text: {html.escape(findings.text)}. Two small networks of the same width and depth were trained
for the same number of steps: an anchored pair (ADLM) and a plain masked diffusion network (MDLM). Bounds are on
{findings.held_out_tokens:,} held-out tokens that neither has seen, with standard errors.</p>
<table><tr><th></th><th>bound, nats a token</th><th>perplexity</th><th>parameters</th><th>tokens seen</th>
<th>training</th></tr>{rows}{counted}</table>
<p><strong>{html.escape(findings.verdict)}</strong></p>
{picture}
<h2>Samples of ADLM</h2>{samples}
<h2>Infilling</h2><pre>{html.escape(findings.canvas)}
{html.escape(findings.infilled)}</pre>
<p class="note">{findings.seconds:.0f} seconds in all; commit {html.escape(findings.commit)}. One seed, minutes of
training on a CPU: this shows that the parts work together, not how anchoring compares at scale.</p></html>
"""
