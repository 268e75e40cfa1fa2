"""The arena: what of ADLM is anchoring, what is deep supervision, what is the bridge. One runner for all its models.

    head -c 170000000 train.txt > enwiki.txt                   # of 200 MB of Wikipedia, articles apart at blank lines
    adlm prepare data.path=enwiki.txt data.boundary=blank tokenizer=bpe-8192 length=256 --out PREPARED
    python experiments/arena/run.py rows                       # models, parameters, overrides
    python experiments/arena/run.py run --data PREPARED --out runs/arena --results RESULTS --seconds 560
    python experiments/arena/run.py run --data PREPARED --out runs/arena --results RESULTS --only control adlm-tied
    python experiments/arena/run.py time --results RESULTS --only control adlm-tied
    python experiments/arena/run.py samples --out runs/arena --results RESULTS --only adlm-seed0 mdlm-12-seed0
    python experiments/arena/run.py judge --out runs/arena --results RESULTS --judge smollm2.gguf --reference PREPARED
    python experiments/arena/run.py table --results RESULTS
    python experiments/arena/run.py plot --results RESULTS --out FIGURES

The models are in arena_rows.py. `run` trains the next ones that have no result, each by `adlm train`, measures the
bound on all of PREPARED's held-out rows, and writes one JSON file per trial. It starts none that is not expected to
end within --seconds; rerun the command to go on. `--only` takes groups, rows and trials (adlm-seed1), in order. --extra
train.steps=4000 applies to all trials, and needs another --results.

Trials that share the device (--jobs) have no comparable seconds. `time` measures a training step of each row with
nothing beside it (RESULTS/seconds), and the tables multiply it by the steps. It also records how long the GPU computes;
where that is much shorter the host was slow, and a table with such a row compares the computing times of all its rows.

`samples` generates texts with trained models in --out, `judge` measures them, there or on another machine with the
files in OUT/samples (arena_samples.py).

Five groups run only if they are named: `books` and `once` on other texts, `finals` on one prepared with tokenizer=gpt2,
`quickstart` on that of `adlm prepare quickstart/mdlm`, on one core a trial in two minutes (CUDA_VISIBLE_DEVICES=), and
`smoke` on any text prepared with tokenizer=bytes, on a CPU in less than a minute. `run` refuses a text with another
vocabulary than a group needs, and another text than that of the results it would be compared with. The results so far
are in experiments/arena/results.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from arena_report import markdown, read_results, read_timings
from arena_rows import GROUPS, TOKENIZERS, Trial, trials_of
from arena_samples import generate_samples, generation_table, judge_samples, read_cards, read_speeds
from arena_train import run_trials, time_rows

from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.models.transformer import num_parameters, on_meta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: object, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about)
        added.set_defaults(do=do)
        return added

    command("rows", print_rows, "print the trials, their parameters and overrides")
    run = command("run", run_trials, "train and measure the trials that have no result")
    timing = command("time", time_rows, "measure the seconds of a training step of the rows that have no timing")
    samples = command("samples", generate_samples, "generate texts with trained models, and time it")
    judge = command("judge", judge_samples, "measure the generated texts")
    table = command("table", print_table, "print the results as Markdown")
    plot = command("plot", draw_figures, "draw the results, one SVG per group")
    for each in (run, timing, samples, judge, table, plot):
        each.add_argument("--results", type=Path, required=True, help="folder of the results, one file per trial")
    for each in (run, timing):
        each.add_argument("--only", nargs="+", metavar="NAME", help="groups, rows or trials")
        each.add_argument("--seconds", type=float, default=math.inf, help="start nothing that would end later")
        each.add_argument("--commit", help="recorded in the results (default: of this checkout)")
        each.add_argument("--extra", nargs="+", default=[], metavar="OVERRIDE", help="overrides of all trials")
    run.add_argument("--data", type=Path, required=True, help="prepared folder with the splits train and valid")
    for each in (run, samples, judge):
        each.add_argument("--out", type=Path, required=True, help="folder of the runs")
    run.add_argument("--trial-seconds", type=float, default=240, help="expected seconds of a trial before the first")
    run.add_argument("--jobs", type=int, default=1, help="trials side by side; their seconds are not comparable")
    run.add_argument("--samples", type=int, default=4, help="replicates of the final bound")
    samples.add_argument("--only", nargs="+", metavar="NAME", required=True, help="trained groups, rows or trials")
    samples.add_argument("--num", type=int, default=512, help="texts of each sampler and number of steps")
    samples.add_argument("--batch", type=int, default=128, help="texts per batch")
    samples.add_argument("--steps", type=int, nargs="+", default=[16, 64, 256], help="sampling steps")
    judge.add_argument("--judge", nargs="+", required=True, help="as --model of `adlm judge`: .gguf files, folders")
    judge.add_argument("--reference", type=Path, help="as of `adlm judge`: held-out text, judged too")
    judge.add_argument("--features", help="as of `adlm judge`: with it, MAUVE is measured (five clusterings)")
    judge.add_argument("--batch", type=int, help="texts per batch")
    plot.add_argument("--out", type=Path, required=True, help="folder of the figures")
    arguments = parser.parse_args()
    try:
        arguments.do(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


def print_rows(arguments: argparse.Namespace) -> None:
    for name, group in GROUPS.items():
        print(f"{name}: {group.question}")
        for trial in trials_of(name):
            own = " ".join((trial.row.preset, *trial.row.overrides))
            print(f"  {trial.key:32} {parameters_of(trial):>12,}  {own}")


def parameters_of(trial: Trial) -> int:
    config = replace(resolve(trial.overrides()), vocabulary=Vocabulary(TOKENIZERS[trial.tokenizer], mask_id=0))
    return num_parameters(on_meta(method_of(config).build))


def print_table(arguments: argparse.Namespace) -> None:
    print("\n".join(markdown(read_results(arguments.results), read_timings(arguments.results))))
    print("\n".join(generation_table(read_cards(arguments.results), read_speeds(arguments.results))))


def draw_figures(arguments: argparse.Namespace) -> None:
    from arena_figures import plot_groups, plot_released_bound  # machines that train may have no matplotlib

    arguments.out.mkdir(parents=True, exist_ok=True)
    results, timings = read_results(arguments.results), read_timings(arguments.results)
    for file in (*plot_groups(results, timings, arguments.out), *plot_released_bound(results, timings, arguments.out)):
        print(file)


if __name__ == "__main__":
    main()
