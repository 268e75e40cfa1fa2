"""Texts of the arena's models: generates them, judges them, and prints the table. Judging needs the texts alone.

    RESULTS/sampling/NAME.json     seconds of a sampling run
    OUT/samples/NAME.jsonl         the texts, as `adlm sample` writes them
    RESULTS/cards/NAME.JUDGE.json  the metric card, as `adlm judge` writes it

NAME is TRIAL-SAMPLER-STEPS. What exists is kept; rerun a command to resume.
"""

import argparse
import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arena_rows import rows_by_name
from arena_train import chosen_trials

from adlm import load
from adlm.apps.bench import measure_sampling
from adlm.apps.judge.card import Card, read_card, write_card
from adlm.apps.judge.inputs import read_inputs
from adlm.apps.judge.judges import judge_of
from adlm.apps.judge.pipeline import make_card
from adlm.apps.judge.settings import JudgeSettings
from adlm.config.schema import Sampling
from adlm.distributed import local_device
from adlm.errors import UserError
from adlm.files import write_file
from adlm.language_model import LanguageModel
from adlm.samples_file import draw_samples, open_samples, provenance_of
from adlm.sampling.sample_request import SampleRequest

SAMPLERS = ("ancestral", "remdm-loop")
TOP_P = 0.9
REPEATS = 3
TOLERANCE = 0.03
"""Two models are equally fast if their seconds per network call differ by less than this."""


class NoProgress:
    def begin(self, steps: int, seconds: float) -> None: ...

    def step(self, done: int) -> None: ...


def generate_samples(arguments: argparse.Namespace) -> None:
    """All models with the same steps; the slower ones also with as many as take the seconds of the fastest."""
    models = {
        trial.key: load(arguments.out / trial.key, local_device("auto")) for trial in chosen_trials(arguments.only)
    }
    for sampler in SAMPLERS:
        for steps in arguments.steps:
            calls = {key: time_sampling(lm, key, sampler, steps, arguments) for key, lm in models.items()}
            fastest = min(calls, key=lambda key: calls[key])
            for key, lm in models.items():
                write_samples(lm, key, sampler, steps, arguments)
                fewer = max(1, round(steps * calls[fastest] / calls[key]))
                if steps - fewer > TOLERANCE * steps:
                    time_sampling(lm, key, sampler, fewer, arguments, f"{fastest} with {steps} steps")
                    write_samples(lm, key, sampler, fewer, arguments)


def sampling_of(lm: LanguageModel, sampler: str, steps: int) -> Sampling:
    return lm.sampling(top_p=TOP_P, sampler=sampler, steps=steps)


def time_sampling(
    lm: LanguageModel, key: str, sampler: str, steps: int, arguments: argparse.Namespace, as_long_as: str = ""
) -> float:
    """Milliseconds per network call, and a file with the whole measurement, that of `adlm bench sample`."""
    path = arguments.results / "sampling" / f"{key}-{sampler}-{steps}.json"
    if not path.is_file():
        sampling = sampling_of(lm, sampler, steps)
        speed = measure_sampling(lm, sampling, arguments.batch, lm.config.length, REPEATS, False, NoProgress())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({**asdict(speed), "as_long_as": as_long_as}, indent=1) + "\n")
        print(f"{path.stem}: {speed.seconds:.2f} s for {speed.batch} texts, {speed.network_calls} calls", flush=True)
    return float(json.loads(path.read_text())["milliseconds_a_call"])


def write_samples(lm: LanguageModel, key: str, sampler: str, steps: int, arguments: argparse.Namespace) -> None:
    """The samples of `adlm sample --num N --batch B --sampler S --steps T sampling.top_p=0.9`."""
    run = lm.plan(SampleRequest(sampling_of(lm, sampler, steps), num=arguments.num, batch=arguments.batch))
    path = arguments.out / "samples" / f"{key}-{sampler}-{steps}.jsonl"
    with open_samples(path, provenance_of(run, str(arguments.out / key), arguments.batch)) as file:
        for batch in run.batches(arguments.batch, file.first_to_sample(arguments.batch)):
            file.append(draw_samples(batch, run.num))


def judge_samples(arguments: argparse.Namespace) -> None:
    """A card per samples file and judge; MAUVE is in the cards of the first judge."""
    files = sorted((arguments.out / "samples").glob("*.jsonl"))
    if not files:
        raise UserError(f"--out {arguments.out} has no samples; `samples` generates them")
    open_judge = functools.cache(judge_of)  # loading a judge takes longer than judging 512 texts
    (arguments.results / "cards").mkdir(parents=True, exist_ok=True)
    for judge in arguments.judge:
        metrics = ["perplexity", "entropy", "diversity"]
        if arguments.features is not None and judge == arguments.judge[0]:
            metrics.append("mauve")
        for file in files:
            path = arguments.results / "cards" / f"{file.stem}.{Path(judge).stem}.json"
            if path.is_file():
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
            write_card(card, path)
            print(f"{path.stem}: gen-PPL {card['perplexity']['pooled']['value']:.4g}", flush=True)


def read_cards(results: Path) -> dict[str, list[Card]]:
    """The cards of each sampler setting."""
    cards = defaultdict(list)
    for path in sorted((results / "cards").glob("*.json")):
        card = read_card(path)
        cards[Path(card["samples"]["file"]).stem].append(card)
    return cards


def read_speeds(results: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((results / "sampling").glob("*.json"))}


def generation_table(cards: Mapping[str, list[Card]], speeds: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One line per sampler setting, and one for the reference text."""
    if not cards:
        return
    judges = sorted({_judge(card) for each in cards.values() for card in each})
    num_texts = {_judge(card): card["samples"]["num"] for each in cards.values() for card in each}
    perplexities = (f"gen-PPL, {judge} ({num_texts[judge]} texts)" for judge in judges)
    columns = ["model", "sampler", "steps", "calls", "s per 100 texts", *perplexities]
    columns += ["entropy", "distinct-2", "rep-4", "MAUVE"]
    yield "## Generated text\n"
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for name, of_setting in sorted(cards.items(), key=lambda item: _order(item[1][0])):
        made_by, speed = of_setting[0]["samples"]["made_by"], speeds.get(name)
        key, sampling = Path(made_by["model"]).name, made_by["sampling"]
        row, _, seed = key.rpartition("-seed")
        steps = str(sampling["steps"])
        calls, seconds = "", ""
        if speed is not None:
            calls, seconds = str(speed["network_calls"]), f"{100 * speed['seconds_per_sequence']:.2f}"
            steps += f" (as long as {speed['as_long_as']})" if speed["as_long_as"] else ""
        cells = [f"{rows_by_name()[row].title}, seed {seed}", sampling["sampler"], steps, calls, seconds]
        yield f"| {' | '.join(cells + _metrics({_judge(card): card for card in of_setting}, judges))} |"
    judged = {_judge(card): card["reference_judged"] for each in cards.values() for card in each if "reference" in card}
    if judged:
        yield f"| held-out text | | | | | {' | '.join(_metrics(judged, judges))} |"
    first = next(iter(cards.values()))[0]["samples"]
    texts = f"Texts of {first['made_by']['length']} tokens, nucleus 0.9"
    batches = {f"{speed['batch']} on {speed['device']}" for speed in speeds.values()}
    yield (
        f"\n{texts}. Seconds: batches of {', '.join(sorted(batches)) or 'unknown size'}, the median of {REPEATS} runs. "
        "Where a model is slower than another, it also has as many steps as take the other's seconds, by the measured "
        "seconds per network call. ± is one standard error over texts; for MAUVE the standard deviation over "
        "clusterings of the same texts. No error covers the training seed. Compare within a column only.\n"
    )


def _judge(card: Card) -> str:
    return Path(card["perplexity"]["judge"]["name"]).stem


def _order(card: Card) -> tuple[str, int, str]:
    made_by = card["samples"]["made_by"]
    return made_by["sampling"]["sampler"], made_by["sampling"]["steps"], made_by["model"]


def _metrics(by_judge: Mapping[str, Mapping[str, Any]], judges: list[str]) -> list[str]:
    """The cells of a line, from its card by each judge."""
    cells = [_value(by_judge[judge]["perplexity"]["pooled"], ".4g") if judge in by_judge else "" for judge in judges]
    any_card = next(iter(by_judge.values()))
    if "entropy" not in any_card:  # a reference with another tokenizer than the samples'
        return [*cells, "", "", "", ""]
    diversity = any_card["diversity"]
    cells += [_value(any_card["entropy"], ".3f"), _value(diversity["distinct"]["2"], ".3f")]
    mauves = [card["mauve"] for card in by_judge.values() if "mauve" in card]
    mauve = f"{mauves[0]['value']:.3f} ± {mauves[0]['spread']:.3f}" if mauves else ""
    return [*cells, _value(diversity["repeated"], ".4f"), mauve]


def _value(mean: Mapping[str, Any], form: str) -> str:
    error = "" if mean["stderr"] is None else f" ± {mean['stderr']:.2g}"
    return f"{mean['value']:{form}}{error}"
