"""Writes the results of the quickstart as report.json, plots and a self-contained HTML page. Measures nothing."""

import html
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adlm.files import write_file
from adlm.training.plots import new_figure, save_figure


@dataclass(frozen=True)
class TrainedModel:
    """The results of one model."""

    nats: float
    stderr: float
    parameters: int
    steps: int
    tokens: int
    seconds: float
    """Training time, without preparation and evaluation."""


SEED_CAVEAT = (
    "Each model was trained with one seed, and another seed changes such a bound by about 0.04 (docs/results.md), so "
    "one run of each does not show which method is better."
)


@dataclass(frozen=True)
class QuickstartReport:
    adlm: TrainedModel
    mdlm: TrainedModel
    difference: float
    """Bound of adlm minus bound of mdlm, on the same rows and random numbers."""
    difference_stderr: float
    unigram_nats: float
    bigram_nats: float
    held_out_tokens: int
    samples: tuple[str, ...]
    """Samples of ADLM."""
    mdlm_samples: tuple[str, ...]
    canvas: str
    """The sentence with gaps."""
    infilled: str
    """The sentence as infilled by ADLM."""
    seconds: float
    """Total time."""
    commit: str
    text: str
    """The name of the text."""

    @property
    def verdict(self) -> str:
        """The conclusion that the numbers support."""
        if abs(self.difference) < 2 * self.difference_stderr:
            return f"The difference between the two bounds is not significant. {SEED_CAVEAT}"
        better, worse = ("ADLM", "MDLM") if self.difference < 0 else ("MDLM", "ADLM")
        return (
            f"For these two models, {better}'s bound is lower than {worse}'s by {abs(self.difference):.4f} ± "
            f"{self.difference_stderr:.4f} nats per token on the same text and random numbers. {SEED_CAVEAT}"
        )


REPORT, PAGE, CURVES = "report.json", "report.html", ("curves.svg", "curves.png")
TRACE = "trace.html"
"""Page with the trace of the first ADLM sample."""

Curves = dict[str, list[dict[str, Any]]]
"""The lines of metrics.jsonl of each run."""


def write_report(folder: Path, report: QuickstartReport, curves: Curves) -> None:
    figure = _plot_curves(report, curves)
    for name in CURVES:
        save_figure(figure, folder / name)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    write_file(folder / REPORT, json.dumps(asdict(report), indent=1, ensure_ascii=False))
    write_file(folder / PAGE, _format_page(report, svg[svg.index("<svg") :]))


def _plot_curves(report: QuickstartReport, curves: Curves) -> Any:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = new_figure((5, 4))  # narrow enough to be read on a phone
    axes = figure.subplots()
    for name, colour in (("adlm", "tab:orange"), ("mdlm", "tab:blue")):
        lines = curves[name]
        training = [(line["tokens"], line["nats"]) for line in lines if line.get("nats") is not None]
        axes.plot(*zip(*training, strict=True), color=colour, alpha=0.25, linewidth=1)
        validated = [line for line in lines if line.get("valid_nats") is not None]
        axes.plot(
            [line["tokens"] for line in validated],
            [line["valid_nats"] for line in validated],
            color=colour,
            marker="o",
            markersize=4,
            label=f"{name.upper()}, held out (faint: training)",
        )
    for nats, name in ((report.unigram_nats, "unigrams"), (report.bigram_nats, "bigrams")):
        axes.axhline(nats, color="grey", linestyle=":", linewidth=1)
        axes.annotate(name, (0.995, nats), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
    axes.set_xlabel("training tokens")
    axes.set_ylabel("nats per token")
    axes.margins(y=0.1)  # room for the labels above both lines
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


def _format_page(report: QuickstartReport, svg: str) -> str:
    samples = "".join(
        f"<section><h2>Samples of {name}</h2>{''.join(f'<pre>{html.escape(text)}</pre>' for text in texts)}</section>"
        for name, texts in (("ADLM", report.samples), ("MDLM", report.mdlm_samples))
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="generator" content="adlm">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>adlm quickstart</title><style>{STYLE}</style>
<h1>adlm quickstart</h1>
<p>Text: {html.escape(report.text)}. Two small networks of the same width and depth were trained
for the same number of steps: an anchored model (ADLM, with an anchor network) and a masked diffusion model (MDLM).
Upper bounds on the loss are measured on {report.held_out_tokens:,} held-out tokens, with standard errors. The unigram
and bigram baselines are counted on the training text.</p>
<div class="table"><table>{_format_table(report)}</table></div>
<p><strong>{html.escape(report.verdict)}</strong></p>
{svg}
<div class="pair">{samples}</div>
<p><a href="{TRACE}">See how the first sample of ADLM was generated</a>, token by token, with the predictions of both of
its networks.</p>
<h2>Infilling with ADLM</h2><pre>{html.escape(report.canvas)}
{html.escape(report.infilled)}</pre>
<p class="note">{report.seconds:.0f} seconds in total; commit {html.escape(report.commit)}. One seed and minutes of
training on a CPU show that the software works, not how the methods compare at scale.</p></html>
"""


def _format_table(report: QuickstartReport) -> str:
    """The HTML rows of the table, one column per model, which fits a phone screen."""
    models, ngrams = (report.adlm, report.mdlm), (report.bigram_nats, report.unigram_nats)
    nats = (*(model.nats for model in models), *ngrams)
    lines = (
        ("", "ADLM", "MDLM", "bigrams", "unigrams"),
        ("nats per token", *(f"{value:.4f}" for value in nats)),
        ("standard error", *(f"{model.stderr:.4f}" for model in models)),
        ("perplexity", *(f"{math.exp(value):.1f}" for value in nats)),
        ("parameters", *(f"{model.parameters:,}" for model in models)),
        ("training tokens", *(f"{model.tokens:,}" for model in models)),
        ("training time", *(f"{model.seconds:.0f} s" for model in models)),
    )
    tags = ("th", *("td" for _ in lines[1:]))
    cells = ("".join(f"<{tag}>{cell}</{tag}>" for cell in line) for tag, line in zip(tags, lines, strict=True))
    return "".join(f"<tr>{row}</tr>" for row in cells)
