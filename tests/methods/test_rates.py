"""Tests of models with an order of their own: bound and sampler by enumeration, the reduction to masked diffusion.

Three tokens of two words, so that all orders and all texts can be enumerated.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from worlds import batch_rng, randomized

from adlm.config.schema import Config, Model, Rates, Sampling, Time, Vocabulary
from adlm.diffusion.masking import draw_order, mask_first
from adlm.diffusion.objectives import log_order_chance, log_reveal_chances
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.estimators import any_order, default_estimator, nelbo
from adlm.methods import method_of
from adlm.methods.masked_diffusion import DrawnOrder, NoisedBatch
from adlm.sampling.frame import NoisyRows, last_frame
from adlm.sampling.rng import RowRng

MASK, LENGTH = 2, 3
TEXTS = torch.tensor(list(itertools.product(range(2), repeat=LENGTH)))
RULES = ("position", "tokens", "text")
SUBSETS = [set(each) for size in range(LENGTH, 0, -1) for each in itertools.combinations(range(LENGTH), size)]


def tiny(method: str = "mdlm", rule: str = "text", **model) -> Config:
    sizes = {"hidden": 16, "heads": 2, "blocks": 1, "denoiser_blocks": 1, "condition": 8, "dropout": 0.0} | model
    return Config(
        method=method,
        vocabulary=Vocabulary(size=3, mask_id=MASK),
        length=LENGTH,
        model=Model(**sizes, bridge="hidden"),
        rates=Rates(rule=rule),
        time=Time(masks="counted"),
    )


def built(config: Config, seed: int = 0):
    """The method and its network in float64, with random weights everywhere; its tokens differ much."""
    method = method_of(config)
    network = randomized(method.build().double().eval(), seed)
    with torch.no_grad():
        network.embedding.weight.mul_(100.0)
    return method, network


def masked_with(x, masked):
    z = x.clone()
    z[..., sorted(masked)] = MASK
    return z


def chances(log_rates, masked):
    """Of each token, that it is the next to be revealed."""
    where = torch.tensor([position in masked for position in range(LENGTH)])
    return log_reveal_chances(log_rates[None], where[None])[0].exp() * where


@torch.no_grad()
def exact_nats(method, network, x, steps=LENGTH):
    """-log p(x) of the sampler, a sum over all orders."""
    share = {frozenset(range(LENGTH)): 1.0}
    for size in range(LENGTH, 0, -LENGTH // steps):
        for masked in [set(each) for each in share if len(each) == size]:
            z = masked_with(x[None], masked)
            beliefs = method.log_beliefs(network, z)[0].exp().gather(-1, x[:, None])[:, 0]
            log_rates = network.log_rates(z)[0]
            for revealed in itertools.permutations(sorted(masked), min(LENGTH // steps, size)):
                left, chance = set(masked), share[frozenset(masked)]
                for position in revealed:
                    chance = chance * chances(log_rates, left)[position] * beliefs[position]
                    left.remove(position)
                share[frozenset(left)] = share.get(frozenset(left), 0.0) + chance
    return -torch.as_tensor(share[frozenset()]).log()


def exact_bound(method, network, x):
    """The expectation of the bound over all orders, drawn by the rates of the text; with a gradient."""
    text_rates, total = network.text_rates(x[None]).log_rates[0], torch.zeros((), dtype=torch.float64)
    share = {frozenset(SUBSETS[0]): 1.0}
    for masked in SUBSETS:
        z = masked_with(x[None], masked)
        logits = network(z)[0].index_fill(-1, torch.tensor(MASK), -torch.inf)
        log_beliefs = logits.log_softmax(dim=-1).gather(-1, x[:, None])[:, 0]
        drawn, predicted = chances(text_rates, masked), chances(network.log_rates(z)[0], masked)
        for position in masked:
            gap = drawn[position].log() - predicted[position].log() - log_beliefs[position]
            total = total + share[frozenset(masked)] * drawn[position] * gap
            left = frozenset(masked - {position})
            share[left] = share.get(left, 0.0) + share[frozenset(masked)] * drawn[position]
    return total


@pytest.mark.parametrize("method", mostly_slow(["mdlm", "adlm"], "adlm"))
@pytest.mark.parametrize("rule", RULES)
def test_the_bound_is_a_bound_on_the_likelihood_of_the_sampler(method, rule):
    method, network = built(tiny(method, rule))
    nats = torch.stack([exact_nats(method, network, x) for x in TEXTS])
    torch.testing.assert_close((-nats).exp().sum(), torch.ones((), dtype=torch.float64), atol=1e-12, rtol=0)
    gaps = torch.stack([exact_bound(method, network, x).detach() for x in TEXTS]) - nats
    assert gaps.min() > 0
    assert gaps.max() < 10


def test_the_bound_is_tight_if_the_order_says_nothing():
    method = method_of(tiny())
    network = method.build().double()
    assert exact_bound(method, network, TEXTS[3]).item() == pytest.approx(float(exact_nats(method, network, TEXTS[3])))


@pytest.mark.parametrize("method", mostly_slow(["mdlm", "adlm"], "adlm"))
@pytest.mark.parametrize("rule", RULES)
def test_estimates_have_the_bound_as_their_expectation(method, rule):
    method, network = built(tiny(method, rule))
    x = TEXTS[5].repeat(6000, 1)
    expected = exact_bound(method, network, TEXTS[5]).detach()
    nats = nelbo(method)(network, x, None, batch_rng()).sum(dim=1)
    assert abs(nats.mean() - expected) < 4 * nats.std() / len(nats) ** 0.5
    powered = method_of(replace(method.config, time=Time(masks="counted", power=2.0)))
    nats = powered.loss(network, x, None, 1.0, batch_rng()).nats.sum(dim=1)
    assert abs(nats.mean() - expected) < 4 * nats.std() / len(nats) ** 0.5


@pytest.mark.parametrize("name", ["mdlm", "adlm"])
def test_equal_rates_have_the_loss_of_masked_diffusion(name):
    config = tiny(name, "tokens")
    method, network = built(config)
    with torch.no_grad():
        for weight in (network.rates.table, network.rates.masks.weight, network.rates.masks.bias):
            weight.fill_(0.0)
    plain = method_of(replace(config, rates=Rates()))
    plain_network = plain.build().double().eval()
    plain_network.load_state_dict({k: v for k, v in network.state_dict().items() if not k.startswith("rates.")})
    z = torch.tensor([[MASK, 1, MASK], [MASK, MASK, MASK], [0, MASK, 1]])
    x, t = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 1]]), torch.tensor([2 / 3, 1, 1 / 3], dtype=torch.float64)
    ours = method.loss_at(network, x, NoisedBatch(z, t, order=DrawnOrder(network.text_rates(x).log_rates, None, None)))
    theirs = plain.loss_at(plain_network, x, NoisedBatch(z, t))
    torch.testing.assert_close(ours.nats, theirs.nats, atol=1e-12, rtol=0)
    torch.testing.assert_close(ours.total, theirs.total, atol=1e-12, rtol=0)
    assert exact_bound(method, network, x[0]).item() == pytest.approx(
        random_order_bound(plain, plain_network, x[0]), abs=1e-12
    )


@torch.no_grad()
def random_order_bound(method, network, x):
    total = 0.0
    for masked in SUBSETS:
        log_beliefs = method.log_beliefs(network, masked_with(x[None], masked))[0].gather(-1, x[:, None])[:, 0]
        sets = sum(len(each) == len(masked) for each in SUBSETS)
        total -= float(log_beliefs[sorted(masked)].mean()) / sets
    return total


@pytest.mark.parametrize("rule", RULES)
def test_clocks_in_time_have_the_same_bound_and_what_their_sum_costs(rule):
    """The bound of generalised masked diffusion, in which a token of rate r is masked at t with probability t^r.

    At masks it is w_q log(w_q / (w_p mu)) - w_q + w_p, where w = rate / t. The network does not see t, and a text's
    sum of rates says when tokens are revealed: this costs extra, and nothing if only the order counts.
    """
    method, network = built(tiny("mdlm", rule))
    x = TEXTS[6]
    with torch.no_grad():
        rates, in_time, of_sums = network.text_rates(x[None]).log_rates[0].exp(), 0.0, 0.0
        for masked in SUBSETS:
            z, where = masked_with(x[None], masked), sorted(masked)
            log_beliefs = method.log_beliefs(network, z)[0].gather(-1, x[:, None])[where, 0]
            q, p = rates[where], network.log_rates(z)[0].exp()[where]
            cost = (q * (q.log() - p.log() - log_beliefs) - q + p).sum()
            sums = q.sum() * (q.sum() / p.sum()).log() - q.sum() + p.sum()
            visible = [position for position in range(LENGTH) if position not in masked]
            time = sum(  # the integral of P(exactly these are masked at t) / t, the product multiplied out
                (-1) ** num / rates[[*where, *more]].sum()
                for num in range(len(visible) + 1)
                for more in itertools.combinations(visible, num)
            )
            in_time, of_sums = in_time + time * cost, of_sums + time * sums
    assert of_sums > 0
    torch.testing.assert_close(in_time - of_sums, exact_bound(method, network, x).detach(), atol=1e-10, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["tokens", "text"])
def test_learnt_rates_get_the_gradient_of_the_bound(rule):
    """Through the masks that are drawn too. Rows: all texts, each 10,000 times."""
    method, network = built(tiny("mdlm", rule))
    learnt = network.rates.table if rule == "tokens" else network.rates.text.weight
    torch.stack([exact_bound(method, network, x) for x in TEXTS]).mean().backward()
    expected = learnt.grad[..., 0].clone() if rule == "tokens" else learnt.grad[0].clone()
    others = network.head.weight.grad.clone()
    network.zero_grad()
    x = TEXTS.repeat(10_000, 1)
    (method.loss(network, x, None, 1.0, batch_rng()).total / len(x)).backward()
    ours = learnt.grad[..., 0] if rule == "tokens" else learnt.grad[0]
    assert expected.norm() > 1e-4
    torch.testing.assert_close(ours, expected, atol=0.1 * float(expected.norm()), rtol=0)
    torch.testing.assert_close(network.head.weight.grad, others, atol=0.05 * float(others.norm()), rtol=0)


@pytest.mark.slow
def test_what_a_text_costs_is_predicted():
    method, network = built(tiny("mdlm", "text"))
    with torch.no_grad():
        network.rates.text.weight[0] = 0.0  # equal rates
    optimizer = torch.optim.Adam([network.rates.text.weight, network.rates.text.bias], lr=0.05)
    x = TEXTS.repeat(8, 1)
    for step in range(150):
        optimizer.zero_grad()
        method.loss(network, x, None, 1.0, batch_rng(step)).total.backward()
        network.rates.text.weight.grad[0] = network.rates.text.bias.grad[0] = 0.0
        optimizer.step()
    share = torch.ones(len(TEXTS), dtype=torch.float64)
    noised = method.noised_by_rates(network, TEXTS, None, share, batch_rng(), None)
    nats = method.loss_at(network, TEXTS, noised).nats.sum(dim=1) / LENGTH  # at t = 1 they do not depend on the order
    assert (noised.order.expected - nats).abs().mean() < 0.3 * nats.std()


def test_the_chance_of_an_order_is_the_product_of_its_steps():
    log_rates = torch.tensor([[0.3, -1.0, 0.7, 9.0, 0.1]], dtype=torch.float64, requires_grad=True)
    text = torch.tensor([[True, True, True, False, True]])
    order = torch.tensor([[0.5, 2.0, 1.0, 3.0, -1.0]])  # tokens 1, 2, 0, 4
    masked = torch.tensor([[True, False, False, False, True]])
    rates = log_rates.exp()[0]
    expected = (rates[1] / rates[[0, 1, 2, 4]].sum() * rates[2] / rates[[0, 2, 4]].sum()).log()
    chance = log_order_chance(log_rates, order, text, masked)
    torch.testing.assert_close(chance[0], expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), log_rates)[0] for each in (chance, expected)))


def test_masks_are_those_left_by_an_order_drawn_by_rates():
    log_rates = torch.tensor([0.0, 1.0, -1.0, 0.5])
    num = 40_000
    x, text = torch.zeros(num, 4, dtype=torch.int64), torch.tensor([True, True, True, False]).expand(num, 4)
    share = torch.full((num,), 2 / 3, dtype=torch.float64)
    z, t = mask_first(x, text, share, draw_order(log_rates.expand(num, 4), batch_rng()), MASK)
    assert (z[:, 3] == 0).all()
    assert torch.allclose(t, share)
    seen = (z[:, :3] != MASK).double().mean(dim=0)  # one token is revealed
    torch.testing.assert_close(seen, log_rates[:3].double().softmax(dim=0), atol=0.01, rtol=0)
    z, _ = mask_first(x, text, share / 2, draw_order(log_rates.expand(num, 4), batch_rng()), MASK)
    first = log_rates[:3].double().softmax(dim=0)
    last = torch.stack([sum(first[a] * first[b] / (1 - first[a]) for a, b in orders(each)) for each in range(3)])
    torch.testing.assert_close((z[:, :3] == MASK).double().mean(dim=0), last, atol=0.01, rtol=0)


def orders(last):
    return list(itertools.permutations([each for each in range(3) if each != last]))


def frequencies(method, network, steps, num=20_000):
    canvas = torch.full((num, LENGTH), MASK)
    sampling = Sampling(sampler="rates", steps=steps, final="draw")
    method.check_run(canvas, sampling, None)
    ids = last_frame(method.generate(network, canvas, sampling, RowRng(0, range(num)))).ids
    return torch.bincount((ids * torch.tensor([4, 2, 1])).sum(dim=1), minlength=8) / num


@pytest.mark.parametrize("method", mostly_slow(["mdlm", "adlm"], "mdlm"))
@pytest.mark.parametrize("steps", mostly_slow([3, 1], 3))
def test_the_sampler_draws_from_its_distribution(method, steps):
    method, network = built(tiny(method))
    expected = torch.stack([(-exact_nats(method, network, x, steps)).exp() for x in TEXTS])
    drawn = frequencies(method, FrozenNetwork(network, torch.float64), steps)
    assert ((drawn - expected).abs() < 4.5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_rows_do_not_depend_on_each_other_or_on_padding():
    method, network = built(tiny())
    sampling = Sampling(sampler="rates", steps=3)
    canvas = torch.tensor([[MASK, 1, MASK], [MASK, MASK, MASK], [0, MASK, MASK]])
    together = last_frame(method.generate(network, canvas, sampling, RowRng(0, range(3)))).ids
    for row in range(3):
        alone = method.generate(network, canvas[row : row + 1], sampling, RowRng(0, [row]))
        assert (last_frame(alone).ids == together[row]).all()
    padded = torch.nn.functional.pad(canvas, (0, 1))
    pad = torch.tensor([False, False, False, True]).expand(3, 4)
    with_pad = last_frame(method.generate(network, padded, sampling, RowRng(0, range(3)), pad)).ids
    assert (with_pad[:, :3] == together).all()
    assert (together[0, 1], together[2, 0]) == (1, 0)


def test_frozen_networks_have_the_same_rates():
    for name in ("mdlm", "adlm"):
        method, network = built(tiny(name))
        frozen = FrozenNetwork(network, torch.float64)
        z = torch.tensor([[MASK, 1, MASK]])
        output, plain = (
            method.sampling_run(each, z, Sampling(), RowRng(0, [0]), None).denoiser(NoisyRows(z))
            for each in (frozen, network)
        )
        positions = torch.tensor([0, 2])
        torch.testing.assert_close(output.log_rates(positions), network.log_rates(z)[0, positions], atol=1e-10, rtol=0)
        torch.testing.assert_close(plain.log_rates(positions), network.log_rates(z)[0, positions], atol=1e-10, rtol=0)


def test_a_random_order_keeps_its_own_bound():
    method, network = built(tiny("mdlm", "text"))
    assert default_estimator(method) == "nelbo"
    x = TEXTS[5].repeat(6000, 1)
    nats = any_order(method)(network, x, None, batch_rng()).sum(dim=1)
    expected = random_order_bound(method, network, TEXTS[5])
    assert abs(nats.mean() - expected) < 4 * nats.std() / len(nats) ** 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": Time()}, "rates.rule text reveals one token after the other, .* use time.masks=counted"),
        ({"time": Time(masks="counted", weight="one")}, "is trained with the bound, and time.weight is one; use bound"),
        ({"method": "ar", "time": Time()}, "rates.rule text is for adlm and mdlm on whole rows, not for ar"),
        ({"rates": Rates(rule="anchors")}, "rates.rule anchors needs an anchor.rule .* count does not; use rare"),
    ],
)
def test_models_that_cannot_have_rates_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        method_of(replace(tiny(), **change))


def test_blocks_have_no_rates_and_the_sampler_needs_them():
    config = tiny()
    with pytest.raises(UserError, match=r"on whole rows, not for model\.block_length 3"):
        method_of(replace(config, model=replace(config.model, block_length=3)))
    plain = method_of(replace(config, rates=Rates()))
    with pytest.raises(UserError, match="sampler rates needs a model that predicts rates"):
        plain.check_run(torch.full((1, LENGTH), MASK), Sampling(sampler="rates"), None)
