"""Given tokens, such as prompts: never masked, never predicted; the bound of the others is conditional on them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from adlm.config.schema import Anchor, Config, Model, Schedule, Time, Train, Vocabulary
from adlm.diffusion.times import BatchRng
from adlm.likelihood.estimators import ESTIMATORS
from adlm.methods import method_of

MASK, BOS, LENGTH = 3, 0, 5
BLOCKS = {"mdlm": 0, "adlm": 0, "mdlm of blocks": 2, "adlm of blocks": 3}
ALL = {**BLOCKS, "sedd": 0, "d3pm": 0, "ar": 0, "a2r": 0}
GIVEN = torch.tensor([[True, True, False, True, False], [True, False, False, False, True]])
"""An answer, a given token and another answer; and an answer with a given token after it."""


def config_of(name: str, length: int = LENGTH, **options) -> Config:
    """Three words, the first of which begins every row."""
    method, *of_blocks = name.split(" of ")
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0, start="neighbours")
    if of_blocks:
        model = replace(model, block_length=BLOCKS[name])
    needed = {
        "sedd": {"schedule": Schedule(eps=1e-3)},
        "d3pm": {"schedule": Schedule(eps=1e-3), "time": Time(steps=4)},
    }
    return Config(
        method=method,
        vocabulary=Vocabulary(size=4, mask_id=MASK, bos_id=BOS, eos_id=BOS),
        length=length,
        model=model,
        **{**needed.get(method, {}), **options},
    )


def built(config: Config):
    torch.manual_seed(0)
    method = method_of(config)
    network = method.build().double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return method, network


def seeded(seed: int = 0) -> BatchRng:
    return BatchRng(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ALL)
def test_given_tokens_are_not_predicted(name):
    method = method_of(config_of(name))
    x = torch.randint(3, (2, LENGTH))
    pad = torch.tensor([[False] * 5, [False, False, False, True, True]])
    expected = ~GIVEN & ~pad
    assert torch.equal(method.predicted(x, pad, GIVEN), expected)


NOISES = {
    "independent": Time(),
    "counted": Time(masks="counted"),
    "power": Time(power=2.0),
    "one": Time(weight="one"),
    "discrete": Time(steps=3),
}


@pytest.mark.parametrize("time", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("name", BLOCKS)
def test_given_tokens_are_never_masked_and_others_are(name, time):
    method = method_of(config_of(name, length=9, time=time, train=Train(random_blocks=True)))
    generator = torch.Generator().manual_seed(3)
    x, given = torch.randint(3, (1000, 9), generator=generator), torch.rand(1000, 9, generator=generator) < 0.6
    given[:, 0], given[:, 8] = True, False
    pad = torch.zeros(1000, 9, dtype=torch.bool)
    pad[::2, 7] = True
    bound = method.noise_for_bound(x, pad, seeded(), given)
    for noised in (
        method.noise(x, pad, seeded(), 0.0, given),
        method.counted_noise(x, pad, seeded(), given),
        bound.noised,
    ):
        masked = noised.z == MASK
        assert not masked[given].any()
        assert torch.equal(noised.z[given], x[given])
        assert 0.2 < masked[~given & ~pad].double().mean() < 0.95
        assert noised.t.isfinite().all()


def test_the_loss_of_ar_is_the_sum_over_answer_tokens():
    method, network = built(config_of("ar"))
    x = torch.randint(3, (2, LENGTH))
    log_p = network(x)[..., :3].log_softmax(dim=-1)
    by_hand = -sum(log_p[row, place - 1, x[row, place]] for row, place in (~GIVEN).nonzero().tolist())
    loss = method.loss(network, x, None, 1.0, seeded(), GIVEN)
    assert float(loss.total.detach()) == pytest.approx(float(by_hand.detach()), abs=1e-5)
    assert float(loss.nats.sum()) == pytest.approx(float(by_hand.detach()), abs=1e-5)
    assert loss.num_tokens == 5


@pytest.mark.parametrize("name", BLOCKS)
def test_the_loss_of_masked_diffusion_is_the_weighted_sum_over_masked_answer_tokens(name):
    """-log p / t at the masks, which are in answers alone; blocks read clean text before them."""
    method, network = built(config_of(name, anchor=Anchor(gamma=0.0)))
    x = torch.randint(3, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    total = 0.0
    for seed in range(8):
        noised = method.noise(x, None, seeded(seed), method.config.time.t_min, GIVEN)
        by_hand = torch.zeros(2, LENGTH, dtype=torch.float64)
        for row, place in (noised.z == MASK).nonzero().tolist():
            assert not GIVEN[row, place]
            start, stop = block_of(name, place)
            z = torch.cat([x[row, :start], noised.z[row, start:stop]])[None]
            t = noised.t[row] if noised.t.ndim == 1 else noised.t[row, place]
            by_hand[row, place] = -method.log_beliefs(network, z)[0, place, x[row, place]] / t
        loss = method.loss(network, x, None, 1.0, seeded(seed), GIVEN)
        torch.testing.assert_close(loss.nats.double(), by_hand, atol=1e-4, rtol=1e-5)
        assert float(loss.total.detach()) == pytest.approx(float(by_hand.sum()), rel=1e-5, abs=1e-5)
        assert loss.num_tokens == 5
        total += float(loss.total.detach())
    assert total > 1


def block_of(name: str, place: int) -> tuple[int, int]:
    """The first token of the block of a place and the token after it; of whole rows, the row."""
    if not BLOCKS[name]:
        return 0, LENGTH
    start = 1 + (place - 1) // BLOCKS[name] * BLOCKS[name]
    return start, min(start + BLOCKS[name], LENGTH)


@pytest.mark.parametrize("given", [GIVEN[0], pytest.param(GIVEN[1], marks=pytest.mark.slow)], ids=["two", "one"])
@pytest.mark.parametrize("name", [*BLOCKS, "ar"])
def test_the_bound_is_one_on_the_answers_given_the_prompt(name, given):
    """The answers to one prompt have probabilities that sum to 1, and the bound is the mean over orders of -log p."""
    method, network = built(config_of(name))
    answers = (~given).nonzero()[:, 0].tolist()
    x = torch.tensor([[BOS, 1, 2, 1, 2]]).repeat(3 ** len(answers), 1)
    x[:, answers] = torch.tensor(list(itertools.product(range(3), repeat=len(answers))))
    is_given = given.expand(len(x), -1)
    log_p, bound = torch.zeros(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)
    blocks = [[place] for place in answers]
    if name != "ar":
        grouped = itertools.groupby(answers, key=lambda place: block_of(name, place))
        blocks = [list(places) for _, places in grouped]
    for places in blocks:
        stop = places[0] + 1 if name == "ar" else block_of(name, places[0])[1]
        by_order = []
        for order in itertools.permutations(places):
            z, chain = x.clone(), torch.zeros(len(x), dtype=torch.float64)
            z[:, places] = MASK
            for place in order:
                at = place - 1 if name == "ar" else place  # which predicts the token after it
                beliefs = method.log_beliefs(network, z[:, :stop])[:, at]
                chain += beliefs.gather(1, x[:, place, None])[:, 0]
                z[:, place] = x[:, place]
            by_order.append(chain)
        chains = torch.stack(by_order)
        bound -= chains.mean(dim=0)
        log_p += chains.logsumexp(dim=0) - math.log(len(by_order))
    assert log_p.exp().sum() == pytest.approx(1, abs=1e-9)
    assert (bound >= -log_p - 1e-9).all()
    num = 1 if name == "ar" else 400
    for estimator in ("nelbo",) if name == "ar" else ("nelbo", "any-order"):
        nats = ESTIMATORS[estimator](method)(network, x.repeat(num, 1), None, seeded(1), is_given.repeat(num, 1))
        assert (nats[is_given.repeat(num, 1)] == 0).all()
        by_row = nats.sum(dim=1).double().view(num, -1)
        error = by_row.std(dim=0) / math.sqrt(num) if num > 1 else torch.zeros(len(x))
        assert ((by_row.mean(dim=0) - bound).abs() < 5 * error + 1e-5).all(), estimator


@pytest.mark.parametrize("estimator", ["left-to-right", "causal", "published"])
def test_other_estimators_leave_given_tokens_out(estimator):
    method, network = built(config_of("mdlm of blocks"))
    x = torch.randint(3, (2, LENGTH))
    nats = ESTIMATORS[estimator](method)(network, x, None, seeded(2), GIVEN)
    assert (nats[GIVEN] == 0).all()
    if estimator != "published":
        assert (nats[~GIVEN] > 0).all()


def test_anchors_and_the_next_token_term_are_of_answers_alone():
    anchor = Anchor(gamma=0.5, rule="all", warm_up=False)
    config = config_of("adlm of blocks", anchor=anchor, train=Train(causal_weight=1.0))
    method, network = built(config)
    x = torch.randint(3, (2, LENGTH))
    loss = method.loss(network, x, None, 1.0, seeded(), GIVEN)
    assert loss.parts["anchor_share"] == loss.num_tokens == 5
    causal = ESTIMATORS["causal"](method)(network, x, None, seeded(), GIVEN)
    assert float(loss.parts["causal"]) == pytest.approx(float(causal.sum()), abs=1e-5)
    anchored = built(config_of("a2r", anchor=anchor))
    assert anchored[0].loss(anchored[1], x, None, 1.0, seeded(), GIVEN).parts["anchor_share"] == 5


@pytest.mark.parametrize("name", ["sedd", "d3pm"])
def test_sedd_and_d3pm_have_no_loss_at_given_tokens(name):
    method, network = built(config_of(name))
    x = torch.randint(3, (2, LENGTH))
    for seed in range(5):
        loss = method.loss(network, x, None, 1.0, seeded(seed), GIVEN)
        assert (loss.nats[GIVEN] == 0).all()
        assert float(loss.total.detach()) == pytest.approx(float(loss.nats.sum()), rel=1e-5)
