"""Infilling by models that write from left to right: rows of training, and the distribution of a hole."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import mostly_slow

from adlm.config.schema import Config, Model, Sampling, Vocabulary
from adlm.data.rows.holes import Rearrangement, RowHole, arrange
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of
from adlm.methods.infilling import arrange_row, generate_arranged
from adlm.sampling.frame import first_frame, last_frame
from adlm.sampling.rng import RowRng

EOS, HOLE, MASK = 0, 4, 5
SAMPLERS = ("speculative", "left-to-right", "ancestral", "confidence")


def model(length: int = 16, block_length: int = 3, **train):
    """Three words besides eos, random weights."""
    config = Config(
        method="mdlm",
        vocabulary=Vocabulary(size=6, mask_id=MASK, bos_id=EOS, eos_id=EOS),
        length=length,
        model=Model(hidden=16, heads=2, blocks=2, condition=8, dropout=0.0, block_length=block_length, hole_id=HOLE),
    )
    config = replace(config, train=replace(config.train, causal_weight=1.0, **train))
    torch.manual_seed(3)
    method = method_of(config)
    network = method.build().double().eval()
    with torch.no_grad():
        network.embedding.weight.normal_()
        for block in network.trunk.blocks:  # what a word is depends on all words before it, in their order
            block.modulation.bias.fill_(1.0)
            block.qkv.weight.normal_(std=0.6)
            block.out.weight.normal_(std=0.6)
        network.head.weight.normal_(std=0.4)  # with more, one word has nearly all the probability
    return method, network


def test_an_outline_and_then_the_text_up_to_the_end_of_its_last_hole():
    a, b, c, d, e, f, g = text = list(range(10, 17))

    def arranged(length, *holes):
        ids, copies = arrange(np.array([EOS, *text[:length]]), [RowHole(*hole) for hole in holes], HOLE, EOS)
        return ids.tolist(), copies.nonzero()[0].tolist()

    assert arranged(6, (3, 5, True)) == ([EOS, HOLE, HOLE, e, f, EOS, a, b, HOLE, c, d, EOS], [])
    assert arranged(6, (3, 5, False)) == ([EOS, HOLE, EOS, e, f, EOS, a, b, HOLE, c, d, EOS], [])
    both_known = [EOS, HOLE, HOLE, e, HOLE, g, EOS, a, b, HOLE, c, d, e, HOLE, f, EOS]
    assert arranged(7, (3, 5, True), (6, 7, True)) == (both_known, [12])
    first_unknown = [EOS, HOLE, EOS, e, HOLE, g, EOS, a, b, HOLE, c, d, EOS, e, HOLE, f, EOS]
    assert arranged(7, (3, 5, False), (6, 7, True)) == (first_unknown, [13])
    last_unknown = [EOS, HOLE, HOLE, e, HOLE, EOS, g, EOS, a, b, HOLE, c, d, e, HOLE, f, EOS]
    assert arranged(7, (3, 5, True), (6, 7, False)) == (last_unknown, [13])
    side_by_side_at_the_beginning = [EOS, HOLE, HOLE, EOS, c, EOS, HOLE, a, HOLE, b, EOS]
    assert arranged(3, (1, 2, True), (2, 3, False)) == (side_by_side_at_the_beginning, [])


def test_training_rows_keep_their_length_and_say_what_was_there():
    rows = np.stack([np.r_[EOS, 10 + np.arange(199)]] * 2)
    rearrange, lengths, seen = Rearrangement(1.0, HOLE, EOS), [], Counter()
    for number in range(500):
        ids, copies = (each[0] for each in rearrange(rows, np.array([number / 500, 0.5])))
        assert ids.shape == copies.shape == (200,)
        first, end = int((ids == 10).argmax()), 200 - int((ids[::-1] == EOS).argmax())  # the first word, and the rest
        text = first - int(ids[first - 1] == HOLE)  # where it begins
        outline, is_word = ids[1:text], ids >= 10
        words = np.unique(ids[:end][is_word[:end]])
        length = len(words)
        assert (words == rows[0, 1 : 1 + length]).all(), "outline and text have every word"
        assert (ids[end:] == rows[0, 1 + length :][: 200 - end]).all(), "then the row goes on with what follows"
        assert len(np.unique(ids[is_word & ~copies])) == (is_word & ~copies).sum(), "nothing else is there twice"
        assert np.isin(ids[copies], outline).all()
        assert (outline[-1], ids[end - 1]) == (EOS, EOS)
        if EOS not in outline[:-1]:  # all holes are of known length
            assert len(set((outline - np.arange(len(outline)))[outline >= 10])) < 2, "a hole id for every missing token"
        assert outline[0] == HOLE
        assert length - len(np.unique(outline[outline >= 10])) >= 1, "something is missing in it"
        lengths.append(length)
        seen += Counter(two=int(copies.any()), unknown=int(EOS in outline[:-1]))
    again = rearrange(rows, np.array([0.1, 0.5]))
    assert all((one == other).all() for one, other in zip(again, rearrange(rows, np.array([0.1, 0.5])), strict=True))
    assert min(lengths) == 16
    assert max(lengths) > 150
    assert 0.45 < np.mean(np.array(lengths) < 56) < 0.7, "short texts as often as long ones"
    assert 0.1 < seen["two"] / 500 < 0.3
    assert 0.45 < seen["unknown"] / 500 < 0.65
    unchanged, copies = Rearrangement(0.0, HOLE, EOS)(rows, np.array([0.1, 0.5]))
    assert (unchanged == rows).all()
    assert not copies.any()


@pytest.mark.parametrize("length", range(1, 20))
def test_rows_in_which_no_hole_fits_stay_as_they_are(length):
    rearrange, draws = Rearrangement(1.0, HOLE, EOS), np.arange(50) / 50
    ended = np.full((50, length), EOS)
    assert (rearrange(ended, draws)[0] == ended).all(), "no hole has an end of text inside"
    rows = np.stack([np.r_[EOS, 10 + np.arange(length - 1)]] * 50)
    changed = (rearrange(rows, draws)[0] != rows).any(axis=1)
    assert changed.any() == (length >= 9), "bos, four words, two hole ids and two eos"
    assert changed.mean() > 0.8 or length < 17


def test_hole_ids_and_copies_are_neither_masked_nor_scored():
    method, network = model(infill=0.5)
    row, copies = arrange(np.array([EOS, 3, 1, 2, 3, 1]), [RowHole(2, 3, True), RowHole(4, 5, True)], HOLE, EOS)
    x, given = torch.from_numpy(row)[None], torch.from_numpy(copies)[None]
    assert x.tolist() == [[EOS, HOLE, 2, HOLE, 1, EOS, 3, HOLE, 1, 2, HOLE, 3, EOS]]
    predicted = [False, False, True, False, True, True, True, False, True, False, False, True, True]
    assert method.predicted(x, None, given).tolist() == [predicted]
    for seed in range(30):
        noised = method.noise(x, None, BatchRng(torch.Generator().manual_seed(seed)), 0.5, given)
        assert (noised.z[(x == HOLE) | given] != MASK).all()
    loss = method.loss(network, x, None, 1.0, BatchRng(torch.Generator().manual_seed(0)), given)
    assert loss.num_tokens == sum(predicted)


def test_a_canvas_is_rearranged_hole_by_hole():
    row = [EOS, 1, MASK, MASK, 2, MASK, 3]
    known = arrange_row(row, [False] * 7, MASK, HOLE, EOS)
    assert known.ids == [EOS, HOLE, HOLE, 2, HOLE, 3, EOS, 1, HOLE]
    assert known.holes == [RowHole(2, 4, True), RowHole(5, 6, True)]
    first_unknown = arrange_row(row, [False, False, True, True, False, False, False], MASK, HOLE, EOS)
    assert first_unknown.ids == [EOS, HOLE, EOS, 2, HOLE, 3, EOS, 1, HOLE]
    assert first_unknown.holes == [RowHole(2, 4, False), RowHole(5, 6, True)]
    side_by_side = arrange_row(row[:6], [False, False, False, True, False, True], MASK, HOLE, EOS)
    assert side_by_side.ids == [EOS, HOLE, HOLE, EOS, 2, HOLE, EOS, EOS, 1, HOLE]
    prompt = arrange_row([EOS, 1, MASK, MASK], [False, False, True, True], MASK, HOLE, EOS)
    assert (prompt.ids, [(hole.start, hole.stop) for hole in prompt.holes]) == ([EOS, 1], [(2, 4)])


def test_a_hole_is_written_after_the_text_before_it_with_one_eos_after_a_hole_of_unknown_length():
    canvas = torch.tensor([[EOS, 1, MASK, MASK, MASK, 2, MASK, MASK, 3]])
    may_end, tokens, read = torch.tensor([[False] * 2 + [True] * 3 + [False] * 4]), iter((1, EOS, EOS, 3, EOS)), []

    def write(part, ending, pad, holes):
        read.append(part[0].tolist())
        frame = first_frame(part, MASK)
        yield frame
        for position in (part[0] == MASK).nonzero().flatten().tolist():
            frame = replace(frame, ids=frame.ids.clone())
            frame.ids[0, position] = next(tokens)
            yield frame

    frames = list(generate_arranged(write, canvas, may_end, MASK, HOLE, EOS, None))
    outline = [EOS, HOLE, EOS, 2, HOLE, HOLE, 3, EOS]
    assert read == [[*outline, 1, HOLE, MASK, MASK, MASK], [*outline, 1, HOLE, 1, EOS, 2, HOLE, MASK, MASK]]
    assert frames[-1].ids.tolist() == [[EOS, 1, 1, EOS, EOS, 2, 3, EOS, 3]]


@pytest.mark.parametrize("sampler", ["speculative", "left-to-right"])
def test_a_hole_has_the_distribution_of_the_model_given_the_text_on_both_sides(sampler):
    method, network = model()
    canvas = torch.tensor([[EOS, 1, MASK, MASK, 2]])
    num = 5000
    texts = last_frame(
        method.generate(
            FrozenNetwork(network), canvas.repeat(num, 1), Sampling(sampler, drafts=2), RowRng(0, range(num))
        )
    ).ids
    assert (texts[:, [0, 1, 4]] == torch.tensor([EOS, 1, 2])).all()
    found = Counter(map(tuple, texts[:, 2:4].tolist()))
    symbols = [0, 1, 2, 3, HOLE]
    fills = list(itertools.product(symbols, repeat=2))
    rows = torch.tensor([[EOS, HOLE, HOLE, 2, EOS, 1, HOLE, first, second] for first, second in fills])
    scorer = method_of(replace(method.config, model=replace(method.config.model, hole_id=None)))  # scores every symbol
    nats = scorer.causal_nats if sampler == "speculative" else scorer.left_to_right_nats
    log_p = -nats(network, rows, None)[:, 7:].sum(dim=1)
    expected = log_p.double().exp()
    assert float(expected.sum()) == pytest.approx(1, abs=1e-5)
    counts = torch.tensor([found[fill] for fill in fills], dtype=torch.float64)
    chi_square = ((counts - expected * num) ** 2 / (expected * num).clamp(min=1)).sum()
    assert chi_square < 24 + 5 * math.sqrt(2 * 24)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_cached_equals_recomputed_and_batched_equals_alone(sampler):
    method, network = model(20)
    canvas = torch.tensor(
        [
            [EOS, 1, MASK, MASK, 2, MASK, 3, 1],
            [EOS, MASK, 1, 2, 0, 0, 0, 0],
            [EOS, 1, 2, MASK, MASK, MASK, MASK, MASK],
            [EOS, MASK, MASK, MASK, MASK, MASK, 3, 3],
        ]
    )
    pad = torch.zeros_like(canvas, dtype=torch.bool)
    pad[1, 4:] = True
    sampling = Sampling(sampler, steps=3, drafts=2)
    frozen = FrozenNetwork(network)
    plain, cached = (
        list(method.generate(each, canvas, sampling, RowRng(3, range(4)), pad)) for each in (network, frozen)
    )
    assert [frame.ids.tolist() for frame in plain] == [frame.ids.tolist() for frame in cached]
    last = cached[-1]
    given = (canvas != MASK) & ~pad
    assert (last.ids[given] == canvas[given]).all()
    assert not (last.ids[~pad] == MASK).any()
    revealed = torch.stack([frame.revealed for frame in cached]).sum(dim=0)
    assert (revealed == (canvas == MASK)).all(), "every hole once"
    for row in range(4):
        length = 4 if row == 1 else 8
        alone = method.generate(frozen, canvas[row : row + 1, :length], sampling, RowRng(3, range(4))[row : row + 1])
        assert (last_frame(alone).ids[0] == last.ids[row, :length]).all()


@pytest.mark.parametrize(
    ("sampler", "block_length"),
    mostly_slow(
        [("speculative", 3), ("left-to-right", 3), ("left-to-right", 2), ("ancestral", 1)],
        ("speculative", 3),
    ),
)
def test_a_hole_of_unknown_length_has_the_distribution_of_the_rearranged_row(sampler, block_length):
    method, network = model(24, block_length)
    canvas, num = torch.tensor([[EOS, 1, HOLE, HOLE, 2, MASK, 3]]), 5000
    frame = last_frame(
        method.generate(
            FrozenNetwork(network), canvas.repeat(num, 1), Sampling(sampler, drafts=2), RowRng(1, range(num))
        )
    )
    assert (frame.ids[:, [0, 1, 4, 6]] == torch.tensor([EOS, 1, 2, 3])).all()
    assert frame.open.tolist() == (canvas == HOLE).repeat(num, 1).tolist()
    found = Counter(map(tuple, frame.ids[:, [2, 3, 5]].tolist()))
    scorer = method_of(replace(method.config, model=replace(method.config.model, hole_id=None)))  # scores every symbol
    nats = scorer.causal_nats if sampler == "speculative" else scorer.left_to_right_nats
    text, words, expected = [EOS, HOLE, EOS, 2, HOLE, 3, EOS, 1, HOLE], [1, 2, 3, HOLE], {}
    for hole in [(), *itertools.product(words, repeat=1), *itertools.product(words, repeat=2)]:
        drawn = (*hole, EOS)[:2]  # two tokens fill the hole: what would follow is cut off
        filled = (*hole, EOS, EOS)[:2]
        log_p = -nats(network, torch.tensor([[*text, *filled]]), None)[0, 9 : 9 + len(drawn)].sum()
        rows = torch.tensor([[*text, *hole, EOS, 2, HOLE, index] for index in (EOS, *words)])
        for index, log_q in zip((EOS, *words), -nats(network, rows, None)[:, -1], strict=True):
            expected[(*filled, index)] = float((log_p + log_q).exp())
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert set(found) <= set(expected), "nothing but eos after the first one"
    chi_square = sum((found[fill] - p * num) ** 2 / max(p * num, 1) for fill, p in expected.items())
    assert chi_square < 104 + 5 * math.sqrt(2 * 104)


@pytest.mark.parametrize("sampler", mostly_slow([*SAMPLERS, "remdm-conf"], "speculative"))
def test_holes_of_unknown_length_cached_equals_recomputed_and_batched_equals_alone(sampler):
    method, network = model(32)
    canvas = torch.tensor(
        [
            [EOS, 1, HOLE, HOLE, HOLE, HOLE, 2, MASK, 3, HOLE, HOLE, 1],
            [EOS, HOLE, HOLE, 1, 2, 0, 0, 0, 0, 0, 0, 0],
            [EOS, 1, 2, MASK, HOLE, HOLE, HOLE, HOLE, HOLE, HOLE, HOLE, HOLE],
            [EOS, 1, MASK, MASK, 2, HOLE, HOLE, HOLE, 3, HOLE, HOLE, HOLE],
            [EOS, 1, 2, *[MASK] * 9],
        ]
    )
    pad = torch.zeros_like(canvas, dtype=torch.bool)
    pad[1, 5:] = True
    frozen, ended = FrozenNetwork(network), 0
    for seed in range(8):
        stop_at_eos = seed % 2 > 0
        sampling, rng = Sampling(sampler, steps=3, drafts=2, stop_at_eos=stop_at_eos), RowRng(seed, range(5))
        plain, cached = (list(method.generate(each, canvas, sampling, rng[:], pad)) for each in (network, frozen))
        assert [frame.ids.tolist() for frame in plain] == [frame.ids.tolist() for frame in cached]
        last, given = cached[-1], (canvas != MASK) & (canvas != HOLE) & ~pad
        assert (cached[0].ids[~pad & ~given] == MASK).all(), "the first frame has masks in all holes"
        assert (last.ids[given] == canvas[given]).all()
        assert not (last.ids[~pad] == MASK).any()
        for holes in (canvas == HOLE, (canvas == MASK) & (torch.arange(5) == 4)[:, None] & stop_at_eos):
            is_end = (last.ids == EOS) & holes
            follows = torch.cat([is_end[:, :1], is_end[:, :-1]], dim=1) & holes
            assert (last.ids[follows] == EOS).all(), "up to the end of the hole"
            ended += int(follows.sum())
        for row in range(5):
            width = 5 if row == 1 else 12
            alone = method.generate(frozen, canvas[row : row + 1, :width], sampling, rng[row : row + 1])
            assert (last_frame(alone).ids[0] == last.ids[row, :width]).all()
    assert ended > 0


def test_tokens_keep_the_probability_they_were_drawn_with_when_the_next_hole_is_filled():
    method, network = model(20)
    canvas = torch.tensor([[EOS, 1, MASK, MASK, 2, MASK, 3, 1]])
    chance = torch.zeros(8)
    for frame in method.generate(FrozenNetwork(network), canvas, Sampling("left-to-right"), RowRng(0, range(1))):
        chance = torch.where(frame.revealed[0], frame.chance[0].float(), chance)
    assert (frame.chance[0][canvas[0] == MASK] == chance[canvas[0] == MASK]).all()
    assert (chance[canvas[0] == MASK] < 1).all()


def test_what_cannot_be_filled_is_refused():
    method, _ = model(10)
    with pytest.raises(UserError, match="takes 13 tokens, with its holes filled in after it"):
        method.check_run(torch.tensor([[EOS, MASK, MASK, MASK, MASK, 1]]), Sampling(), None)
    with pytest.raises(UserError, match="takes 12 tokens"):
        method.check_run(torch.tensor([[EOS, HOLE, HOLE, HOLE, HOLE, HOLE, 1]]), Sampling(), None)
    method.check_run(torch.tensor([[EOS, HOLE, HOLE, HOLE, 1]]), Sampling(), None)  # 10 tokens
    plain = method_of(replace(method.config, model=replace(method.config.model, hole_id=None)))
    with pytest.raises(UserError, match="token after a mask"):
        plain.check_run(torch.tensor([[EOS, MASK, 1]]), Sampling(), None)
    with pytest.raises(UserError, match="hole_id is empty"):
        method_of(replace(plain.config, train=replace(plain.config.train, infill=0.5)))


@pytest.mark.parametrize("sampler", mostly_slow(["speculative", "left-to-right", "ancestral"], "speculative"))
@pytest.mark.parametrize("frozen", mostly_slow([True, False], True))
@pytest.mark.parametrize("may_end", mostly_slow([False, True], True))
def test_of_two_candidates_one_is_kept_by_what_the_text_after_it_says(sampler, frozen, may_end):
    """All pairs of fills are enumerated: q from the rearranged row, p from the plain text."""
    method, network = model(block_length=1 if sampler == "ancestral" else 3)
    symbols, num = [0, 1, 2, 3, HOLE], 3000
    hole = [HOLE, HOLE] if may_end else [MASK, MASK]
    canvas = torch.tensor([[EOS, 1, *hole, 2, 3]])
    scorer = method_of(replace(method.config, model=replace(method.config.model, hole_id=None)))  # scores every symbol

    def log_p(nats, row, start, num=None):
        return -float(nats(network, torch.tensor([row]), None)[0, start:][:num].sum())

    of_q = scorer.causal_nats if sampler == "speculative" else scorer.left_to_right_nats
    if may_end:
        fills = [(), *((a,) for a in symbols[1:]), *itertools.product(symbols[1:], repeat=2)]
        outline = [EOS, HOLE, EOS, 2, 3, EOS, 1, HOLE]
        drawn = [(*fill, EOS, EOS)[:2] for fill in fills]  # the second of two eos is not drawn
    else:
        fills = drawn = list(itertools.product(symbols, repeat=2))
        outline = [EOS, HOLE, HOLE, 2, 3, EOS, 1, HOLE]
    log_q = torch.tensor(
        [log_p(of_q, [*outline, *ids], len(outline), len(fill) + 1) for ids, fill in zip(drawn, fills, strict=True)]
    )
    assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-5)
    log_w = torch.tensor([log_p(scorer.causal_nats, [EOS, 1, *fill, 2, 3], 2) for fill in fills]) - log_q
    first = torch.sigmoid(log_w[:, None] - log_w)  # the chance that the first of two is kept
    q = log_q.exp()
    expected = q * (first * q).sum(dim=1) + q * ((1 - first.T) * q).sum(dim=1)
    sampling = Sampling(sampler, drafts=2, candidates=2, steps=8)
    by = FrozenNetwork(network) if frozen else network
    num = num if frozen else 300
    texts = last_frame(method.generate(by, canvas.repeat(num, 1), sampling, RowRng(0, range(num)))).ids
    assert (texts[:, [0, 1, 4, 5]] == torch.tensor([EOS, 1, 2, 3])).all()
    found = Counter(
        tuple(itertools.takewhile(lambda t: t != EOS or not may_end, row)) for row in texts[:, 2:4].tolist()
    )
    counts = torch.tensor([found[fill] for fill in fills], dtype=torch.float64)
    assert counts.sum() == num
    chi_square = float(((counts - expected * num) ** 2 / (expected * num).clamp(min=1)).sum())
    assert chi_square < len(fills) + 5 * math.sqrt(2 * len(fills))
    one = ((counts - q * num) ** 2 / (q * num).clamp(min=1)).sum()
    assert not frozen or one > chi_square, "the text after the hole matters"


@pytest.mark.slow
def test_with_many_candidates_a_hole_has_the_distribution_of_the_causal_model_given_both_sides():
    method, network = model()
    symbols, num = [0, 1, 2, 3, HOLE], 600
    scorer = method_of(replace(method.config, model=replace(method.config.model, hole_id=None)))
    rows = torch.tensor([[EOS, 1, token, 2, 3] for token in symbols])
    expected = (-scorer.causal_nats(network, rows, None).sum(dim=1)).double().softmax(dim=0)
    canvas = torch.tensor([[EOS, 1, MASK, 2, 3]]).repeat(num, 1)
    sampling = Sampling("speculative", drafts=0, candidates=32)
    texts = last_frame(method.generate(FrozenNetwork(network), canvas, sampling, RowRng(0, range(num)))).ids
    counts = torch.stack([(texts[:, 2] == token).sum() for token in symbols])
    assert float((counts / num - expected).abs().sum()) < 0.25, "one candidate has 0.69"


def test_candidates_of_several_holes_alone_and_in_a_batch():
    method, network = model(length=24)
    canvas = torch.tensor(
        [[EOS, 1, MASK, 2, HOLE, HOLE, 3], [EOS, 2, MASK, MASK, 3, 1, 2], [EOS, 3, 1, 2, 3, MASK, MASK]]
    )
    sampling, frozen = Sampling("speculative", drafts=2, candidates=3), FrozenNetwork(network)
    frames = list(method.generate(frozen, canvas, sampling, RowRng(5, range(3))))
    assert len(frames) == 3, "the canvas, and a frame for each hole"
    assert (frames[-1].ids != MASK).all()
    plain = last_frame(method.generate(network, canvas, sampling, RowRng(5, range(3)))).ids
    assert frames[-1].ids.tolist() == plain.tolist()
    for row in range(3):
        alone = last_frame(method.generate(frozen, canvas[row : row + 1], sampling, RowRng(5, [row])))
        if row < 2:  # the last row has no text after its hole: alone, no candidates are drawn
            assert alone.ids.tolist() == frames[-1].ids[row : row + 1].tolist()


def test_what_candidates_cannot_do_is_refused():
    method, _ = model()
    canvas = torch.tensor([[EOS, 1, MASK, 2]])
    with pytest.raises(UserError, match="sampler confidence has none"):
        method.check_run(canvas, Sampling("confidence", candidates=2), None)
    method.check_run(torch.tensor([[EOS, 1, MASK, MASK]]), Sampling("confidence", candidates=2), None)  # no hole
    config = replace(method.config, train=replace(method.config.train, causal_weight=0.0))
    with pytest.raises(UserError, match=r"train\.causal_weight have them"):
        method_of(config).check_run(canvas, Sampling("left-to-right", candidates=2), None)
