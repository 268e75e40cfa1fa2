"""Finds the tail of a text to hold out if it has too few documents for random ones. Independent of tokenizers."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from adlm.data.sources.text_files import TextFile

SHORTEST = 64  # characters; a shorter tail is too little to evaluate on
WINDOW = 2**16  # characters before and after the target position that are searched for a break

BREAKS = (re.compile(r"\n(?:[ \t\r]*\n)+"), re.compile(r"\n"), re.compile(r"(?<=\S)(?=\s)"))
"""Where a document may be cut, in order of preference: after a blank line, after a line, before whitespace."""


@dataclass(frozen=True)
class Document:
    part: int
    number: int
    """Its number within its part."""
    start: int
    """Number of characters in all documents before it."""
    length: int
    """In characters."""


@dataclass(frozen=True)
class Tail:
    """All text from character `at` of a document to the end."""

    document: Document
    index: int
    """The document's number over all parts."""
    at: int
    """0 if the tail begins at the start of the document."""


def find_tail(parts: Sequence[TextFile], share: float, is_drawn: Callable[[int], bool]) -> Tail | None:
    """The last `share` of the text, or None if there are enough documents for random ones, or too little text.

    Documents are enough if `share` of them is at least one and `is_drawn` holds for at least one; reading stops there.
    The tail begins at the start of a document, after a blank line, after a line or before whitespace, in this order of
    preference: at the nearest such position that makes it between half and twice as long as requested, or exactly at
    the requested length if there is none.
    """
    documents: list[Document] = []
    any_drawn = False
    for index, document in enumerate(_documents(parts)):
        any_drawn = any_drawn or is_drawn(index)
        if any_drawn and (index + 1) * share >= 1:
            return None
        documents.append(document)
    total = sum(document.length for document in documents)
    held_out = share * total
    if held_out < SHORTEST:
        return None
    wanted = round(total - held_out)
    longest = min(2 * held_out, (held_out + total) / 2)  # also leaves training text if share > 0.5
    low, high = total - longest, total - held_out / 2
    starts = [Tail(document, index, 0) for index, document in enumerate(documents) if low <= document.start <= high]
    if starts:
        return min(starts, key=lambda tail: abs(tail.document.start - wanted))
    index, document = next(
        (index, document)
        for index, document in enumerate(documents)
        if document.start < wanted < document.start + document.length
    )
    low, high = max(low, wanted - WINDOW), min(high, wanted + WINDOW)
    return Tail(document, index, _nearest_break(parts, document, wanted - document.start, low - wanted, high - wanted))


def _documents(parts: Sequence[TextFile]) -> Iterator[Document]:
    before = 0
    for part, file in enumerate(parts):
        number = length = 0
        with closing(file.chunks()) as chunks:
            for text, ends in chunks:
                length += len(text)
                if ends:
                    yield Document(part, number, before, length)
                    number, before, length = number + 1, before + length, 0


def _nearest_break(parts: Sequence[TextFile], document: Document, wanted: int, low: float, high: float) -> int:
    """The break nearest to character `wanted` of the document, among those at offsets `low` to `high` from it."""
    first, last = max(1, round(wanted + low)), min(document.length - 1, round(wanted + high))
    text = _slice(parts[document.part], document.number, first - 1, last + 1)
    for pattern in BREAKS:
        breaks = [first - 1 + match.end() for match in pattern.finditer(text)]
        if allowed := [position for position in breaks if first <= position <= last]:
            return min(allowed, key=lambda position: abs(position - wanted))
    return wanted


def _slice(file: TextFile, document: int, start: int, stop: int) -> str:
    """Characters `start` to `stop` of a document of the file."""
    number, before, found = 0, 0, []
    with closing(file.chunks()) as chunks:
        for text, ends in chunks:
            if number == document:
                found.append(text[max(0, start - before) : max(0, stop - before)])
                before += len(text)
                if before >= stop:
                    break
            number += ends
    return "".join(found)
