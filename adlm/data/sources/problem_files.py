"""Reasoning problems as parts of a text source; each problem is one document of question, steps and answer."""

import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.data.reasoning import gsm8k, prontoqa, prosqa
from adlm.data.reasoning.make_prontoqa import generate_prontoqa
from adlm.data.reasoning.make_prosqa import generate_prosqa
from adlm.data.reasoning.problem import Problem, read_problems
from adlm.data.reasoning.series import forbidden_forms
from adlm.data.sources.chunks import Chunk, split_into_chunks
from adlm.data.sources.decoding import decoding_errors
from adlm.data.sources.text_files import ignore_progress

READERS: dict[str, Callable[[Path], tuple[Problem, ...]]] = {
    ".json": read_problems,
    ".jsonl": gsm8k.read_original,
    ".txt": gsm8k.read_prose,
}


def as_text(problem: Problem) -> str:
    """The document of a problem: the question, one line per step, and the answer after ###."""
    return "\n".join((problem.question, *problem.steps, f"### {problem.answer}"))


def gsm8k_text(record: Any) -> str:
    """The document of a record of GSM8K on the Hub."""
    return as_text(gsm8k.parse_original(record["question"], record["answer"], "a record of the hub"))


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


@dataclass(frozen=True)
class ProblemFile:
    """A file of problems without those in the files `without`: GSM8K's train.jsonl contains its validation set."""

    path: Path
    name: str
    split: str
    without: tuple[Path, ...] = ()

    @property
    def size(self) -> int:
        with decoding_errors(self.name):
            return self.path.stat().st_size

    def fingerprint(self) -> str:
        with decoding_errors(self.name):
            return _digest(self.path, *self.without)

    def problems(self) -> Iterator[Problem]:
        excluded = {problem.question for path in self.without for problem in READERS[path.suffix](path)}
        return (problem for problem in READERS[self.path.suffix](self.path) if problem.question not in excluded)

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        with decoding_errors(self.name):
            problems = self.problems()
        for problem in problems:
            yield from split_into_chunks(as_text(problem))

    def num_documents(self) -> int:
        return sum(1 for _ in self.problems())


Generate = Callable[..., Iterator[Problem]]
GENERATORS: dict[str, tuple[Generate, Callable[[Problem], str]]] = {
    "prosqa": (generate_prosqa, prosqa.structure),
    "prontoqa": (generate_prontoqa, prontoqa.content),
}
"""The generator of each kind of problem, and the form in which generated problems must differ from those in files."""


@dataclass(frozen=True)
class GeneratedProblems:
    """`num` generated training problems, none of which is in the files `exclude` (the validation and test sets)."""

    kind: str
    num: int
    seed: int
    exclude: tuple[Path, ...]
    split: str = "train"

    size = None

    @property
    def name(self) -> str:
        return f"{self.num:,} {self.kind} problems of seed {self.seed}"

    def fingerprint(self) -> str:
        return f"{self.name} beside {_digest(*self.exclude)}"

    def problems(self) -> Iterator[Problem]:
        generate, form = GENERATORS[self.kind]
        return generate(self.num, self.seed, forbidden=forbidden_forms(self.exclude, form))

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        for problem in self.problems():
            yield from split_into_chunks(as_text(problem))

    def num_documents(self) -> int:
        return self.num
