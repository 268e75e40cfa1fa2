"""A reasoning problem, and JSON files of them. Does not interpret the steps.

A file is an array of {question, steps, answer}, the common format of these datasets; graph problems also have the
fields idx_to_symbol, edges, root, target and neg_target.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.errors import UserError
from adlm.files import parse_json, read_bytes, replacing

GRAPH_FIELDS = ("idx_to_symbol", "edges", "root", "target", "neg_target")


@dataclass(frozen=True)
class Graph:
    """The graph of a question's sentences: an edge (a, b) means `symbols[a] is a symbols[b]`."""

    symbols: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    root: int
    target: int
    neg_target: int
    chain_concepts: tuple[str, ...] = ()
    """The concepts of the proof in order; only ProntoQA's files have them."""


@dataclass(frozen=True)
class Problem:
    """A question, the steps to its answer (empty if the source has none), and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: str
    graph: Graph | None = None


def read_problems(path: Path) -> tuple[Problem, ...]:
    """The problems of a JSON array. Empty steps, with which the processed GSM8K marks missing ones, are dropped."""
    try:
        entries = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); expected an array of {{question, steps, answer}}") from None
    if not isinstance(entries, list):
        raise UserError(f"{path} holds a {type(entries).__name__}, not an array of {{question, steps, answer}}")
    return tuple(_problem(entry, f"{path}, entry {index}") for index, entry in enumerate(entries))


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write the problems as a JSON array that `read_problems` reads, atomically.

    They are written one per line as they are generated, without holding them in memory.
    """
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        separator = "[\n"
        for problem in problems:
            file.write(separator + json.dumps(_entry(problem), ensure_ascii=False))
            separator = ",\n"
        file.write("[]\n" if separator == "[\n" else "\n]\n")


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


def _problem(entry: object, where: str) -> Problem:
    question, answer = text_field(entry, "question", where), text_field(entry, "answer", where)
    assert isinstance(entry, dict)
    steps = _texts(entry, "steps", where)
    given = [key for key in GRAPH_FIELDS if key in entry]
    if not given:
        return Problem(question, tuple(filter(None, steps)), answer)
    if len(given) < len(GRAPH_FIELDS):
        raise UserError(f"{where} has {', '.join(given)} but not all of {', '.join(GRAPH_FIELDS)}; give all or none")
    return Problem(question, tuple(filter(None, steps)), answer, _graph(entry, where))


def _graph(entry: Mapping[str, Any], where: str) -> Graph:
    symbols = _texts(entry, "idx_to_symbol", where)

    def index(value: object, key: str) -> int:
        if type(value) is not int or not 0 <= value < len(symbols):
            shown = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)
            raise UserError(
                f"{where}: {key} {shown} is not an index of idx_to_symbol, which has {len(symbols)} symbols"
            )
        return value

    edges = entry["edges"]
    if not isinstance(edges, list) or not all(isinstance(edge, list) and len(edge) == 2 for edge in edges):
        raise UserError(f"{where}: 'edges' is not an array of pairs of indices")
    return Graph(
        symbols=symbols,
        edges=tuple((index(a, "edges"), index(b, "edges")) for a, b in edges),
        root=index(entry["root"], "root"),
        target=index(entry["target"], "target"),
        neg_target=index(entry["neg_target"], "neg_target"),
        chain_concepts=_texts(entry, "chain_concepts", where) if "chain_concepts" in entry else (),
    )


def _texts(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    texts = entry.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: {key!r} is not an array of texts; give one, empty where there is nothing")
    return tuple(texts)


def _entry(problem: Problem) -> dict[str, Any]:
    entry: dict[str, Any] = {"question": problem.question, "steps": problem.steps, "answer": problem.answer}
    if problem.graph is None:
        return entry
    graph = problem.graph
    values = (graph.symbols, graph.edges, graph.root, graph.target, graph.neg_target)
    entry.update(zip(GRAPH_FIELDS, values, strict=True))
    if graph.chain_concepts:
        entry["chain_concepts"] = graph.chain_concepts
    return entry
