"""A form of a coloured graph that no renaming of its nodes changes. Knows no sentences."""

import hashlib
from collections.abc import Iterable, Mapping


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
