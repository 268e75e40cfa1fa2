"""The canonical form is invariant under renaming."""

import random
from itertools import pairwise

from adlm.data.reasoning.series import canonical_form


def form(*edges, **colours):
    nodes = {node for a, b, _ in edges for node in (a, b)}
    return canonical_form({node: colours.get(node, "node") for node in nodes}, edges)


def arms(*lengths):
    """Paths of these lengths that meet in one node."""
    edges = []
    for arm, length in enumerate(lengths):
        names = ["centre", *(f"{arm}.{step}" for step in range(length))]
        edges += [(a, b, "is") for a, b in pairwise(names)]
    return edges


def test_renaming_and_reordering_keep_the_form():
    rng = random.Random(0)
    for _ in range(50):
        edges = list({(str(a), str(rng.randrange(a + 1, 9)), rng.choice("xy")) for a in range(8) for _ in range(2)})
        nodes = sorted({node for a, b, _ in edges for node in (a, b)})
        other = dict(zip(nodes, rng.sample("abcdefghi", len(nodes)), strict=True))
        renamed = [(other[a], other[b], kind) for a, b, kind in rng.sample(edges, len(edges))]
        assert form(*edges) == form(*renamed)


def test_a_difference_several_edges_away_changes_the_form():
    assert form(*arms(3, 5)) != form(*arms(4, 4))


def test_the_direction_of_an_edge_changes_the_form():
    circle = [("a", "b", "is"), ("b", "c", "is"), ("c", "d", "is"), ("d", "a", "is")]
    zigzag = [("a", "b", "is"), ("c", "b", "is"), ("c", "d", "is"), ("a", "d", "is")]
    assert form(*circle) != form(*zigzag)


def test_edge_kinds_and_colours_change_the_form():
    path = [("a", "b", "is"), ("b", "c", "is")]
    assert form(*path) != form(("a", "b", "is"), ("b", "c", "is not"))
    assert form(*path, a="asked") != form(*path)
    assert form(*path, a="asked") != form(*path, c="asked")
