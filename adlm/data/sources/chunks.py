"""Documents as a stream of pieces small enough to encode, whatever the length of a document. Knows no files and no ids.

A document of two hundred megabytes must not fill the memory, and one of many pieces can be encoded in parallel. A piece
ends where blanks begin, between two words if it can. A tokenizer that first splits text into words, as GPT-2's and
BERT's do, joins nothing there, so its ids do not change. One that does not (SentencePiece over whole lines, say) may
give other ids around a cut, and so may any in a stretch of 4 PIECE characters without such a place, cut where it is.
Where the pieces end depends on the document alone, not on how it was read.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

CHUNK = 2**16  # characters
FARTHEST = 4  # pieces in which a place to cut is looked for

SEPARATORS = {"file": None, "line": re.compile(r"\n"), "blank": re.compile(r"\r?\n(?:[ \t\r]*\n)+")}
"""What stands between two documents of plain text; nothing does where a document is a file."""

LAST_BREAK = re.compile(r"\r?\n[ \t\r]*\Z")
"""What ends the last of the documents that blank lines part."""

WORDS, BLANKS = re.compile(r"\w \w"), re.compile(r"(?<=\S)\s")
"""A piece ends between words, or failing that wherever blanks begin."""


class Chunk(NamedTuple):
    text: str
    ends: bool
    """Whether the document ends with this piece."""


def split_into_chunks(document: str) -> Iterator[Chunk]:
    """A whole document, cut."""
    start = 0
    for end in _cuts(document):
        yield Chunk(document[start:end], False)
        start = end
    yield Chunk(document[start:], True)


def join_chunks(blocks: Iterable[str], boundary: str, whole: bool = False) -> Iterator[Chunk]:
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
                    yield from [Chunk(document, True)] if whole else split_into_chunks(document)
                inside = False
        if boundary == "blank" and block is None:
            buffer = LAST_BREAK.sub("", buffer) if inside or buffer.strip() else ""
        if not whole:
            start = 0
            for end in _cuts(buffer):
                yield Chunk(buffer[start:end], False)
                start, inside = end, True
            buffer = buffer[start:]
        buffer += waiting
    if inside or buffer:
        yield Chunk(buffer, True)


def _cuts(text: str) -> Iterator[int]:
    """Where a text that may go on can be cut already; something always stays behind the last cut."""
    start = 0
    while len(text) - start > 2 * CHUNK and (end := _cut(text, start)):
        yield end
        start = end


def _cut(text: str, start: int) -> int:
    """The end of the piece that begins at `start`, or 0 where that takes more text than there is yet."""
    first, last = start + CHUNK // 2, start + CHUNK
    space = last
    while (space := text.rfind(" ", first, space)) >= 0:
        if WORDS.match(text, space - 1, last):
            return space
    if found := [match.start() for match in BLANKS.finditer(text, first, last)]:
        return found[-1]
    farthest = start + FARTHEST * CHUNK
    if len(text) <= farthest:
        return 0
    later = BLANKS.search(text, last, farthest)
    return later.start() if later else farthest
