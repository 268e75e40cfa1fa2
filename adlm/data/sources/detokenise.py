"""Restores normal spacing in corpora that were published tokenised. Independent of corpora and tokenizers.

Each detokeniser is a list of substitutions that are applied to a document in order. They reproduce the released code,
including its odd rules, because published perplexities depend on them; comments mark those rules.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

Rule = tuple[str | re.Pattern[str], str]


def _close_up(marks: str) -> list[Rule]:
    """Rules that remove the space before a mark with a space on both sides."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


def _at_the_end(marks: str) -> list[Rule]:
    return [(re.compile(rf" \{mark}$"), mark) for mark in marks]


WIKITEXT: list[Rule] = [
    ("s '", "s'"),
    # meant for years like '90s, but the released pattern contains slashes and its replacement no group
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
    (" N ", " 1 "),  # a second pass: in N N N the first one consumes the spaces of every second N
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
    """The text after all rules, applied in order."""
    for find, put in rules:
        text = text.replace(find, put) if isinstance(find, str) else find.sub(put, text)
    return text


def lambada(text: str) -> str:
    """The passage with straight quotes, after one line break."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


DETOKENISERS: dict[str, Callable[[str], str]] = {
    "wikitext": partial(substituted, WIKITEXT),
    "ptb": partial(substituted, PTB),
    "lm1b": partial(substituted, LM1B),
    "lambada": lambada,
    "scientific-papers": partial(substituted, [*WIKITEXT, *LM1B]),
}
