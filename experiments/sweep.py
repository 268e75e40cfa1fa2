"""Sweeps: the trials of a question (sweep.yaml), their results (results.jsonl), and the runner of what is missing.

A question is a folder of experiments/ with these two files and two modules: `train` trains and measures one trial,
`tables` prints and draws the results. No method, metric or figure is named here.
"""

import argparse
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from adlm.errors import UserError
from adlm.files import append_synced

FOLDER = Path(__file__).parent
MARGIN = 1.1
"""A trial is expected to take this many times as long as the longest one so far."""


@dataclass(frozen=True)
class Row:
    """A model, trained with some seeds."""

    name: str
    """Unique in the sweep."""
    title: str
    preset: str
    overrides: tuple[str, ...]
    seeds: range = range(1)
    needs: str = ""
    """The row whose model, of the same seed, this one starts from."""


@dataclass(frozen=True)
class Group:
    """Rows that answer a question together."""

    name: str
    question: str
    common: tuple[str, ...]
    """Overrides of all rows, before their own."""
    rows: tuple[Row, ...]
    against: tuple[str, ...] = ()
    """Names of the rows, of any group with the same `common`, that the others are compared with."""
    tokenizer: str = "bpe-8192"
    """Of the prepared text."""
    by_name: bool = False
    """Not among the groups that are run without --only."""

    def trials(self) -> Iterator["Trial"]:
        """The first seeds of all rows before the second ones."""
        for number in range(max(len(row.seeds) for row in self.rows)):
            yield from (Trial(self, row, row.seeds[number]) for row in self.rows if number < len(row.seeds))


@dataclass(frozen=True)
class Trial:
    """One training run."""

    group: Group
    row: Row
    seed: int

    @property
    def key(self) -> str:
        return key_of(self.row.name, self.seed)

    @property
    def needs(self) -> "Trial | None":
        """The trial whose model this one starts from."""
        return next((Trial(self.group, row, self.seed) for row in self.group.rows if row.name == self.row.needs), None)

    def overrides(self, extra: Sequence[str] = ()) -> list[str]:
        """The preset and overrides of the run, without its text and folder."""
        return [self.row.preset, *self.group.common, *self.row.overrides, f"train.seed={self.seed}", *extra]


def key_of(row: str, seed: int) -> str:
    return f"{row}-seed{seed}"


@dataclass(frozen=True)
class Sweep:
    groups: dict[str, Group]
    symbols: dict[str, int]
    """Of each tokenizer, the mask included."""

    @property
    def rows(self) -> dict[str, Row]:
        return {row.name: row for group in self.groups.values() for row in group.rows}

    def trials(self) -> list[Trial]:
        return [trial for group in self.groups.values() for trial in group.trials()]

    def chosen(self, only: list[str] | None) -> list[Trial]:
        """The trials named by group, row or key, in the order of the names; without names, those of the common text."""
        if only is None:
            return [trial for trial in self.trials() if not trial.group.by_name]
        chosen = {}
        for name in only:
            named = [trial for trial in self.trials() if name in (trial.group.name, trial.row.name, trial.key)]
            if not named:
                raise UserError(f"--only {name}: no such group, row or trial; `trials` lists them")
            chosen.update(dict.fromkeys(named))
        return list(chosen)


@functools.cache
def sweep_of(question: str) -> Sweep:
    """The sweep.yaml of a question; arena/sweep.yaml says what its words mean."""
    content = yaml.safe_load((FOLDER / question / "sweep.yaml").read_text())
    parts = content["parts"]

    def words(text: str) -> Iterator[str]:
        for word in text.split():
            yield from words(parts[word]) if word in parts else (word,)

    def rows(group: str, content: dict[str, Any]) -> Iterator[Row]:
        of_rows, prefix, values = content.pop("rows"), "", content.pop("values", {})
        if isinstance(of_rows, str):  # the rows of a template, with the values of the group
            of_rows, prefix = templates[of_rows], f"{group}-"
        for name, row in of_rows.items():
            preset, *overrides = " ".join(words(row["train"])).format(**values).split()
            needs = row.get("needs", "") and prefix + row["needs"]
            title = row.get("title", name)
            first_seed = row.get("first_seed", 0)
            seeds = range(first_seed, first_seed + row.get("seeds", 1))
            yield Row(prefix + name, title, preset, tuple(overrides), seeds, needs)

    templates, groups = content.get("templates", {}), {}
    for name, group in content["groups"].items():
        found = tuple(rows(name, group))
        against, common = tuple(group.pop("against", ())), tuple(words(group.pop("common")))
        groups[name] = Group(name, common=common, rows=found, against=against, **group)
    return Sweep(groups, content.get("symbols", {}))


class Results:
    """The records of a question: one JSON object a line, by kind ("trial", ...) and name. Lines are only appended."""

    def __init__(self, path: Path):
        self.path = path
        self._records: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self._lock = threading.Lock()
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if line.endswith(b"\n"):  # else a process was killed while it wrote the line
                record = json.loads(line)
                self._records[record.pop("kind")][record.pop("name")] = record

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return self._records[kind]

    def add(self, kind: str, name: str, record: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, "name": name, **record}).encode() + b"\n"
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # other runners may add to the file
                file.seek(0)
                file.truncate(file.readall().rfind(b"\n") + 1)
                append_synced(file, line)
            self._records[kind][name] = record


class Question(Protocol):
    """The module `train` of a question."""

    def check(self, trials: list[Trial], results: Results, arguments: argparse.Namespace) -> None:
        """UserError if the trials cannot be run with these arguments."""

    def train(self, trial: Trial, arguments: argparse.Namespace) -> None:
        """Train into `arguments.out / trial.key`."""

    def measure(self, trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
        """The result of a trained trial."""

    def summary(self, result: dict[str, Any]) -> str:
        """The figures that are printed at the end of a trial."""


class Budget:
    """Decides whether work may still start that is expected to take so many seconds."""

    def __init__(self, seconds: float):
        self.start, self.seconds = time.monotonic(), seconds

    def allows(self, expected: float) -> bool:
        return time.monotonic() - self.start + MARGIN * expected <= self.seconds


@dataclass
class Runner:
    """Trains and measures the trials without a result, `arguments.jobs` at a time, each after the one it needs."""

    question: Question
    todo: list[Trial]
    results: Results
    arguments: argparse.Namespace

    def __post_init__(self) -> None:
        self.done, self.commit = self.results.of("trial"), self.arguments.commit or current_commit()
        self.budget, self.changed = Budget(self.arguments.seconds), threading.Condition()
        self.failed, self.running = list[str](), set[str]()
        self.past_seconds = defaultdict[tuple[str, ...], list[float]](list)  # by what trials of a group have in common

    def run(self) -> None:
        extra = self.arguments.extra
        self.question.check(self.todo, self.results, self.arguments)
        for trial in [trial for trial in self.todo if trial.key in self.done]:
            if self.done[trial.key].get("overrides", trial.overrides(extra)) != trial.overrides(extra):
                raise UserError(
                    f"--results {self.results.path} has {trial.key} with other overrides; give another file"
                )
            self.todo.remove(trial)
        print(f"{len(self.done)} results in {self.results.path}, {len(self.todo)} trials to do", flush=True)
        needed = dict.fromkeys(trial.needs for trial in self.todo if trial.needs and trial.needs not in self.todo)
        self.todo[:0] = [trial for trial in needed if not (self.arguments.out / trial.key / "model").exists()]
        groups = {trial.group.name: trial.group for trial in self.todo}
        for result in self.done.values():
            if result.get("jobs") == self.arguments.jobs and result.get("group") in groups:
                self.past_seconds[groups[result["group"]].common].append(result["seconds"])
        if self.arguments.jobs > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # by default each trial would use all CPUs that are idle now
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            for worker in [pool.submit(self._work) for _ in range(self.arguments.jobs)]:
                worker.result()
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}")

    def _work(self) -> None:
        while (trial := self._next()) is not None:
            started = time.monotonic()
            try:
                self.question.train(trial, self.arguments)
                if trial.key not in self.done:  # else only its model was missing
                    result = self.question.measure(trial, self.arguments)
                    seconds = round(time.monotonic() - started, 1)
                    result |= {"commit": self.commit, "jobs": self.arguments.jobs, "seconds": seconds}
                    self.past_seconds[trial.group.common].append(seconds)
                    self.results.add("trial", trial.key, result)
                    for name in ("checkpoints", "best"):  # of 55M parameters 0.9 GB with EMA and moments, and 0.2 GB
                        shutil.rmtree(self.arguments.out / trial.key / name, ignore_errors=True)
                    print(f"{trial.key}: {self.question.summary(result)}, {seconds:.0f} s", flush=True)
            except UserError as error:
                self.failed.append(trial.key)
                print(f"{trial.key} failed: {error}", flush=True)
            finally:
                with self.changed:
                    self.running.remove(trial.key)
                    self.changed.notify_all()

    def _next(self) -> Trial | None:
        """The first trial that need not wait for another; None where none is left or the time is over."""
        with self.changed:
            while self.todo:
                for trial in [trial for trial in self.todo if trial.needs and trial.needs.key in self.failed]:
                    self.todo.remove(trial)
                    self.failed.append(trial.key)
                waiting = self.running | {trial.key for trial in self.todo}
                ready = (trial for trial in self.todo if trial.needs is None or trial.needs.key not in waiting)
                if (trial := next(ready, None)) is None:
                    self.changed.wait()
                    continue
                expected = max(self.past_seconds[trial.group.common], default=self.arguments.trial_seconds)
                if not self.budget.allows(expected):
                    print(f"no time for {trial.key}, about {MARGIN * expected:.0f} s", flush=True)
                    self.todo.clear()
                    self.changed.notify_all()
                    return None
                self.todo.remove(trial)
                self.running.add(trial.key)
                return trial
            return None


def adlm(*words: str) -> str:
    """The standard output of a command of adlm, a process of its own; UserError with the end of its errors."""
    run = subprocess.run([sys.executable, "-m", "adlm", *words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise UserError(f"exit code {run.returncode}\n{run.stderr[-3000:]}")
    return run.stdout


def current_commit() -> str:
    """The commit of this checkout, with a + if files are changed; empty where there is no git."""
    git = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
