"""Series of generated problems: problem i depends only on (seed, i), and problems of a test set are never generated.

Problems are compared by a canonical form that does not change when the nodes of a graph are renamed. Independent of the
kind of problem.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adlm.data.reasoning.problem import Problem, read_problems
from adlm.errors import UserError


@dataclass(frozen=True)
class Forbidden:
    """A set of forms with the function that computes them, so that both always match."""

    form: Callable[[Problem], str]
    forms: frozenset[str]

    def __contains__(self, problem: Problem) -> bool:
        return self.form(problem) in self.forms


def forbidden_forms(paths: Iterable[Path], form: Callable[[Problem], str]) -> Forbidden:
    """Forbids the problems of the files, and all problems of the same form.

    `form` is `content` (the same facts and question in any order; the minimum to keep sets disjoint) or `structure`
    (the same up to renaming) of `prosqa` or `prontoqa`.
    """
    forms = set()
    for path in paths:
        for index, problem in enumerate(read_problems(path)):
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


MOST_DRAWS = 10_000


def series(
    task: str,
    draw: Callable[[random.Random], Problem],
    num: int,
    seed: int,
    start: int,
    forbidden: Forbidden | None,
) -> Iterator[Problem]:
    """Problems start to start + num - 1; each is the first draw from its own RNG that is not forbidden."""
    if num < 0 or start < 0:
        raise UserError(f"num {num} and start {start} count problems; give 0 or more")

    def problem(index: int) -> Problem:
        rng = random.Random(f"{task} {seed} {index}")
        for _ in range(MOST_DRAWS):
            drawn = draw(rng)
            if forbidden is None or drawn not in forbidden:
                return drawn
        raise UserError(f"all {MOST_DRAWS} draws for problem {index} are forbidden; forbid less")

    return map(problem, range(start, start + num))
