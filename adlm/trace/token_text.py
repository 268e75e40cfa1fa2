"""How a token looks by itself: its own bytes, and the text they are part of. Knows no walks."""

from collections.abc import Iterable, Sequence

from adlm.tokens import Tokenizer


def token_bytes(tokenizer: Tokenizer | None, index: int) -> bytes:
    """What an id adds to a text, in UTF-8; without a tokenizer its number."""
    return f" {index}".encode() if tokenizer is None else tokenizer.piece(index)


def tokens_bytes(tokenizer: Tokenizer | None, ids: Sequence[int], special_tokens: bool = False) -> list[bytes]:
    """What each id adds to the text of `Tokenizer.decode(ids, special_tokens)`.

    Hidden special tokens are empty pieces; the first of a run between two texts is the blank line that stands for it.
    """
    hidden = [not special_tokens and tokenizer is not None and index in tokenizer.special_ids for index in ids]
    last = max((place for place, special in enumerate(hidden) if not special), default=-1)
    pieces = []
    for place, index in enumerate(ids):
        separates = 0 < place < last and not hidden[place - 1]
        pieces.append((b"\n\n" if separates else b"") if hidden[place] else token_bytes(tokenizer, index))
    return pieces


def text_of(tokenizer: Tokenizer | None, ids: Iterable[int], special_tokens: bool = False) -> str:
    """The text of ids, for people; masks are written out, and ids are numbers where there is no tokenizer."""
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(list(ids), special_tokens)


def decode_whole(data: bytes) -> str | None:
    """The text of bytes that are whole characters, else nothing."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def readable(data: bytes) -> str:
    """The text of a piece by itself; bytes that are only part of a character as their escapes."""
    return data.decode(errors="backslashreplace")


def decode_side_by_side(pieces: Sequence[bytes | None]) -> list[str]:
    """The text of each piece beside the others; nothing stands between two pieces but None.

    A character that several pieces share is given to the first of them and the others are empty; bytes that are part
    of no character are written as their escapes.
    """
    texts = ["" if data is None else readable(data) for data in pieces]
    start = 0
    while start < len(pieces):
        end, data = start + 1, pieces[start] or b""
        while decode_whole(data) is None and end < min(len(pieces), start + 4) and pieces[end] is not None:
            data += pieces[end] or b""
            end += 1
        text = decode_whole(data)
        if text is None:
            end = start + 1
        else:
            texts[start:end] = [text] + [""] * (end - start - 1)
        start = end
    return texts
