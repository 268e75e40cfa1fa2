"""The quickstart: show the model in the box, prepare text, train two models, compare, sample and write a report."""

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from adlm import code_commit
from adlm.apps.quickstart.report import (
    PAGE,
    REPORT,
    TRACE,
    BoxTexts,
    QuickstartReport,
    TrainedModel,
    format_report_page,
)
from adlm.apps.trace.page import write_trace
from adlm.apps.trace.recording import TraceInfo, record_trace
from adlm.bases.named import find_named_base
from adlm.canvas import HOLE
from adlm.checkpoints.model_folder import CONFIG, TOKENIZER, WEIGHTS, load_model_folder, replace_model_folder
from adlm.config.load import differences, load_config, resolve, to_mapping
from adlm.config.schema import Config
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import Prepared
from adlm.data.sources.corpora import CORPORA
from adlm.data.sources.source import resolve_source
from adlm.errors import UserError
from adlm.files import check_output, reporting_os_errors, write_file
from adlm.language_model import LanguageModel, load
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.ngrams import ngram_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import Estimate, Nats, difference, summarize
from adlm.models.transformer import num_parameters
from adlm.tokens import Tokenizer
from adlm.training.metrics import read_metrics
from adlm.training.optimizer import check_warm_up
from adlm.training.run_folder import MAY_CHANGE, RunFolder
from adlm.training.train import Reporter, train

METHODS = ("adlm", "mdlm")
ROWS, REPLICATES = 4096, 2  # held-out rows, as many as `train.valid_rows`, and replicates of the reported bounds
SAMPLES, STEPS, TOP_P = 3, 64, 0.9
INFILLING_TOKENS = 4096  # held-out tokens that are searched for a sentence to infill
BOX_CANVAS = 'The old man looked at the[MASK*4] and said to his[MASK*2], "I[MASK*8]."'
PROMPT, PROMPT_TOKENS = "The history of the lighthouse begins", 64
SENTENCE = re.compile(r"(?<=[.!?] )\w[^.!?]{30,}[.!?]")


def quickstart(
    overrides: list[str],
    out: Path,
    print_box: Callable[[BoxTexts], None],
    print_stage: Callable[[str], None],
    make_reporter: Callable[[Config], Reporter],
) -> QuickstartReport:
    """Run the quickstart in `out`. Finished work of an earlier run there is reused."""
    started = time.monotonic()
    configs = {name: resolve([f"quickstart/{name}", *overrides]) for name in METHODS}
    if configs["adlm"].data.prepared:
        raise UserError("data.prepared: the quickstart prepares its own data; give data.path=FILE instead")
    for name, config in configs.items():
        if config.method != name:
            raise UserError(
                f"method={config.method}: the quickstart compares {' and '.join(METHODS)}; train another method with "
                "`adlm train`"
            )
        check_warm_up(config.train)
    _check_output_folder(out)
    data = configs["adlm"].data
    resolve_source(data, without=(out,))  # a user error if it is not there
    print_stage("sampling from the models that come with adlm")
    box = _box_texts()
    print_box(box)
    corpus = CORPORA.get(data.name)
    source = data.path or data.hub or (data.name if corpus is None else corpus.title)
    print_stage(f"preparing {source}, tokenizer {configs['adlm'].tokenizer}")
    prepared = prepare(configs["adlm"], out / "data").prepared
    held_out = next((split for split in ("valid", "test") if split in prepared.splits), None)
    if held_out is None:
        raise UserError(
            f"no text of {source} is held out by data.held_out {configs['adlm'].data.held_out:g}, and the bounds are "
            "measured on held-out text; try data.held_out=0.1, or a longer text"
        )
    tokens = prepared.tokens(held_out)
    ids = np.zeros(min(INFILLING_TOKENS, len(tokens)), np.int64)
    tokens.copy_to(ids, 0, len(ids))
    text = prepared.tokenizer.decode(ids.tolist(), special_tokens=False).strip()
    canvas = make_infilling_canvas(text, prepared.tokenizer, configs["adlm"].length - 2)
    models, seconds = {}, {}
    for name, config in configs.items():
        print_stage(f"training {name.upper()}: {config.train.steps:,} steps of {config.train.batch_size} rows")
        models[name], seconds[name] = _train_model(name, config, prepared, out, make_reporter)
    print_stage("measuring both models on the same held-out rows and random numbers")
    rows = prepared.rows(held_out)
    settings = PerplexitySettings("any-order", REPLICATES, batch=64, max_tokens=ROWS * configs["adlm"].length)
    nats = {name: measure_nats(model.method, model.network, rows, settings) for name, model in models.items()}
    num_symbols = prepared.tokenizer.vocabulary.size
    ngrams = ngram_nats(prepared.rows("train").in_parts(), rows.in_parts(), num_symbols)
    gap = difference(nats["adlm"], nats["mdlm"])
    print_stage("sampling from both models")
    report = QuickstartReport(
        adlm=_model_row(models["adlm"], configs["adlm"], nats["adlm"], seconds["adlm"]),
        mdlm=_model_row(models["mdlm"], configs["mdlm"], nats["mdlm"], seconds["mdlm"]),
        difference=gap.nats,
        difference_stderr=_stderr(gap),
        unigram_nats=ngrams.unigram,
        bigram_nats=ngrams.bigram,
        held_out_tokens=gap.tokens,
        samples=_samples(models["adlm"]),
        mdlm_samples=_samples(models["mdlm"]),
        canvas=canvas,
        infilled=models["adlm"].fill(canvas, steps=STEPS, top_p=TOP_P, seed=1).strip(),
        box=box,
        seconds=round(time.monotonic() - started, 1),
        commit=code_commit(),
        text=source,
        commands=_commands(overrides, out, canvas, settings),
    )
    frames = models["adlm"].watch(f"[MASK*{configs['adlm'].length}]", steps=STEPS, top_p=TOP_P, seed=0)
    info = TraceInfo("quickstart", models["adlm"].config.sampling.sampler, STEPS, seed=0)
    write_trace(record_trace(models["adlm"], frames, info), out / TRACE)  # of the first sample
    curves = {name: read_metrics(out / "runs" / name / "metrics.jsonl") for name in METHODS}
    write_file(out / REPORT, json.dumps(asdict(report), indent=1, ensure_ascii=False))
    write_file(out / PAGE, format_report_page(report, curves))
    return report


def _box_texts() -> BoxTexts:
    model, pretrained = load(), ""
    if find_named_base("smollm2") is not None:
        pretrained = load("smollm2").sample(1, PROMPT_TOKENS, prompt=PROMPT, seed=0)[0].strip()
    sample = model.sample(1, steps=STEPS, seed=0)[0].strip()
    infilled = model.fill(BOX_CANVAS, steps=STEPS, seed=0).strip()
    return BoxTexts(sample, BOX_CANVAS, infilled, pretrained)


def _check_output_folder(out: Path) -> None:
    """Raise a user error if the quickstart would replace a file that it did not write."""
    with reporting_os_errors(out):
        if not out.exists():
            parent = next(folder for folder in out.absolute().parents if folder.exists())
            if not os.access(parent, os.W_OK):
                raise UserError(f"--out {out} cannot be written: {parent} is not writable; give another --out")
            return
        if not out.is_dir():
            raise UserError(f"--out {out} is a file, and the quickstart writes a folder; give another --out")
        for name in METHODS:
            if (out / name).exists() and not _is_quickstart_model(out, name):
                raise UserError(
                    f"{out / name} exists and was not written by the quickstart, which saves a model there; "
                    "give another --out"
                )
    for name in (REPORT, PAGE, TRACE):
        check_output(out / name, "--out: the file")
    with reporting_os_errors(out):
        names = {path.name for path in out.iterdir()}
    if names and not names & {"data", "runs", REPORT}:
        raise UserError(
            f"--out {out} holds other files, and the quickstart writes a folder of its own; give another --out"
        )


def _is_quickstart_model(out: Path, name: str) -> bool:
    """Whether out/NAME is a copy of the model of out/runs/NAME and has no other files."""
    run, model = RunFolder(out / "runs" / name).config, out / name
    if run is None or model.is_symlink() or not (model / CONFIG).is_file():
        return False
    names = {path.name for path in model.iterdir()}
    changed = differences(to_mapping(load_config(model / CONFIG)), to_mapping(run))
    return names <= {WEIGHTS, CONFIG, TOKENIZER, "special_tokens_map.json"} and changed.keys() <= MAY_CHANGE


def _train_model(
    name: str, config: Config, prepared: Prepared, out: Path, make_reporter: Callable[[Config], Reporter]
) -> tuple[LanguageModel, float]:
    """Train a model, save it in out/NAME, and return it with its training time in seconds."""
    run = out / "runs" / name
    config = replace(config, data=replace(config.data, prepared=str(prepared.folder)))
    reporter = make_reporter(config)
    try:
        outcome = train(config, run, reporter)
    finally:
        reporter.close()
    if outcome.signal:
        raise KeyboardInterrupt
    replace_model_folder(load_model_folder(run / "model"), out / name)
    lines = read_metrics(run / "metrics.jsonl")
    steps = [0, *(line["step"] for line in lines)]
    return load(out / name), sum(
        (line["step"] - before) * (line.get("seconds_per_step") or 0.0)
        for before, line in zip(steps, lines, strict=False)
    )


def _model_row(model: LanguageModel, config: Config, nats: Nats, seconds: float) -> TrainedModel:
    estimate = summarize(nats)
    tokens = config.train.steps * config.train.batch_size * config.length
    return TrainedModel(
        estimate.nats, _stderr(estimate), num_parameters(model.network), config.train.steps, tokens, round(seconds, 1)
    )


def _stderr(estimate: Estimate) -> float:
    """The standard error over documents and Monte Carlo; Monte Carlo only if a single document is held out."""
    stderr = estimate.monte_carlo if estimate.stderr is None else estimate.stderr
    assert stderr is not None  # REPLICATES > 1
    return stderr


def _samples(model: LanguageModel) -> tuple[str, ...]:
    return tuple(text.strip() for text in model.sample(SAMPLES, steps=STEPS, top_p=TOP_P, seed=0))


def _commands(overrides: list[str], out: Path, canvas: str, settings: PerplexitySettings) -> dict[str, str]:
    """By purpose: the command that runs the quickstart, and commands that repeat its parts."""
    adlm, mdlm = str(out / "adlm"), str(out / "mdlm")
    sampling = ["--steps", str(STEPS), f"sampling.top_p={TOP_P}"]
    measuring = ["--samples", str(settings.samples), "--max-tokens", str(settings.max_tokens)]
    words = {
        "all of this; rerun to resume": ["quickstart", *overrides, "--out", str(out)],
        "the bounds": ["perplexity", adlm, mdlm, "--data", str(out / "data"), *measuring],
        "the loss curves as PNG and SVG": ["train", "--plot", *(str(out / "runs" / name) for name in METHODS)],
        "the samples": ["sample", adlm, "--num", str(SAMPLES), *sampling],
        "the sentence": ["sample", adlm, "--fill", canvas, "--seed", "1", *sampling],
        "the sample of the model in the box": ["sample", "--steps", str(STEPS)],
        "the sample of smollm2": ["sample", "smollm2", "--prompt", PROMPT, "--length", str(PROMPT_TOKENS)],
        "another text, while it is generated": ["sample", adlm, "--prompt", "The ", "--watch"],
    }
    return {purpose: shlex.join(["adlm", *each]) for purpose, each in words.items()}


def make_infilling_canvas(text: str, tokenizer: Tokenizer, max_tokens: int) -> str:
    """The first sentence of at most `max_tokens` tokens, with two spans of words replaced by as many masked tokens.

    Without such a sentence, the first words that fit; without words, the first characters.
    """
    text = HOLE.sub("", " ".join(word for word in text.split() if not tokenizer.unknown_words(word)))
    sentences = (match[0] for match in SENTENCE.finditer(text))
    sentence = next((candidate for candidate in sentences if len(tokenizer.encode(candidate)) <= max_tokens), text)
    space = " " if sentence.count(" ") >= 5 else ""
    words = sentence.split(" ") if space else list(sentence)
    while len(tokenizer.encode(space.join(words))) > max_tokens:
        words = words[: len(words) * 3 // 4]
    size = max(1, len(words) // 6)
    # The later span first, so that the indices of the earlier one stay valid.
    for start in (len(words) * 2 // 3, len(words) // 4):
        hidden = (space if tokenizer.joins_spaces else "") + space.join(words[start : start + size])
        words[start : start + size] = [f"[MASK*{len(tokenizer.encode(hidden)) or 1}]"]
    return space.join(words)
