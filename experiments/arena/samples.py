"""Texts of the arena's models: generates them and judges them. Judging needs the texts alone.

    OUT/samples/NAME.jsonl        the texts, as `adlm sample` writes them
    "speed" NAME                  of the results: seconds of a sampling run
    "card" NAME.JUDGE             of the results: the metric card, as `adlm judge` makes it
    "short" TRIAL-SAMPLER-LENGTH  of the results: repetition, ends and entropy of texts of this length
    "short" TRIAL-LENGTH          of the results: the bound on held-out rows of this length

NAME is TRIAL-SAMPLER-STEPS. What exists is kept; rerun a command to resume.
"""

import argparse
import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arena.tables import ARENA, TIMED_RUNS, stderr_of
from sweep import Results, current_commit

from adlm import load
from adlm.apps.bench import measure_sampling
from adlm.apps.judge.diversity import entropy_of, mean_of, repeated
from adlm.apps.judge.inputs import JudgeSettings, read_inputs
from adlm.apps.judge.judges import judge_of
from adlm.apps.judge.pipeline import make_card
from adlm.config.schema import Sampling
from adlm.distributed import local_device
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import summarize
from adlm.likelihood.text_sets import text_sets
from adlm.samples_file import draw_samples, open_samples, provenance_of
from adlm.sampling.settings import SampleSettings

LENGTH_SAMPLERS = ("ancestral", "confidence")
TOP_P = 0.9
TOLERANCE = 0.03
"""Two models are equally fast if their seconds per network call differ by less than this."""


class NoProgress:
    def begin(self, steps: int, seconds: float) -> None: ...

    def step(self, done: int) -> None: ...


def generate_samples(arguments: argparse.Namespace) -> None:
    """All models with the same steps; the slower ones also with as many as take the seconds of the fastest.

    With --untimed, the same steps alone, and no seconds.
    """
    results = Results(arguments.results)
    models = {
        trial.key: load(arguments.out / trial.key, local_device("auto")) for trial in ARENA.chosen(arguments.only)
    }
    for sampler in arguments.samplers:
        for steps in arguments.steps:
            if arguments.untimed:
                for key, lm in models.items():
                    write_samples(lm, key, sampler, steps, arguments)
                continue
            calls = {key: time_sampling(lm, key, sampler, steps, arguments, results) for key, lm in models.items()}
            fastest = min(calls, key=lambda key: calls[key])
            for key, lm in models.items():
                write_samples(lm, key, sampler, steps, arguments)
                fewer = max(1, round(steps * calls[fastest] / calls[key]))
                if steps - fewer > TOLERANCE * steps:
                    time_sampling(lm, key, sampler, fewer, arguments, results, f"{fastest} with {steps} steps")
                    write_samples(lm, key, sampler, fewer, arguments)


def sampling_of(lm: LanguageModel, sampler: str, steps: int) -> Sampling:
    return lm.sampling(top_p=TOP_P, sampler=sampler, steps=steps)


def time_sampling(
    lm: LanguageModel,
    key: str,
    sampler: str,
    steps: int,
    arguments: argparse.Namespace,
    results: Results,
    as_long_as: str = "",
) -> float:
    """Milliseconds per network call, and a record of the whole measurement, that of `adlm bench sample`."""
    name = f"{key}-{sampler}-{steps}"
    if name not in results.of("speed"):
        sampling = sampling_of(lm, sampler, steps)
        speed = measure_sampling(lm, sampling, arguments.batch, lm.config.length, TIMED_RUNS, False, NoProgress())
        results.add("speed", name, {**asdict(speed), "as_long_as": as_long_as})
        print(f"{name}: {speed.seconds:.2f} s for {speed.batch} texts, {speed.network_calls} calls", flush=True)
    return float(results.of("speed")[name]["milliseconds_a_call"])


def write_samples(lm: LanguageModel, key: str, sampler: str, steps: int, arguments: argparse.Namespace) -> None:
    """The samples of `adlm sample --num N --batch B --sampler S --steps T sampling.top_p=0.9`."""
    run = lm.plan(SampleSettings(sampling_of(lm, sampler, steps), num=arguments.num, batch=arguments.batch))
    path = arguments.out / "samples" / f"{key}-{sampler}-{steps}.jsonl"
    with open_samples(path, provenance_of(run, str(arguments.out / key), arguments.batch)) as file:
        for batch in run.batches(arguments.batch, file.first_to_sample(arguments.batch)):
            file.append(draw_samples(batch, run.num))


def measure_lengths(arguments: argparse.Namespace) -> None:
    """Texts of the model's length and of half of it, and the bound on held-out rows of half of it."""
    results, commit = Results(arguments.results), arguments.commit or current_commit()
    for trial in ARENA.chosen(arguments.only):
        lm = load(arguments.out / trial.key, local_device("auto"))
        half = lm.config.length // 2
        settings = [(sampler, length) for length in (lm.config.length, half) for sampler in LENGTH_SAMPLERS]
        for sampler, length in [("", half), *settings]:
            name = f"{trial.key}-{sampler}-{length}" if sampler else f"{trial.key}-{length}"
            if name in results.of("short"):
                continue
            if sampler:
                found = measured_texts(lm, sampler, length, arguments.num)
            else:
                found = bound_of_rows(lm, length, arguments.data)
            of = {"row": trial.row.name, "seed": trial.seed, "length": length, "commit": commit}
            results.add("short", name, of | found)
            print(f"{name}: {found}", flush=True)


def bound_of_rows(lm: LanguageModel, length: int, data: Path) -> dict[str, Any]:
    with text_sets([str(data)], lm.require_tokenizer(), length, split="valid") as texts:
        estimate = summarize(measure_nats(lm.method, lm.network, texts[0].rows, PerplexitySettings(samples=2)))
    return {"nats": estimate.nats, "stderr": stderr_of(estimate)}


def measured_texts(lm: LanguageModel, sampler: str, length: int, num: int) -> dict[str, Any]:
    """`num` texts with as many steps as tokens; eos belongs at the end of a row, and is rare after its bos."""
    settings = SampleSettings(sampling_of(lm, sampler, length), length=length, num=num)
    texts, vocabulary = lm.plan(settings).filled(), lm.require_tokenizer().vocabulary
    eos_id, first = vocabulary.eos_id, len(vocabulary.row_boundaries[0])  # bos may have the id of eos
    metrics = {
        "repeated": mean_of(map(repeated, texts)),
        "entropy": entropy_of(texts),
        "eos_before_end": mean_of(float(eos_id in ids[first:-1]) for ids in texts),
        "eos_at_end": mean_of(float(ids[-1] == eos_id) for ids in texts),
    }
    return {"sampler": sampler, **{name: asdict(mean) for name, mean in metrics.items()}}


def judge_samples(arguments: argparse.Namespace) -> None:
    """A card per samples file and judge; MAUVE is in the cards of the first judge."""
    files = sorted((arguments.out / "samples").glob("*.jsonl"))
    if not files:
        raise UserError(f"--out {arguments.out} has no samples; `samples` generates them")
    open_judge = functools.cache(judge_of)  # loading a judge takes longer than judging 512 texts
    results = Results(arguments.results)
    for judge in arguments.judge:
        metrics = ["perplexity", "entropy", "diversity"]
        if arguments.features is not None and judge == arguments.judge[0]:
            metrics.append("mauve")
        for file in files:
            name = f"{file.stem}.{Path(judge).stem}"
            if name in results.of("card"):
                continue
            settings = JudgeSettings(
                metrics=tuple(metrics),
                reference=arguments.reference,
                judge_reference=arguments.reference is not None,
                model=judge,
                features=arguments.features or "",
                batch=arguments.batch,
            )
            card = make_card(
                read_inputs(file, settings), arguments.out / "judged", lambda stage, done, total: None, open_judge
            )
            assert card is not None  # None in the other processes of torchrun
            results.add("card", name, card)
            print(f"{name}: gen-PPL {card['perplexity']['pooled']['value']:.4g}", flush=True)
