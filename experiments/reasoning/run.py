"""The table of docs/reasoning.md: every method on ProsQA, ProntoQA and GSM8K, trained here, tested on the real files.

    python experiments/reasoning/run.py train smollm2-prosqa --base SmolLM2 --runs runs/reason --results results.json
    python experiments/reasoning/run.py table experiments/reasoning/results.json
    python experiments/reasoning/run.py plot experiments/reasoning/results.json

`train` runs the rows of a group, several at a time (--lanes), and starts none after --seconds; rows that are in the
results already are skipped. A row is one `adlm reason train` and one `adlm reason eval` on the test file. All but
No-CoT and Pause start from one first stage of plain chain of thought, the row `first`, whose epochs count as theirs.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from adlm.apps.paper.published_tables import TABLES

TITLES = {
    "smollm2-prosqa": "ProsQA, SmolLM2-135M",
    "smollm2-prontoqa": "ProntoQA, SmolLM2-135M",
    "smollm2-gsm8k": "GSM8K, SmolLM2-135M",
    "scratch-first": "ProsQA, random weights, 24,000 problems",
    "scratch-prosqa": "ProsQA, random weights, 100,000 problems",
    "scratch-prontoqa": "ProntoQA, random weights, 50,000 problems",
    "muon-prosqa": "ProsQA, random weights, Muon",
    "muon-prontoqa": "ProntoQA, random weights, Muon",
}
PLAIN = ("no-cot", "pause")
METHODS = ("no-cot", "pause", "cot", "icot", "coconut", "coconut-pause", "acot")
FIRST = ("first", "first-again")
"""First stages, by the name of their rows; `first-again` was trained later, for rows that were still missing."""
REPEATED = ("acot", "cot", "coconut")
"""Methods that are trained with a second seed."""


@dataclass(frozen=True)
class Group:
    """Rows that share data, model and budget."""

    preset: str
    overrides: tuple[str, ...]
    first_epochs: int
    epochs: int
    stage_epochs: int = 1
    slots: int = 6
    coconut_slots: int = 0
    """Of the other methods, two a stage, where they have more than acot; 0: as many."""
    data: str = "prosqa"
    pretrained: bool = True


@dataclass(frozen=True)
class Row:
    name: str
    command: tuple[str, ...]
    """Of `adlm reason train`, without --out."""
    needs: str = ""
    """The row whose model this one starts from."""


MUON = ("train.batch_size=64", "train.optimizer=muon", "train.learning_rate=2e-3")

GROUPS = {
    "smollm2-prosqa": Group(
        "prosqa/gpt2",
        ("data.problems=5000", "train.batch_size=64", "train.learning_rate=2e-4"),
        first_epochs=2,
        epochs=8,
    ),
    "smollm2-prontoqa": Group(
        "prontoqa/gpt2",
        ("data.problems=4000", "train.learning_rate=3e-4", "train.micro_batch=64"),
        first_epochs=2,
        epochs=7,
        data="prontoqa",
    ),
    "smollm2-gsm8k": Group(
        "gsm8k/gpt2",
        ("train.learning_rate=3e-4", "train.micro_batch=64", "reason.max_tokens=160"),
        first_epochs=3,
        epochs=5,
        slots=2,
        coconut_slots=6,
        data="gsm8k",
    ),
    "scratch-prosqa": Group(
        "prosqa/small",
        ("data.problems=100000", "train.batch_size=1024", "train.learning_rate=2e-3"),
        first_epochs=30,
        epochs=7,
        pretrained=False,
    ),
    "scratch-prontoqa": Group(
        "prontoqa/small",
        ("data.problems=50000", "train.batch_size=512"),
        first_epochs=20,
        epochs=7,
        data="prontoqa",
        pretrained=False,
    ),
    "muon-prosqa": Group(
        "prosqa/small",
        MUON,
        first_epochs=8,
        epochs=7,
        pretrained=False,
    ),
    "muon-prontoqa": Group(
        "prontoqa/small",
        MUON,
        first_epochs=8,
        epochs=7,
        data="prontoqa",
        pretrained=False,
    ),
    "smoke": Group(
        "prosqa/small",
        (
            "data.problems=64",
            "model.hidden=32",
            "model.heads=2",
            "model.blocks=2",
            "train.batch_size=32",
            "train.warm_up_steps=1",
            "reason.max_tokens=8",
            "reason.misfits=keep",
        ),
        first_epochs=1,
        epochs=2,
        slots=2,
        pretrained=False,
    ),
}


def rows_of(group: Group, base: str) -> list[Row]:
    """All rows of a group, those with a second seed last."""
    rows = []
    for seed, methods in ((0, (*REPEATED, *PLAIN, "icot", "coconut-pause")), (1, REPEATED)):
        common = (group.preset, *group.overrides, f"train.seed={seed}", "train.valid_rows=100", "reason.first_epochs=0")
        pretrained = (f"reason.base={base}",) if group.pretrained else ()
        first = f"first-{seed}"
        rows.append(Row(first, (*common, *pretrained, "reason.method=cot", f"reason.epochs={group.first_epochs}")))
        for method in methods:
            slots = group.slots if method == "acot" else group.coconut_slots or group.slots
            options = (
                f"reason.method={method}",
                f"reason.slots={slots}",
                f"reason.slots_a_stage={2 if slots > group.slots else 1}",
                f"reason.stage_epochs={group.stage_epochs}",
            )
            if method in PLAIN:
                epochs = f"reason.epochs={group.first_epochs + group.epochs}"
                rows.append(Row(f"{method}-{seed}", (*common, *pretrained, *options, epochs)))
            else:
                rows.append(Row(f"{method}-{seed}", (*common, *options, f"reason.epochs={group.epochs}"), first))
    return rows


@dataclass
class Lanes:
    """Runs rows in threads, a row after the one it needs."""

    group: Group
    runs: Path
    commit: str
    deadline: float
    pending: list[Row]
    done: dict[str, dict]
    save: Callable[[], None]
    """Writes `done` to the results."""
    failed: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    lock: threading.Condition = field(default_factory=threading.Condition)

    def work(self) -> None:
        while (row := self._next()) is not None:
            began = time.monotonic()
            result = self._run(row)
            with self.lock:
                self.running.remove(row.name)
                if result is None:
                    self.failed.add(row.name)
                    print(f"{row.name} failed: see {self.runs / row.name}.log", flush=True)
                else:
                    self.done[row.name] = result | {"seconds": round(time.monotonic() - began, 1)}
                    self.save()
                self.lock.notify_all()

    def _next(self) -> Row | None:
        with self.lock:
            while self.pending and time.monotonic() < self.deadline:
                self.pending = [row for row in self.pending if row.needs not in self.failed]
                ready = next((row for row in self.pending if not row.needs or self._has_model(row.needs)), None)
                if ready is not None:
                    self.pending.remove(ready)
                    self.running.add(ready.name)
                    return ready
                self.lock.wait(timeout=5)
        return None

    def _has_model(self, name: str) -> bool:
        return name in self.done and (self.runs / name / "model").exists() and name not in self.running

    def _run(self, row: Row) -> dict | None:
        out = self.runs / row.name
        base = (f"reason.base={self.runs / row.needs / 'model'}",) if row.needs else ()
        command = ["reason", "train", *row.command, *base]
        log = self.runs / f"{row.name}.log"
        with log.open("w") as file:
            if _adlm([*command, "--out", str(out)], file) is None:
                return None
            evaluation = ["reason", "eval", str(out), "--data", self.group.data, "--json"]
            said = _adlm([*evaluation, "--out", f"{out}.jsonl", "--force"], file)
        if said is None:
            return None
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        answers = [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]
        curve = [[line["step"], line["epoch"], line.get("nats"), line.get("anchors")] for line in lines]
        print(f"{row.name}: {said}", flush=True)
        return {
            **json.loads(said),
            "epochs": [self.group.first_epochs, self.group.epochs, self.group.stage_epochs],
            "needs": row.needs,
            "command": f"adlm {' '.join(command)}",
            "commit": self.commit,
            "steps": lines[-1]["step"],
            "validation": lines[-1].get("valid_accuracy"),
            "solved": "".join("1" if answer["right"] else "0" for answer in answers),
            "curve": curve[:: max(1, len(curve) // 60)],
        }


def _adlm(arguments: list[str], log) -> str | None:
    done = subprocess.run([sys.executable, "-m", "adlm", *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def train(arguments: argparse.Namespace) -> int:
    group = GROUPS[arguments.group]
    arguments.runs.mkdir(parents=True, exist_ok=True)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    done = results.setdefault(arguments.group, {})
    rows = rows_of(group, arguments.base)
    pending = [row for row in rows if row.name not in done and (not arguments.only or row.name in arguments.only)]
    needed = {row.needs for row in pending} - {row.name for row in pending}
    pending += [  # rows that others start from, if they are not trained to their end or their models are gone
        row
        for row in rows
        if row.name in needed and not (row.name in done and (arguments.runs / row.name / "model").exists())
    ]
    lanes = Lanes(
        group,
        arguments.runs,
        arguments.commit,
        time.monotonic() + arguments.seconds,
        pending,
        done,
        lambda: arguments.results.write_text(as_json(results)),
    )
    if arguments.lanes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # by default each row would use all CPUs that are idle now
    threads = [threading.Thread(target=lanes.work) for _ in range(arguments.lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if lanes.failed else 0


def as_json(results: dict[str, dict[str, dict]]) -> str:
    """Groups of rows, one row a line."""
    groups = []
    for group, rows in results.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        groups.append(f" {json.dumps(group)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def published(data: str) -> dict[str, float]:
    """The paper's accuracies by method, of GPT-2."""
    return {row.name: row.figures[data] for row in TABLES["reasoning"].rows}


def seeds_of(rows: dict[str, dict], method: str) -> list[dict]:
    return [row for name, row in sorted(rows.items()) if name.rpartition("-")[0] == method]


def table(arguments: argparse.Namespace) -> int:
    """One Markdown table per group: accuracy with its interval for each seed, tokens, and the paper's figure."""
    for group, rows in json.loads(arguments.results.read_text()).items():
        data = next(iter(rows.values()))["data"]
        paper = published(data)
        print(
            f"\n{group}\n\n| method | accuracy, one value per seed | tokens written | paper, GPT-2 |\n|---|---|---|---|"
        )
        for method in (*FIRST, *METHODS):
            found = seeds_of(rows, method)
            if not found:
                continue
            cells = []
            for row in found:
                low, high = row["interval"]
                cells.append(f"{row['accuracy']:.1%} ({100 * low:.1f} to {100 * high:.1f})")
            tokens = sum(row["tokens"] for row in found) / len(found)
            print(f"| `{method}` | {', '.join(cells)} | {tokens:.1f} | {paper.get(method, '')} |")
        print()
        for ours, theirs in ((f"acot-{seed}", f"{other}-{seed}") for seed in (0, 1) for other in ("cot", "coconut")):
            if "solved" in rows.get(ours, {}) and "solved" in rows.get(theirs, {}):
                print(paired(ours, rows[ours]["solved"], theirs, rows[theirs]["solved"]))
    return 0


def paired(ours: str, our_solved: str, theirs: str, their_solved: str) -> str:
    """The problems that one of two models solves and the other does not, with the exact two-sided sign test."""
    pairs = list(zip(our_solved, their_solved, strict=True))
    gained, lost = pairs.count(("1", "0")), pairs.count(("0", "1"))
    num, fewer = gained + lost, min(gained, lost)
    chance = min(1.0, 2 * sum(math.comb(num, count) for count in range(fewer + 1)) / 2**num)
    return f"{gained} problems are solved by {ours} only, {lost} by {theirs} only (sign test: p = {chance:.2g})"


def plot(arguments: argparse.Namespace) -> int:
    """Accuracies with their intervals, three groups a line; the paper's figures are open circles."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    groups = json.loads(arguments.results.read_text())
    columns = min(3, len(groups))
    lines = math.ceil(len(groups) / columns)
    size = (4.5 * columns, 3.4 * lines + 0.2)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    for axis, (group, rows) in zip(axes.flat, groups.items(), strict=False):
        paper = published(next(iter(rows.values()))["data"])
        for place, method in enumerate(reversed(METHODS)):
            found = seeds_of(rows, method)
            for number, row in enumerate(found):
                low, high = row["interval"]
                height = place + 0.18 * (number - (len(found) - 1) / 2)
                axis.plot([100 * low, 100 * high], [height, height], color="tab:blue", linewidth=2)
                axis.plot(100 * row["accuracy"], height, "o", color="tab:blue", markersize=5)
            if method in paper:
                axis.plot(paper[method], place, "o", markerfacecolor="none", color="tab:orange", markersize=8)
        if group.startswith(("scratch", "muon")):
            axis.axvline(50, color="tab:gray", linestyle="--", linewidth=1)
        axis.set_title(TITLES.get(group, group), fontsize=11)
        axis.set_xlabel("% of the test problems solved")
        axis.set_yticks(range(len(METHODS)), list(reversed(METHODS)))
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        "Ours, one dot a seed, with 95% intervals; open circles: the paper's GPT-2; dashed: chance", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=130)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    training = commands.add_parser("train")
    training.add_argument("group", choices=GROUPS)
    training.add_argument("--base", default="", help="folder of the pretrained model")
    training.add_argument("--runs", type=Path, required=True)
    training.add_argument("--results", type=Path, required=True)
    training.add_argument("--lanes", type=int, default=2)
    training.add_argument("--seconds", type=float, default=1e9)
    training.add_argument("--only", nargs="*", help="names of rows")
    training.add_argument("--commit", default="", help="the commit, to keep with the results")
    training.set_defaults(run=train)
    for name, function in (("table", table), ("plot", plot)):
        command = commands.add_parser(name)
        command.add_argument("results", type=Path)
        command.add_argument("--out", type=Path, default=Path("reasoning.png"), help="of plot")
        command.set_defaults(run=function)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
