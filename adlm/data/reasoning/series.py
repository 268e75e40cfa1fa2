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
    """Forms, with the function that gives a problem's form: parted from it they would forbid nothing, silently."""

    form: Callable[[Problem], str]
    forms: frozenset[str]

    def __contains__(self, problem: Problem) -> bool:
        return self.form(problem) in self.forms


def forbidden_forms(paths: Iterable[Path], form: Callable[[Problem], str]) -> Forbidden:
    """Every problem of the files, and whatever has the same form.

    The forms are `content` (the same facts and question in any order: so much must be apart) and `structure` (the same
    under any renaming) of `prosqa` and `prontoqa`.
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
    """Equal for isomorphic graphs: colour refinement, then the edges between the colours it settles on.

    Edges carry a kind. Two graphs with one form are isomorphic where every node ends with a colour of its own, and
    nearly always elsewhere: a set kept apart by this form is apart from every renaming, and may lose a little more.
    """
    edges = list(edges)
    around: dict[str, list[tuple[str, str]]] = {node: [] for node in colours}
    for a, b, kind in edges:
        around[a].append((b, f"to {kind}"))
        around[b].append((a, f"from {kind}"))
    palette = sorted(set(colours.values()))
    rank = {node: palette.index(colour) for node, colour in colours.items()}
    num_classes = len(palette)
    while True:
        signs = {
            node: (rank[node], tuple(sorted((kind, rank[other]) for other, kind in near)))
            for node, near in around.items()
        }
        order = {sign: place for place, sign in enumerate(sorted(set(signs.values())))}
        rank = {node: order[sign] for node, sign in signs.items()}
        if len(order) == num_classes:
            break
        num_classes = len(order)
    settled = (
        sorted((rank[node], colour) for node, colour in colours.items()),
        sorted((rank[a], rank[b], kind) for a, b, kind in edges),
    )
    return hashlib.blake2b(repr(settled).encode(), digest_size=16).hexdigest()


MOST_DRAWS = 10_000


def series(
    task: str,
    draw: Callable[[random.Random], Problem],
    num: int,
    seed: int,
    start: int,
    forbidden: Forbidden | None,
) -> Iterator[Problem]:
    """Problems start to start + num - 1: each the first draw of its own stream that is not forbidden."""
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
