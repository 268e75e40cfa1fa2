"""How speed and memory grow: training by the size of the network, sampling by length and batch, answers by clients.

    python experiments/growth/run.py measure --out results.jsonl          # everything, most important rows first
    python experiments/growth/run.py measure --only train-1b sample       # rows by name, or by the beginning of it
    python experiments/growth/run.py measure --small --out /tmp/s.jsonl   # every kind of row on a CPU, tiny
    python experiments/growth/run.py table                                # the tables, in Markdown
    python experiments/growth/run.py plot docs/figures/growth.svg

Every row is a line of JSON, written as soon as it is measured. A row that failed is a line with its error, and is
measured anew by the same command; other rows of the file are skipped. Networks have random weights, but `run-3b` is
`adlm train` itself, on a prepared text (--text).
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adlm import code_commit
from adlm.config.load import resolve
from adlm.errors import UserError
from adlm.files import read_metrics

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RESULTS, TEXT = FOLDER / "results.jsonl", ROOT / "prepared" / "speeches"
Result = dict[str, Any]

BPE = "owt/adlm tokenizer=bpe-8192 length=256 model.hidden=512 model.heads=8 model.blocks=8 model.denoiser_blocks=4"
TINY_NETWORK = "owt/adlm length=32 model.hidden=32 model.heads=2 model.blocks=2 train.compile=off"
TINY = f"{TINY_NETWORK} tokenizer=bytes"
TINY_RUN = (
    f"{TINY_NETWORK} method=mdlm model.denoiser_blocks=null data.name= data.packing=packed train.steps=6 "
    "train.batch_size=4 train.warm_up_steps=1 train.log_every=2 train.sample_every=0 train.ema=0"
)
RUN = (
    "owt/mdlm model=3b data.name=sotu data.packing=packed train.steps=50 train.batch_size=16 train.warm_up_steps=10 "
    "train.learning_rate=2e-4 train.ema=0 train.log_every=5 train.sample_every=0"
)
"""The words of `adlm train`; data.prepared and --out follow."""
PREPARE = "data.name=sotu data.held_out=0 tokenizer=bpe-50257 length=1024"
TINY_PREPARE = f"data.path={ROOT / 'README.md'} data.boundary=line data.held_out=0 tokenizer=bytes length=32"


@dataclass(frozen=True)
class Row:
    """Something to measure: a training step, sampling runs, a whole training run, or a server under load."""

    name: str
    kind: str
    """step, sample, run or serve."""
    words: tuple[str, ...] = ()
    """As for `adlm train`."""
    batch: int = 1
    """Sequences; of a server, those that it samples at once."""
    steps: int = 10
    """Timed training steps."""
    clients: tuple[int, ...] = ()
    """Of a server: the numbers of concurrent clients, one after the other."""


def step_row(name: str, words: str, batch: int, steps: int = 10) -> Row:
    return Row(f"train-{name}", "step", tuple(words.split()), batch, steps)


def sample_row(length: int, batch: int) -> Row:
    words = f"owt/adlm length={length} sampling.sampler=ancestral sampling.top_p=1 sampling.steps=128"
    return Row(f"sample-{length}x{batch}", "sample", tuple(words.split()), batch)


ROWS = (
    step_row("3b", "owt/mdlm model=3b", 12, 6),
    step_row("1b", "owt/mdlm model=1b", 32),
    step_row("293m", "owt/adlm", 64),
    step_row("50m", BPE, 256),
    Row("run-3b", "run", tuple(RUN.split()), 16),
    *(sample_row(length, 1) for length in (1024, 256, 512, 2048, 4096, 8192)),
    *(sample_row(1024, batch) for batch in (2, 4, 8, 16, 32, 64)),
    Row("serve-box", "serve", batch=64, clients=(1, 4, 16, 64)),
    step_row("1b-adlm", "owt/adlm model=1b", 24),
    step_row("3b-small-batch", "owt/mdlm model=3b", 4, 6),
    step_row("3b-recompute", "owt/mdlm model=3b train.recompute=true", 32, 4),
)
SMALL_ROWS = (
    step_row("small", TINY, 4, 2),
    step_row("small-recompute", f"{TINY} train.recompute=true", 4, 2),
    Row("run-small", "run", tuple(TINY_RUN.split()), 4),
    *(
        Row(f"sample-{length}x{batch}", "sample", (*TINY.split(), f"length={length}", "sampling.steps=4"), batch)
        for length, batch in ((16, 1), (32, 1), (32, 2))
    ),
    Row("serve-small", "serve", batch=4, clients=(1, 4)),
)


def planned(words: Sequence[str], batch: int | None = None) -> Result:
    """What `adlm plan --gpu h200` says of a config."""
    from adlm.apps.plan.estimate import Machines, plan
    from adlm.tokens import with_vocabulary
    from adlm.training.gpus import GPUS

    given = [] if batch is None else [f"train.batch_size={batch}"]
    config = with_vocabulary(resolve([*words, *given]))
    found = plan(config, Machines(GPUS["h200"], 1, 1.0))
    return {
        "parameters": found.parameters,
        "gib": found.total_gib,
        "usable_gib": found.usable_gib,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
    }


@dataclass(frozen=True)
class Setting:
    """What the measurements of one call have in common."""

    text: Path
    """The prepared text of `run-3b`; prepared if it is missing."""
    scratch: Path
    """A folder for what is deleted again."""
    row_seconds: float
    """A row that takes longer has failed."""
    save_seconds: float
    """Time that `adlm train` has to save its model and checkpoint after its last step."""
    small: bool


def command_of(*words: object) -> list[str]:
    return [sys.executable, "-m", "adlm", *map(str, words)]


def measure_step(row: Row, setting: Setting) -> Result:
    """One `adlm bench train`, in a process of its own, so that its memory is free afterwards."""
    words = ["bench", "train", *row.words, "--batch", row.batch, "--steps", row.steps, "--profile", "--json"]
    done = subprocess.run(
        command_of(*words), capture_output=True, text=True, check=False, timeout=setting.row_seconds, cwd=ROOT
    )
    if done.returncode:
        raise UserError(done.stderr[-1500:])
    return {**json.loads(done.stdout), "planned": planned(row.words, row.batch)}


def measure_sample(row: Row, setting: Setting) -> Result:
    """A sampling run of a network with random weights, after an untimed one."""
    import torch

    from adlm.apps.bench import fresh_network, measure_sampling
    from adlm.language_model import LanguageModel
    from adlm.methods import method_of
    from adlm.tokens import with_vocabulary

    config = with_vocabulary(resolve(row.words))
    device, method = torch.device("cuda" if torch.cuda.is_available() else "cpu"), method_of(config)
    lm = LanguageModel(config, method, fresh_network(method, device).eval().requires_grad_(False))
    try:
        return asdict(measure_sampling(lm, config.sampling, row.batch, config.length, 1, False, Silent()))
    finally:
        del lm
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Silent:
    """A SpeedProgress that reports nothing."""

    def begin(self, steps: int, seconds: float) -> None:
        pass

    def step(self, done: int) -> None:
        pass


def measure_run(row: Row, setting: Setting) -> Result:
    """`adlm train` until its last step is logged; what it saves then is waited for no longer than `save_seconds`."""
    text, out, log = setting.text, setting.scratch / "run", setting.scratch / "train.log"
    if setting.small:
        text = setting.scratch / "text"
    if not text.exists():
        source = TINY_PREPARE if setting.small else PREPARE
        command = command_of("prepare", *source.split(), "--out", text)
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
    words = [*row.words, f"data.prepared={text}"]
    plan, num_steps = planned(with_vocabulary_of(row.words, text)), resolve(row.words).train.steps
    begun, lines, saved, seconds = time.monotonic(), list[Result](), False, 0.0
    with (
        log.open("w") as file,
        subprocess.Popen(command_of("train", *words, "--out", out), stdout=file, stderr=file, cwd=ROOT) as run,
    ):
        try:
            while run.poll() is None and time.monotonic() < begun + setting.row_seconds:
                if len(found := metrics_of(out)) > len(lines):
                    lines = found
                    print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
                if lines and lines[-1]["step"] == num_steps:
                    ended = time.monotonic()
                    run.wait(setting.save_seconds)
                    saved, seconds = run.returncode == 0, time.monotonic() - ended
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            pass
        finally:
            run.kill()
    lines = metrics_of(out)
    if not lines or lines[-1]["step"] != num_steps:
        raise UserError(f"{len(lines)} lines are logged: {log.read_text()[-1500:]}")
    sizes = {name: sum(path.stat().st_size for path in (out / name).rglob("*")) for name in ("model", "checkpoints")}
    return {
        "seconds": time.monotonic() - begun,
        "saved": saved,
        "seconds_to_save": seconds if saved else None,
        "bytes": sizes if saved else None,
        "lines": lines,
        "planned": plan,
    }


def with_vocabulary_of(words: Sequence[str], prepared: Path) -> list[str]:
    from adlm.data.prepare.prepared import open_prepared

    vocabulary = open_prepared(prepared, sums=False).tokenizer.vocabulary
    return [*words, f"vocabulary.size={vocabulary.size}", f"vocabulary.mask_id={vocabulary.mask_id}"]


def metrics_of(run: Path) -> list[Any]:
    path = run / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def measure_serve(row: Row, setting: Setting) -> Result:
    """Answers per second of `adlm serve` with the model in the box, by the number of concurrent clients."""
    import httpx  # the server needs fastapi, uvicorn and prometheus-client

    spec = importlib.util.spec_from_file_location("serve_load_run", FOLDER.parent / "serve_load" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    load = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(load)

    model, seconds = ROOT / "adlm" / "box", 0.5 if setting.small else 4.0

    async def answers(address: str) -> list[Result]:
        requests, found = load.bodies(model.name), []
        requests = requests[:2] if setting.small else requests
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=60, limits=unlimited) as http:

            async def ask(body: Result) -> list[Any]:
                return load.answer_of(await http.post("/v1/completions", json=body))  # type: ignore[no-any-return]

            expected = [await ask(body) for body in requests]
            for clients in row.clients:
                begun = time.monotonic()
                run = load.Load(http, requests, expected, begun + seconds)
                run.figures.memory_mb = [0]  # not measured
                await asyncio.gather(*(run.client(number) for number in range(clients)))
                figures = run.figures.as_dict(time.monotonic() - begun)
                names = ("answers", "lost", "wrong", "refused", "per_second", "p50_s", "p99_s")
                found.append({"clients": clients, **{name: figures[name] for name in names}})
        return found

    command = command_of("serve", model, "--port", 0, "--batch", row.batch)
    log = setting.scratch / "serve.log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT) as server,
    ):
        assert server.stdout is not None
        timer = threading.Timer(setting.row_seconds, server.kill)
        timer.start()
        try:
            line = server.stdout.readline()
            if not line:
                raise UserError(f"the server did not start: {log.read_text()[-1500:]}")
            return {"clients": asyncio.run(answers(line.split()[-1]))}
        except httpx.HTTPError as error:
            raise UserError(f"{type(error).__name__} {error}: {log.read_text()[-1500:]}") from None
        finally:
            timer.cancel()
            server.terminate()


FAILURES = (UserError, RuntimeError, OSError, ImportError, ValueError, LookupError, subprocess.SubprocessError)
MEASURES: dict[str, Callable[[Row, Setting], Result]] = {
    "step": measure_step,
    "sample": measure_sample,
    "run": measure_run,
    "serve": measure_serve,
}


def read_results(path: Path) -> dict[str, Result]:
    """The rows that were measured, by name; of several the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {row["row"]: row for row in rows if "error" not in row}


def measure(arguments: argparse.Namespace) -> None:
    end = time.monotonic() + arguments.seconds
    rows = SMALL_ROWS if arguments.small else ROWS
    chosen = [row for row in rows if any(row.name.startswith(name) for name in arguments.only or [""])]
    known, commit = read_results(arguments.out), arguments.commit or code_commit()
    with arguments.out.open("a") as file, tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for row in chosen:
            if row.name in known:
                continue
            left = end - time.monotonic()
            if left <= 0:
                print(f"no time is left for {row.name}", file=sys.stderr, flush=True)
                continue
            place = Path(scratch) / row.name
            place.mkdir()
            setting = Setting(
                arguments.text, place, min(arguments.row_seconds, left), arguments.save_seconds, arguments.small
            )
            begun = time.monotonic()
            try:
                found = MEASURES[row.kind](row, setting)
            # for example for lack of memory, of a package or of time: that must not cost the other rows
            except FAILURES as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            finally:
                shutil.rmtree(place, ignore_errors=True)
            spent = round(time.monotonic() - begun, 1)
            line = {"row": row.name, "kind": row.kind, "commit": commit, "wall_s": spent}
            line |= {"words": " ".join(row.words), "batch": row.batch} | found
            for to in (file, sys.stdout):
                to.write(json.dumps(line) + "\n")
                to.flush()


# Tables.


def of_kind(results: Mapping[str, Result], kind: str) -> list[Result]:
    return [row for row in results.values() if row["kind"] == kind]


def by_size(results: Mapping[str, Result]) -> list[Result]:
    """Training steps, the smallest network first."""
    return sorted(of_kind(results, "step"), key=lambda row: (row["planned"]["parameters"], row["batch"]))


def training_table(results: Mapping[str, Result]) -> str:
    lines = [
        "| config | batch | parameters | GiB | planned | tokens/s | planned | of a large product | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in by_size(results):
        plan, gib, rate = row["planned"], row["peak_gib"], row["tokens_per_second"]
        cells = [f"`{row['words']}`", str(row["batch"]), size_of(plan["parameters"])]
        cells += ["", ""] if gib is None else [f"{gib:.1f}", f"{plan['gib']:.1f} ({plan['gib'] / gib - 1:+.1%})"]
        error = plan["tokens_per_second"] / rate - 1
        cells += [f"{rate / 1e3:,.1f}k", f"{plan['tokens_per_second'] / 1e3:,.1f}k ({error:+.1%})"]
        cells += [f"{row['of_product']:.0%}", "" if row["of_datasheet"] is None else f"{row['of_datasheet']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kinds_of(rows: Sequence[Result]) -> list[str]:
    """The kinds of kernels in the profiles, those with the largest shares first."""
    shares: dict[str, float] = {}
    for row in rows:
        total = sum(each for _, each in row["profile"])
        for kind, milliseconds in row["profile"]:
            shares[kind] = shares.get(kind, 0.0) + milliseconds / total
    return sorted(shares, key=lambda kind: -shares[kind])


def profile_table(results: Mapping[str, Result]) -> str:
    """Where the time of a step goes, in shares of the profiled time."""
    rows = by_size(results)
    kinds = kinds_of(rows)
    lines = [f"| {' | '.join(['parameters, batch', *kinds])} |", f"|---|{'---|' * len(kinds)}"]
    for row in rows:
        times = dict(row["profile"])
        shares = [f"{times.get(kind, 0) / sum(times.values()):.1%}" for kind in kinds]
        lines.append(f"| {size_of(row['planned']['parameters'])}, {row['batch']} | {' | '.join(shares)} |")
    return "\n".join(lines)


def size_of(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def sampling_table(results: Mapping[str, Result]) -> str:
    lines = [
        "| tokens | batch | seconds | seconds a text | ms a network call | tokens/s | GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(of_kind(results, "sample"), key=lambda row: (row["batch"], row["length"])):
        memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        cells = [row["length"], row["batch"], f"{row['seconds']:.3f}", f"{row['seconds_per_sequence']:.3f}"]
        cells += [f"{row['milliseconds_a_call']:.2f}", f"{row['tokens_per_second']:,.0f}", memory]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def serving_table(results: Mapping[str, Result]) -> str:
    lines = [
        "| clients | answers | lost | wrong | answers/s | median | 99th percentile |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in of_kind(results, "serve"):
        for of in row["clients"]:
            cells = [str(of[name]) for name in ("clients", "answers", "lost", "wrong")]
            cells += [f"{of['per_second']:.1f}", f"{of['p50_s']:.2f} s", f"{of['p99_s']:.2f} s"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run_table(results: Mapping[str, Result]) -> str:
    """The log of the training run: means since the line before."""
    lines = ["| step | nats per token | gradient norm | tokens/s | GiB |", "|---|---|---|---|---|"]
    for row in of_kind(results, "run"):
        for line in row["lines"]:
            cells = [str(line["step"]), f"{line['nats']:.3f}", f"{line['gradient_norm']:.2f}"]
            cells += [f"{line['tokens_per_second']:,.0f}", f"{line['memory_gib']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure_link(results: Mapping[str, Result]) -> str:
    """For docs/plan.md: the figure, once there are results."""
    text = "FLOP/s and shares of a training step by parameters; sampling by length and by number of texts"
    return f"![{text}](figures/growth.svg)" if results else ""


TABLES = {
    "training": training_table,
    "profile": profile_table,
    "run": run_table,
    "sampling": sampling_table,
    "serving": serving_table,
}


def plot(results: Mapping[str, Result], out: Path) -> None:
    """Four panels: FLOP/s and shares of a step by size, and sampling by length and by batch."""
    import matplotlib

    from adlm.apps.plots import new_figure, save_figure

    matplotlib.rcParams["svg.hashsalt"] = "growth"  # with no date, the same results give the same file
    figure = new_figure(11, 8)
    (speed, shares), (lengths, batches) = figure.subplots(2, 2)
    draw_speed(speed, by_size(results))
    draw_shares(shares, by_size(results))
    draw_lengths(lengths, of_kind(results, "sample"))
    draw_batches(batches, of_kind(results, "sample"))
    for axes in (speed, shares, lengths, batches):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out)


def step_labels(steps: Sequence[Result]) -> list[str]:
    labels = [f"{size_of(row['planned']['parameters'])}\nbatch {row['batch']}" for row in steps]
    return [
        f"{label}\nrecomputed" if "recompute=true" in row["words"] else label
        for label, row in zip(labels, steps, strict=True)
    ]


def draw_speed(axes: Any, steps: Sequence[Result]) -> None:
    """FLOP/s of training steps, measured and planned, with the measured tokens per second."""
    from adlm.apps.plots import COLOURS

    reached = [100 * row["of_product"] for row in steps]
    plans = [
        share * row["planned"]["tokens_per_second"] / row["tokens_per_second"]
        for share, row in zip(reached, steps, strict=True)
    ]
    axes.plot(range(len(steps)), reached, "o", color=COLOURS[0], label="measured, with tokens/s")
    axes.plot(range(len(steps)), plans, "x", color=COLOURS[1], label="adlm plan")
    for place, (row, share) in enumerate(zip(steps, reached, strict=True)):
        text = f"{row['tokens_per_second'] / 1e3:,.0f}k"
        axes.annotate(text, (place, share), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(steps)), step_labels(steps), fontsize=8)
    axes.set(ylabel="% of the FLOP/s of a large product", ylim=(0, 100))
    axes.set_title("Training: FLOP/s of a step", fontsize=10)
    axes.margins(x=0.08)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_shares(axes: Any, steps: Sequence[Result]) -> None:
    """Where the time of training steps goes."""
    from adlm.apps.plots import COLOURS, GREY

    times = [dict(row["profile"]) for row in steps]
    bottom = [0.0] * len(steps)
    for number, kind in enumerate(kinds_of(steps)):
        heights = [100 * of.get(kind, 0) / sum(of.values()) for of in times]
        colour = (*COLOURS, GREY, "#444444", "#b0b0b0")[number]
        axes.bar(range(len(steps)), heights, bottom=bottom, label=kind, color=colour, width=0.75)
        for place, (low, height) in enumerate(zip(bottom, heights, strict=True)):
            if height >= 4:
                axes.text(place, low + height / 2, f"{height:.0f}", ha="center", va="center", fontsize=7, color="white")
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(steps)), step_labels(steps), fontsize=8)
    axes.set(ylabel="% of the time of a step", ylim=(0, 100))
    axes.set_title("Training: where the time goes", fontsize=10, pad=36)
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_lengths(axes: Any, samples: Sequence[Result]) -> None:
    """Milliseconds of a network call, and what of them is not quadratic in the length."""
    import numpy as np

    from adlm.apps.plots import GREY

    alone = sorted((row for row in samples if row["batch"] == 1), key=lambda row: row["length"])
    points = [(row["length"], row["milliseconds_a_call"]) for row in alone]
    if len(points) > 2:
        _, linear, fixed = quadratic(points)
        x = np.geomspace(points[-3][0], points[-1][0])
        axes.plot(x, fixed + linear * x, ":", color=GREY, label="without the term quadratic in the length")
        axes.legend(frameon=False, fontsize=8)
    curve(axes, points, "{:.3g}")
    axes.set(yscale="log", xlabel="tokens of one text", ylabel="milliseconds of a network call")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.13)
    axes.set_title("Sampling: by the length of a text", fontsize=10)


def quadratic(points: Sequence[tuple[float, float]]) -> Any:
    """The coefficients, highest first, of the quadratic through the last three points."""
    import numpy as np

    return np.polyfit(*zip(*points[-3:], strict=True), 2)


def draw_batches(axes: Any, samples: Sequence[Result]) -> None:
    """Seconds a text by the number of texts that are sampled together."""
    common = max((row["length"] for row in samples if row["batch"] > 1), default=0)
    together = sorted((row for row in samples if row["length"] == common), key=lambda row: row["batch"])
    curve(axes, [(row["batch"], row["seconds_per_sequence"]) for row in together], "{:.3f}")
    axes.set(xlabel=f"texts of {common:,} tokens, sampled together", ylabel="seconds a text, T = 128")
    axes.set_title("Sampling: by the number of texts", fontsize=10)
    axes.margins(x=0.13)
    axes.set_ylim(0, 1.15 * max((row["seconds_per_sequence"] for row in together), default=1))


def curve(axes: Any, points: Sequence[tuple[float, float]], form: str) -> None:
    """Points on a logarithmic axis of x, with their values, and those of x at the ticks."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    from adlm.apps.plots import COLOURS

    if not points:
        return
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=COLOURS[0])
    rises = points[-1][1] > points[0][1]
    for point in points:  # beside the curve
        offset, side = ((-5, 4), "right") if rises else ((3, 5), "left")
        axes.annotate(form.format(point[1]), point, offset, textcoords="offset points", ha=side, fontsize=8)
    axes.set(xscale="log")
    axes.xaxis.set_major_locator(FixedLocator([x for x, _ in points]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("measure")
    new.add_argument("--out", type=Path, default=RESULTS)
    new.add_argument("--only", nargs="+", help="rows by name, or by the beginning of it")
    new.add_argument("--small", action="store_true", help="tiny rows of every kind, on a CPU")
    new.add_argument("--text", type=Path, default=TEXT, help="prepared text of run-3b; prepared if missing")
    new.add_argument("--scratch", type=Path, help="where the run is written, 50 GB if it is saved (default: /tmp)")
    new.add_argument("--seconds", type=float, default=3600, help="begin no row after so long, and end the last one")
    new.add_argument("--row-seconds", type=float, default=300, help="a row that takes longer has failed")
    new.add_argument("--save-seconds", type=float, default=0, help="time for run-3b to save after its last step")
    new.add_argument("--commit", help="of this code, where there is no git")
    printing, drawing = (commands.add_parser(name) for name in ("table", "plot"))
    for each in (printing, drawing):
        each.add_argument("--results", type=Path, default=RESULTS)
    drawing.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments)
    elif arguments.command == "table":
        results = read_results(arguments.results)
        print("\n\n".join(table(results) for table in TABLES.values()))
    else:
        plot(read_results(arguments.results), arguments.out)


if __name__ == "__main__":
    main()
