"""Constrained holes of causal models, AR and A2R: distributions by enumeration, caches, batches, holes that end."""

import itertools
import math
import re
from collections import Counter

import pytest
import torch
from small_models import mostly_slow, small_model
from worlds import randomized

import adlm
from adlm import Choices, Regex
from adlm.config.schema import Config, Model, Sampling, Vocabulary
from adlm.constraints.automaton import compile_tokens, pieces_of
from adlm.constraints.holes import ConstrainedHole, fitted
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

EOS, MASK = 0, 4
PIECES = {1: b"a", 2: b"b", 3: b"ab"}
PATTERN = "a*b|(ab)*a|bb"


def model(name):
    config = Config(
        method=name,
        vocabulary=Vocabulary(size=5, mask_id=MASK, bos_id=EOS, eos_id=EOS),
        length=12,
        model=Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0),
    )
    method = method_of(config)
    return method, randomized(method.build()).double().eval()


def hole(row, start, num, pattern=PATTERN, is_open=False, least=0):
    tokens = compile_tokens(byte_automaton(pattern), pieces_of(PIECES), pattern)
    return ConstrainedHole(row, (start,), fitted(tokens, num, EOS if is_open else None, least))


def texts_of(num, is_open, least=0):
    """What may be in a hole of PATTERN: tokens and, if its length is unknown, eos up to its end."""
    return [
        (*x, *[EOS] * (num - length))
        for length in (range(least, num + 1) if is_open else [num])
        for x in itertools.product(PIECES, repeat=length)
        if re.fullmatch(PATTERN, b"".join(map(PIECES.get, x)).decode())
    ]


@torch.no_grad()
def expected(method, network, before, num, is_open, least):
    """p of every fill: each token has its belief, given that the tokens so far can be completed."""
    texts, found = texts_of(num, is_open, least), {}

    def recurse(fill, p):
        if len(fill) == num:
            found[fill] = p
            return
        beliefs = method.log_beliefs(network, torch.tensor([[*before, *fill]]))[0, -1].exp()
        allowed = {text[len(fill)] for text in texts if text[: len(fill)] == fill}
        for token in allowed:
            recurse((*fill, token), p * float(beliefs[token] / sum(beliefs[each] for each in allowed)))

    recurse((), 1.0)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return found


@pytest.mark.parametrize(
    ("name", "is_open"),
    mostly_slow([("ar", False), ("ar", True), ("a2r", False), ("a2r", True)], ("ar", True)),
)
def test_each_token_has_its_belief_given_what_can_still_be_written(name, is_open):
    method, network = model(name)
    num, places, least = 2000, 4, 2 * is_open
    fills = expected(method, network, [EOS, 1], places, is_open, least)
    canvas = torch.tensor([[EOS, 1, *[MASK] * places]])
    holes = [hole(row, 2, places, is_open=is_open, least=least) for row in range(num)]
    run = canvas.repeat(num, 1), Sampling(sampler="ancestral"), RowRng(0, range(num)), None, holes
    frame = last_frame(method.generate(FrozenNetwork(network), *run))
    found = Counter(map(tuple, frame.ids[:, 2:].tolist()))
    assert set(found) <= set(fills)
    chi_square = sum((found[fill] - p * num) ** 2 / max(p * num, 1) for fill, p in fills.items())
    assert chi_square < len(fills) + 5 * math.sqrt(2 * len(fills))
    of_fills = torch.tensor([fills[tuple(fill)] for fill in frame.ids[:, 2:].tolist()])
    torch.testing.assert_close(frame.chance[:, 2:].double().prod(dim=1), of_fills.double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", mostly_slow([{}, {"temperature": 0}, {"top_k": 1}, {"no_repeat": 1}], {}), ids=str)
def test_cached_equals_recomputed_and_batched_equals_alone(options):
    """Prompts of different length, holes beside each other, one that ends, and a row without a constraint."""
    method, network = model("ar")
    canvas = torch.tensor(
        [[EOS, 1, MASK, MASK, MASK, MASK], [EOS, 1, 2, 1, MASK, MASK], [EOS, 3, MASK, MASK, MASK, MASK]]
    )
    holes = [hole(0, 2, 4, is_open=True), hole(1, 4, 1, "b"), hole(1, 5, 1, "a|b")]
    sampling = Sampling(sampler="ancestral", **options)
    for seed in range(8):
        rng = RowRng(seed, range(3))
        plain, cached = (
            last_frame(method.generate(each, canvas, sampling, rng[:], None, holes)).ids
            for each in (network, FrozenNetwork(network))
        )
        assert torch.equal(plain, cached)
        assert tuple(cached[0, 2:].tolist()) in texts_of(4, True)
        assert (cached[1, 4] == 2, cached[1, 5] in (1, 2)) == (True, True)
        for row in range(3):
            own = [ConstrainedHole(0, each.starts, each.automaton) for each in holes if each.row == row]
            alone = method.generate(
                FrozenNetwork(network), canvas[row : row + 1], sampling, rng[row : row + 1], None, own
            )
            assert torch.equal(last_frame(alone).ids[0], cached[row])


def test_texts_and_their_open_holes(tmp_path):
    lm = adlm.load(small_model(tmp_path / "ar", "ar", length=40))
    day = Regex("[0-9]{4}-[0-9]{2}")
    assert {len(text) for text in lm.fill(["It was on [MASK:day]"] * 8, constraints={"day": day})} == {17}
    animals = Choices(["cat", "horse"])
    for text in lm.fill("A [MASK*..9:animal]", num=8, constraints={"animal": animals}):
        assert text in ("A cat", "A horse")
    assert lm.fill("[MASK:animal]", constraints={"animal": animals}) in animals.texts
    for text, message in {
        "A [MASK:animal] ran": "writes from left to right without looking ahead",
        "A [MASK*3:animal][MASK*3:animal]": "have no text between them",
        "A [MASK*2:animal]": "the constraint of hole animal cannot be satisfied with 2 tokens; it can have 3 or 5",
        "A [MASK*..9:animal][MASK*]": "[MASK*] is a hole of unknown length, which needs a name and a constraint",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            lm.fill(text, constraints={"animal": animals})
