"""Documents as a stream of pieces small enough to encode, whatever the length of a document. Knows no files and no ids.

A document of two hundred megabytes must not fill the memory, and one of many pieces can be encoded in parallel. A piece
ends between two words, where no tokenizer that splits text into words joins anything, so the ids do not change.
Where the pieces end depends on the document alone, not on how it was read.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

PIECE = 2**16  # characters

SEPARATORS = {"file": None, "line": re.compile(r"\n"), "blank": re.compile(r"\r?\n(?:[ \t\r]*\n)+")}
"""What stands between two documents of plain text; nothing does where a document is a file."""

GAPS = (re.compile(r"(?<=\w) (?=\w)"), re.compile(r"(?<=\S)\s(?=\S)"))
"""Where a piece may end: between words, or failing that at any gap."""


class Piece(NamedTuple):
    text: str
    ends: bool
    """Whether the document ends with this piece."""


def in_pieces(document: str) -> Iterator[Piece]:
    """A whole document, cut."""
    for text in _cuts(document):
        document = document[len(text) :]
        yield Piece(text, False)
    yield Piece(document, True)


def documents_of(blocks: Iterable[str], boundary: str, whole: bool = False) -> Iterator[Piece]:
    """The documents of a text that comes in blocks of any size, blank ones left out where blank lines part them.

    With `whole`, each document comes in one piece.
    """
    separator, buffer, inside = SEPARATORS[boundary], "", False
    for block in chain(blocks, [None]):
        buffer += block or ""
        # blank lines at the end may go on in the next block, so they wait for it
        known = len(buffer.rstrip()) if boundary == "blank" and block is not None else len(buffer)
        buffer, waiting = buffer[:known], buffer[known:]
        if separator is not None:
            *complete, buffer = separator.split(buffer)
            for document in complete:
                if inside or boundary == "line" or document.strip():
                    yield from [Piece(document, True)] if whole else in_pieces(document)
                inside = False
        if not whole:
            for text in _cuts(buffer):
                buffer, inside = buffer[len(text) :], True
                yield Piece(text, False)
        buffer += waiting
    if inside or (buffer if boundary != "blank" else buffer.strip()):
        yield Piece(buffer, True)


def _cuts(text: str) -> Iterator[str]:
    """What can be cut off the front of a text that may go on; something always stays."""
    start = 0
    while len(text) - start > 2 * PIECE:
        end = _gap(text, start + PIECE // 2, start + PIECE)
        yield text[start:end]
        start = end


def _gap(text: str, first: int, last: int) -> int:
    for pattern in GAPS:
        if gaps := [match.start() for match in pattern.finditer(text, first, last)]:
            return gaps[-1]
    return last
