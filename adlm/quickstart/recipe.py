"""The quickstart as a recipe: text -> tokenizer -> two runs -> bounds on the same draws -> samples -> report."""

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from adlm.canvas import HOLE
from adlm.checkpoints.model_folder import CONFIG, TOKENIZER, WEIGHTS, load_model_folder, replace_model_folder
from adlm.config.load import differences, load_config, resolve, to_mapping
from adlm.config.schema import Config, Data
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import Prepared
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError
from adlm.files import check_output, writing
from adlm.language_model import LanguageModel, load
from adlm.likelihood.estimate import Estimate, Nats, difference, summarize
from adlm.likelihood.ngrams import ngram_nats
from adlm.likelihood.perplexity import PerplexitySettings, measure_nats
from adlm.models.transformer import num_parameters
from adlm.quickstart.report import CURVES, PAGE, REPORT, TRACE, QuickstartReport, TrainedModel, write_report
from adlm.tokens import Tokenizer
from adlm.trace.page import write_trace
from adlm.trace.recording import TraceInfo, record_trace
from adlm.training.metrics import read_metrics
from adlm.training.run_folder import MAY_CHANGE, RunFolder
from adlm.training.train import Reporter, train

METHODS = ("adlm", "mdlm")
ROWS, DRAWS = 4096, 2  # held-out rows, evenly spread (here all of them), and draws of each, for the bounds reported
SAMPLES, STEPS, TOP_P = 3, 64, 0.9
BEGINNING = 4096  # held-out tokens in which a sentence to put gaps into is looked for
SENTENCE = re.compile(r"(?<=[.!?] )\w[^.!?]{30,}[.!?]")

Say = Callable[[str], None]


def quickstart(words: list[str], out: Path, say: Say, screen: Callable[[Config], Reporter]) -> QuickstartReport:
    """Everything, into `out`; what an earlier run there has done is not done again."""
    started = time.monotonic()
    configs = {name: resolve([f"quickstart/{name}", *words]) for name in METHODS}
    if configs["adlm"].data.prepared:
        raise UserError("data.prepared: the quickstart prepares its text itself; give data.path=FILE instead")
    for name, config in configs.items():
        if config.method != name:
            raise UserError(
                f"method={config.method}: the quickstart compares {' and '.join(METHODS)}; train another method by "
                "`adlm train`"
            )
    _check_place(out)
    text = _title(configs["adlm"].data)
    say(f"preparing {text}, tokenizer {configs['adlm'].tokenizer}")
    prepared = prepare(configs["adlm"], out / "data").prepared
    held_out = next((split for split in ("valid", "test") if split in prepared.splits), None)
    if held_out is None:
        raise UserError(
            f"nothing of {text} is held out by data.held_out {configs['adlm'].data.held_out:g}, and the bounds are "
            "measured on held-out text; try data.held_out=0.1, or a longer text"
        )
    canvas = with_gaps(_beginning(prepared, held_out), prepared.tokenizer, configs["adlm"].length - 2)
    models, seconds = {}, {}
    for name, config in configs.items():
        say(f"training {name.upper()}: {config.train.steps:,} steps of {config.train.batch_size} rows")
        models[name], seconds[name] = _trained(name, config, prepared, out, screen)
    say("measuring both on the same held-out rows and draws")
    rows, recipe = (
        prepared.rows(held_out),
        PerplexitySettings("any-order", DRAWS, batch=64, max_tokens=ROWS * configs["adlm"].length),
    )
    nats = {name: measure_nats(model.method, model.network, rows, recipe) for name, model in models.items()}
    num_symbols = prepared.tokenizer.vocabulary.size
    counted = ngram_nats(prepared.rows("train").in_parts(), rows.in_parts(), num_symbols)
    gap = difference(nats["adlm"], nats["mdlm"])
    say("writing with both")
    findings = QuickstartReport(
        adlm=_row(models["adlm"], configs["adlm"], nats["adlm"], seconds["adlm"]),
        mdlm=_row(models["mdlm"], configs["mdlm"], nats["mdlm"], seconds["mdlm"]),
        difference=gap.nats,
        difference_stderr=_error(gap),
        unigram_nats=counted.unigram,
        bigram_nats=counted.bigram,
        held_out_tokens=gap.tokens,
        samples=_samples(models["adlm"]),
        mdlm_samples=_samples(models["mdlm"]),
        canvas=HOLE.sub(lambda hole: "_" * int(hole[1]), canvas),
        infilled=models["adlm"].fill(canvas, steps=STEPS, top_p=TOP_P, seed=1).strip(),
        seconds=round(time.monotonic() - started, 1),
        commit=_commit(),
        text=text,
    )
    _write_trace(models["adlm"], out / TRACE)
    write_report(out, findings, {name: read_metrics(out / "runs" / name / "metrics.jsonl") for name in METHODS})
    return findings


def _check_place(out: Path) -> None:
    """Refuse to replace anything that the quickstart did not write."""
    with writing(out):
        if not out.is_dir():
            return
        for name in METHODS:
            if (out / name).exists() and not _is_own(out, name):
                raise UserError(
                    f"{out / name} is in the way: the quickstart writes a model there, and this is not one of its own; "
                    "give another --out"
                )
    for name in (REPORT, PAGE, TRACE, *CURVES):
        check_output(out / name, "--out: the file")


def _is_own(out: Path, name: str) -> bool:
    """Whether out/NAME is a copy of the model that out/runs/NAME has trained, and nothing else."""
    run, model = RunFolder(out / "runs" / name).config, out / name
    if run is None or model.is_symlink() or not (model / CONFIG).is_file():
        return False
    names = {path.name for path in model.iterdir()}
    changed = differences(to_mapping(load_config(model / CONFIG)), to_mapping(run))
    return names <= {WEIGHTS, CONFIG, TOKENIZER, "special_tokens_map.json"} and changed.keys() <= MAY_CHANGE


def _trained(
    name: str, config: Config, prepared: Prepared, out: Path, screen: Callable[[Config], Reporter]
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
    replace_model_folder(load_model_folder(run / "model"), out / name)
    lines = read_metrics(run / "metrics.jsonl")
    steps = [0, *(line["step"] for line in lines)]
    return load(out / name), sum(
        (line["step"] - before) * (line.get("seconds_per_step") or 0.0)
        for before, line in zip(steps, lines, strict=False)
    )


def _row(model: LanguageModel, config: Config, nats: Nats, seconds: float) -> TrainedModel:
    found = summarize(nats)
    tokens = config.train.steps * config.train.batch_size * config.length
    return TrainedModel(
        found.nats, _error(found), num_parameters(model.network), config.train.steps, tokens, round(seconds, 1)
    )


def _error(found: Estimate) -> float:
    """Over documents and draws together; of the draws alone where a single document is held out."""
    error = found.monte_carlo if found.stderr is None else found.stderr
    assert error is not None  # DRAWS is more than one
    return error


def _samples(model: LanguageModel) -> tuple[str, ...]:
    return tuple(text.strip() for text in model.sample(SAMPLES, steps=STEPS, top_p=TOP_P, seed=0))


def _write_trace(model: LanguageModel, place: Path) -> None:
    """How the first of the samples was written, as a page."""
    frames = model.watch(f"[MASK*{model.config.length}]", steps=STEPS, top_p=TOP_P, seed=0)
    about = TraceInfo("quickstart", model.config.sampling.sampler, STEPS, seed=0)
    write_trace(record_trace(model, frames, about), place)


def _title(data: Data) -> str:
    """What the text is called, for a reader."""
    known = CORPORA.get(data.name)  # `prepare` refuses another name
    return data.path or data.hub or (data.name if known is None else known.title)


def _beginning(prepared: Prepared, split: str) -> str:
    tokens = prepared.tokens(split)
    ids = np.zeros(min(BEGINNING, len(tokens)), np.int64)
    tokens.copy_to(ids, 0, len(ids))
    return prepared.tokenizer.decode(ids.tolist(), special_tokens=False).strip()


def with_gaps(text: str, tokenizer: Tokenizer, longest: int) -> str:
    """The first sentence of at most `longest` tokens, with two gaps of as many tokens as the words in them have.

    Where there is none, the first words that fit; where there are no words, characters.
    """
    text = HOLE.sub("", " ".join(word for word in text.split() if not tokenizer.unknown_words(word)))
    sentences = (found[0] for found in SENTENCE.finditer(text))
    sentence = next((each for each in sentences if len(tokenizer.encode(each)) <= longest), text)
    space = " " if sentence.count(" ") >= 5 else ""
    words = sentence.split(" ") if space else list(sentence)
    while len(tokenizer.encode(space.join(words))) > longest:
        words = words[: len(words) * 3 // 4]
    size = max(1, len(words) // 6)
    for start in (len(words) * 2 // 3, len(words) // 4):  # the later one first: it moves nothing before it
        hidden = (space if tokenizer.joins_spaces else "") + space.join(words[start : start + size])
        words[start : start + size] = [f"[MASK*{len(tokenizer.encode(hidden)) or 1}]"]
    return space.join(words)


def _commit() -> str:
    """Of this code, where it lies in a repository."""
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"
