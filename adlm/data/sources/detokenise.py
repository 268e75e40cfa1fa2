"""Text as people write it, from the spaced-out form old corpora come in. Knows nothing of corpora or ids.

Each detokeniser is a list of substitutions, done in order over one document. They give what the field's code gives, odd
rules included, because published perplexities rest on them; where a rule does something strange, a comment says so.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

Rule = tuple[str | re.Pattern[str], str]


def _close_up(marks: str) -> list[Rule]:
    """No space before a mark that has one on both sides."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


def _at_the_end(marks: str) -> list[Rule]:
    return [(re.compile(rf" \{mark}$"), mark) for mark in marks]


WIKITEXT: list[Rule] = [
    ("s '", "s'"),
    # the field means a year like '90s here, but its pattern has slashes in it and its replacement is no group
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *_close_up(":;.!?,"),
    *((re.compile(rf"{opening}\s*([^{closing}]*?)\s*{closing}"), rf"{opening[-1]}\1{closing[-1]}")
      for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]"), (r"\{", r"\}"), ('"', '"'), ("'", "'"))),
    *((" ".join("=" * level), "=" * level) for level in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]  # fmt: skip

PTB: list[Rule] = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    (" N ", " 1 "),
    (" N ", " 1 "),  # once more for every second of a run N N N, whose spaces the first pass has used
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]

LM1B: list[Rule] = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    *(rule for mark in "?!" for rule in (*_close_up(mark), *_at_the_end(mark))),
    *_close_up(",:;"),
    (" / ", "/"),
    *((re.compile(rf"{mark} ([^{mark}]+) {mark}"), rf"{mark}\1{mark}") for mark in "\"'"),
    (re.compile(r"\( ([^()]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
]


def substituted(rules: Sequence[Rule], text: str) -> str:
    """Every rule, one after the other, everywhere in the text."""
    for find, put in rules:
        text = text.replace(find, put) if isinstance(find, str) else find.sub(put, text)
    return text


def lambada(text: str) -> str:
    """Straight quotes, and one line break before the passage."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


DETOKENISERS: dict[str, Callable[[str], str]] = {
    "wikitext": partial(substituted, WIKITEXT),
    "ptb": partial(substituted, PTB),
    "lm1b": partial(substituted, LM1B),
    "lambada": lambada,
    "scientific-papers": partial(substituted, [*WIKITEXT, *LM1B]),
}
