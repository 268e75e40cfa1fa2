"""A2R beside AR of equal depth and of equal parameters, with two controls: gamma 0, and every token an anchor.

    OPTIONS="data.boundary=blank data.held_out=0 length=256"
    adlm prepare data.path=train.txt tokenizer=bpe-8192 $OPTIONS --out TEXT/train
    adlm prepare data.path=valid.txt tokenizer=TEXT/train $OPTIONS --out TEXT/valid
    python experiments/a2r/run.py rows                              # the models and their parameters
    python experiments/a2r/run.py train TEXT --out runs/a2r --results results.json --jobs 2 --seconds 560
    python experiments/a2r/run.py table --results results.json

train.txt is the first 77,997,723 bytes of enwiki2014's train.txt (20,901 articles, 20.8M tokens), valid.txt its own.

`train` runs the rows in order of importance, each by `adlm train`, and measures every token of TEXT/valid. Finished
rows are in the results file; rerun the command to train the rest. All rows have the same text, number of tokens and
learning rate, and rows of one seed the same batches. Nats are exact. Standard errors are over blocks of neighbouring
articles, at least 8,192 characters each; those of differences are paired, over the differences of the blocks.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adlm import load
from adlm.config.load import resolve
from adlm.config.schema import Vocabulary
from adlm.distributed import local_device
from adlm.likelihood.estimate import Estimate, Nats, difference, perplexity_of, summarize
from adlm.likelihood.perplexity import PerplexitySettings, measure_nats
from adlm.likelihood.text_sets import text_sets
from adlm.methods import method_of
from adlm.models.meta import on_meta
from adlm.models.transformer import num_parameters
from adlm.training.metrics import read_metrics

NUM_SYMBOLS = 8192
# 256 rows x 256 tokens = 65,536 tokens a step; 1,000 steps are 65.5M tokens, 3.1 epochs of 20.8M
COMMON = (
    *("data.packing=packed", "length=256", "model.dropout=0", "train.unigram_start=true"),
    *("train.steps=1000", "train.batch_size=256", "train.learning_rate=1e-3", "train.warm_up_steps=100"),
    *("train.decay=trapezoid", "train.ema=0.995", "train.log_every=50", "train.checkpoint_every=1000000"),
    *("train.valid_every=0", "train.sample_every=0", "train.samples=1", "train.keep=1"),
)
SMALL = (  # after the options of a row: tests this script on a CPU
    *("length=32", "model.hidden=32", "model.heads=2", "model.blocks=2", "model.denoiser_blocks=1"),
    *("train.steps=8", "train.batch_size=8", "train.warm_up_steps=2", "train.log_every=2"),
)
AR = ("owt/ar", "model.blocks=12", "model.heads=8")
A2R = ("owt/a2r", "model.blocks=8", "model.denoiser_blocks=4", "model.hidden=512", "model.heads=8")
HIDDEN = (*A2R, "model.bridge=hidden", "anchor.warm_up=false")


@dataclass(frozen=True)
class Row:
    """One model of the table."""

    name: str
    title: str
    options: tuple[str, ...]
    equal_depth: str = ""
    """Name of the AR row with as many blocks and the same width; empty for that row itself."""
    equal_parameters: str = ""
    """Name of the AR row with as many parameters, within 2%, and as many blocks."""
    seed: int = 0

    @property
    def key(self) -> str:
        return key_of(self.name, self.seed)

    def overrides(self, small: bool) -> list[str]:
        return [*self.options[:1], *COMMON, *self.options[1:], *(SMALL if small else ()), f"train.seed={self.seed}"]


def key_of(name: str, seed: int) -> str:
    return f"{name}-seed{seed}"


def a2r(name: str, title: str, *options: str) -> Row:
    return Row(name, title, (*HIDDEN, *options), "ar", "ar-544")


AR_12 = Row("ar", "AR, 12 blocks of 512", (*AR, "model.hidden=512"))
GAMMA_01 = a2r("a2r-0.1", "A2R, hidden bridge, gamma 0.1", "anchor.gamma=0.1")
GAMMA_0 = a2r("a2r-0", "A2R, hidden bridge, gamma 0", "anchor.gamma=0")
ROWS = (  # the most important first
    AR_12,
    GAMMA_01,
    GAMMA_0,
    a2r("a2r-all", "A2R, hidden bridge, gamma 0.1, every token an anchor", "anchor.gamma=0.1", "anchor.tau=256"),
    Row("ar-544", "AR, 12 blocks of 544", (*AR, "model.hidden=544"), "ar"),
    Row(
        "a2r-published",
        "A2R, logits bridge, gamma 0.003 (published)",
        (*A2R, "model.bridge=logits", "anchor.gamma=3e-3"),
        "ar",
        "ar-560",
    ),
    a2r("a2r-0.003", "A2R, hidden bridge, gamma 0.003", "anchor.gamma=3e-3"),
    replace(AR_12, seed=1),
    replace(GAMMA_01, seed=1),
    replace(GAMMA_0, seed=1),
    Row("ar-560", "AR, 12 blocks of 560", (*AR, "model.hidden=560"), "ar"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the models and their parameters")
    rows.add_argument("--small", action="store_true")
    train = commands.add_parser("train", help="train and measure the rows that the results file lacks")
    train.add_argument("text", type=Path, help="folder with the prepared folders train and valid")
    train.add_argument("--out", type=Path, required=True, help="folder of the runs")
    train.add_argument("--results", type=Path, required=True, help="results file, written after each row")
    train.add_argument("--jobs", type=int, default=1, help="rows side by side")
    train.add_argument("--seconds", type=float, default=math.inf, help="start no row that would end later than this")
    train.add_argument("--row-seconds", type=float, default=180, help="expected seconds of the first row")
    train.add_argument("--only", nargs="+", metavar="ROW", help="keys of the rows to train, such as ar-seed0")
    train.add_argument("--small", action="store_true", help="tiny models and few steps, to test this script on a CPU")
    table = commands.add_parser("table", help="print the results file as Markdown")
    table.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    {"rows": print_rows, "train": train_rows, "table": print_table}[arguments.command](arguments)


def print_rows(arguments: argparse.Namespace) -> None:
    """Parameters of every row, and how they compare with the AR row of equal parameters."""
    counts = {row.name: parameters_of(row, arguments.small) for row in ROWS}
    for row in ROWS:
        other = row.equal_parameters
        against = f"{counts[row.name] / counts[other] - 1:+.2%} against {other}'s {counts[other]:,}" if other else ""
        print(f"{row.key:22} {counts[row.name]:>12,} parameters {against}")


def parameters_of(row: Row, small: bool) -> int:
    config = replace(resolve(row.overrides(small)), vocabulary=Vocabulary(NUM_SYMBOLS, mask_id=0))
    return num_parameters(on_meta(method_of(config).build))


class Budget:
    """Decides whether a row may still start, by the longest row so far."""

    def __init__(self, seconds: float, row_seconds: float):
        self.start, self.seconds, self.row_seconds = time.monotonic(), seconds, row_seconds
        self.is_measured = False

    def allows_a_row(self) -> bool:
        return time.monotonic() - self.start + 1.1 * self.row_seconds <= self.seconds

    def add(self, row_seconds: float) -> None:
        self.row_seconds = max(row_seconds, self.row_seconds) if self.is_measured else row_seconds
        self.is_measured = True


def train_rows(arguments: argparse.Namespace) -> None:
    results, lock = read_results(arguments.results), threading.Lock()
    budget = Budget(arguments.seconds, arguments.row_seconds)
    todo = [row for row in ROWS if not arguments.only or row.key in arguments.only]
    for row in [row for row in todo if row.key in results]:
        if results[row.key]["overrides"] != row.overrides(arguments.small):
            sys.exit(f"{arguments.results} has {row.key} with other options; choose another --results")
        print(f"{row.key}: already in {arguments.results}", flush=True)
        todo.remove(row)
    failed: list[str] = []

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                if not budget.allows_a_row():
                    print(f"no time for {todo[0].key}: a row takes about {budget.row_seconds:.0f} s", flush=True)
                    return
                row = todo.pop(0)
            started = time.monotonic()
            problem = train_row(row, arguments)
            if problem:
                failed.append(row.key)
                print(f"{row.key} failed: {problem}", flush=True)
                continue
            with lock:  # one measurement at a time
                result = measure(row, arguments)
                result["seconds"] = round(time.monotonic() - started, 1)
                budget.add(result["seconds"])
                results[row.key] = result
                write_results(arguments.results, results)
                print(
                    f"{row.key}: {result['nats']:.4f} ± {result['stderr']:.4f} nats, {result['parameters']:,} "
                    f"parameters, {result['tokens_per_second']:,.0f} tokens/s, {result['seconds']:.0f} s",
                    flush=True,
                )

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for worker in [pool.submit(work) for _ in range(arguments.jobs)]:
            worker.result()
    print("\n".join(markdown(results)), flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def train_row(row: Row, arguments: argparse.Namespace) -> str:
    """Run `adlm train`. Returns the end of its standard error if it fails, else an empty string."""
    text = arguments.text / "train"
    command = [sys.executable, "-m", "adlm", "train", *row.overrides(arguments.small), f"data.prepared={text}"]
    command += ["--out", str(arguments.out / row.key), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if run.returncode == 0 else f"exit code {run.returncode}\n{run.stderr[-3000:]}"


def measure(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """The exact nats of every block of the held-out text, and what was trained."""
    folder = arguments.out / row.key
    lm = load(folder, str(local_device("auto")))
    assert lm.tokenizer is not None
    with text_sets([str(arguments.text / "valid")], lm.tokenizer, lm.config.length) as texts:
        nats = measure_nats(lm.method, lm.network, texts[0].rows, PerplexitySettings())
        held_out = {"sha256": texts[0].digest, "unit": texts[0].unit, "rows": len(texts[0].rows)}
    estimate, logged = summarize(nats), read_metrics(folder / "metrics.jsonl")
    speeds = [line["tokens_per_second"] for line in logged[1:] if line.get("tokens_per_second")]
    return {
        "overrides": row.overrides(arguments.small),
        "parameters": num_parameters(lm.network),
        "steps": logged[-1]["step"],
        "tokens": logged[-1]["tokens"],
        "tokens_per_second": round(float(np.median(speeds))),
        "train_nats": [[line["step"], round(float(line["nats"] or math.nan), 4)] for line in logged],
        "held_out": held_out,
        "nats": estimate.nats,
        "stderr": estimate.over_documents,
        "perplexity": estimate.perplexity,
        "block_nats": [round(float(block), 3) for block in nats.documents[:, 0]],
        "block_tokens": nats.tokens.tolist(),
    }


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Rewrite the file in the order of ROWS, one line per row."""
    lines = [f"{json.dumps(row.key)}: {json.dumps(results[row.key])}" for row in ROWS if row.key in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(temporary, path)


def nats_of_result(result: dict[str, Any]) -> Nats:
    blocks = np.array(result["block_nats"])[:, None]
    return Nats(blocks.sum(axis=0, keepdims=True), blocks, np.array(result["block_tokens"]), exact=True)


def stderr_of(estimate: Estimate) -> float:
    return math.nan if estimate.over_documents is None else estimate.over_documents


def print_table(arguments: argparse.Namespace) -> None:
    print("\n".join(markdown(read_results(arguments.results))))


def markdown(results: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in ROWS if row.key in results]
    if not rows:
        return
    yield "| model | seed | parameters | nats per token | perplexity | minus AR of equal depth | of equal parameters |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        result = results[row.key]
        estimate = summarize(nats_of_result(result))
        error = stderr_of(estimate)
        ppl = f"{estimate.perplexity:.2f} ± {error * estimate.perplexity:.2f}"
        gaps = [paired(results, row, name) for name in (row.equal_depth, row.equal_parameters)]
        numbers = (f"{result['parameters']:,}", f"{estimate.nats:.4f} ± {error:.4f}", ppl, *gaps)
        yield f"| {row.title} | {row.seed} | {' | '.join(numbers)} |"
    first = results[rows[0].key]
    num_blocks, held_out = len(first["block_tokens"]), first["held_out"]
    yield ""
    yield (
        f"Trained on {first['tokens']:,} tokens each; measured on {sum(first['block_tokens']):,} tokens in "
        f"{held_out['rows']:,} rows. ± is one standard error over {num_blocks} blocks of neighbouring articles, paired "
        "for differences, and does not include the choice of the training seed."
    )
    yield from over_seeds(results)


def paired(results: dict[str, Any], row: Row, name: str) -> str:
    """The nats of the row minus those of the AR row of the same seed, with the paired standard error."""
    other = results.get(key_of(name, row.seed)) if name else None
    if other is None:
        return ""
    gap = difference(nats_of_result(results[row.key]), nats_of_result(other))
    return f"{gap.nats:+.4f} ± {stderr_of(gap):.4f}"


def over_seeds(results: dict[str, Any]) -> Iterator[str]:
    """The models with two or more seeds: mean, and its difference from AR with the standard error over seeds."""
    names = list(dict.fromkeys(row.name for row in ROWS))
    nats = {
        name: {row.seed: results[row.key]["nats"] for row in ROWS if row.name == name and row.key in results}
        for name in names
    }
    several = [name for name in names if len(nats[name]) > 1]
    if several:
        yield ""
        yield "| model | seeds | mean nats | standard deviation | perplexity of the mean | minus AR, pairs of seeds |"
        yield "|---|---|---|---|---|---|"
    for name in several:
        values = np.array(list(nats[name].values()))
        common = sorted(nats[name].keys() & nats["ar"].keys()) if name != "ar" else []
        gaps = np.array([nats[name][seed] - nats["ar"][seed] for seed in common])
        error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        against = f"{gaps.mean():+.4f} ± {error:.4f}" if len(gaps) > 1 else ""
        title = next(row.title for row in ROWS if row.name == name)
        mean = f"{values.mean():.4f} | {values.std(ddof=1):.4f} | {perplexity_of(float(values.mean())):.2f}"
        yield f"| {title} | {len(values)} | {mean} | {against} |"


if __name__ == "__main__":
    main()
