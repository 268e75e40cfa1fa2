"""Reasoning problems: the record, sets of them, JSON files, and generated series. No tokens, no networks.

A file is an array of {question, steps, answer}, the common format of these datasets; other fields are ignored.

A set of problems (`ProblemSet`) is a corpus: `adlm prepare` and `adlm train` read it as text, one document a problem.
Each is one file of `datasets/` and one line of `data/sources/corpora.py`, which names it by "module:attribute"; the
library imports it when the corpus is used, as it would one of another package by the entry-point group adlm.corpora.
So the library depends on no application.
"""

import hashlib
import os
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from adlm.config.schema import Data, PackingName
from adlm.data.sources.corpora import CORPORA, Corpus
from adlm.data.sources.decoding import decoding_errors
from adlm.data.sources.source import how_to_add, resolve_source
from adlm.data.sources.text_files import Chunk, ignore_progress, split_into_chunks
from adlm.errors import UserError
from adlm.files import parse_json, read_bytes

PER_PROCESS = 4_000  # problems that a process generates at a time, in about three seconds
NUM_HELD_OUT, HELD_OUT_START = 200, 10**9  # of generated validation and test problems
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Problem:
    """A question, the steps to its answer (empty if the source has none), and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: str

    def as_text(self) -> str:
        """The document of a problem: the question, one line per step, and the answer after ###."""
        return "\n".join((self.question, *self.steps, f"### {self.answer}"))


def read_problems(path: Path) -> tuple[Problem, ...]:
    """The problems of a JSON array. Empty steps, with which the processed GSM8K marks missing ones, are dropped."""
    try:
        entries = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); expected an array of {{question, steps, answer}}") from None
    if not isinstance(entries, list):
        raise UserError(f"{path} holds a {type(entries).__name__}, not an array of {{question, steps, answer}}")
    return tuple(_problem(entry, f"{path}, entry {index}") for index, entry in enumerate(entries))


def read_text(path: Path) -> str:
    """The text of a regular UTF-8 file of bounded size."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def text_field(entry: object, key: str, where: str) -> str:
    """The string under `key` of a JSON entry."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is a {type(entry).__name__}, not a mapping with {key!r}")
    if key not in entry:
        raise UserError(f"{where} has no {key!r}, only {', '.join(map(str, entry)) or 'nothing'}; add it")
    if not isinstance(entry[key], str):
        raise UserError(f"{where}: {key!r} is a {type(entry[key]).__name__}; write it as text")
    return str(entry[key])


def _problem(entry: Any, where: str) -> Problem:
    question, answer = text_field(entry, "question", where), text_field(entry, "answer", where)
    steps = entry.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"{where}: 'steps' is not an array of texts; give one, empty where there is nothing")
    return Problem(question, tuple(filter(None, steps)), answer)


@dataclass(frozen=True)
class Forbidden:
    """A set of forms with the function that computes them, so that both always match."""

    form: Callable[[Problem], str]
    forms: frozenset[str]

    def __contains__(self, problem: Problem) -> bool:
        return self.form(problem) in self.forms


def forbidden_forms(
    paths: Iterable[Path], form: Callable[[Problem], str], readers: "Mapping[str, Reader] | None" = None
) -> Forbidden:
    """Forbids the problems of the files, and all problems of the same form.

    `form` is, for example, `content` of `datasets.prontoqa` (the same facts and question in any order; the minimum to
    keep sets disjoint) or `structure` of `datasets.prosqa` (the same up to renaming). `readers` are those of the set,
    by default of JSON.
    """
    forms = set()
    for path in paths:
        read = read_problems if readers is None else readers[path.suffix]
        for index, problem in enumerate(read(path)):
            try:
                forms.add(form(problem))
            except UserError as error:
                raise UserError(f"{path}, entry {index}: {error}") from None
    return Forbidden(form, frozenset(forms))


def canonical_form(colours: Mapping[str, str], edges: Iterable[tuple[str, str, str]]) -> str:
    """A hash that is equal for isomorphic graphs: of the colours and edges after colour refinement.

    Edges are (from, to, kind). Equal hashes imply isomorphism if every node ends with a unique colour, and almost
    always otherwise: excluding problems by this form excludes every renaming, and possibly a few other problems.
    """
    edges = list(edges)
    adjacent: dict[str, list[tuple[str, str]]] = {node: [] for node in colours}
    for a, b, kind in edges:
        adjacent[a].append((b, f"to {kind}"))
        adjacent[b].append((a, f"from {kind}"))
    palette = sorted(set(colours.values()))
    rank = {node: palette.index(colour) for node, colour in colours.items()}
    num_classes = len(palette)
    while True:
        signatures = {
            node: (rank[node], tuple(sorted((kind, rank[neighbour]) for neighbour, kind in neighbours)))
            for node, neighbours in adjacent.items()
        }
        order = {signature: index for index, signature in enumerate(sorted(set(signatures.values())))}
        rank = {node: order[signature] for node, signature in signatures.items()}
        if len(order) == num_classes:
            break
        num_classes = len(order)
    refined = (
        sorted((rank[node], colour) for node, colour in colours.items()),
        sorted((rank[a], rank[b], kind) for a, b, kind in edges),
    )
    return hashlib.blake2b(repr(refined).encode(), digest_size=16).hexdigest()


def series(
    name: str,
    draw: Callable[[random.Random], Problem],
    num: int,
    seed: int,
    start: int = 0,
    forbidden: Forbidden | None = None,
) -> Iterator[Problem]:
    """Problems start to start + num - 1 of a seed; each is the first draw from its own RNG that is not forbidden.

    Problem i depends only on (seed, i): a longer set begins with the shorter one, and ranges can be generated in
    parallel.
    """

    def problem(index: int) -> Problem:
        rng = random.Random(f"{name} {seed} {index}")
        for _ in range(MOST_DRAWS):
            drawn = draw(rng)
            if forbidden is None or drawn not in forbidden:
                return drawn
        raise UserError(f"all {MOST_DRAWS} draws for problem {index} are forbidden; forbid less")

    return map(problem, range(start, start + num))


Reader = Callable[[Path], tuple[Problem, ...]]


@dataclass(frozen=True, kw_only=True)
class ProblemSet(Corpus):
    """A corpus of problems. Problems of other splits are removed from the training split."""

    own_format: ClassVar[bool] = True
    packing: PackingName = "padded"
    labels: Callable[[Problem], tuple[str, ...]]
    """The anchor labels of a problem, in order."""
    label_prefix: str = " "
    """What a label is tokenized after: in text, a space stands before a word but not before the number of a step.

    The name of a graph problem begins the first step, and has the space that it has within the question.
    """
    removes_steps: bool = False
    """Whether ACoT leaves out a step for every slot, unless `reason.remove_steps` says otherwise."""
    readers: Mapping[str, Reader] = field(default_factory=lambda: {".json": read_problems})
    """The reader of each kind of file, by its ending."""
    draw: Callable[[random.Random], Problem] | None = None
    """Generates a problem; None if there is no generator."""
    form: Callable[[Problem], str] = attrgetter("question")
    """In which generated problems must differ from those of the validation and test files."""

    def own_parts(self, data: Data, folder: Path | None) -> list[Any]:
        """The files of problems in the folder, and generated problems if data.problems is set.

        Training problems are generated instead of read, and where no file holds out any, validation and test problems.
        """
        files: dict[str, Path] = {}
        for split, names in self.files.items():
            found = [folder / name for name in names if (folder / name).is_file()] if folder else []
            if found:
                files[split] = found[0]
        if data.problems:
            if self.draw is None:
                generated = ", ".join(name for name, other in problem_sets().items() if other.draw)
                raise UserError(f"data.problems {data.problems} is for {generated}; {data.name} has its own")
            files.pop("train", None)
        held_out = tuple(path for split, path in files.items() if split != "train")
        parts: list[Problems] = []
        if data.problems:
            parts.append(GeneratedProblems(self, data.name, data.problems, data.seed, held_out))
            # further on in the series of the seed, so that they do not depend on data.problems
            starts = {} if held_out else {"valid": HELD_OUT_START, "test": 2 * HELD_OUT_START}
            for split, start in starts.items():
                parts.append(GeneratedProblems(self, data.name, NUM_HELD_OUT, data.seed, (), split, start))
        for split, path in files.items():
            without = held_out if split == "train" else ()
            parts.append(ProblemFile(path, f"{data.name}/{path.name}", split, self.readers, without))
        return parts


def problem_sets() -> dict[str, ProblemSet]:
    """The corpora that are sets of problems, by name."""
    return {name: corpus for name, corpus in CORPORA.items() if isinstance(corpus, ProblemSet)}


def problem_set(name: str) -> ProblemSet:
    """The set of problems that `data.name` names."""
    found = problem_sets()
    if name not in found:
        raise UserError(f"data.name {name!r} is not a set of problems: {', '.join(found)}")
    return found[name]


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


@dataclass(frozen=True)
class ProblemFile:
    """A file of problems without those in the files `without`: GSM8K's train.jsonl contains its validation set."""

    path: Path
    name: str
    split: str
    readers: Mapping[str, Reader]
    without: tuple[Path, ...] = ()

    @property
    def size(self) -> int:
        with decoding_errors(self.name):
            return self.path.stat().st_size

    def fingerprint(self) -> str:
        with decoding_errors(self.name):
            return _digest(self.path, *self.without)

    def problems(self) -> Iterator[Problem]:
        excluded = {problem.question for path in self.without for problem in self.readers[path.suffix](path)}
        return (problem for problem in self.readers[self.path.suffix](self.path) if problem.question not in excluded)

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        with decoding_errors(self.name):
            problems = self.problems()
        for problem in problems:
            yield from split_into_chunks(problem.as_text())

    def num_documents(self) -> int:
        return sum(1 for _ in self.problems())


@dataclass(frozen=True)
class GeneratedProblems:
    """Generated problems `start` to `start + num - 1` of a seed, none of which is in the files `exclude`."""

    problem_set: ProblemSet
    set_name: str
    num: int
    seed: int
    exclude: tuple[Path, ...]
    split: str = "train"
    start: int = 0

    path = size = None

    @property
    def name(self) -> str:
        return f"{self.num:,} generated {self.set_name} problems of seed {self.seed}"

    def fingerprint(self) -> str:
        start = f" from {self.start}" if self.start else ""
        return f"{self.num:,} {self.set_name} problems of seed {self.seed}{start} beside {_digest(*self.exclude)}"

    def problems(self) -> Iterator[Problem]:
        """In order. Many are generated by several processes: a problem depends on the seed and its number only."""
        parts = [range(start, min(start + PER_PROCESS, self.num)) for start in range(0, self.num, PER_PROCESS)]
        if len(parts) == 1:
            yield from self._generate(parts[0])
            return
        with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1), get_context("spawn")) as pool:
            for problems in pool.map(self._generate, parts):
                yield from problems

    def _generate(self, numbers: range) -> list[Problem]:
        assert self.problem_set.draw is not None
        forbidden = forbidden_forms(self.exclude, self.problem_set.form, self.problem_set.readers)
        start = self.start + numbers.start
        return list(series(self.set_name, self.problem_set.draw, len(numbers), self.seed, start, forbidden))

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        for problem in self.problems():
            yield from split_into_chunks(problem.as_text())

    def num_documents(self) -> int:
        return self.num


Problems = ProblemFile | GeneratedProblems


def problem_parts(data: Data) -> dict[str, Problems]:
    """The splits of the set of problems that the data options name."""
    source, parts = problem_set(data.name), {part.split: part for part in resolve_source(data).parts}
    if not all(isinstance(part, Problems) for part in parts.values()):
        raise UserError(f"data.name {data.name} is not here; {how_to_add(data, source)}")
    return parts  # type: ignore[return-value]
