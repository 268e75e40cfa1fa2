"""Pages can be read once: short sentences, short lines, no paragraphs in table cells."""

from pathlib import Path

import pytest
from prose import counts_of, length

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT)
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "experiments/**/README.md", "benchmarks/README.md")
    for path in sorted(ROOT.glob(pattern))
]
FIRST = (Path("README.md"), Path("docs/results.md"))
"""The pages that everyone reads."""


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_sentence_has_to_be_read_twice(page):
    counts, limit = counts_of((ROOT / page).read_text()), 30 if page in FIRST else 74
    assert counts.longer_than(limit) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_cell_of_a_table_is_a_paragraph(page):
    assert [cell for cell in counts_of((ROOT / page).read_text()).cells if length(cell) > 45] == []


@pytest.mark.parametrize("page", FIRST, ids=str)
def test_lines_are_wrapped(page):
    assert [line for line in counts_of((ROOT / page).read_text()).lines if len(line) > 110] == []


def test_the_results_fit_a_page_of_1500_words_and_readme_has_at_most_six():
    assert counts_of((ROOT / "docs" / "results.md").read_text()).words <= 1500
    table = (ROOT / "README.md").read_text().partition("<!-- table: summary -->")[2].partition("<!-- end")[0]
    assert len(table.strip().splitlines()) <= 2 + 6


def test_sentences_end_at_full_stops_and_at_the_ends_of_items_cells_and_code():
    page = """---
title: not text
---
# A heading of five words
One two `three or more` [four](five.md). Six i.e. seven, 0.8 nine.
It goes on.

- An item
  of four words
- Another

| a cell | two words here |
|---|---|

```bash
adlm code is not prose
```
"""
    lengths = [length(sentence) for sentence in counts_of(page).sentences]
    assert lengths == [5, 4, 5, 3, 5, 1, 2, 3]
    assert counts_of(page).words == 28
