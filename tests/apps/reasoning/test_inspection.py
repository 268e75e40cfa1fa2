"""What `adlm prepare --inspect` says of problems: the targets of the slots, split labels, counts."""

import pytest

from adlm.apps.reasoning.datasets.prosqa import PROSQA
from adlm.apps.reasoning.inspection import inspected
from adlm.apps.reasoning.problems import Problem
from adlm.apps.reasoning.rows import with_reasoning_tokens
from adlm.tokens import load_tokenizer

STEPS = ("Tom is a terpus.", "Every terpus is a brimpus.")
PROBLEM = Problem("Tom is a terpus. Every terpus is a brimpus. Is Tom a brimpus or wug?", STEPS, "Tom is a brimpus.")
BARE = Problem("Is Tom a terpus or wug?", (), "Tom is a terpus.")


@pytest.fixture
def tokenizer(tmp_path):
    """WordPiece: Tom and brimpus are single tokens, terpus is two."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "tom", "is", "a", "ter", "##pus", "brimpus", ".", "#"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return with_reasoning_tokens(load_tokenizer(str(tmp_path / "vocab.txt")))


@pytest.mark.parametrize(
    ("num_slots", "targets"),
    [
        (0, []),
        (1, [("[BOA]", "tom"), ("1", "[EOA]")]),
        (2, [("[BOA]", "tom"), ("1", "ter"), ("2", "[EOA]")]),
        (3, [("[BOA]", "tom"), ("1", "ter"), ("2", "brimpus"), ("3", "[EOA]")]),
        (5, [("[BOA]", "tom"), ("1", "ter"), ("2", "brimpus"), ("3", None), ("4", None), ("5", None)]),
    ],
)
def test_each_slot_is_trained_towards_the_label_after_its_own_and_the_last_towards_eoa(tokenizer, num_slots, targets):
    [example] = inspected([PROBLEM], PROSQA, tokenizer, num_slots).examples
    assert [(slot.position, slot.target) for slot in example.slots] == targets
    labels = [slot.label.text for slot in example.slots if slot.label]
    assert labels == ["Tom", "terpus", "brimpus"][:num_slots]


def test_split_labels_steps_and_labels_are_counted(tokenizer):
    found = inspected([PROBLEM, BARE, PROBLEM, BARE], PROSQA, tokenizer, 2)
    [first, *_] = found.examples
    assert [(label.text, label.tokens, label.is_split) for label in first.labels] == [
        ("Tom", ("tom",), False),
        ("terpus", ("ter", "##pus"), True),
        ("brimpus", ("brimpus",), False),
    ]
    counts = found.statistics
    assert (counts.num_problems, counts.without_steps) == (4, 2)
    assert counts.steps == {0: 2, 2: 2}
    assert counts.labels == {0: 2, 3: 2}
    assert (counts.num_labels, counts.distinct_labels, counts.distinct_targets) == (6, 3, 3)
    assert counts.split_share == pytest.approx(1 / 3)
    assert (counts.problems_with_split, counts.problems_beyond_slots) == (2, 2)


def test_labels_that_begin_with_the_same_token_share_a_target():
    found = inspected([PROBLEM], PROSQA, with_reasoning_tokens(load_tokenizer("bytes")), 6)
    assert (found.statistics.distinct_labels, found.statistics.distinct_targets) == (3, 1)  # a label follows a space


def test_problems_without_any_label_have_no_split_ones(tokenizer):
    found = inspected([BARE], PROSQA, tokenizer, 2)
    assert found.statistics.split_share == 0.0
    assert [slot.target for slot in found.examples[0].slots] == [None, None, None]
