"""Statistics of a split, each against a plain count."""

import numpy as np
from test_packing import FRAMED, stored

from adlm.config.schema import Anchor
from adlm.data.rows.anchor_rules import anchor_rule, statistics_of, symbol_statistics
from adlm.data.rows.packing import rows_of
from adlm.tokens import load_tokenizer

RULE = anchor_rule(Anchor(tau=1), FRAMED.size)


def test_statistics_are_counts(tmp_path):
    documents = [[5] * 4, [5, 6], [7], [6, 5, 8]]
    seen = statistics_of(rows_of(stored(tmp_path, documents, FRAMED), FRAMED, 8, "padded"), RULE)
    assert (seen.num_rows, seen.num_documents, seen.num_tokens) == (4, 4, 14)
    assert seen.document_lengths == (2, 2, 4, 5, 5), "with the eos of each"
    assert seen.sampled_tokens == 10 + 8, "bos and eos of each row with them"
    assert seen.padding == 1 - 18 / 32
    assert [share for _, share in seen.most_frequent] == sorted(
        (share for _, share in seen.most_frequent), reverse=True
    )
    assert dict(seen.most_frequent) == {5: 6 / 18, 1: 4 / 18, 2: 4 / 18, 6: 2 / 18, 7: 1 / 18, 8: 1 / 18}
    assert next(iter(seen.most_frequent)) == (5, 6 / 18)
    assert seen.distinct == 6
    assert seen.anchors == (18 - 4) / 18, "only the row of four equal ids has any more than once"


def test_the_quantiles_of_many_lengths(tmp_path):
    documents = [[5] * length for length in np.random.default_rng(0).permutation(101)]
    rows = rows_of(stored(tmp_path, documents, FRAMED, shard=512), FRAMED, 8, "packed")
    assert statistics_of(rows, RULE).document_lengths == (1, 11, 51, 91, 101)


def test_symbols_are_counted_in_all_rows(tmp_path):
    documents = [[5] * 4, [5, 6], [7], [6, 5, 8]]
    tokenizer = load_tokenizer("bytes")
    found = symbol_statistics(rows_of(stored(tmp_path, documents, FRAMED), FRAMED, 8, "padded"), tokenizer)
    assert (found.num_rows, len(found.texts)) == (4, tokenizer.vocabulary.size)
    assert {index: int(found.counts[index]) for index in (1, 2, 5, 6, 7, 8, 9)} == {
        1: 4,
        2: 4,
        5: 6,
        6: 2,
        7: 1,
        8: 1,
        9: 0,
    }
    assert {index: int(found.rows[index]) for index in (1, 5, 6, 7, 9)} == {1: 4, 5: 3, 6: 2, 7: 1, 9: 0}
    assert found.texts[ord("a")] == "a"
