"""Constrained holes of models that write block by block: distributions by enumeration, caches, batches, copies."""

import itertools
import math
import re
from collections import Counter

import pytest
import torch
from small_models import infilling_model, mostly_slow
from test_infilling import EOS, HOLE, MASK, model

import adlm
from adlm import Regex
from adlm.config.schema import Sampling
from adlm.constraints.automaton import compile_tokens, pieces_of
from adlm.constraints.holes import ConstrainedHole, fitted
from adlm.constraints.patterns import byte_automaton
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.sampling import constrained
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

PIECES = {1: b"a", 2: b"b", 3: b"ab"}
PATTERN = "a*b|(ab)*a|bb"
SAMPLERS = ["speculative", "left-to-right", "ancestral", "confidence", "remdm-conf", "remdm-cap", "entropy"]


def hole(row, start, num, pattern=PATTERN, is_open=False, least=0):
    tokens = compile_tokens(byte_automaton(pattern), pieces_of(PIECES), pattern)
    return ConstrainedHole(row, (start,), fitted(tokens, num, EOS if is_open else None, least))


def texts_of(num, is_open, pattern=PATTERN, least=0):
    """What may be in a hole: tokens and, if its length is unknown, eos up to its end."""
    found = []
    for length in range(least, num + 1) if is_open else [num]:
        for x in itertools.product(PIECES, repeat=length):
            if re.fullmatch(pattern, b"".join(map(PIECES.get, x)).decode()):
                found.append((*x, *[EOS] * (num - length)))
    return found


def expected(method, network, before, num, is_open, of_block, least=0):
    """p of every fill, token by token from the left: the beliefs in the masks of a block, given that what they begin
    can be completed. Of draws after an eos, all are allowed."""
    texts, found = texts_of(num, is_open, least=least), {}
    bounds = method._cut(torch.zeros(1, len(before) + num)).bounds

    def recurse(fill, p):
        if fill in texts:
            found[fill] = found.get(fill, 0.0) + p
            return
        row = [*before, *fill]
        stop = next(end for start, end in bounds if start <= len(row) < end) if of_block else len(row) + 1
        z = torch.tensor([[*row, *[MASK] * (stop - len(row))]])
        if of_block:
            beliefs = method.log_beliefs(network, z)[0, len(row) :].exp()
        else:
            logits = network.causal_logits(torch.tensor([[*row, 0]]))[0, -1:]
            beliefs = clean_log_beliefs(logits, MASK).exp()
        weights = {}
        for part in {text[len(fill) : stop - len(before)] for text in texts if text[: len(fill)] == fill}:
            kept = itertools.takewhile(lambda place: EOS not in part[:place], range(len(part)))  # noqa: B023
            weight = math.prod(float(beliefs[place, part[place]]) for place in kept)
            weights[part[0]] = weights.get(part[0], 0.0) + weight
        for token, weight in weights.items():
            after = (*fill, token) if token != EOS else (*fill, *[EOS] * (num - len(fill)))
            recurse(after, p * weight / sum(weights.values()))

    with torch.no_grad():
        recurse((), 1.0)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return found


@pytest.mark.parametrize(
    ("sampler", "block_length", "after", "is_open"),
    mostly_slow(
        [
            (*case, is_open)
            for case in (("speculative", 3, []), ("speculative", 3, [2, 3]), ("left-to-right", 3, []))
            for is_open in (False, True)
        ]
        + [("left-to-right", 2, [2, 3], False), ("left-to-right", 2, [2, 3], True)],
        ("speculative", 3, [2, 3], False),
    ),
)
def test_fills_have_the_distribution_of_the_beliefs_given_the_constraint(sampler, block_length, after, is_open):
    method, network = model(24, block_length)
    num, places, least = 2000 if sampler == "speculative" else 600, 4, 2 * is_open
    mark = HOLE if is_open else MASK
    canvas = torch.tensor([[EOS, 1, *[mark] * places, *after]])
    holes = [hole(row, 2, places, is_open=is_open, least=least) for row in range(num)]
    outline = [EOS, HOLE, EOS, *after, EOS, 1, HOLE] if is_open else [EOS, *[HOLE] * places, *after, EOS, 1, HOLE]
    before = outline if after else [EOS, 1]
    fills = expected(method, network, before, places, is_open, sampler != "speculative", least)
    sampling = Sampling(sampler, steps=100, drafts=2)
    frame = last_frame(
        method.generate(FrozenNetwork(network), canvas.repeat(num, 1), sampling, RowRng(0, range(num)), None, holes)
    )
    assert (frame.ids[:, [0, 1]] == torch.tensor([EOS, 1])).all()
    found = Counter(map(tuple, frame.ids[:, 2 : 2 + places].tolist()))
    assert set(found) <= set(fills)
    chi_square = sum((found[fill] - p * num) ** 2 / max(p * num, 1) for fill, p in fills.items())
    assert chi_square < len(fills) + 5 * math.sqrt(2 * len(fills))
    row_p = frame.chance[:, 2 : 2 + places].double().prod(dim=1)
    of_fills = torch.tensor([fills[tuple(fill)] for fill in frame.ids[:, 2 : 2 + places].tolist()])
    assert torch.allclose(row_p, of_fills.double(), rtol=1e-4), "the chances multiply to the probability of the fill"


@pytest.mark.parametrize("sampler", mostly_slow(SAMPLERS, "speculative", "ancestral"))
def test_cached_equals_recomputed_and_batched_equals_alone(sampler):
    """Rows with and without constraints; the third has the same text in two holes."""
    method, network = model(40)
    canvas = torch.tensor(
        [
            [EOS, 1, HOLE, HOLE, HOLE, HOLE, 2, MASK, 3, HOLE, HOLE, 1],
            [EOS, 1, 2, MASK, MASK, HOLE, HOLE, HOLE, HOLE, HOLE, HOLE, HOLE],
            [EOS, MASK, MASK, MASK, 2, 1, MASK, MASK, MASK, 2, 1, MASK],
            [EOS, 1, HOLE, HOLE, HOLE, HOLE, 2, MASK, 3, HOLE, HOLE, 1],
        ]
    )

    def holes_of(row, at=None):
        at = row if at is None else at
        if row == 0:
            return [hole(at, 2, 4, is_open=True), hole(at, 9, 2, "b|ab", is_open=True)]
        if row == 1:
            return [hole(at, 3, 2, "ab"), hole(at, 5, 7, "(ab)*b?", is_open=True, least=3)]
        both = hole(at, 1, 3)
        return [ConstrainedHole(at, (1, 6), both.automaton)] if row == 2 else []

    frozen, seen = FrozenNetwork(network), set()
    for seed in range(4):
        candidates = 2 if seed % 2 and sampler in ("speculative", "left-to-right", "ancestral") else 1
        sampling, rng = Sampling(sampler, steps=3, drafts=0, candidates=candidates), RowRng(seed, range(4))
        holes = [each for row in range(4) for each in holes_of(row)]
        plain, cached = (
            list(method.generate(each, canvas, sampling, rng[:], None, holes)) for each in (network, frozen)
        )
        assert [frame.ids.tolist() for frame in plain] == [frame.ids.tolist() for frame in cached]
        ids = cached[-1].ids
        assert not (ids == MASK).any()
        assert tuple(ids[0, 2:6].tolist()) in texts_of(4, True)
        assert tuple(ids[0, 9:11].tolist()) in texts_of(2, True, "b|ab")
        assert tuple(ids[1, 3:5].tolist()) in texts_of(2, False, "ab")
        assert tuple(ids[1, 5:].tolist()) in texts_of(7, True, "(ab)*b?", 3)
        assert tuple(ids[2, 1:4].tolist()) in texts_of(3, False)
        assert ids[2, 6:9].tolist() == ids[2, 1:4].tolist()
        for row in (0, 2, 3) if candidates > 1 else range(4):  # without text after a hole there are no candidates
            own = holes_of(row, 0)
            alone = method.generate(frozen, canvas[row : row + 1], sampling, rng[row : row + 1], None, own)
            assert last_frame(alone).ids[0].tolist() == ids[row].tolist()
        seen.add(tuple(ids.flatten().tolist()))
    assert len(seen) > 1


def test_many_candidates_come_closer_to_the_causal_model_given_constraint_and_text():
    """Importance resampling corrects what the constraint does to a token at a time."""
    method, network = model(24)
    num, places, after, pattern = 200, 3, [2, 3], "aab|bba|aba"
    canvas = torch.tensor([[EOS, 1, *[MASK] * places, *after]])
    texts = texts_of(places, False, pattern)
    rows = torch.tensor([[EOS, 1, *text, *after] for text in texts])
    p = (-method.causal_nats(network, rows, None)[:, 2:].sum(dim=1)).double().softmax(dim=0)

    def distance(candidates):
        sampling = Sampling("speculative", drafts=0, candidates=candidates)
        holes = [hole(row, 2, places, pattern) for row in range(num)]
        batch, rng = canvas.repeat(num, 1), RowRng(0, range(num))
        ids = last_frame(method.generate(FrozenNetwork(network), batch, sampling, rng, None, holes)).ids
        found = Counter(map(tuple, ids[:, 2 : 2 + places].tolist()))
        return sum(abs(found[text] / num - float(own)) for text, own in zip(texts, p, strict=True)) / 2

    assert distance(16) < 0.1
    assert distance(1) > 0.6


@pytest.mark.parametrize("sampler", ["speculative", "left-to-right"])
def test_no_sequence_is_written_twice_outside_of_constraints(sampler):
    """Block-causal, a token a call, cached and recomputed; the constraint of the last row goes first."""
    method, network = model(24)
    canvas = torch.tensor([[EOS, 1, *[MASK] * 8]] * 3)
    sampling, rng = Sampling(sampler, steps=100, no_repeat=2), RowRng(0, range(3))
    holes = [hole(2, 2, 8, "(ab)*")]
    plain, cached = (
        list(method.generate(each, canvas, sampling, rng[:], None, holes)) for each in (network, FrozenNetwork(network))
    )
    assert [frame.ids.tolist() for frame in plain] == [frame.ids.tolist() for frame in cached]
    for row in cached[-1].ids[:2].tolist():
        assert len({*itertools.pairwise(row)}) == len(row) - 1
    assert tuple(cached[-1].ids[2, 2:].tolist()) in texts_of(8, False, "(ab)*")


@pytest.fixture(scope="module")
def infilling(tmp_path_factory):
    return adlm.load(infilling_model(tmp_path_factory.mktemp("infilling")))


OWN = ("speculative", "ancestral", "confidence", "left-to-right")


@pytest.mark.parametrize("sampler", OWN)
def test_a_constrained_hole_may_begin_a_text(infilling, sampler):
    """bos stands before it: in a free hole the first mask becomes bos."""
    constraints = {"a": Regex("[a-c]{3}")}
    for text in ("[MASK*3:a] was", "[MASK*3:a]", "[MASK:a]", "[MASK*3:a] x [MASK*3:a]."):
        filled = infilling.fill(text, constraints=constraints, sampler=sampler)
        assert re.fullmatch(re.sub(r"\\\[MASK.*?\\\]", "([a-c]{3})", re.escape(text)), filled), filled
    first, second = re.fullmatch("(.*) x (.*)[.]", infilling.fill("[MASK*3:a] x [MASK*3:a].", sampler=sampler)).groups()
    assert first == second


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("x[MASK*6][MASK*3:a]", {"stop_at_eos": True}),
        ("x[MASK*2:a][MASK*2:b][MASK*2:a]y", {}),
        ("x[MASK:a][MASK*2:b]y", {}),
    ],
)
def test_holes_that_cannot_be_told_apart_are_refused(infilling, text, options):
    constraints = {name: Regex("[a-c]{2,3}") for name in "ab" if f":{name}]" in text}
    with pytest.raises(UserError, match="the hole beside it have no text between them but perhaps a space"):
        infilling.fill(text, constraints=constraints, **options)
    apart = text.replace("][", "] and [")
    filled = infilling.fill(apart, constraints=constraints, **options)
    assert len(re.findall("[a-c]{2,3}", filled.partition("x")[2])) >= len(constraints)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_on_a_gpu_constraints_hold_in_blocks(sampler):
    """With CUDA graphs, class sums on the device and draws by the kernels; open and closed holes, with a nucleus."""
    method, network = model(24)
    canvas = torch.tensor([[EOS, 1, HOLE, HOLE, HOLE, HOLE, 2, 3], [EOS, 1, MASK, MASK, MASK, MASK, 2, 3]]).cuda()
    frozen = FrozenNetwork(network.float().cuda())
    for seed in range(3):
        sampling = Sampling(sampler, steps=8, top_p=0.9 if seed else 1.0)
        holes = [hole(0, 2, 4, is_open=True), hole(1, 2, 4)]
        ids = last_frame(method.generate(frozen, canvas, sampling, RowRng(seed, range(2)), None, holes)).ids.cpu()
        assert tuple(ids[0, 2:6].tolist()) in texts_of(4, True)
        assert tuple(ids[1, 2:6].tolist()) in texts_of(4, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sampler", ["ancestral", "remdm-loop", "remdm-conf", "confidence", "anchor-first"])
def test_on_a_gpu_constraints_hold_on_whole_rows(sampler):
    lm, word = adlm.load(device="cuda"), Regex("[a-z]{3,7}")
    for options in ({}, {"top_p": 0.8}, {"temperature": 0.0}, {"repetition_penalty": 1.3}):
        text = "The [MASK:who] was old, and the [MASK:who] went [MASK*4:where]."
        filled = lm.fill(
            text, sampler=sampler, steps=8, constraints={"who": word, "where": Regex("[a-z ]+")}, **options
        )
        assert re.fullmatch(r"The ([a-z]{3,7}) was old, and the \1 went [a-z ]+\.", filled), filled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "text", ["The [MASK:who] was old, and the [MASK:who] went [MASK*4:where].", "It was [MASK*30:x]."]
)
def test_on_a_gpu_kernels_draw_the_tokens_of_the_plain_form(text, monkeypatch):
    """The head runs on other numbers of rows, and in bf16 that may round a belief the other way."""
    lm, word = adlm.load(device="cuda"), Regex("[a-z]{3,7}")
    constraints = {"who": word, "where": Regex("[a-z ]+")} if "who" in text else {"x": Regex("[a-z]+( [a-z]+)*")}
    options = {"steps": 16, "constraints": constraints, "num": 8}
    ours = lm.fill(text, **options)
    monkeypatch.setattr(constrained, "has_kernels", lambda tensor: False)
    plain = lm.fill(text, **options)
    assert sum(map(str.__eq__, ours, plain)) >= 6, (ours, plain)
