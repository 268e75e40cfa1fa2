"""Splits documents into chunks that are tokenised separately. Independent of files and tokenizers.

Chunks bound the memory that a very long document needs and let it be tokenised in parallel. A chunk ends before
whitespace, between two words if possible. Tokenizers that pre-tokenise text into words, as GPT-2's and BERT's do, never
merge across such a boundary, so the ids are those of the whole document. Other tokenizers (SentencePiece over whole
lines, for example) may give different ids around a boundary, and so may any tokenizer in FARTHEST * CHUNK characters
without whitespace, which are cut at that length. The boundaries depend on the document alone, not on how it was read.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

CHUNK = 2**16  # characters
FARTHEST = 4  # chunk lengths that are searched for a boundary

SEPARATORS = {"file": None, "line": re.compile(r"\n"), "blank": re.compile(r"\r?\n(?:[ \t\r]*\n)+")}
"""Separator of documents in plain text for each value of data.boundary; None if the whole file is one document."""

LAST_BREAK = re.compile(r"\r?\n[ \t\r]*\Z")
"""Line break at the end of the last document, for boundary "blank"."""

WORDS, BLANKS = re.compile(r"\w \w"), re.compile(r"(?<=\S)\s")
"""A chunk ends between two words, or otherwise before any whitespace."""


class Chunk(NamedTuple):
    text: str
    ends: bool
    """Whether this is the last chunk of its document."""


def split_into_chunks(document: str) -> Iterator[Chunk]:
    """The chunks of one document."""
    start = 0
    for end in _cuts(document):
        yield Chunk(document[start:end], False)
        start = end
    yield Chunk(document[start:], True)


def join_chunks(blocks: Iterable[str], boundary: str, whole: bool = False) -> Iterator[Chunk]:
    """The chunks of the documents of a text that is read in blocks of any size.

    Empty documents are dropped for boundary "blank". With `whole`, each document is one chunk.
    """
    separator, buffer, inside = SEPARATORS[boundary], "", False
    for block in chain(blocks, [None]):
        buffer += block or ""
        # whitespace at the end of a block may continue in the next one, so it is not split yet
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
    """The chunk boundaries in a text that may continue; some text always remains after the last one."""
    start = 0
    while len(text) - start > 2 * CHUNK and (end := _cut(text, start)):
        yield end
        start = end


def _cut(text: str, start: int) -> int:
    """The end of the chunk that begins at `start`, or 0 if more text is needed to determine it."""
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
