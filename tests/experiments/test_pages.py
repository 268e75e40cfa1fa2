"""The tables on the pages are those that the generator makes from the results."""

import pages
import pytest
from pages import MARK, PAGES, TABLES, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_a_page_holds_what_the_generator_prints(page):
    assert page.read_text() == filled(page.read_text()), "run python experiments/pages.py --write"


def test_every_table_is_on_a_page():
    used = {name for page in PAGES for name in MARK.findall(page.read_text())}
    assert used == TABLES.keys()


def test_differences_are_over_pairs_of_seeds_or_of_one_pair_over_documents(monkeypatch):
    nats = {"ours": {0: 5.25, 1: 5.35}, "theirs": {0: 5.0, 1: 5.0}, "one": {0: 5.5}}
    monkeypatch.setattr(pages, "seeds", lambda row: {seed: {"nats": value} for seed, value in nats[row].items()})
    assert pages.gap("ours", "theirs") == "+0.300 ± 0.050"  # 0.25 and 0.35: standard deviation 0.0707, over sqrt(2)
    assert pages.gap("ours", "theirs", with_p=True) == "+0.300 ± 0.050 (p = 0.11)"
    assert pages.gap("theirs", "ours", 2) == "−0.30 ± 0.05"
    assert pages.gap("ours", "ours") == ""
    monkeypatch.setattr(pages, "paired", lambda ours, theirs: None)  # of another text
    assert pages.gap("one", "theirs") == ""
