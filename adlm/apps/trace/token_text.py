"""The bytes and the text of single tokens, alone and within their sequence. Does not depend on traces."""

from collections.abc import Iterable, Sequence

from adlm.tokens import Tokenizer


def token_bytes(tokenizer: Tokenizer | None, index: int) -> bytes:
    """The UTF-8 bytes that an id adds to a text; without a tokenizer, its number."""
    return f" {index}".encode() if tokenizer is None else tokenizer.piece(index)


def tokens_bytes(tokenizer: Tokenizer | None, ids: Sequence[int], special_tokens: bool = False) -> list[bytes]:
    """The bytes that each id adds to the text of `Tokenizer.decode(ids, special_tokens)`.

    Hidden special tokens add nothing, except that the first one between two documents adds a blank line.
    """
    hidden = [not special_tokens and tokenizer is not None and index in tokenizer.special_ids for index in ids]
    last = max((position for position, is_hidden in enumerate(hidden) if not is_hidden), default=-1)
    pieces = []
    for position, index in enumerate(ids):
        separates = 0 < position < last and not hidden[position - 1]
        pieces.append((b"\n\n" if separates else b"") if hidden[position] else token_bytes(tokenizer, index))
    return pieces


def text_of(tokenizer: Tokenizer | None, ids: Iterable[int], special_tokens: bool = False) -> str:
    """The text of the ids, with masks spelled out; without a tokenizer, the ids as numbers."""
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(list(ids), special_tokens)


def decode_complete(data: bytes) -> str | None:
    """The text of bytes that are complete UTF-8 characters, else None."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def decode_escaped(data: bytes) -> str:
    """The text of the bytes of one token; incomplete characters are escaped."""
    return data.decode(errors="backslashreplace")


def decode_side_by_side(pieces: Sequence[bytes | None]) -> list[str]:
    """The text of each token in its sequence; None is a mask.

    A character that spans several tokens belongs to the first of them, and the others are empty. Incomplete characters
    are escaped.
    """
    texts = ["" if data is None else decode_escaped(data) for data in pieces]
    start = 0
    while start < len(pieces):
        end, data = start + 1, pieces[start] or b""
        while decode_complete(data) is None and end < min(len(pieces), start + 4) and pieces[end] is not None:
            data += pieces[end] or b""
            end += 1
        text = decode_complete(data)
        if text is None:
            end = start + 1
        else:
            texts[start:end] = [text] + [""] * (end - start - 1)
        start = end
    return texts
