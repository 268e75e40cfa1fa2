"""`adlm choose`: how probable each of several choices is in the hole of a text."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console, Progress
from adlm.config.load import BOX
from adlm.data.sources.decoding import REPLACE_HINT
from adlm.data.sources.text_files import TextFile
from adlm.errors import UserError
from adlm.likelihood.settings import ChoiceSettings
from adlm.request import narrow, option

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.likelihood.choices import ChoiceScores

INPUT = "{text}"
BAR_WIDTH, TEXT_WIDTH = 24, 60


@dataclass(frozen=True)
class ChooseRequest(ChoiceSettings):
    """The options of `adlm choose`."""

    example = """adlm choose --text "The film was [MASK]." --choices great terrible
  adlm choose smollm2 --text "Paris is the capital of [MASK]." --choices France Spain "the world" --normalise prior
  adlm choose smollm2 --texts news.txt --template "{text} This is news about [MASK]." --choices sport business --json"""

    model: str = option(
        "a model folder, run folder, or owner/name on the hub\n(default: box, the small model that comes with adlm)",
        BOX,
        positional=True,
    )
    text: tuple[str, ...] = option("a text with a hole, [MASK]; may be repeated", (), repeated=True)
    texts: Path | None = option(
        "a file of texts with a hole each: one a line, or .jsonl with a field; also .csv, .parquet", None
    )
    field: str = option("the field of a record with the text", "text")
    template: str | None = option(
        f"a text with a hole, and {INPUT} where each of --texts is put, which then need no hole", None, metavar="TEXT"
    )
    choices: tuple[str, ...] = option("what may stand in the hole, at least two texts", metavar="CHOICE")
    device: str = option("auto, cuda or cpu (default: auto)", "auto")
    json: bool = option("print JSON: a line for each text", False)


def run(request: ChooseRequest) -> int:
    texts = [*request.text, *_texts_of_file(request)]
    if not texts:
        raise UserError("there is no text; give --text TEXT or --texts FILE")
    from adlm.language_model import load
    from adlm.likelihood.choices import score_choices

    lm, settings = load(request.model, request.device), narrow(request, ChoiceSettings)
    done, total = 0, len(dict.fromkeys(texts)) * len(request.choices)
    with Progress(Console(stderr=True), "scoring", total, unit="filled texts") as progress:

        def report(num: int) -> None:
            nonlocal done
            done = min(done + num, total)  # those of a prior are not in the total
            progress.update(done)

        found = score_choices(lm.method, lm.network, lm.require_tokenizer(), texts, request.choices, settings, report)
    if request.json:
        for each in found:
            row = {"best": each.best, **asdict(each), "settings": asdict(settings)}
            sys.stdout.write(f"{json.dumps(row)}\n")
    elif len(found) == 1:
        _print_choices(found[0], settings)
    else:
        _print_texts(found, settings)
    return 0


def _texts_of_file(request: ChooseRequest) -> Iterable[str]:
    """The texts of --texts, each in the template."""
    if request.template is not None and request.texts is None:
        raise UserError("--template is for the texts of a file; give --texts FILE, or write the whole text in --text")
    if request.template is not None and request.template.count(INPUT) != 1:
        raise UserError(f"--template {request.template!r:.60} must have {INPUT} once, where each text is put")
    if request.texts is None:
        return
    file = TextFile(request.texts, request.texts.name, field=request.field, boundary="line", whole=True)
    try:
        for chunk in file.chunks():
            yield chunk.text if request.template is None else request.template.replace(INPUT, chunk.text)
    except UserError as error:  # name the option of this command
        message = str(error).replace("data.field=...", "--field NAME").replace(REPLACE_HINT, "")
        raise UserError(f"--texts {request.texts}: {message.rstrip()}") from None


def _print_choices(scores: "ChoiceScores", settings: ChoiceSettings) -> None:
    """The choices of one text, the most probable first."""
    console = Console()
    table = Table("choice", "probability", "", "log score", box=None)
    order = sorted(range(len(scores.choices)), key=lambda index: -scores.probabilities[index])
    for index in order:
        table.add_row(
            Text(scores.choices[index]),
            _with_error(scores.probabilities[index], scores.stderr[index]),
            Bar(1.0, 0.0, scores.probabilities[index], width=BAR_WIDTH),
            _with_error(scores.log_scores[index], scores.log_score_stderr[index]),
        )
    console.print(table)
    _print_notes(console, [scores], settings)


def _print_texts(found: list["ChoiceScores"], settings: ChoiceSettings) -> None:
    """The most probable choice of each text."""
    console = Console()
    table = Table("best", "probability", "", "text", box=None)
    for scores in found:
        index, text = scores.choices.index(scores.best), " ".join(scores.text.split())
        table.add_row(
            Text(scores.best),
            _with_error(scores.probabilities[index], scores.stderr[index]),
            Bar(1.0, 0.0, scores.probabilities[index], width=BAR_WIDTH),
            Text(text if len(text) <= TEXT_WIDTH else f"...{text[3 - TEXT_WIDTH :]}"),
        )
    console.print(table)
    counts = {choice: sum(each.best == choice for each in found) for choice in found[0].choices}
    console.print(", ".join(f"{num:,} {choice}" for choice, num in counts.items()), soft_wrap=True)
    _print_notes(console, found, settings)


def _print_notes(console: Console, found: list["ChoiceScores"], settings: ChoiceSettings) -> None:
    """What the figures are, and how many of them the Monte Carlo error leaves open."""
    if found[0].is_bound and not any(any(scores.stderr) for scores in found):
        source, errors = "bounds of masked diffusion, all masks enumerated", ""
    elif found[0].is_bound:
        source = f"bounds of masked diffusion, {settings.samples} masked versions, seed {settings.seed}"
        errors = "; +- is their Monte Carlo standard error"
    else:
        source, errors = "exact", ""
    unit = {"tokens": "nats per token", "characters": "nats per character"}.get(settings.normalise, "nats")
    console.print(f"{unit}, normalise {settings.normalise}; {source}{errors}", style="dim", soft_wrap=True)
    undecided = sum(each.gap < 2 * each.gap_stderr for each in found)
    if undecided:
        console.print(
            f"{undecided:,} of {len(found):,} undecided: the two best choices differ by less than two standard errors; "
            f"use more than --samples {settings.samples}",
            style="yellow",
            soft_wrap=True,
        )


def _with_error(value: float, stderr: float) -> str:
    return f"{value:.3f}" if stderr == 0 else f"{value:.3f} +- {stderr:.2g}"
