"""`adlm sample`: text from a model, from nothing or around what is given."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from adlm.canvas import encode_canvas, hole_between
from adlm.cli.console import Console, Progress, write_error
from adlm.distributed import device_of
from adlm.errors import TEXT, UserError, printable
from adlm.evaluation.generation.draw_samples import (
    FrameFilter,
    SampleRequest,
    check_request,
    provenance_of,
    sample_batch,
    sampling_config,
    tokenizer_of,
)
from adlm.files import check_output
from adlm.language_model import LanguageModel, load
from adlm.samples_file import Sample, open_samples
from adlm.sampling.frame import Frame
from adlm.trace.page import check_trace_place, write_trace
from adlm.trace.recording import TraceInfo, TraceRecorder
from adlm.trace.terminal import show_in_terminal
from adlm.trace.token_text import decode_side_by_side, tokens_bytes

EXAMPLE = """adlm sample runs/own --prompt "Fellow citizens" --length 64
  adlm sample runs/own --fill "Fellow citizens, [MASK*12] the Union." --num 4 --sampler remdm-cap sampling.top_p=0.9
  adlm sample runs/own --watch --trace walk.html --steps 64
  adlm sample runs/own --num 1000 --steps 256 --out samples.jsonl"""

BATCH, GPU_BATCH = 16, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model folder, the folder of a run, or a .ckpt")
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="WORD",
        help="sampling.knob=value, such as sampling.top_p=0.9; the model's own where not given\n"
        "(`adlm presets owt/adlm --explain` has every knob, docs/sampling.md every sampler)",
    )
    parser.add_argument(
        "--fill",
        action="append",
        metavar="TEXT",
        help="a text with holes: [MASK] is one token, [MASK*12] twelve; give --fill again for another",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    parser.add_argument("--suffix", metavar="TEXT", help="what it ends with")
    parser.add_argument("--length", type=int, metavar="L", help="tokens in all (as many as the model has room for)")
    parser.add_argument("--num", type=int, default=1, metavar="N", help="samples, of each --fill (1)")
    parser.add_argument("--sampler", metavar="NAME", help="short for sampling.sampler=NAME")
    parser.add_argument("--steps", type=int, metavar="T", help="short for sampling.steps=T")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="sample i is drawn from (S, i) (0)")
    parser.add_argument("--batch", type=int, metavar="B", help="samples side by side (16, on a GPU 64)")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda or cpu (auto: a GPU if there is one)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write them as JSON lines; a file that was interrupted is gone on with"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file of --out or --trace that holds something else"
    )
    parser.add_argument("--watch", action="store_true", help="see the first sample being written")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="keep how the first one was written: .html to look at, .json the data",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="show bos, eos and pad in the text (hidden; ids and a file of --out always have them)",
    )
    parser.add_argument("--json", action="store_true", help="for machines: a line for each sample, or for --out")


def run(arguments: argparse.Namespace) -> int:
    lm = load(arguments.model, arguments.device)
    wanted = _wanted(lm, arguments)
    check_request(lm, wanted)
    if arguments.trace is not None:
        _check_trace(lm, wanted, arguments)
    if arguments.force:
        check_output(arguments.out, force=True, inputs=[arguments.model])
    if arguments.watch and arguments.json:
        raise UserError("--watch is for people and --json for machines; leave one out")
    shown = Shown(lm, wanted, arguments.json, arguments.special_tokens)
    watched = arguments.watch and shown.console.is_terminal
    if watched or arguments.trace is not None:
        first = _look(lm, wanted, shown if watched else None, arguments)
        if wanted.num_rows == 1 and arguments.out is None:
            shown.show([] if watched else first)
            return 0
    if arguments.out is not None:
        _write(lm, wanted, arguments)
        return 0
    for samples in _drawn(lm, wanted, 0):
        shown.show([sample for sample in samples if sample.row > 0 or not watched])
    return 0


def _wanted(lm: LanguageModel, arguments: argparse.Namespace) -> SampleRequest:
    sampling = sampling_config(lm, arguments.words, sampler=arguments.sampler, steps=arguments.steps)
    batch = arguments.batch
    if batch is None:
        batch = GPU_BATCH if device_of(arguments.device).type == "cuda" else BATCH
    return SampleRequest(tuple(_canvases(lm, arguments)), arguments.num, arguments.seed, sampling, batch)


def _canvases(lm: LanguageModel, arguments: argparse.Namespace) -> list[str]:
    if arguments.fill is None:
        prompt, suffix, length = arguments.prompt or "", arguments.suffix or "", arguments.length
        if length is None:
            length = lm.max_text_length(encode_canvas(prompt, tokenizer_of(lm)))
        return [hole_between(prompt, suffix, length, tokenizer_of(lm))]
    for name in ("prompt", "suffix", "length"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--fill says all that is given and how long the text is; leave out --{name}, or --fill")
    return list(arguments.fill)


def _check_trace(lm: LanguageModel, wanted: SampleRequest, arguments: argparse.Namespace) -> None:
    check_trace_place(arguments.trace, "--trace", arguments.force, [arguments.model])
    length = len(encode_canvas(wanted.canvases[0], tokenizer_of(lm)))
    if length > lm.config.length:
        raise UserError(
            f"--trace asks the network about all {length} tokens at every step, and it was made for "
            f"{lm.config.length}; shorten the text"
        )


def _look(
    lm: LanguageModel, wanted: SampleRequest, screen: "Shown | None", arguments: argparse.Namespace
) -> list[Sample]:
    """The first sample, drawn by itself while the terminal or a trace looks on."""
    about = TraceInfo(str(arguments.model), wanted.sampling.sampler, wanted.sampling.steps, wanted.seed)
    recording = TraceRecorder(lm, about, special_tokens=arguments.special_tokens)
    looking: list[FrameFilter] = [] if arguments.trace is None else [recording.through]
    if screen is not None:
        screen.rule(0)
        start = len(lm.bos_prefix(encode_canvas(wanted.canvases[0], tokenizer_of(lm))))
        looking.append(
            lambda frames: show_in_terminal(
                lm, frames, screen.console, start=start, special_tokens=arguments.special_tokens
            )
        )
    samples = sample_batch(lm, wanted.first_alone, 0, looking)
    if arguments.trace is not None:
        write_trace(recording.trace, arguments.trace, arguments.force)
        write_error(f"adlm: the trace is in {arguments.trace}")  # standard output holds samples alone
    return samples


def _drawn(lm: LanguageModel, wanted: SampleRequest, rows: int) -> Iterator[list[Sample]]:
    """The batches that are left when so many rows are there."""
    progress = Progress(Console(stderr=True), "sampling", wanted.num_rows, rows, "samples")
    try:
        for start in wanted.starts(rows):
            samples = sample_batch(lm, wanted, start, [partial(_followed, progress, start, wanted)])
            with progress.hidden():
                yield samples
    finally:
        progress.close()


def _followed(progress: Progress, start: int, wanted: SampleRequest, frames: Iterator[Frame]) -> Iterator[Frame]:
    """The frames of the batch that begins with row `start`, as they are; the progress follows their times."""
    rows = min(wanted.batch, wanted.num_rows - start)
    for frame in frames:
        progress.update(start + rows * (1 - float(frame.t.mean())))
        yield frame


def _write(lm: LanguageModel, wanted: SampleRequest, arguments: argparse.Namespace) -> None:
    with open_samples(arguments.out, provenance_of(lm, str(arguments.model), wanted), arguments.force) as file:
        before = file.num_rows
        try:
            for samples in _drawn(lm, wanted, before):
                file.append([sample for sample in samples if sample.row >= file.num_rows])
        except KeyboardInterrupt:
            write_error(f"adlm: interrupted after {_counted(file.num_rows)}; run the same command again to go on")
            raise
        report = {"out": str(arguments.out), "samples": file.num_rows, "drawn": file.num_rows - before}
    there = f", {before} of them there before" if before else ""
    told = f"{_counted(file.num_rows)}{there}: {arguments.out}"
    sys.stdout.write(f"{json.dumps(report) if arguments.json else printable(told)}\n")


def _counted(num: int) -> str:
    return "1 sample" if num == 1 else f"{num} samples"


class Shown:
    """Standard output: JSON, or texts, control characters escaped; on a terminal what was given is dimmed."""

    def __init__(self, lm: LanguageModel, wanted: SampleRequest, as_json: bool, special_tokens: bool):
        self.lm, self.wanted, self.as_json, self.special_tokens = lm, wanted, as_json, special_tokens
        self.console = Console()

    def show(self, samples: list[Sample]) -> None:
        for sample in samples:
            text = tokenizer_of(self.lm).decode(sample.ids, self.special_tokens)
            if self.as_json:
                sys.stdout.write(f"{json.dumps(asdict(replace(sample, text=text)))}\n")
                continue
            self.rule(sample.row)
            if self.console.is_terminal:
                self.console.print(self._coloured(sample))
            else:
                sys.stdout.write(f"{printable(text, keep=TEXT)}\n")
        sys.stdout.flush()

    def rule(self, row: int) -> None:
        """A line with the sample's number, where there are several."""
        if self.wanted.num_rows > 1 and self.console.file.isatty():  # FORCE_COLOR gives a pipe colours, but no edge
            self.console.print(Rule(f"{row + 1}", style="dim"))
        elif self.wanted.num_rows > 1:
            sys.stdout.write(f"--- {row + 1} ---\n")

    def _coloured(self, sample: Sample) -> Text:
        tokenizer = tokenizer_of(self.lm)
        given = [index != self.lm.mask_id for index in encode_canvas(self.wanted.canvases[sample.canvas], tokenizer)]
        words = decode_side_by_side(tokens_bytes(tokenizer, sample.ids, self.special_tokens))
        return Text.assemble(*((printable(word), "dim" * dim) for word, dim in zip(words, given, strict=True)))
