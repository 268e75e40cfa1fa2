"""Labels of tokens, made from the text of a document by the rule that `data.labels` names. Independent of tensors.

A rule finds spans of characters in a text. A token is labelled if it has a character of such a span, so the space that
a tokenizer joins to a name does not matter. The anchor rule `syntax` takes the labelled tokens as anchors.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]

PYTHON = re.compile(
    r"""
    \#[^\n]*                                                                       # a comment
    | (?:[bBuUfFrR]|[bBfF][rR]|[rR][bBfF])?                                        # a string
      (?: '''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:'''|\Z) | '[^\n'\\]*(?:\\.[^\n'\\]*)*'?
        | \"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:\"""|\Z) | "[^\n"\\]*(?:\\.[^\n"\\]*)*"? )
    | 0[xX][\da-fA-F_]+ | 0[bB][01_]+ | 0[oO][0-7_]+                               # a number
    | (?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?[jJ]?
    | ([^\W\d]\w*)                                                                 # a name
    """,
    re.DOTALL | re.VERBOSE,
)
"""A lexer of what may contain letters. It is faster than `tokenize`, reads any text and is the same in every Python."""


def python_names(text: str) -> Iterator[Span]:
    """The names of Python source: keywords, identifiers and names of definitions; not those in strings and comments.

    An f-string is a string, also the expressions in it.
    """
    return (match.span(1) for match in PYTHON.finditer(text) if match[1])


LABELS: dict[str, Callable[[str], Iterator[Span]]] = {"python": python_names}


def label_tokens(spans: Iterator[Span], offsets: Sequence[Span], num_characters: int) -> NDArray[np.bool_]:
    """For each token, given by its offsets in the text, whether it has a character of a span."""
    edges = np.zeros(num_characters + 1, np.int64)
    starts_and_stops = np.array(list(spans), np.int64).reshape(-1, 2)
    edges[starts_and_stops[:, 0]] += 1  # spans do not overlap, so no index occurs twice
    edges[starts_and_stops[:, 1]] -= 1
    before = np.concatenate(([0], np.cumsum(np.cumsum(edges[:-1]))))  # characters of spans before each position
    first_and_last = np.array(offsets, np.int64).reshape(-1, 2)
    return before[first_and_last[:, 1]] > before[first_and_last[:, 0]]
