"""One runner for the questions that are sweeps, `arena` and `reasoning`: trains what is missing, prints, and draws.

    python experiments/run.py trials arena                     # names and overrides
    python experiments/run.py run arena --data PREPARED --out runs/arena --only control adlm-tied --seconds 560
    python experiments/run.py run reasoning --base SmolLM2 --out runs/reason --only smollm2-prosqa --jobs 2
    python experiments/run.py table arena                      # also reasoning
    python experiments/run.py plot arena --out FIGURES
    python experiments/run.py time --only control adlm-tied    # a training step of models of the arena, and their texts
    python experiments/run.py samples --out runs/arena --only adlm-seed0 mdlm-12-seed0
    python experiments/run.py judge --out runs/arena --judge smollm2.gguf --reference PREPARED
    python experiments/run.py lengths --out runs/arena --data PREPARED --only quick-mdlm-bound quick-lengths

The trials are in experiments/QUESTION/sweep.yaml, their results in experiments/QUESTION/results.jsonl (or --results).
`run` trains the next ones that have no result and appends one line for each. It starts none that is not expected to end
within --seconds; rerun the command to resume. `--only` takes groups, rows and trials (adlm-seed1), in order. --extra
train.steps=4000 applies to all trials, and needs another --results.

The README of each question says how its text is prepared. `run arena` refuses a text with another vocabulary than a
group needs, and another text than that of the results it would be compared with. Trials that share the device (--jobs)
have no comparable seconds: `time` measures a training step of each row with nothing beside it, and the tables multiply
it by the steps. It also records how long the GPU computes; where that is much shorter the host was slow, and a table
with such a row compares the computing times of all its rows.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sweep import FOLDER, Results, Runner, Trial, sweep_of

from adlm.errors import UserError

QUESTIONS = ("arena", "reasoning")
Do = Callable[[argparse.Namespace], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: Do | str, about: str, *, of: tuple[str, ...] = ("arena",)) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about)
        added.set_defaults(do=do, question="arena")
        if len(of) > 1:
            added.add_argument("question", choices=of)
        added.add_argument("--results", type=Path, help="default: experiments/QUESTION/results.jsonl")
        return added

    command("trials", print_trials, "print the trials and their overrides", of=QUESTIONS)
    run = command("run", run_trials, "train and measure the trials that have no result", of=QUESTIONS)
    command("table", print_tables, "print the results as Markdown", of=QUESTIONS)
    plot = command("plot", draw_figures, "draw the results", of=QUESTIONS)
    timing = command(
        "time", "arena.train:time_rows", "measure the seconds of a training step of the rows that have no timing"
    )
    samples = command("samples", "arena.samples:generate_samples", "generate texts with trained models, and time it")
    lengths = command("lengths", "arena.samples:measure_lengths", "measure models on texts of full and of half length")
    judge = command("judge", "arena.samples:judge_samples", "measure the generated texts")
    for each in (run, timing):
        each.add_argument("--only", nargs="+", metavar="NAME", help="groups, rows or trials")
        each.add_argument("--seconds", type=float, default=math.inf, help="start nothing that would end later")
        each.add_argument("--commit", help="recorded in the results (default: of this checkout)")
        each.add_argument("--extra", nargs="+", default=[], metavar="OVERRIDE", help="overrides of all trials")
    for each in (run, samples, lengths, judge):
        each.add_argument("--out", type=Path, required=True, help="folder of the runs")
    run.add_argument("--trial-seconds", type=float, default=240, help="expected seconds of a trial before the first")
    run.add_argument("--jobs", type=int, default=1, help="trials side by side; their seconds are not comparable")
    run.add_argument("--data", type=Path, help="arena: prepared folder with the splits train and valid")
    run.add_argument("--samples", type=int, default=4, help="arena: replicates of the final bound")
    run.add_argument("--base", type=Path, help="reasoning: folder of the pretrained model of the groups smollm2-*")
    samples.add_argument("--only", nargs="+", metavar="NAME", required=True, help="trained groups, rows or trials")
    samples.add_argument("--num", type=int, default=512, help="texts of each sampler and number of steps")
    samples.add_argument("--batch", type=int, default=128, help="texts per batch")
    samples.add_argument("--steps", type=int, nargs="+", default=[16, 64, 256], help="sampling steps")
    samples.add_argument("--samplers", nargs="+", default=["ancestral", "remdm-loop"], help="as of `adlm sample`")
    samples.add_argument("--untimed", action="store_true", help="texts alone, no seconds")
    lengths.add_argument("--only", nargs="+", metavar="NAME", required=True, help="trained groups, rows or trials")
    lengths.add_argument("--data", type=Path, required=True, help="prepared folder with the split valid")
    lengths.add_argument("--num", type=int, default=32, help="texts of each sampler and length")
    lengths.add_argument("--commit", help="recorded in the results (default: of this checkout)")
    judge.add_argument("--judge", nargs="+", required=True, help="as --model of `adlm judge`: .gguf files, folders")
    judge.add_argument("--reference", type=Path, help="as of `adlm judge`: held-out text, judged too")
    judge.add_argument("--features", help="as of `adlm judge`: with it, MAUVE is measured (five clusterings)")
    judge.add_argument("--batch", type=int, help="texts per batch")
    plot.add_argument("--out", type=Path, required=True, help="folder of the figures")
    arguments = parser.parse_args()
    arguments.results = arguments.results or FOLDER / arguments.question / "results.jsonl"
    try:
        do = arguments.do
        if isinstance(do, str):
            module, _, name = do.partition(":")
            do = getattr(importlib.import_module(module), name)
        do(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def print_trials(arguments: argparse.Namespace) -> None:
    for group in sweep_of(arguments.question).groups.values():
        print(f"{group.name}: {group.question}")
        for trial in group.trials():
            own = " ".join((trial.row.preset, *trial.row.overrides))
            parameters = f"{parameters_of(trial):>12,}  " if arguments.question == "arena" else ""
            print(f"  {trial.key:32} {parameters}{own}")


def parameters_of(trial: Trial) -> int:
    """Of a model of the arena."""
    from adlm.config.load import resolve
    from adlm.config.schema import Vocabulary
    from adlm.methods import method_of
    from adlm.models.transformer import num_parameters, on_meta

    symbols = sweep_of("arena").symbols[trial.group.tokenizer]
    config = replace(resolve(trial.overrides()), vocabulary=Vocabulary(symbols, mask_id=0))
    return num_parameters(on_meta(method_of(config).build))


def run_trials(arguments: argparse.Namespace) -> None:
    question = importlib.import_module(f"{arguments.question}.train")
    trials = sweep_of(arguments.question).chosen(arguments.only)
    Runner(question, trials, Results(arguments.results), arguments).run()


def print_tables(arguments: argparse.Namespace) -> None:
    question = importlib.import_module(f"{arguments.question}.tables")
    print("\n".join(question.tables(Results(arguments.results))))


def draw_figures(arguments: argparse.Namespace) -> None:
    question = importlib.import_module(f"{arguments.question}.tables")
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("\n".join(map(str, question.figures(Results(arguments.results), arguments.out))))


if __name__ == "__main__":
    main()
