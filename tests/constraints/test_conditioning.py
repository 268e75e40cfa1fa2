"""Conditioned beliefs, by listing all sequences: five tokens and an end token, four places."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from forced_draws import every_outcome
from worlds import seeded

from adlm.constraints import conditioning
from adlm.constraints.automaton import compile_tokens, pieces_of
from adlm.constraints.conditioning import condition, draw_class
from adlm.constraints.holes import fitted
from adlm.constraints.patterns import byte_automaton

PIECES = {0: b"a", 1: b"b", 2: b"ab", 3: b"c", 4: b"ba"}
END, MASK, PLACES = 5, 6, 4
PATTERNS = ["a*b*c?", "(ab|c)+", "[abc]*", "a.*c", "abababab|ccab|cccc"]
KINDS = [{}, {"end_id": END}, {"end_id": END, "least": 2}]


def hole_of(pattern, num_places=PLACES, **kind):
    return fitted(compile_tokens(byte_automaton(pattern), pieces_of(PIECES), pattern), num_places, **kind)


def random_log_beliefs(num, seed=0):
    beliefs = torch.randn(num, MASK, generator=seeded(seed), dtype=torch.float64).mul(2).log_softmax(dim=-1)
    return torch.cat([beliefs, torch.full((num, 1), -torch.inf, dtype=torch.float64)], dim=1)


def accepted(pattern, kind):
    """The raw draws of a hole that are accepted -> its tokens: after an end token anything may be drawn."""
    symbols = [*PIECES, END] if kind else [*PIECES]
    for x in itertools.product(symbols, repeat=PLACES):
        text = [*itertools.takewhile(lambda token: token != END, x)]
        if len(text) >= kind.get("least", 0) and re.fullmatch(pattern, b"".join(map(PIECES.get, text)).decode()):
            yield x, tuple(text + [END] * (PLACES - len(text)))


def listed(pattern, log_beliefs, ids, kind, num_places=PLACES):
    """The weight of every way to fill the first places that some accepted sequence has, given the visible tokens."""
    masked = [place for place, index in enumerate(ids[:num_places]) if index == MASK]
    raw, found = {}, {}
    for x, tokens in accepted(pattern, kind):
        if all(index in (token, MASK) for token, index in zip(tokens[:num_places], ids, strict=False)):
            raw[tuple(x[place] for place in masked), tokens[:num_places]] = True
    for x, tokens in raw:  # the draws at masks decide the tokens there; others are visible
        weight = sum(float(log_beliefs[row, token]) for row, token in enumerate(x))
        found[tokens] = found.get(tokens, 0.0) + math.exp(weight)
    return found


def cases():
    for pattern, kind in itertools.product(PATTERNS, KINDS):
        everything = sorted({tokens for _, tokens in accepted(pattern, kind)})
        x = everything[len(everything) // 2]  # some of its tokens are visible
        for hidden in ((0, 1, 2, 3), (1, 2), (0, 3), (2,)):
            yield pattern, kind, tuple(MASK if place in hidden else token for place, token in enumerate(x))


@pytest.mark.parametrize(("pattern", "kind", "ids"), [*cases()])
def test_mass_marginals_and_likeliest_sequence_are_those_of_the_list(pattern, kind, ids):
    log_beliefs, masked = random_log_beliefs(ids.count(MASK)), [p for p in range(PLACES) if ids[p] == MASK]
    weights = listed(pattern, log_beliefs, ids, kind)
    given = condition(log_beliefs, hole_of(pattern, **kind), torch.tensor(ids), MASK)
    mass = sum(weights.values())
    assert abs(given.log_mass - math.log(mass)) < 1e-12
    marginals = torch.zeros(len(masked), MASK + 1, dtype=torch.float64)
    for x, weight in weights.items():
        marginals[range(len(masked)), [x[place] for place in masked]] += weight / mass
    assert torch.allclose(given.log_marginals.exp(), marginals, rtol=0, atol=1e-12)
    if not kind:
        assert given.likeliest.tolist() == [max(weights, key=weights.get)[place] for place in masked]
        assert torch.allclose(given.log_marginals_of_text.exp(), marginals, rtol=0, atol=1e-12)


def drawn(given, revealed, monkeypatch):
    """The distribution of the revealed tokens, and that their chances say. Every choice is forced in turn."""
    where = torch.tensor([place in revealed for place in given.masked.tolist()])

    def draw(choose):
        monkeypatch.setattr(conditioning, "draw_class", lambda weights, uniform: (choose(weights), 0.5))
        in_class = lambda weights, uniforms: torch.tensor([choose(row) for row in weights])  # noqa: E731
        return given.draw(where, torch.zeros(len(revealed)), in_class)

    found, chances = {}, {}
    for (tokens, own), chance in every_outcome(draw):
        key = tuple(tokens.tolist())
        found[key] = found.get(key, 0.0) + chance
        chances[key] = chances.get(key, 0.0) + float(own.prod())
    return found, chances


@pytest.mark.parametrize("revealed", [(0, 1, 2, 3), (0, 2), (1, 3), (2,)])
@pytest.mark.parametrize(("pattern", "kind"), [("(ab|c)+", KINDS[0]), ("a*b*c?", KINDS[1]), ("[ab]*c*", KINDS[2])])
def test_revealed_tokens_are_drawn_from_their_joint_marginal(pattern, kind, revealed, monkeypatch):
    log_beliefs, ids = random_log_beliefs(PLACES), (MASK,) * PLACES
    weights, expected = listed(pattern, log_beliefs, ids, kind), {}
    for x, weight in weights.items():
        part = tuple(x[place] for place in revealed)
        expected[part] = expected.get(part, 0.0) + weight / sum(weights.values())
    given = condition(log_beliefs, hole_of(pattern, **kind), torch.tensor(ids), MASK)
    found, chances = drawn(given, revealed, monkeypatch)
    assert found == pytest.approx(expected, abs=1e-12)
    assert chances == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_first_places_of_a_hole_are_those_that_some_continuation_completes(num, kind, monkeypatch):
    """As in text written block by block: what comes later has no weight, it only has to be possible."""
    pattern, log_beliefs, ids = "ab*c|cab|(ab|ba)*b", random_log_beliefs(num), torch.tensor([MASK] * num)
    weights = listed(pattern, log_beliefs, ids.tolist(), kind, num)
    given = condition(log_beliefs, hole_of(pattern, **kind), ids, MASK)
    assert given.log_mass == pytest.approx(math.log(sum(weights.values())), abs=1e-12)
    found, _ = drawn(given, tuple(range(num)), monkeypatch)
    assert found == pytest.approx({x: w / sum(weights.values()) for x, w in weights.items()}, abs=1e-12)


def test_beliefs_that_underflow_as_products_are_conditioned_all_the_same():
    log_beliefs = random_log_beliefs(PLACES)
    log_beliefs[:, 3] -= 5000.0
    given = condition(log_beliefs, hole_of("cccc"), torch.tensor([MASK] * PLACES), MASK)
    assert given.log_mass == pytest.approx(float(log_beliefs[:, 3].sum()), rel=1e-12)
    assert given.likeliest.tolist() == [3, 3, 3, 3]
    everywhere = torch.ones(PLACES, dtype=torch.bool)
    tokens, chance = given.draw(everywhere, torch.zeros(PLACES), lambda weights, uniforms: weights.argmax(dim=1))
    assert (tokens.tolist(), chance.tolist()) == ([3] * 4, [1.0] * 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masses_by_products_are_those_by_logarithms(pattern, kind):
    hole = hole_of(pattern, **kind)
    edges, last = [hole.edges(place) for place in range(PLACES)], np.where(hole.alive[-1], 0.0, -np.inf)
    class_beliefs = np.random.default_rng(0).normal(0, 30, (PLACES, hole.num_classes))
    class_beliefs[1, 1:] = -np.inf
    expected = conditioning.plain_log_masses(edges, class_beliefs, last)
    found = conditioning.log_masses(edges, class_beliefs, last)
    assert found is None or found == pytest.approx(expected, rel=1e-13)
    assert (found is None) == np.isneginf(expected).all(axis=1).any()
    if hole.num_classes > 1:
        assert conditioning.log_masses(edges, class_beliefs * 100, last) is None


@pytest.mark.parametrize("seldom", [(-2000.0, 0.0), (-500.0, -500.0)], ids=["at one place", "at two places"])
def test_a_state_whose_mass_is_too_small_for_a_double_is_not_lost(seldom):
    """Nine places each of which is e^-100 of the most: e^-900 for all of them, and the other text is less likely."""
    places = 11
    hole = hole_of("c*|bb" + "a" * (places - 2), places)
    log_beliefs = torch.full((places, MASK + 1), -torch.inf, dtype=torch.float64)
    log_beliefs[2:, 0], log_beliefs[:2, 1], log_beliefs[:, 3] = -100.0, 0.0, 0.0
    log_beliefs[:2, 3] = torch.tensor(seldom)
    given = condition(log_beliefs, hole, torch.tensor([MASK] * places), MASK)
    assert given.log_mass == pytest.approx(-900.0)
    marginals = given.log_marginals
    assert marginals[:2, 1] == pytest.approx(0.0, abs=1e-12)
    assert marginals[2:, 0] == pytest.approx(0.0, abs=1e-12)


def test_without_a_constraint_the_beliefs_are_the_marginals():
    log_beliefs = random_log_beliefs(PLACES)[:, :END].log_softmax(dim=-1)
    given = condition(log_beliefs, hole_of("[abc]*"), torch.tensor([MASK] * PLACES), MASK)
    assert torch.allclose(given.log_marginals, log_beliefs, rtol=0, atol=1e-12)
    assert abs(given.log_mass) < 1e-12


def test_a_class_is_drawn_with_its_probability_and_what_is_left_is_uniform():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0], dtype=torch.float64).numpy()
    found = {}
    for number in range(800):
        index, left = draw_class(weights, (number + 0.5) / 800)
        found.setdefault(index, []).append(left)
    assert {index: len(left) for index, left in found.items()} == {1: 300, 3: 100, 4: 400}
    for left in found.values():
        assert left == pytest.approx([(number + 0.5) / len(left) for number in range(len(left))])
    assert draw_class(weights, 1 - 2**-53)[0] == 4


def test_sums_of_classes_are_the_same_on_other_devices(monkeypatch):
    """The form for a GPU, on a CPU."""
    log_beliefs, hole = random_log_beliefs(3), hole_of("a*b*c?", end_id=END)
    log_beliefs[1, 2] = -500.0  # added up in another way
    expected = conditioning.class_sums(hole, log_beliefs)
    assert expected == pytest.approx(conditioning.scattered_class_sums(hole, log_beliefs), abs=1e-12)
    assert expected.min() < -400
