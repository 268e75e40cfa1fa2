"""`adlm sample`: generate text with a model, unconditionally or given a prompt, a suffix or a text with holes."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adlm.canvas import MAX_HOLE
from adlm.cli.streams import write_error
from adlm.config.load import BOX, MODEL_NAMES, load_config, model_source
from adlm.config.options import suggestion
from adlm.constraints.kinds import parse_constraints
from adlm.errors import TEXT, UserError, printable
from adlm.files import check_output
from adlm.hub import download_model
from adlm.registry import SAMPLER_SUMMARIES, SAMPLERS
from adlm.request import Request, option
from adlm.sampling.settings import SampleSettings, parse_sampling, sampling_with

if TYPE_CHECKING:
    from rich.text import Text

    from adlm.language_model import LanguageModel, Run
    from adlm.samples_file import Sample
    from adlm.sampling.frame import Frame

BATCH, GPU_BATCH = 16, 64
SAMPLER_LINES = "\n".join(f"  {name:20} {SAMPLER_SUMMARIES.get(name, 'of another package')}" for name in SAMPLERS)


@dataclass(frozen=True)
class SampleRequest(Request):
    """The options of `adlm sample`."""

    example = f"""adlm sample --prompt "The old man looked at the sea"
  adlm sample runs/own --prompt "Fellow citizens" --length 64
  adlm sample runs/own --fill "Fellow citizens, [MASK*12] the Union." --num 4 --sampler remdm-cap sampling.top_p=0.9
  adlm sample --fill "It was on [MASK*10:day]." --constrain 'day=[12]\\d{{3}}-[01]\\d-[0-3]\\d'
  adlm sample runs/own --watch --trace trace.html --steps 64
  adlm sample runs/own --num 1000 --steps 256 --out samples.jsonl

samplers (details: docs/sampling.md):
{SAMPLER_LINES}"""

    model: str | None = option(
        "a model folder, a run folder, or owner/name on the Hugging Face hub;\n"
        "`adlm import` makes a model folder of a .ckpt file (default: box, the small model that comes with adlm)",
        None,
        positional=True,
    )
    overrides: tuple[str, ...] = option(
        "sampling.option=value, such as sampling.top_p=0.9 (default: the model's config)\n"
        "(options: `adlm presets owt/adlm --explain`)",
        (),
        positional=True,
        metavar="OVERRIDE",
    )
    fill: tuple[str, ...] = option(
        "text to infill: [MASK] is one masked token, [MASK*12] twelve; may be repeated\n"
        "(block-causal models trained to infill, and holes with --constrain: [MASK*..12] is at most twelve,\n"
        "[MASK*3..12] at least three too, [MASK:NAME] as many as needed; holes of one name have the same text)",
        (),
        metavar="TEXT",
        repeated=True,
    )
    constrain: tuple[str, ...] = option(
        "what the hole [MASK:NAME] or [MASK*12:NAME] must be filled with: NAME=PATTERN, a regular expression,\n"
        'or NAME=KIND:VALUE, such as NAME=choices:["yes","no"], NAME=json:SCHEMA, NAME=json:@FILE,\n'
        'NAME=words:{"required": ["a"], "forbidden": ["b"]}, NAME=characters:3..10, NAME=regex:PATTERN;\n'
        "may be repeated",
        (),
        metavar="CONSTRAINT",
        repeated=True,
    )
    prompt: str | None = option("start of the text", None, metavar="TEXT")
    suffix: str | None = option("end of the text", None, metavar="TEXT")
    length: int | None = option(
        "number of tokens (default: as many as the model allows; with --suffix, those of a hole [MASK*] if it can)",
        None,
        metavar="L",
        minimum=1,
        maximum=MAX_HOLE,
    )
    num: int = option("number of samples per --fill", 1, minimum=1)
    sampler: str | None = option("short for sampling.sampler=NAME; the samplers are listed below", None)
    steps: int | None = option("short for sampling.steps=T", None, metavar="T", minimum=1)
    seed: int = option("seed; sample i uses the RNG of (S, i)", 0, metavar="S", minimum=0)
    batch: int | None = option("samples per batch (default: 16, on a GPU 64)", None, metavar="B", minimum=1)
    device: str = option("auto, cuda or cpu (default: auto, a GPU if available)", "auto", metavar="D")
    out: Path | None = option("write the samples as JSON lines; rerun the same command to resume", None)
    force: bool = option("replace the file of --out or --trace even if it has other content", False)
    watch: bool = option("show the first sample in the terminal while it is generated", False)
    trace: Path | None = option(
        "write a trace of the first sample: .html for a page, .svg for an animated image, .json for the data", None
    )
    special_tokens: bool = option(
        "show bos, eos and pad in the printed text (ids and --out always include them)", False
    )
    json: bool = option("print JSON: one line per sample, or one line with --out", False)


def run(request: SampleRequest) -> int:
    model, overrides = _model_and_overrides([request.model, *request.overrides])
    options = parse_sampling(overrides, sampler=request.sampler, steps=request.steps)
    _check_outputs(request, model)
    source, given = model_source(model), model
    if not source.exists() and source.suffix != ".ckpt":  # a name on the hub
        source = download_model(model)
        given = str(source)
    saved = source / "config.yaml"
    # the default options of a .ckpt, or of an exported model, are known once it is loaded
    lm = None if saved.is_file() else _load(given, request.device)
    defaults = lm.config.sampling if lm else load_config(saved).sampling
    asked = SampleSettings(  # checked before torch is imported
        sampling_with(defaults, options),
        texts=request.fill or None,
        prompt=request.prompt or "",
        suffix=request.suffix or "",
        length=request.length,
        num=request.num,
        seed=request.seed,
        batch=request.batch,
        num_option="--num",
        constraints=parse_constraints(request.constrain, "--constrain"),
    )
    lm = lm or _load(model, request.device)
    batch = request.batch or (GPU_BATCH if lm.device.type == "cuda" else BATCH)
    planned = lm.plan(replace(asked, batch=batch, streamed=True))
    if request.trace is not None and (length := planned.canvas.take([0]).ids.shape[1]) > lm.config.length:
        raise UserError(
            f"--trace runs the network on all {length} tokens at every step, and the model's length is "
            f"{lm.config.length}; use a shorter text"
        )
    output = SampleOutput(planned, request.json, request.special_tokens)
    watch = request.watch and output.console.is_live
    if watch or request.trace is not None:
        first = _sample_first(planned, output if watch else None, request, model)
        if len(planned.rng) == 1 and request.out is None:
            output.print([] if watch else first)
            return 0
    if request.out is not None:
        _write_samples(planned, batch, request.out, request, model)
        return 0
    for samples in _sample_batches(planned, batch, 0):
        output.print([sample for sample in samples if sample.row > 0 or not watch])
    return 0


def _load(model: str, device: str) -> "LanguageModel":
    from adlm.language_model import load  # imports torch, which takes seconds

    return load(model, device)


def _model_and_overrides(words: list[str | None]) -> tuple[str, list[str]]:
    """The model, by default the one in the box, and option=value; argparse takes the first word as the model."""
    given = [word for word in words if word is not None]
    names_model = bool(given) and ("=" not in given[0] or os.path.exists(given[0]))
    model, overrides = (given[0], given[1:]) if names_model else (BOX, given)
    texts = [word for word in overrides if "=" not in word]
    looks_like_text = " " in model or not ("/" in model or model.endswith((".ckpt", ".gguf")))
    if model not in MODEL_NAMES and not os.path.exists(model) and looks_like_text:
        texts = [model]
    if texts and os.path.exists(texts[0]) and texts[0] != model:
        raise UserError(f"{model} and {texts[0]} are two models; give one")
    if texts:
        raise UserError(
            f"{texts[0]!r} is neither a model folder, such as runs/own, nor a sampling option; "
            f"a text goes by --prompt {shlex.quote(texts[0])}{suggestion(texts[0], MODEL_NAMES)}"
        )
    return model, overrides


def _check_outputs(request: SampleRequest, model: str) -> None:
    """User errors for options that exclude each other, and for files that cannot be written."""
    for name in ("prompt", "suffix", "length"):
        if request.fill and getattr(request, name) is not None:
            raise UserError(
                f"--{name} cannot be combined with --fill, which gives the whole text; leave out --{name}, or --fill"
            )
    if request.constrain and request.out is not None:
        raise UserError("--constrain cannot be combined with --out: samples files do not record it; leave one out")
    if request.watch and request.json:
        raise UserError("--watch cannot be combined with --json; leave one out")
    if request.trace is not None:
        from adlm.apps.trace.page import check_trace_path

        check_trace_path(request.trace, "--trace", request.force, [Path(model)])
    if request.force:
        check_output(request.out, force=True, inputs=[Path(model)])


def _sample_first(planned: "Run", output: "SampleOutput | None", request: SampleRequest, model: str) -> "list[Sample]":
    """Generate the first sample alone, shown in the terminal or recorded as a trace."""
    from adlm.apps.trace.page import write_trace
    from adlm.apps.trace.recording import TraceInfo, TraceRecorder
    from adlm.apps.trace.terminal import show_in_terminal
    from adlm.samples_file import draw_samples

    first, lm, special_tokens = next(planned.batches(1)), planned.lm, request.special_tokens
    info = TraceInfo(model, planned.sampling.sampler, planned.sampling.steps, request.seed)
    recorder, frames = TraceRecorder(lm, info, special_tokens=special_tokens, holes=first.holes), first.frames()
    if request.trace is not None:
        frames = recorder.record(frames)
    if output is not None:
        output.print_header(0)
        frames = show_in_terminal(
            lm, frames, output.console, start=first.canvas.starts[0], special_tokens=special_tokens
        )
    samples = draw_samples(first, planned.num, frames)
    if request.trace is not None:
        write_trace(recorder.trace, request.trace, request.force)
        write_error(f"adlm: wrote the trace to {request.trace}")  # standard output is for samples only
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


def _write_samples(planned: "Run", batch: int, out: Path, request: SampleRequest, model: str) -> None:
    from adlm.samples_file import open_samples, provenance_of

    with open_samples(out, provenance_of(planned, model, batch), request.force) as file:
        num_existing = file.num_rows
        try:
            for samples in _sample_batches(planned, batch, file.first_to_sample(batch)):
                file.append(samples)
        except KeyboardInterrupt:
            write_error(f"adlm: interrupted after {_count_samples(file.num_rows)}; rerun the same command to resume")
            raise
        report = {"out": str(out), "samples": file.num_rows, "drawn": file.num_rows - num_existing}
    existing = f", {num_existing} of them from an earlier run" if num_existing else ""
    message = f"{_count_samples(file.num_rows)}{existing}: {out}"
    sys.stdout.write(f"{json.dumps(report) if request.json else printable(message)}\n")


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

        from adlm.tokens import decode_side_by_side, tokens_bytes

        lm, canvas = self.planned.lm, self.planned.canvas.take([sample.canvas])
        [given] = canvas.texts(canvas.ids)
        texts = decode_side_by_side(tokens_bytes(self.tokenizer, sample.ids, self.special_tokens))
        styles = ["" if index in (lm.mask_id, lm.open_id) else "dim" for index in given]
        if (
            lm.open_id in given
        ):  # from the first hole of unknown length to the last, nothing says which tokens are given
            first, num_after = given.index(lm.open_id), given[::-1].index(lm.open_id)
            between = [""] * (len(texts) - first - num_after)
            styles = [*styles[:first], *between, *styles[len(styles) - num_after :]]
        return Text.assemble(*((printable(text), style) for text, style in zip(texts, styles, strict=True)))
