"""Problems to reason about, as parts of a plan: each is a document of question, steps and answer. Solves none."""

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
from adlm.data.sources.text_files import ignore

READERS: dict[str, Callable[[Path], tuple[Problem, ...]]] = {
    ".json": read_problems,
    ".jsonl": gsm8k.read_original,
    ".txt": gsm8k.read_prose,
}


def as_text(problem: Problem) -> str:
    """The question, a line for each step, and the answer after ###."""
    return "\n".join((problem.question, *problem.steps, f"### {problem.answer}"))


def gsm8k_text(record: Any) -> str:
    """A record of the hub's GSM8K as a document."""
    return as_text(gsm8k.original(record["question"], record["answer"], "a record of the hub"))


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


@dataclass(frozen=True)
class ProblemFile:
    """A file of problems, those left out that another file has too: GSM8K's train.jsonl holds its validation set."""

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
        others = {problem.question for path in self.without for problem in READERS[path.suffix](path)}
        return (problem for problem in READERS[self.path.suffix](self.path) if problem.question not in others)

    def pieces(self, seen: Callable[[int], None] = ignore) -> Generator[Chunk, None, None]:
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
"""Each with the form by which its problems must differ from every problem of the files at hand."""


@dataclass(frozen=True)
class GeneratedProblems:
    """So many problems made up, none of them in the files beside: a training set for the real validation and test."""

    kind: str
    num: int
    seed: int
    beside: tuple[Path, ...]
    split: str = "train"

    size = None

    @property
    def name(self) -> str:
        return f"{self.num:,} {self.kind} problems of seed {self.seed}"

    def fingerprint(self) -> str:
        return f"{self.name} beside {_digest(*self.beside)}"

    def problems(self) -> Iterator[Problem]:
        generate, form = GENERATORS[self.kind]
        return generate(self.num, self.seed, forbidden=forbidden_forms(self.beside, form))

    def pieces(self, seen: Callable[[int], None] = ignore) -> Generator[Chunk, None, None]:
        for problem in self.problems():
            yield from split_into_chunks(as_text(problem))

    def num_documents(self) -> int:
        return self.num
