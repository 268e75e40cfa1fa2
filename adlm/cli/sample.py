"""`adlm sample`: generate text with a model, unconditionally or given a prompt, a suffix or a text with holes."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from adlm.apps.judge.draw_samples import (
    FrameFilter,
    SampleRequest,
    check_request,
    provenance_of,
    sample_batch,
    sampling_config,
    tokenizer_of,
)
from adlm.apps.trace.page import check_trace_path, write_trace
from adlm.apps.trace.recording import TraceInfo, TraceRecorder
from adlm.apps.trace.terminal import show_in_terminal
from adlm.apps.trace.token_text import decode_side_by_side, tokens_bytes
from adlm.canvas import encode_canvas, hole_between
from adlm.cli.console import Console, Progress
from adlm.cli.streams import write_error
from adlm.config.load import BOX
from adlm.distributed import device_of
from adlm.errors import TEXT, UserError, printable
from adlm.files import check_output
from adlm.language_model import LanguageModel, load
from adlm.samples_file import Sample, open_samples
from adlm.sampling.frame import Frame

BATCH, GPU_BATCH = 16, 64


def run(arguments: argparse.Namespace) -> int:
    arguments.model, arguments.overrides = _model_and_overrides([arguments.model, *arguments.overrides])
    lm = load(arguments.model, arguments.device)
    request = _request(lm, arguments)
    check_request(lm, request)
    if arguments.trace is not None:
        _check_trace(lm, request, arguments)
    if arguments.force:
        check_output(arguments.out, force=True, inputs=[Path(arguments.model)])
    if arguments.watch and arguments.json:
        raise UserError("--watch cannot be combined with --json; leave one out")
    output = SampleOutput(lm, request, arguments.json, arguments.special_tokens)
    watch = arguments.watch and output.console.is_live
    if watch or arguments.trace is not None:
        first = _sample_with_trace(lm, request, output if watch else None, arguments)
        if request.num_rows == 1 and arguments.out is None:
            output.print([] if watch else first)
            return 0
    if arguments.out is not None:
        _write_samples(lm, request, arguments)
        return 0
    for samples in _sample_batches(lm, request, 0):
        output.print([sample for sample in samples if sample.row > 0 or not watch])
    return 0


def _model_and_overrides(words: list[str | None]) -> tuple[str, list[str]]:
    """The model, by default the one in the box, and option=value; argparse takes the first word as the model."""
    given = [word for word in words if word is not None]
    names_model = bool(given) and ("=" not in given[0] or os.path.exists(given[0]))
    model, overrides = (given[0], given[1:]) if names_model else (BOX, given)
    texts = [word for word in overrides if "=" not in word]
    if model != BOX and not os.path.exists(model) and (" " in model or not ("/" in model or model.endswith(".ckpt"))):
        texts = [model]
    if texts:
        raise UserError(
            f"{texts[0]!r} is neither a model folder, such as runs/own, nor a sampling option; "
            f"a text goes by --prompt {shlex.quote(texts[0])}"
        )
    return model, overrides


def _request(lm: LanguageModel, arguments: argparse.Namespace) -> SampleRequest:
    sampling = sampling_config(lm, arguments.overrides, sampler=arguments.sampler, steps=arguments.steps)
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
            raise UserError(
                f"--{name} cannot be combined with --fill, which gives the whole text; leave out --{name}, or --fill"
            )
    return list(arguments.fill)


def _check_trace(lm: LanguageModel, request: SampleRequest, arguments: argparse.Namespace) -> None:
    check_trace_path(arguments.trace, "--trace", arguments.force, [Path(arguments.model)])
    length = len(encode_canvas(request.canvases[0], tokenizer_of(lm)))
    if length > lm.config.length:
        raise UserError(
            f"--trace runs the network on all {length} tokens at every step, and the model's length is "
            f"{lm.config.length}; use a shorter text"
        )


def _sample_with_trace(
    lm: LanguageModel, request: SampleRequest, output: "SampleOutput | None", arguments: argparse.Namespace
) -> list[Sample]:
    """Generate the first sample alone, shown in the terminal or recorded as a trace."""
    info = TraceInfo(str(arguments.model), request.sampling.sampler, request.sampling.steps, request.seed)
    recorder = TraceRecorder(lm, info, special_tokens=arguments.special_tokens)
    filters: list[FrameFilter] = [] if arguments.trace is None else [recorder.record]
    if output is not None:
        output.print_header(0)
        start = len(lm.bos_prefix(encode_canvas(request.canvases[0], tokenizer_of(lm))))
        filters.append(
            lambda frames: show_in_terminal(
                lm, frames, output.console, start=start, special_tokens=arguments.special_tokens
            )
        )
    samples = sample_batch(lm, request.first_row_only, 0, filters)
    if arguments.trace is not None:
        write_trace(recorder.trace, arguments.trace, arguments.force)
        write_error(f"adlm: wrote the trace to {arguments.trace}")  # standard output is for samples only
    return samples


def _sample_batches(lm: LanguageModel, request: SampleRequest, num_done: int) -> Iterator[list[Sample]]:
    """The batches that remain after the first `num_done` rows."""
    progress = Progress(Console(stderr=True), "sampling", request.num_rows, num_done, "samples")
    try:
        for start in request.starts(num_done):
            samples = sample_batch(lm, request, start, [partial(_track_progress, progress, start, request)])
            with progress.hidden():
                yield samples
    finally:
        progress.close()


def _track_progress(progress: Progress, start: int, request: SampleRequest, frames: Iterator[Frame]) -> Iterator[Frame]:
    """Pass the frames of the batch that starts at row `start` through unchanged, and update the progress by their t."""
    rows = min(request.batch, request.num_rows - start)
    for frame in frames:
        progress.update(start + rows * (1 - float(frame.t.mean())))
        yield frame


def _write_samples(lm: LanguageModel, request: SampleRequest, arguments: argparse.Namespace) -> None:
    with open_samples(arguments.out, provenance_of(lm, str(arguments.model), request), arguments.force) as file:
        num_existing = file.num_rows
        try:
            for samples in _sample_batches(lm, request, num_existing):
                file.append([sample for sample in samples if sample.row >= file.num_rows])
        except KeyboardInterrupt:
            write_error(f"adlm: interrupted after {_count_samples(file.num_rows)}; rerun the same command to resume")
            raise
        report = {"out": str(arguments.out), "samples": file.num_rows, "drawn": file.num_rows - num_existing}
    existing = f", {num_existing} of them from an earlier run" if num_existing else ""
    message = f"{_count_samples(file.num_rows)}{existing}: {arguments.out}"
    sys.stdout.write(f"{json.dumps(report) if arguments.json else printable(message)}\n")


def _count_samples(num: int) -> str:
    return "1 sample" if num == 1 else f"{num} samples"


class SampleOutput:
    """Prints samples on standard output: JSON, or text with control characters escaped. Terminals show prompts dim."""

    def __init__(self, lm: LanguageModel, request: SampleRequest, as_json: bool, special_tokens: bool):
        self.lm, self.request, self.as_json, self.special_tokens = lm, request, as_json, special_tokens
        self.console = Console()

    def print(self, samples: list[Sample]) -> None:
        for sample in samples:
            text = tokenizer_of(self.lm).decode(sample.ids, self.special_tokens)
            if self.as_json:
                sys.stdout.write(f"{json.dumps(asdict(replace(sample, text=text)))}\n")
                continue
            self.print_header(sample.row)
            if self.console.is_terminal:
                self.console.print(self._highlight(sample))
            else:
                sys.stdout.write(f"{printable(text, keep=TEXT)}\n")
        sys.stdout.flush()

    def print_header(self, row: int) -> None:
        """Print a line with the number of the sample, if there are several."""
        if self.request.num_rows == 1:
            return
        if self.console.file.isatty():  # with FORCE_COLOR a pipe counts as a terminal, but has no width
            self.console.print(Rule(f"{row + 1}", style="dim"))
        else:
            sys.stdout.write(f"--- {row + 1} ---\n")

    def _highlight(self, sample: Sample) -> Text:
        tokenizer = tokenizer_of(self.lm)
        given = [index != self.lm.mask_id for index in encode_canvas(self.request.canvases[sample.canvas], tokenizer)]
        texts = decode_side_by_side(tokens_bytes(tokenizer, sample.ids, self.special_tokens))
        return Text.assemble(
            *((printable(text), "dim" * is_given) for text, is_given in zip(texts, given, strict=True))
        )
