"""The anchor mask."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from adlm.diffusion.objectives import anchor_mask

rows = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=1, max_size=3)
)


@given(rows, st.integers(0, 6))
def test_a_token_is_an_anchor_where_its_id_occurs_at_most_tau_times_in_its_own_sequence(ids, tau):
    counted = [[row.count(token) <= tau for token in row] for row in ids]
    assert anchor_mask(torch.tensor(ids), tau, num_symbols=6).tolist() == counted


@given(rows, st.integers(0, 6), st.integers(0, 12))
def test_padding_is_neither_counted_nor_an_anchor(ids, tau, length):
    x = torch.tensor(ids)
    pad = (torch.arange(x.shape[1]) >= length).expand_as(x)
    found = anchor_mask(x, tau, 6, pad)
    assert not found[pad].any()
    if length:
        assert torch.equal(found[:, :length], anchor_mask(x[:, :length], tau, 6))
