"""The results of the quickstart, the conclusion that they support, and their page. Measures nothing.

The page is self-contained HTML without scripts.
"""

import base64
import hashlib
import html
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from adlm.apps.plots import Lines, draw_loss_chart
from adlm.canvas import HOLE

REPORT, PAGE = "report.json", "report.html"
TRACE = "trace.html"
"""Page with the trace of the first ADLM sample."""


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


@dataclass(frozen=True)
class BoxTexts:
    """What the model in the box writes; not trained by the quickstart."""

    sample: str
    canvas: str
    """A sentence with holes, such as [MASK*3]."""
    infilled: str
    pretrained: str = ""
    """What smollm2 writes after a prompt; empty where its base weights are missing."""


SEED_CAVEAT = (
    "Each model was trained with one seed, and another seed changes such a bound by about 0.01 (docs/results.md), so "
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
    """The sentence with holes, such as [MASK*3]."""
    infilled: str
    """The sentence as infilled by ADLM."""
    box: BoxTexts
    seconds: float
    """Total time."""
    commit: str
    text: str
    """The name of the text."""
    commands: dict[str, str]
    """By purpose: the command that made the report, and commands that repeat its parts."""

    @property
    def conclusion(self) -> str:
        """The result in one sentence."""
        if abs(self.difference) < 2 * self.difference_stderr:
            return "The difference between the two bounds is not significant."
        better, worse = ("ADLM", "MDLM") if self.difference < 0 else ("MDLM", "ADLM")
        return (
            f"For these two models, {better}'s bound is lower than {worse}'s by {abs(self.difference):.4f} ± "
            f"{self.difference_stderr:.4f} nats per token on the same text and random numbers."
        )

    @property
    def verdict(self) -> str:
        """The conclusion and what it does not show."""
        return f"{self.conclusion} {SEED_CAVEAT}"


OPTION = re.compile(r"(?<!\S)--\S+")
WIDE, NARROW = (760, 360), (340, 300)  # of the chart in pixels, for a window and for a phone


def format_report_page(report: QuickstartReport, curves: Mapping[str, Lines]) -> str:
    """The page. Its policy forbids loading anything, and every text of the report is escaped."""
    style = files("adlm.apps.quickstart").joinpath("report_page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    text, escape = html.escape(report.text), html.escape
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'">
<meta name="generator" content="adlm">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>adlm quickstart: {text}</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="eyebrow">adlm quickstart</p>
<h1>{text}</h1>
<p class="meta">an anchored model (ADLM) and a masked diffusion model (MDLM) · {_duration(report.seconds)} ·
commit {escape(report.commit)}</p>
</header>
<main>
<p class="result">{escape(report.conclusion)}</p>
<p class="note">{escape(SEED_CAVEAT)}</p>
{_figures(report)}
<section>
<h2>Loss during training</h2>
<div class="card">{_chart(report, curves)}</div>
</section>
<section>
<h2>A sentence filled in by ADLM</h2>
<div class="card">{_infilling(report.canvas, report.infilled)}</div>
</section>
<section>
<h2>Samples</h2>
<div class="pair">
<article class="card adlm"><h3>ADLM</h3>{_samples(report.samples)}</article>
<article class="card mdlm"><h3>MDLM</h3>{_samples(report.mdlm_samples)}</article>
</div>
<p class="watch"><a href="{TRACE}">Watch the first sample of ADLM being generated</a>, token by token, with the
predictions of its two networks.</p>
</section>
{_pretrained(report.box.pretrained)}<section>
<h2>For comparison: the model in the box</h2>
<div class="card">{_infilling(report.box.canvas, report.box.infilled)}
<h3>A sample</h3><p class="sample">{escape(report.box.sample)}</p></div>
<p class="note">It has 6 million parameters and was trained on books and speeches on a GPU, not by this quickstart.</p>
</section>
<section>
<h2>Measures</h2>
<div class="card table"><table>{_table(report)}</table></div>
<p class="note">The two networks have the same width and depth and were trained for the same number of steps; ADLM has
an anchor network in addition to its denoiser. Nats per token are upper bounds on the loss on {report.held_out_tokens:,}
held-out tokens, with standard errors over documents (if there are several) and Monte Carlo. Perplexity is their
exponential. Lower is better.
{_baselines(report)}</p>
</section>
<section>
<h2>Commands</h2>
<div class="card"><dl class="commands">{_commands(report)}</dl></div>
</section>
</main>
</body>
</html>
"""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}&nbsp;min {rest}&nbsp;s" if minutes else f"{rest}&nbsp;s"


def _figures(report: QuickstartReport) -> str:
    def model(name: str, row: TrainedModel) -> str:
        return (
            f'<div class="{name.lower()}"><dt>{name}</dt><dd class="value">{row.nats:.3f} '
            f"<small>± {row.stderr:.3f}</small></dd>"
            f"<dd>nats per token <span>perplexity {math.exp(row.nats):.1f}</span></dd></div>"
        )

    difference = f"{report.difference:+.4f}".replace("-", "−")
    return (
        f'<dl class="figures">{model("ADLM", report.adlm)}{model("MDLM", report.mdlm)}'
        f'<div><dt>Difference</dt><dd class="value">{difference} '
        f"<small>± {report.difference_stderr:.4f}</small></dd>"
        "<dd>ADLM minus MDLM, on the same random numbers</dd></div></dl>"
    )


def _chart(report: QuickstartReport, curves: Mapping[str, Lines]) -> str:
    """Two drawings of the same curves; the style sheet shows the one that fits the screen."""
    levels = {"unigrams": report.unigram_nats, "bigrams": report.bigram_nats}
    wide, narrow = (draw_loss_chart(curves, levels, *size) for size in (WIDE, NARROW))
    measured = {line["valid_tokens"] for lines in curves.values() for line in lines if line.get("valid_tokens")}
    same = measured <= {report.held_out_tokens}
    tokens = "the same tokens as in" if same else f"{' and '.join(f'{n:,}' for n in sorted(measured))} of the tokens of"
    return (
        '<ul class="legend"><li class="adlm">ADLM, held out</li><li class="mdlm">MDLM, held out</li>'
        '<li class="faint">the same in training</li></ul>'
        + wide.replace('class="chart"', 'class="chart wide"', 1)
        + narrow.replace('class="chart"', 'class="chart narrow"', 1)
        + f'<p class="note">Held-out points are bounds on {tokens} the figures above, with one Monte Carlo replicate '
        "instead of two.</p>"
    )


def _pretrained(text: str) -> str:
    if not text:
        return ""
    return f"""<section>
<h2>For comparison: a pretrained model, adapted</h2>
<div class="card"><p class="sample">{html.escape(text)}</p></div>
<p class="note">smollm2: SmolLM2-135M, which an adapter makes a block-causal diffusion model. Not trained here.</p>
</section>
"""


def _infilling(canvas: str, infilled: str) -> str:
    given, sizes = HOLE.sub("\0", canvas).split("\0"), [hole[1] for hole in HOLE.finditer(canvas)]
    blanks = ['<span class="masked" title="masked token"></span>' * int(size) for size in sizes]
    # what stands in place of the holes; nothing is marked if the given parts are not found
    match = re.fullmatch("(.*?)".join(map(re.escape, given)), infilled, re.DOTALL)
    filled = [f"<mark>{html.escape(text)}</mark>" for text in (match.groups() if match else ())]
    marked = _interleave(given, filled) if filled else html.escape(infilled)
    return (
        f'<h3>Given</h3><p class="sentence">{_interleave(given, blanks)}</p>'
        f'<h3>Filled in</h3><p class="sentence">{marked}</p>'
    )


def _interleave(given: list[str], fillings: list[str]) -> str:
    parts = [html.escape(given[0])]
    for filling, part in zip(fillings, given[1:], strict=True):
        parts += [filling, html.escape(part)]
    return "".join(parts)


def _samples(texts: tuple[str, ...]) -> str:
    return "".join(f'<p class="sample">{html.escape(text)}</p>' for text in texts)


def _table(report: QuickstartReport) -> str:
    """The rows of the table: one column per model, which fits a phone screen; the baselines below both."""
    models = (report.adlm, report.mdlm)
    lines = {
        "nats per token": [f"{model.nats:.4f} ±&nbsp;{model.stderr:.4f}" for model in models],
        "perplexity": [f"{math.exp(model.nats):.1f}" for model in models],
        "parameters": [f"{model.parameters:,}" for model in models],
        "training tokens": [f"{model.tokens:,}" for model in models],
        "training time": [_duration(model.seconds) for model in models],
    }
    rows = [f"<tr><td></td>{''.join(f'<th>{name}</th>' for name in ('ADLM', 'MDLM'))}</tr>"]
    rows += [
        f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in lines.items()
    ]
    for name, nats in (("bigrams", report.bigram_nats), ("unigrams", report.unigram_nats)):
        cell = f"{nats:.4f} nats per token, perplexity {math.exp(nats):.1f}"
        rows.append(f'<tr><th>{name}</th><td colspan="2">{cell}</td></tr>')
    return "".join(rows)


def _baselines(report: QuickstartReport) -> str:
    """What the baselines are, and whether the models are better."""
    text = "Unigrams and bigrams are token frequencies, and those after each token, counted on the training text."
    if report.bigram_nats < min(report.adlm.nats, report.mdlm.nats):
        text += " Bigrams are better than both models here, which are tiny and were trained for minutes."
    return text


def _commands(report: QuickstartReport) -> str:
    parts = []
    for purpose, command in report.commands.items():
        code = OPTION.sub(r"<span>\g<0></span>", html.escape(command))  # no line break within an option
        parts.append(f"<dt>{html.escape(purpose)}</dt><dd><code>{code}</code></dd>")
    return "".join(parts)
