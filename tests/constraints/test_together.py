"""The kernels that draw many holes together, against each hole alone in the plain form.

On a GPU, or with TRITON_INTERPRET=1 (and Triton installed) on a CPU.
"""

import os

import pytest
import torch
from worlds import seeded

from adlm.constraints import together
from adlm.constraints.automaton import compile_tokens, pieces_of
from adlm.constraints.conditioning import condition
from adlm.constraints.holes import fitted
from adlm.constraints.patterns import byte_automaton
from adlm.constraints.together import draw_together, fits
from adlm.sampling.rng import plain_categorical

PIECES = {0: b"a", 1: b"b", 2: b"ab", 3: b"c", 4: b"ba"}
END, MASK, PLACES = 5, 6, 4
interprets = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, which interprets the kernels on a CPU
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not interprets, reason="no CUDA device"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that classes go on in the next block, and because interpreted blocks take time."""
    together.tables_of.cache_clear()
    for name, size in (("WIDTH", 2), ("ROWS", 2), ("BLOCK", 2)):
        monkeypatch.setattr(together, name, size)
    yield
    together.tables_of.cache_clear()


def hole_of(pattern, num_places=PLACES, **kind):
    return fitted(compile_tokens(byte_automaton(pattern), pieces_of(PIECES), pattern), num_places, **kind)


def beliefs_of(num, scale, generator):
    log_beliefs = torch.randn(num, MASK + 1, generator=generator).mul(scale)
    log_beliefs[:, MASK] = -torch.inf
    return log_beliefs.log_softmax(dim=-1)


@pytest.mark.parametrize("num_places", [PLACES, 3])
@pytest.mark.parametrize("scale", [2.0, 300.0])
@pytest.mark.parametrize("kind", [{}, {"end_id": END}, {"end_id": END, "least": 2}])
@pytest.mark.parametrize("pattern", ["a*b*c?", "(ab|c)+", "[abc]*", "a.*c", "abababab|ccab|cccc"])
def test_holes_drawn_together_have_the_tokens_that_each_draws_alone(pattern, kind, scale, num_places):
    """Texts are drawn in two calls, so in the second some tokens are visible; 300: masses below a double's range."""
    hole, generator = hole_of(pattern, **kind), seeded(0)
    assert fits(hole)
    ids = torch.full((6, num_places), MASK)
    for call in range(2):
        masked = ids == MASK
        log_beliefs = beliefs_of(int(masked.sum()), scale, generator)
        to_draw = masked & (torch.rand(ids.shape, generator=generator) < 0.5 + call)
        to_draw[0] = masked[0] if call else False
        uniforms = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        slots = torch.where(masked, masked.flatten().cumsum(0).view(ids.shape) - 1, -1)
        where = to_draw.flatten().nonzero()[:, 0]
        last = torch.where(to_draw, torch.arange(num_places), -1).amax(dim=1)
        uniform_of = torch.where(to_draw, torch.arange(ids.numel()).view(ids.shape), -1)
        inputs = (torch.where(masked, 0, ids), slots, uniforms, uniform_of, where, last)
        tokens, chance = draw_together(log_beliefs.to(DEVICE), hole, *(each.to(DEVICE) for each in inputs))
        expected, chances = ids.clone(), torch.ones(ids.shape, dtype=torch.float64)
        for row, own in enumerate(ids):
            if masked[row].any():
                given = condition(log_beliefs[slots[row][masked[row]]], hole, own, MASK)
                drawn, p = given.draw(to_draw[row][masked[row]], uniforms[row][to_draw[row]], plain_categorical)
                expected[row, to_draw[row]], chances[row, to_draw[row]] = drawn, p.double()
        tokens = torch.where(masked & ~to_draw, MASK, tokens.cpu())
        assert tokens.tolist() == expected.tolist()
        torch.testing.assert_close(chance.cpu(), chances, rtol=1e-5, atol=0)
        ids = tokens
    assert (ids != MASK).all()


def test_a_hole_has_the_same_bits_whatever_is_drawn_beside_it():
    hole, generator, num = hole_of("[abc]*"), seeded(1), 5
    log_beliefs = beliefs_of(num * PLACES, 2.0, generator).to(DEVICE)
    uniforms = torch.rand(num, PLACES, generator=generator, dtype=torch.float64).to(DEVICE)
    slots = torch.arange(num * PLACES, device=DEVICE).view(num, PLACES)
    ids, places = torch.zeros_like(slots), torch.arange(PLACES, device=DEVICE)
    where, last = torch.arange(num * PLACES, device=DEVICE), torch.full((num,), PLACES - 1, device=DEVICE)
    tokens, chance = draw_together(log_beliefs, hole, ids, slots, uniforms, slots, where, last)
    for row in range(num):
        own = log_beliefs[slots[row]], hole, ids[:1], slots[:1], uniforms[row], slots[:1], places, last[:1]
        alone, chance_alone = draw_together(*own)
        assert alone[0].tolist() == tokens[row].tolist()
        assert chance_alone[0].tolist() == chance[row].tolist()


def test_automata_with_more_transitions_than_a_program_holds_are_left_to_the_plain_form(monkeypatch):
    assert fits(hole_of("[abc]*"))
    monkeypatch.setattr(together, "MAX_EDGES", 0)
    assert not fits(hole_of("[abc]*"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_beliefs_that_are_not_finite_give_chances_that_are_not(value):
    hole, slots, one = hole_of("[abc]*"), torch.arange(PLACES, device=DEVICE)[None], torch.tensor([PLACES - 1])
    log_beliefs = torch.full((PLACES, MASK + 1), value, device=DEVICE)
    uniforms = torch.full((PLACES,), 0.5, dtype=torch.float64, device=DEVICE)
    inputs = torch.zeros_like(slots), slots, uniforms, slots, slots[0], one.to(DEVICE)
    _, chance = draw_together(log_beliefs, hole, *inputs)
    assert not chance.isfinite().any()


def test_what_follows_an_end_has_no_segment_to_read(monkeypatch):
    """The segments of all classes fill the last program: there is none behind them."""
    monkeypatch.setattr(together, "ROWS", 1)
    hole = hole_of("a*b*c?", end_id=END)
    tables = together.tables_of(hole, MASK + 1, torch.device(DEVICE))
    assert tables.starts[hole.end_class + 1] == len(tables.columns)
    slots, uniforms = torch.arange(PLACES, device=DEVICE)[None], torch.full((PLACES,), 0.5, dtype=torch.float64)
    log_beliefs = torch.full((PLACES, MASK + 1), -50.0)
    log_beliefs[:, END] = 0.0
    inputs = torch.zeros_like(slots), slots, uniforms.to(DEVICE), slots, slots[0], torch.tensor([3], device=DEVICE)
    tokens, chance = draw_together(log_beliefs.to(DEVICE), hole, *inputs)
    assert tokens.tolist() == [[END] * PLACES]
    assert chance.isfinite().all()
