"""The quickstart as a recipe: text -> tokenizer -> two runs -> bounds on the same draws -> samples -> report."""

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from adlm.canvas import HOLE
from adlm.config.load import resolve
from adlm.config.schema import Config
from adlm.data.packing import Rows
from adlm.data.prepare import prepare
from adlm.data.prepared import Prepared
from adlm.evaluation.likelihood import Nats, difference, estimate
from adlm.evaluation.ngrams import ngram_nats
from adlm.evaluation.perplexity import Recipe, measure
from adlm.interfaces.looking.page import write_trace
from adlm.interfaces.looking.trace import About, record
from adlm.interfaces.quickstart.report import TRACE, Findings, Trained, write_report
from adlm.language_model import LanguageModel, load
from adlm.model_folder import load_model_folder, save_model_folder
from adlm.models.transformer import num_parameters
from adlm.training.logbook import read_metrics
from adlm.training.train import Screen, train

METHODS = ("adlm", "mdlm")
ROWS, DRAWS = 4096, 2  # held-out rows, evenly spread (here all of them), and draws of each, for the bounds reported
SAMPLES, STEPS, TOP_P = 3, 64, 0.9
GAPS = "The state of our[MASK*6] is strong, and the people of the United States[MASK*8]."

Say = Callable[[str], None]


def quickstart(words: list[str], out: Path, say: Say, screen: Callable[[Config], Screen]) -> Findings:
    """Everything, into `out`; what an earlier run there has done is not done again."""
    started = time.monotonic()
    configs = {name: resolve([f"quickstart/{name}", *words]) for name in METHODS}
    say("preparing the speeches, and a tokenizer learnt from them")
    prepared = prepare(configs["adlm"], out / "data").prepared
    models, seconds = {}, {}
    for name, config in configs.items():
        say(f"training {name.upper()}: {config.train.steps:,} steps of {config.train.batch_size} rows")
        models[name], seconds[name] = _trained(name, config, prepared, out, screen)
    say("measuring both on the same held-out rows and draws")
    rows, recipe = (
        prepared.rows("valid"),
        Recipe("any-order", DRAWS, batch=64, max_tokens=ROWS * configs["adlm"].length),
    )
    nats = {name: measure(model.method, model.network, rows, recipe) for name, model in models.items()}
    counted = ngram_nats(
        _in_parts(prepared.rows("train")), _in_parts(prepared.rows("valid")), prepared.tokenizer.vocabulary.size
    )
    gap = difference(nats["adlm"], nats["mdlm"])
    say("writing with both")
    canvas, infilled = _infilled(models["adlm"])
    findings = Findings(
        adlm=_row(models["adlm"], configs["adlm"], nats["adlm"], seconds["adlm"]),
        mdlm=_row(models["mdlm"], configs["mdlm"], nats["mdlm"], seconds["mdlm"]),
        difference=gap.nats,
        difference_stderr=gap.stderr,
        unigram_nats=counted.unigram,
        bigram_nats=counted.bigram,
        held_out_tokens=gap.tokens,
        samples=_samples(models["adlm"]),
        mdlm_samples=_samples(models["mdlm"]),
        canvas=canvas,
        infilled=infilled,
        seconds=round(time.monotonic() - started, 1),
        commit=_commit(),
    )
    _write_trace(models["adlm"], out / TRACE)
    write_report(out, findings, {name: read_metrics(out / "runs" / name / "metrics.jsonl") for name in METHODS})
    return findings


def _trained(
    name: str, config: Config, prepared: Prepared, out: Path, screen: Callable[[Config], Screen]
) -> tuple[LanguageModel, float]:
    """The model, in its folder, and how long its training took."""
    run = out / "runs" / name
    config = replace(config, data=replace(config.data, prepared=str(prepared.folder)))
    told = screen(config)
    try:
        outcome = train(config, run, told)
    finally:
        told.close()
    if outcome.signal:
        raise KeyboardInterrupt
    shutil.rmtree(out / name, ignore_errors=True)
    save_model_folder(load_model_folder(run / "model"), out / name)
    lines = read_metrics(run / "metrics.jsonl")
    steps = [0, *(line["step"] for line in lines)]
    return load(out / name), sum(
        (line["step"] - before) * (line.get("seconds_per_step") or 0.0)
        for before, line in zip(steps, lines, strict=False)
    )


def _row(model: LanguageModel, config: Config, nats: Nats, seconds: float) -> Trained:
    found = estimate(nats)
    tokens = config.train.steps * config.train.batch_size * config.length
    return Trained(
        found.nats, found.stderr, num_parameters(model.network), config.train.steps, tokens, round(seconds, 1)
    )


def _in_parts(rows: Rows, size: int = 4096):  # type: ignore[no-untyped-def]
    return (rows.read(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size))


def _samples(model: LanguageModel) -> tuple[str, ...]:
    return tuple(text.strip() for text in model.sample(SAMPLES, steps=STEPS, top_p=TOP_P, seed=0))


def _write_trace(model: LanguageModel, place: Path) -> None:
    """How the first of the samples was written, as a page."""
    frames = model.watch(f"[MASK*{model.config.length}]", steps=STEPS, top_p=TOP_P, seed=0)
    about = About("quickstart", model.config.sampling.sampler, STEPS, seed=0)
    write_trace(record(model, frames, about), place)


def _infilled(model: LanguageModel) -> tuple[str, str]:
    """A sentence with gaps, and the same with the gaps filled."""
    return HOLE.sub(lambda hole: " " + "_" * int(hole[1] or 1), GAPS), model.fill(
        GAPS, steps=STEPS, top_p=TOP_P, seed=1
    )


def _commit() -> str:
    """Of this code, where it lies in a repository."""
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"
