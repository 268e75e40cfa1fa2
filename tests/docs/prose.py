"""Counts what makes a page hard to read: long sentences, long lines, long table cells.

python tests/docs/prose.py README.md docs/*.md
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^\s*```.*?^\s*```\s*$", re.DOTALL | re.MULTILINE)
START = re.compile(r"^\s*(?:[-*+]|\d+\.|#+|>)\s+")  # of a list item, a heading or a quotation
END = re.compile(r"(?<=[.!?])[*_\")\]]*\s+(?=[^a-z])")  # the next sentence begins with no small letter
WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True)
class Counts:
    words: int
    sentences: list[str]
    """Of the text and of the cells of tables. A code span is one word; of a link only its text counts."""
    cells: list[str]
    lines: list[str]
    """Of the text: not of tables, code and HTML."""

    def longer_than(self, num_words: int) -> list[str]:
        return [sentence for sentence in self.sentences if length(sentence) > num_words]


def length(text: str) -> int:
    return len(WORD.findall(text))


def counts_of(page: str) -> Counts:
    page = FENCE.sub("\n", re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", page, flags=re.DOTALL))
    blocks, cells, lines, block = list[str](), list[str](), list[str](), list[str]()
    for line in [*page.splitlines(), ""]:
        is_table, is_markup = line.lstrip().startswith("|"), line.lstrip().startswith(("<", "!["))
        if is_table or is_markup or not line.strip() or START.match(line):
            blocks.append(" ".join(block))
            block = []
        if is_table:
            cells += [_plain(cell) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        elif line.strip() and not is_markup:
            block.append(START.sub("", line) + "." * line.startswith("#"))  # a heading ends like a sentence
            lines.append(line)
    texts = [_plain(text) for text in (*blocks, *cells)]
    sentences = [sentence for text in texts for sentence in END.split(text) if length(sentence)]
    return Counts(sum(length(text) for text in texts), sentences, cells, lines)


def _plain(text: str) -> str:
    """Without the addresses of links; code spans become one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]+`", "CODE", text).strip()


def main() -> None:
    row = "{:25} {:>6} {:>17} {:>8} {:>8} {:>13} {:>13}\n"
    titles = ("page", "words", "longest sentence", "over 30", "over 25", "longest cell", "longest line")
    sys.stdout.write(row.format(*titles))
    for name in sys.argv[1:]:
        counts = counts_of(Path(name).read_text(encoding="utf-8"))
        longest = max(map(length, counts.sentences))
        figures = (len(counts.longer_than(30)), len(counts.longer_than(25)), max(map(length, counts.cells), default=0))
        sys.stdout.write(row.format(name[-25:], counts.words, longest, *figures, max(map(len, counts.lines))))


if __name__ == "__main__":
    main()
