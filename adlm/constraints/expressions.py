"""Extended regular expressions: what every constraint is written as, and `patterns.py` compiles.

A str is a regular expression of Python that the whole text must match. The records below combine expressions. Beside
what regular expressions have, they can say "and" and "not", and hold long lists of texts and of optional parts.

They are compared by identity, so that parts may be shared without being expanded.
"""

from dataclasses import dataclass
from typing import Union

OPTION = "constraints"
ANYTHING = r"[\s\S]*"


@dataclass(frozen=True, eq=False)
class Search:
    """Texts in which a regular expression matches somewhere, as `re.search` finds it."""

    pattern: str


@dataclass(frozen=True, eq=False)
class OneOf:
    """These texts, literally."""

    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Concatenation:
    """One after the other."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, eq=False)
class Alternatives:
    """Texts of any of the parts."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, eq=False)
class Intersection:
    """Texts of all of the parts, and of none of `excluded`."""

    parts: tuple["Expression", ...]
    excluded: tuple["Expression", ...] = ()


@dataclass(frozen=True, eq=False)
class Repetition:
    """A part `least` to `most` times, None is no limit, with a separator between; without one if `least` is 0."""

    part: "Expression"
    least: int
    most: int | None
    separator: str = ""


@dataclass(frozen=True, eq=False)
class OptionalParts:
    """The parts in this order, those that are not required left out or not, with a separator between those written."""

    parts: tuple["Expression", ...]
    required: tuple[bool, ...]
    separator: str


Expression = Union[str, Search, OneOf, Concatenation, Alternatives, Intersection, Repetition, OptionalParts]  # noqa: UP007
