"""`adlm sample`: generate text with a model, unconditionally or given a prompt, a suffix or a text with holes."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adlm.apps.trace.page import check_trace_path
from adlm.cli.streams import write_error
from adlm.config.load import BOX, load_config, model_source
from adlm.errors import TEXT, UserError, printable
from adlm.files import check_output
from adlm.sampling.request import SampleRequest, parse_sampling, sampling_with

if TYPE_CHECKING:
    from rich.text import Text

    from adlm.config.schema import Sampling
    from adlm.language_model import LanguageModel, Run
    from adlm.samples_file import Sample
    from adlm.sampling.frame import Frame

BATCH, GPU_BATCH = 16, 64


def run(arguments: argparse.Namespace) -> int:
    arguments.model, arguments.overrides = _model_and_overrides([arguments.model, *arguments.overrides])
    saved = model_source(arguments.model) / "config.yaml"
    lm = None if saved.is_file() else _load(arguments)  # of a .ckpt or a hub name, options are known when it is loaded
    request = _request(arguments, lm.config.sampling if lm else load_config(saved).sampling)  # before torch is imported
    lm = lm or _load(arguments)
    batch = request.batch or (GPU_BATCH if lm.device.type == "cuda" else BATCH)
    planned = lm.plan(replace(request, batch=batch))
    if arguments.trace is not None and (length := planned.canvas.take([0]).ids.shape[1]) > lm.config.length:
        raise UserError(
            f"--trace runs the network on all {length} tokens at every step, and the model's length is "
            f"{lm.config.length}; use a shorter text"
        )
    output = SampleOutput(planned, arguments.json, arguments.special_tokens)
    watch = arguments.watch and output.console.is_live
    if watch or arguments.trace is not None:
        first = _sample_first(planned, output if watch else None, arguments)
        if len(planned.rng) == 1 and arguments.out is None:
            output.print([] if watch else first)
            return 0
    if arguments.out is not None:
        _write_samples(planned, batch, arguments)
        return 0
    for samples in _sample_batches(planned, batch, 0):
        output.print([sample for sample in samples if sample.row > 0 or not watch])
    return 0


def _load(arguments: argparse.Namespace) -> "LanguageModel":
    from adlm.language_model import load  # imports torch, which takes seconds

    return load(arguments.model, arguments.device)


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


def _request(arguments: argparse.Namespace, defaults: "Sampling") -> SampleRequest:
    """What to sample, after the checks that need no model. `defaults` are the model's sampling options."""
    if arguments.fill is not None:
        for name in ("prompt", "suffix", "length"):
            if getattr(arguments, name) is not None:
                raise UserError(
                    f"--{name} cannot be combined with --fill, which gives the whole text; leave out --{name}, or "
                    "--fill"
                )
    if arguments.trace is not None:
        check_trace_path(arguments.trace, "--trace", arguments.force, [Path(arguments.model)])
    if arguments.force:
        check_output(arguments.out, force=True, inputs=[Path(arguments.model)])
    if arguments.watch and arguments.json:
        raise UserError("--watch cannot be combined with --json; leave one out")
    options = parse_sampling(arguments.overrides, sampler=arguments.sampler, steps=arguments.steps)
    try:
        return SampleRequest(
            sampling_with(defaults, options),
            texts=arguments.fill,
            prompt=arguments.prompt or "",
            suffix=arguments.suffix or "",
            length=arguments.length,
            num=arguments.num,
            seed=arguments.seed,
            batch=arguments.batch,
        )
    except UserError as error:
        flag = "--" if error.option in ("num", "seed", "batch", "length", "prompt", "suffix") else ""
        raise UserError(f"{flag}{error}") from None


def _sample_first(planned: "Run", output: "SampleOutput | None", arguments: argparse.Namespace) -> "list[Sample]":
    """Generate the first sample alone, shown in the terminal or recorded as a trace."""
    from adlm.apps.trace.page import write_trace
    from adlm.apps.trace.recording import TraceInfo, TraceRecorder
    from adlm.apps.trace.terminal import show_in_terminal
    from adlm.samples_file import draw_samples

    first, lm, special_tokens = next(planned.batches(1)), planned.lm, arguments.special_tokens
    info = TraceInfo(str(arguments.model), planned.sampling.sampler, planned.sampling.steps, arguments.seed)
    recorder, frames = TraceRecorder(lm, info, special_tokens=special_tokens), first.frames()
    if arguments.trace is not None:
        frames = recorder.record(frames)
    if output is not None:
        output.print_header(0)
        frames = show_in_terminal(
            lm, frames, output.console, start=first.canvas.starts[0], special_tokens=special_tokens
        )
    samples = draw_samples(first, planned.num, frames)
    if arguments.trace is not None:
        write_trace(recorder.trace, arguments.trace, arguments.force)
        write_error(f"adlm: wrote the trace to {arguments.trace}")  # standard output is for samples only
    return samples


def _sample_batches(planned: "Run", batch: int, first: int) -> "Iterator[list[Sample]]":
    """The samples from row `first` on, batch by batch, with a progress bar."""
    import torch

    from adlm.cli.console import Console, Progress
    from adlm.samples_file import draw_samples

    progress = Progress(Console(stderr=True), "sampling", len(planned.rng), first, "samples")

    def tracked(part: "Run") -> "Iterator[Frame]":
        for frame in part.frames():
            progress.update(part.rng.rows[0] + len(part.rng) * (1 - float(frame.t.mean())))
            yield frame

    try:
        for part in planned.batches(batch, first):
            samples = draw_samples(part, planned.num, tracked(part))
            with progress.hidden():
                yield samples
    except torch.OutOfMemoryError:
        fewer = f"--batch {len(part.rng) // 2}" if len(part.rng) > 1 else "a shorter text"
        raise UserError(
            f"--batch {batch} of {part.canvas.ids.shape[1]} tokens does not fit the memory of the device; try {fewer}"
        ) from None
    finally:
        progress.close()


def _write_samples(planned: "Run", batch: int, arguments: argparse.Namespace) -> None:
    from adlm.samples_file import open_samples, provenance_of

    with open_samples(arguments.out, provenance_of(planned, str(arguments.model), batch), arguments.force) as file:
        num_existing = file.num_rows
        try:
            for samples in _sample_batches(planned, batch, file.first_to_sample(batch)):
                file.append(samples)
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

    def __init__(self, planned: "Run", as_json: bool, special_tokens: bool):
        from adlm.cli.console import Console

        self.planned, self.as_json, self.special_tokens = planned, as_json, special_tokens
        self.tokenizer, self.console = planned.lm.require_tokenizer(), Console()

    def print(self, samples: "list[Sample]") -> None:
        for sample in samples:
            text = self.tokenizer.decode(sample.ids, self.special_tokens)
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
        from rich.rule import Rule

        if len(self.planned.rng) == 1:
            return
        if self.console.file.isatty():  # with FORCE_COLOR a pipe counts as a terminal, but has no width
            self.console.print(Rule(f"{row + 1}", style="dim"))
        else:
            sys.stdout.write(f"--- {row + 1} ---\n")

    def _highlight(self, sample: "Sample") -> "Text":
        from rich.text import Text

        from adlm.apps.trace.token_text import decode_side_by_side, tokens_bytes

        canvas = self.planned.canvas.take([sample.canvas])
        [given] = canvas.texts(canvas.ids)
        texts = decode_side_by_side(tokens_bytes(self.tokenizer, sample.ids, self.special_tokens))
        return Text.assemble(
            *(
                (printable(text), "dim" * (index != self.planned.lm.mask_id))
                for text, index in zip(texts, given, strict=True)
            )
        )
