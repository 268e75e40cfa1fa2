"""`adlm sample`: text from a model, from nothing or around what is given."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.text import Text

from adlm.canvas import hole_between
from adlm.errors import UserError
from adlm.interfaces.commands.prepare import _visible as visible
from adlm.interfaces.drawing import Through, Wanted, check_wanted, draw_batch, made_by, sampling_of, tokenizer_of
from adlm.language_model import LanguageModel, device_of, load
from adlm.samples_file import Sample, growing
from adlm.sampling.frame import Frame

EXAMPLE = """adlm sample runs/own --prompt "Fellow citizens" --length 64
  adlm sample runs/own --fill "Fellow citizens, [MASK*12] the Union." --num 4 --sampler remdm-cap sampling.top_p=0.9
  adlm sample runs/own --num 1000 --steps 256 --out samples.jsonl"""

BATCH = {"cpu": 16, "cuda": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model folder, the folder of a run, or a .ckpt")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="sampling.knob=value, such as sampling.top_p=0.9; the model's own where not given\n"
        "(`adlm presets --explain` has every knob, docs/sampling.md every sampler)",
    )
    parser.add_argument(
        "--fill",
        action="append",
        metavar="TEXT",
        help="a text with holes: [MASK] is one token, [MASK*12] twelve; give --fill again for another",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    parser.add_argument("--suffix", metavar="TEXT", help="what it ends with")
    parser.add_argument("--length", type=int, metavar="L", help="tokens in all (the model's length)")
    parser.add_argument("--num", type=int, default=1, metavar="N", help="samples, of each --fill (1)")
    parser.add_argument("--sampler", metavar="NAME", help="short for sampling.sampler=NAME")
    parser.add_argument("--steps", type=int, metavar="T", help="short for sampling.steps=T")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="sample i is drawn from (S, i) (0)")
    parser.add_argument("--batch", type=int, metavar="B", help="samples side by side (16, on a GPU 64)")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda or cpu (auto: a GPU if there is one)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write them as JSON lines; a file that was interrupted is gone on with"
    )
    parser.add_argument("--json", action="store_true", help="for machines: a line for each sample, or for --out")


def run(arguments: argparse.Namespace) -> int:
    lm = load(arguments.model, arguments.device)
    wanted = _wanted(lm, arguments)
    check_wanted(lm, wanted)
    if arguments.out is None:
        console = Console()
        for samples in _drawn(lm, wanted, 0, _looking(lm, wanted, arguments)):
            _show(console, wanted, samples, arguments.json)
    else:
        _write(lm, wanted, arguments)
    return 0


def _wanted(lm: LanguageModel, arguments: argparse.Namespace) -> Wanted:
    sampling = sampling_of(lm, arguments.words, sampler=arguments.sampler, steps=arguments.steps)
    batch = BATCH[device_of(arguments.device).type] if arguments.batch is None else arguments.batch
    return Wanted(tuple(_canvases(lm, arguments)), arguments.num, arguments.seed, sampling, batch)


def _canvases(lm: LanguageModel, arguments: argparse.Namespace) -> list[str]:
    if arguments.fill is None:
        length = lm.config.length if arguments.length is None else arguments.length
        return [hole_between(arguments.prompt or "", arguments.suffix or "", length, tokenizer_of(lm))]
    for name in ("prompt", "suffix", "length"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--fill says all that is given and how long the text is; leave out --{name}, or --fill")
    return list(arguments.fill)


def _looking(lm: LanguageModel, wanted: Wanted, arguments: argparse.Namespace) -> list[Through]:
    """Who looks at the first batch's frames: the terminal and the trace, both at row 0."""
    return []


def _drawn(lm: LanguageModel, wanted: Wanted, rows: int, looking: list[Through]) -> Iterator[list[Sample]]:
    """The batches that are left when so many rows are there; the first one's walk is looked at."""
    bar = Bar(wanted.num_rows, hidden=bool(looking))
    for number, start in enumerate(wanted.starts(rows)):
        with bar.shown(start, wanted.batch) as along:
            samples = draw_batch(lm, wanted, start, [along, *looking] if number == 0 else [along])
        yield samples


def _write(lm: LanguageModel, wanted: Wanted, arguments: argparse.Namespace) -> None:
    with growing(arguments.out, made_by(lm, str(arguments.model), wanted)) as file:
        before = file.num_rows
        try:
            for samples in _drawn(lm, wanted, before, _looking(lm, wanted, arguments)):
                file.append([sample for sample in samples if sample.row >= file.num_rows])
        except KeyboardInterrupt:
            sys.stderr.write(f"adlm: interrupted after {file.num_rows} samples; run the same command again to go on\n")
            raise
        report = {"out": str(arguments.out), "samples": file.num_rows, "drawn": file.num_rows - before}
    there = f", {before} of them there before" if before else ""
    told = json.dumps(report) if arguments.json else f"{report['samples']} samples{there}: {arguments.out}"
    sys.stdout.write(f"{told}\n")


def _show(console: Console, wanted: Wanted, samples: list[Sample], as_json: bool) -> None:
    """The texts, ruled off from each other where there are several."""
    for sample in samples:
        if as_json:
            sys.stdout.write(f"{json.dumps(asdict(sample), ensure_ascii=False)}\n")
        elif console.is_terminal:
            if wanted.num_rows > 1:
                console.print(Rule(f"{sample.row + 1}", style="dim"))
            console.print(Text(visible(sample.text)))
        else:
            rule = f"--- {sample.row + 1} ---\n" if wanted.num_rows > 1 else ""
            sys.stdout.write(f"{rule}{sample.text}\n")
    sys.stdout.flush()


class Bar:
    """How far the drawing is, on standard error where that is a terminal; gone while a batch is shown."""

    def __init__(self, num_rows: int, hidden: bool):
        console = Console(stderr=True)
        columns = (TextColumn("sampling"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total} "))
        self.progress = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden or not console.is_terminal
        )
        self.task = self.progress.add_task("sampling", total=num_rows)

    @contextmanager
    def shown(self, start: int, batch: int) -> Iterator[Through]:
        """While a batch walks, which passes through what this gives."""

        def along(frames: Iterator[Frame]) -> Iterator[Frame]:
            for frame in frames:
                self.progress.update(self.task, completed=start + batch * (1 - float(frame.t.mean())))
                yield frame

        with self.progress:
            yield along
