"""The quickstart's findings as report.json and as one page that needs nothing else. Measures nothing."""

import html
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adlm.files import PLOT_METADATA, replacing, write_file


@dataclass(frozen=True)
class TrainedModel:
    """One model's row of the table."""

    nats: float
    stderr: float
    parameters: int
    steps: int
    tokens: int
    seconds: float
    """Of training, preparing and measuring not counted."""


SEEDS = (
    "Each was trained with one seed, and another seed moves such a bound by about 0.04 (docs/results.md), so one run "
    "of each does not say which method is better."
)


@dataclass(frozen=True)
class QuickstartReport:
    adlm: TrainedModel
    mdlm: TrainedModel
    difference: float
    """Of the bounds, adlm minus mdlm, on the same rows and draws."""
    difference_stderr: float
    unigram_nats: float
    bigram_nats: float
    held_out_tokens: int
    samples: tuple[str, ...]
    """Of ADLM."""
    mdlm_samples: tuple[str, ...]
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
            return f"The two bounds cannot be told apart. {SEEDS}"
        better, worse = ("ADLM", "MDLM") if self.difference < 0 else ("MDLM", "ADLM")
        return (
            f"These two models: {better}'s bound is lower than {worse}'s by {abs(self.difference):.4f} ± "
            f"{self.difference_stderr:.4f} nats per token on the same text and draws. {SEEDS}"
        )


REPORT, PAGE, CURVES = "report.json", "report.html", ("curves.svg", "curves.png")
TRACE = "trace.html"
"""Beside the report: how the first of ADLM's samples was written."""

Curves = dict[str, list[dict[str, Any]]]
"""The lines of each run's metrics.jsonl."""


def write_report(folder: Path, findings: QuickstartReport, curves: Curves) -> None:
    figure = _drawn(findings, curves)
    for name in CURVES:
        form = Path(name).suffix
        with replacing(folder / name) as part:
            figure.savefig(part, format=form[1:], dpi=120, metadata=PLOT_METADATA[form])
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    drawn = picture.getvalue()
    write_file(folder / REPORT, json.dumps(asdict(findings), indent=1, ensure_ascii=False))
    write_file(folder / PAGE, _page(findings, drawn[drawn.index("<svg") :]))


def _drawn(findings: QuickstartReport, curves: Curves) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(5, 4), layout="constrained")  # narrow enough to be read on a phone
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
    axes.set_ylabel("nats per token")
    axes.margins(y=0.1)  # room for the names above both lines
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter())  # 1.5 M, not 1.5 above a 1e6 in the corner
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside upper left")
    return figure


STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #666; --line: #999; --paper: #fff; --block: #f6f4ee; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e3dc; --soft: #9d9a92; --line: #666; --paper: #15171b; --block: #20242b; }
}
body { font: 16px/1.5 Georgia, serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem 0 .25rem 1.4rem; text-align: right; font-weight: normal; }
td:first-child, th:first-child { padding-left: 0; text-align: left; }
th { border-bottom: 1px solid var(--line); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; background: var(--block); padding: .8rem 1rem;
  margin: .8rem 0; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; margin: 1.5rem auto; border-radius: 6px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.5rem; } .pair > * { min-width: 0; }
a { color: inherit; }
.note { color: var(--soft); font-size: .9rem; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; } h1 { font-size: 1.6rem; }
  table { width: 100%; font-size: .8rem; } td, th { padding-left: .4rem; }
  .pair { grid-template-columns: 1fr; }
}
"""


def _page(findings: QuickstartReport, picture: str) -> str:
    samples = "".join(
        f"<section><h2>Samples of {name}</h2>{''.join(f'<pre>{html.escape(text)}</pre>' for text in texts)}</section>"
        for name, texts in (("ADLM", findings.samples), ("MDLM", findings.mdlm_samples))
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="generator" content="adlm">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>adlm quickstart</title><style>{STYLE}</style>
<h1>adlm quickstart</h1>
<p>Text: {html.escape(findings.text)}. Two small networks of the same width and depth were trained
for the same number of steps: an anchored pair (ADLM, with a second head) and a plain masked diffusion network (MDLM).
Bounds are on
{findings.held_out_tokens:,} held-out tokens that neither has seen, with standard errors; unigrams and bigrams, by
counting, predict the tokens of the text alone.</p>
<div class="table"><table>{_rows(findings)}</table></div>
<p><strong>{html.escape(findings.verdict)}</strong></p>
{picture}
<div class="pair">{samples}</div>
<p><a href="{TRACE}">See how the first sample of ADLM was written</a>, token by token, with what both of its networks
expected.</p>
<h2>Infilling by ADLM</h2><pre>{html.escape(findings.canvas)}
{html.escape(findings.infilled)}</pre>
<p class="note">{findings.seconds:.0f} seconds in all; commit {html.escape(findings.commit)}. One seed, minutes of
training on a CPU: this shows that the parts work together, not how anchoring compares at scale.</p></html>
"""


def _rows(findings: QuickstartReport) -> str:
    """The table, a column a model: narrow enough for a phone."""
    models, counted = (findings.adlm, findings.mdlm), (findings.bigram_nats, findings.unigram_nats)
    nats = (*(model.nats for model in models), *counted)
    lines = (
        ("", "ADLM", "MDLM", "bigrams", "unigrams"),
        ("nats a token", *(f"{each:.4f}" for each in nats)),
        ("standard error", *(f"{model.stderr:.4f}" for model in models)),
        ("perplexity", *(f"{math.exp(each):.1f}" for each in nats)),
        ("parameters", *(f"{model.parameters:,}" for model in models)),
        ("tokens seen", *(f"{model.tokens:,}" for model in models)),
        ("training", *(f"{model.seconds:.0f} s" for model in models)),
    )
    tags = ("th", *("td" for _ in lines[1:]))
    cells = ("".join(f"<{tag}>{cell}</{tag}>" for cell in line) for tag, line in zip(tags, lines, strict=True))
    return "".join(f"<tr>{row}</tr>" for row in cells)
