"""The anchor rules, each against its definition on a small text, and as a part of training."""

import pytest
import torch

from adlm.config.schema import Anchor
from adlm.data.rows.anchor_rules import SymbolStatistics, anchor_rule, describe_rule, no_statistics
from adlm.errors import UserError
from adlm.registry import ANCHOR_RULES

TEXTS = [" the", " law", " order", ",", " of", " peace", " 1862", "ful", " The", "[MASK]"]
COUNTS = torch.tensor([40.0, 6, 4, 20, 20, 3, 2, 4, 1, 0])
ROWS = torch.tensor([10.0, 2, 4, 10, 9, 1, 2, 4, 1, 0])
X = torch.tensor([[0, 1, 3, 1, 4, 5, 0, 3], [8, 2, 3, 6, 7, 7, 7, 9]])
PAD = torch.tensor([[False] * 8, [False] * 7 + [True]])


def anchors(rule, pad=None, **options):
    statistics = SymbolStatistics(TEXTS, COUNTS, ROWS, num_rows=10)
    return anchor_rule(Anchor(rule=rule, **options), len(TEXTS), lambda: statistics)(X, pad)


def symbols(chosen):
    return sorted(X[chosen].unique().tolist())


@pytest.mark.parametrize("rule", sorted({*ANCHOR_RULES.built_in} - {"syntax"}))  # whose anchors are in the batch
def test_padding_is_never_an_anchor_and_changes_no_other_position_of_another_row(rule):
    plain, padded = anchors(rule, pattern="law|peace"), anchors(rule, PAD, pattern="law|peace")
    assert padded.dtype == torch.bool
    assert not padded[PAD].any()
    assert torch.equal(padded[0], plain[0])


def test_the_rarest_and_the_most_frequent_symbols_make_up_the_share():
    assert symbols(anchors("rare", PAD, share=0.03)) == [6, 8], "1 + 2 of 100 occurrences"
    assert symbols(anchors("rare", PAD, share=0.06)) == [5, 6, 8]
    assert symbols(anchors("frequent", PAD, share=0.4)) == [0]
    assert symbols(anchors("frequent", PAD, share=0.41)) == [0, 3]
    assert not anchors("rare", share=0.0).any()
    assert anchors("rare", share=1.0)[~PAD].all()


def test_tf_idf_takes_the_tokens_that_are_frequent_here_and_rare_elsewhere():
    chosen = anchors("tf-idf", PAD, share=0.25)
    assert symbols(chosen[:1].expand_as(X) & (torch.arange(2)[:, None] == 0)) == [1], "law: twice here, in 2 of 10 rows"
    assert chosen.sum(dim=1).tolist() == [2, 2], "a quarter of eight tokens; of seven, two"


def test_patterns_and_content_words():
    assert symbols(anchors("pattern", pattern="law|peace|1862")) == [1, 5, 6]
    assert symbols(anchors("pattern", pattern="[A-Z].*")) == [8]
    assert symbols(anchors("content")) == [1, 2, 5, 6, 7, 9], "not the, of, The and the comma"
    for pattern, message in (
        ("", "needs anchor.pattern"),
        ("(", "not a regular expression"),
        ("zzz", "matches no symbol"),
    ):
        with pytest.raises(UserError, match=message):
            anchors("pattern", pattern=pattern)


def test_random_anchors_are_a_share_of_the_positions_and_always_the_same():
    x = torch.randint(50, (400, 64), generator=torch.Generator().manual_seed(0))
    rule = anchor_rule(Anchor(rule="random", share=0.3), 50, no_statistics)
    chosen = rule(x, None)
    assert abs(float(chosen.float().mean()) - 0.3) < 4 * (0.3 * 0.7 / chosen.numel()) ** 0.5
    assert abs(chosen.float().mean(dim=0) - 0.3).max() < 0.12, "at every position"
    pairs = (chosen[:, :-1] & chosen[:, 1:]).float().mean()
    assert abs(float(pairs) - 0.09) < 0.01, "neighbours are independent"
    assert torch.equal(chosen, rule(x, None))
    assert torch.equal(chosen[5:9], rule(x[5:9], None))


def test_all_tokens():
    assert torch.equal(anchors("all", PAD), ~PAD)


def test_a_rule_that_needs_statistics_says_so():
    for rule in ("rare", "frequent", "tf-idf", "content"):
        with pytest.raises(UserError, match="needs statistics of the training text"):
            anchor_rule(Anchor(rule=rule), 10)


def test_a_rule_of_another_package_always_gets_the_padding(monkeypatch):
    monkeypatch.setitem(ANCHOR_RULES._registered, "mine", lambda anchor, num_symbols, statistics: lambda x, pad: ~pad)
    rule = anchor_rule(Anchor(rule="mine"), 10)
    assert rule(X, None).all()
    assert torch.equal(rule(X, PAD), ~PAD)


@pytest.mark.parametrize(
    ("result", "given"),
    [(X, r"torch.int64 \(2, 8\)"), (PAD[0], r"torch.bool \(8,\)"), ([True], "list"), (None, "NoneType")],
    ids=["ids", "one row", "list", "nothing"],
)
def test_a_rule_of_another_package_must_give_booleans_of_the_shape_of_the_ids(monkeypatch, result, given):
    monkeypatch.setitem(ANCHOR_RULES._registered, "mine", lambda anchor, num_symbols, statistics: lambda x, pad: result)
    with pytest.raises(UserError, match=rf"anchor.rule mine gave {given} for ids \(2, 8\); it must return a bool"):
        anchors("mine")


def test_rules_in_words():
    assert describe_rule(Anchor()) == "at most 5 times in the row"
    assert describe_rule(Anchor(rule="rare", share=0.05)) == "rarest symbols, 5% of the text"
    assert describe_rule(Anchor(rule="mine")) == "mine"
