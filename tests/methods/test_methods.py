"""The methods against each other, against formulas written out by hand, and on invalid input."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_models import mostly_slow
from worlds import batch_rng, randomized, real, seeded

from adlm import registry
from adlm.canvas import Canvas
from adlm.config.schema import Anchor, Config, Data, Model, Sampling, Schedule, Time, Train, Vocabulary
from adlm.diffusion.objectives import anchor_mask
from adlm.diffusion.times import BatchRng, BatchSlice
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.language_model import LanguageModel
from adlm.methods import method_of
from adlm.methods.inputs import check_canvas
from adlm.methods.masked_diffusion import NoisedBatch, per_token
from adlm.models.transformer import TimeCondition
from adlm.registry import METHODS
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.settings import SampleSettings
from adlm.training.step import MicroBatch, new_train_state, train_step

MASK, BOS = 7, 3
CLEAN = torch.tensor([i for i in range(12) if i != MASK])
DIFFUSION = ("adlm", "mdlm", "sedd", "d3pm")
every_method = pytest.mark.parametrize("name", METHODS)
every_diffusion = pytest.mark.parametrize("name", DIFFUSION)


def settings(name: str, **options) -> Config:
    """Eleven words and a mask id in the middle; sedd and d3pm get the schedule and time they require."""
    base = Config(
        method=name,
        vocabulary=Vocabulary(size=12, mask_id=MASK, bos_id=BOS),
        length=8,
        model=Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0),
        schedule=Schedule(eps=1e-3 if name in ("sedd", "d3pm") else 0.0),
        time=Time(steps=20 if name == "d3pm" else 0),
    )
    return replace(base, **options)


def text(rows: int = 4, length: int = 8, seed: int = 0) -> torch.Tensor:
    return CLEAN[torch.randint(len(CLEAN), (rows, length), generator=seeded(seed))]


def rows(num: int, seed: int = 0) -> RowRng:
    return RowRng(seed, range(num))


def random_network(config: Config, seed: int = 0):
    return randomized(method_of(config).build(), seed)


def model(name: str) -> LanguageModel:
    """A model of random weights; its calls check their arguments, which the method trusts."""
    method = method_of(settings(name))
    return LanguageModel(method.config, method, method.build())


def step_on(lm: LanguageModel, batch: MicroBatch, progress: float = 1.0) -> None:
    """One training step on a batch."""
    train_step(new_train_state(lm.method, lm.network), [batch], 1.0, progress, seeded())


def noising(x: torch.Tensor, discrete: bool = False) -> NoisedBatch:
    """Half of the tokens masked, at t = 0.5."""
    z = x.masked_fill(torch.rand(x.shape, generator=seeded(1)) < 0.5, MASK)
    times = torch.full((len(x),), 0.5).double()
    return NoisedBatch(z, times, times - 0.05 if discrete else None)


@pytest.mark.parametrize(("anchored", "plain"), [("adlm", "mdlm"), ("a2r", "ar")])
def test_without_anchors_and_a_second_network_anchoring_changes_nothing(anchored, plain):
    """gamma 0: ADLM is MDLM and A2R is AR, in weights, losses, gradients, bounds and samples, to the last bit."""
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=0, condition=8, dropout=0.1)
    runs = []
    for method in (method_of(settings(name, model=model, anchor=Anchor(gamma=0.0))) for name in (anchored, plain)):
        torch.manual_seed(1)
        network = method.build()
        optimizer, generator, losses = torch.optim.AdamW(network.parameters(), lr=1e-2), seeded(), []
        for step in range(5):
            loss = method.loss(network, text(seed=step), None, step / 5, BatchRng(generator))
            optimizer.zero_grad()
            loss.mean.backward()
            optimizer.step()
            losses.append(loss.mean.detach())
        bound = method.bound(network, text(), None, batch_rng(1))
        canvas = torch.full((3, 8), MASK)
        sample = list(method.generate(network, canvas, Sampling(steps=6), rows(len(canvas))))[-1].ids
        runs.append((losses, bound, sample, list(network.parameters())))
    for ours, theirs in zip(*runs, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def weights_in_one_network(pair: dict[str, torch.Tensor], blocks: int) -> dict[str, torch.Tensor]:
    """The weights of a pair without a bridge under the names of one network; those of the auxiliary head are left out.

    `blocks` is the number of blocks of the anchor network.
    """
    auxiliary = ("anchor.head.", "anchor.trunk.norm.", "anchor.trunk.modulation.")
    one = {name.removeprefix("anchor."): weight for name, weight in pair.items() if not name.startswith("denoiser.")}
    one = {name: weight for name, weight in one.items() if not f"anchor.{name}".startswith(auxiliary)}
    for name, weight in pair.items():
        if name.startswith("denoiser.trunk.blocks."):
            _, _, _, number, rest = name.split(".", 4)
            one[f"trunk.blocks.{blocks + int(number)}.{rest}"] = weight
        elif name.startswith("denoiser."):
            one[name.removeprefix("denoiser.")] = weight
    return one


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(("anchored", "plain"), [("adlm", "mdlm"), ("a2r", "ar")])
def test_without_a_bridge_and_anchors_the_pair_is_one_network_of_the_summed_depth(anchored, plain, timed):
    """model.bridge none and gamma 0, the same weights in float64: equal to the last bit, gradients and samples too."""
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.1, bridge="none")
    common = {"anchor": Anchor(gamma=0.0), "schedule": Schedule(eps=1e-3)}
    deep = replace(model, blocks=3, time_conditioning=timed)
    ours = method_of(settings(anchored, model=replace(model, time_conditioning=timed), **common))
    theirs = method_of(settings(plain, model=deep, **common))
    pair, one = randomized(ours.build().double()), theirs.build().double()
    one.load_state_dict(weights_in_one_network(pair.state_dict(), blocks=2))
    z, pad = noising(text()).z, torch.arange(8) >= torch.tensor([[8], [3], [8], [6]])
    assert torch.equal(ours.log_beliefs(pair, z), theirs.log_beliefs(one, z))
    runs = []
    for method, network in ((ours, pair), (theirs, one)):
        torch.manual_seed(0)
        loss = method.loss(network, text(), pad, 0.5, batch_rng())
        loss.total.backward()
        canvas = torch.full((3, 8), MASK)
        sample = list(method.generate(FrozenNetwork(network), canvas, Sampling(steps=6), rows(3)))[-1].ids
        gradients = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
        runs.append((loss.total, method.bound(network, text(), pad, batch_rng(1)), sample, gradients))
    (*numbers, gradients), (*expected, expected_gradients) = runs
    for a, b in zip(numbers, expected, strict=True):
        assert torch.equal(a, b)
    gradients = weights_in_one_network(gradients, blocks=2)
    assert gradients.keys() == expected_gradients.keys() == dict(one.named_parameters()).keys()
    for name in gradients:
        assert torch.equal(gradients[name], expected_gradients[name])


@pytest.mark.parametrize("name", ["adlm", "a2r"])
def test_without_a_bridge_the_anchor_loss_trains_only_the_blocks_before_its_head(name):
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0, bridge="none")
    trained = []
    for gamma in (0.0, 0.5):
        method = method_of(settings(name, model=model, anchor=Anchor(gamma=gamma, rule="all", warm_up=False)))
        network = randomized(method.build().double())
        method.loss(network, text(), None, 1.0, batch_rng()).total.backward()
        trained.append({key: 0 if each.grad is None else each.grad for key, each in network.named_parameters()})
    changed = {key for key in trained[0] if not torch.equal(torch.as_tensor(trained[0][key]), trained[1][key])}
    assert changed == {key for key in trained[0] if key.startswith("anchor.")}
    assert all(torch.is_tensor(trained[0][key]) for key in trained[0] if key.startswith("denoiser."))


@pytest.mark.parametrize("name", ["mdlm", "adlm"])
def test_a_planner_adds_weight_where_a_head_expects_the_token(name):
    """Of adlm the anchor network's; what is reported stays the bound, and the weights get no gradient."""
    train = Train(planner=2.0, planner_temperature=0.5)
    plain_config = settings(name, anchor=Anchor(gamma=0.0), schedule=Schedule(eps=1e-3))
    config, x, t = replace(plain_config, train=train), text(), torch.tensor([0.2, 0.4, 0.6, 0.9]).double()
    method, network, z = method_of(config), random_network(config).double(), noising(x).z
    z[3] = x[3]  # a row without masks
    loss = method.loss_at(network, x, NoisedBatch(z, t))
    masked, clean = z == MASK, torch.arange(12) != MASK
    planned = network.anchor_logits(z) if name == "adlm" else network(z)
    expected = planned[..., clean].log_softmax(-1).exp()
    place = (clean.long().cumsum(0) - 1)[x][..., None]
    chance = (expected.gather(-1, place)[..., 0] ** 2 * masked).detach()
    shares = chance / chance.sum(dim=1, keepdim=True).clamp(min=1e-300) * masked.sum(dim=1, keepdim=True)
    right = -network(z)[..., clean].log_softmax(-1).gather(-1, place)[..., 0]
    weight = masked / t[:, None]
    total = (weight * (1 + 2 * shares) * right).sum()
    torch.testing.assert_close(loss.total, total)
    torch.testing.assert_close(loss.nats, (weight * right).detach())
    assert "nelbo" not in loss.parts
    total.backward()
    gradients = {key: weight.grad for key, weight in network.named_parameters() if weight.grad is not None}
    network.zero_grad()
    loss.total.backward()
    ours = {key: weight.grad for key, weight in network.named_parameters() if weight.grad is not None}
    assert ours.keys() == gradients.keys()
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, gradients[key], msg=key)
    plain = method_of(plain_config).loss_at(network, x, NoisedBatch(z, t))
    assert torch.equal(plain.nats, loss.nats)


@pytest.mark.parametrize(
    "options",
    [{"method": "ar"}, {"method": "sedd", "schedule": Schedule(eps=1e-3)}, {"model": Model(block_length=4)}],
)
def test_a_planner_is_for_masks_of_whole_rows(options):
    with pytest.raises(UserError, match="planner 1 is for adlm and mdlm on whole rows"):
        method_of(replace(settings("mdlm"), train=Train(planner=1.0), **options))


def test_the_adlm_loss_is_the_anelbo_written_out():
    """weight * (masked cross-entropy + gamma * anchor cross-entropy at anchors), summed over tokens."""
    config = settings("adlm", anchor=Anchor(gamma=0.4, tau=1), schedule=Schedule(eps=1e-3))
    method, network, x = method_of(config), random_network(config), text()
    z = noising(x).z
    t = torch.tensor([0.2, 0.4, 0.6, 0.9]).double()
    loss = method.loss_at(network, x, NoisedBatch(z, t))
    denoised = network(z)
    denoised[..., MASK] = -torch.inf
    right = -denoised.log_softmax(-1).gather(-1, x[..., None])[..., 0]
    anchored = -network.anchor_logits(z).log_softmax(-1).gather(-1, x[..., None])[..., 0]
    weight, masked, anchors = (1 / t.float())[:, None], z == MASK, anchor_mask(x, 1, 12)
    assert anchors.any()
    assert not anchors.all()
    torch.testing.assert_close(loss.total, (weight * (masked * right + 0.4 * anchors * anchored)).sum())
    torch.testing.assert_close(loss.nats, (weight * masked * right).detach())
    torch.testing.assert_close(loss.parts["anchor"], (weight * anchors * anchored).sum().detach())
    assert loss.num_tokens == x.numel()
    at_masked = method_of(replace(config, anchor=replace(config.anchor, positions="masked")))
    torch.testing.assert_close(
        at_masked.loss_at(network, x, NoisedBatch(z, t)).total,
        (weight * masked * (right + 0.4 * anchors * anchored)).sum(),
    )


@pytest.mark.parametrize("name", ["adlm", "a2r"])
def test_labelled_tokens_are_the_anchors_of_rule_syntax(name):
    """The loss minus that without the anchor term, written out; with every label the loss of rule all."""
    config = settings(name, anchor=Anchor(gamma=0.4, rule="syntax", warm_up=False), schedule=Schedule(eps=1e-3))
    network, x = random_network(config), text()

    def total(labels=None, **options):
        changed = replace(config, anchor=replace(config.anchor, **options))
        given = {} if labels is None else {"labels": labels}
        rng = BatchRng(torch.Generator().manual_seed(0))
        return method_of(changed).loss(network, x, None, 1.0, rng, **given).total

    labels = (x + torch.arange(x.shape[1])) % 3 == 0
    every = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(total(every), total(rule="all"), rtol=0, atol=0)
    if name == "adlm":
        noised = method_of(config).noise(x, None, BatchRng(torch.Generator().manual_seed(0)), config.time.t_min)
        cross_entropy = -network.anchor_logits(noised.z).log_softmax(-1).gather(-1, x[..., None])[..., 0]
        by_hand = ((1 / noised.t.float())[:, None] * labels * cross_entropy).sum()
    else:
        cross_entropy = -network.anchor_logits(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0]
        by_hand = (labels[:, 1:] * cross_entropy).sum()
    torch.testing.assert_close(total(labels) - total(gamma=0.0), 0.4 * by_hand, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"anchor.rule syntax reads labels of the training text, and here there are"):
        total()


@pytest.mark.parametrize("name", ["adlm", "mdlm"])
def test_with_weight_one_the_gradient_is_that_of_the_mean_cross_entropy_at_masks(name):
    """At any times: the total is the number of masks times their mean cross-entropy. Anchors have weight 1 too."""
    config = settings(name, anchor=Anchor(gamma=0.4, tau=1), time=Time(weight="one"))
    network, x = random_network(config).double(), text()
    z, t = noising(x).z, torch.tensor([0.2, 0.4, 0.6, 0.9]).double()
    loss = method_of(config).loss_at(network, x, NoisedBatch(z, t))
    masked = z == MASK
    logits = network(z).index_fill(-1, torch.tensor(MASK), -torch.inf)
    plain = F.cross_entropy(logits[masked], x[masked])
    if name == "adlm":
        anchors = anchor_mask(x, 1, 12)
        anchor_sum = F.cross_entropy(network.anchor_logits(z)[anchors], x[anchors], reduction="sum")
        plain = plain + 0.4 * anchor_sum / masked.sum()
    weights = list(network.parameters())
    ours, theirs = (
        torch.autograd.grad(each, weights, allow_unused=True, materialize_grads=True)
        for each in (loss.total / masked.sum(), plain)
    )
    assert any((gradient.abs() > 1e-3).any() for gradient in theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("time", [Time(), Time(power=2.0), Time(masks="counted", power=1.5)], ids=str)
@pytest.mark.parametrize("block_length", [0, 3])
@pytest.mark.parametrize("name", ["adlm", "mdlm"])
def test_the_training_weight_leaves_the_reported_nats_unchanged(name, block_length, time):
    """To the last bit, in training and in the bound; with weight one the loss has the importance weights alone."""
    plain = settings(name, model=replace(settings(name).model, block_length=block_length), time=time)
    network, x = random_network(plain), text()
    bound, one = (method_of(replace(plain, time=replace(time, weight=weight))) for weight in ("bound", "one"))
    by_bound, by_one = (method.loss(network, x, None, 1.0, batch_rng()) for method in (bound, one))
    assert torch.equal(by_bound.nats, by_one.nats)
    assert torch.equal(bound.bound(network, x, None, batch_rng()), one.bound(network, x, None, batch_rng()))
    assert torch.allclose(by_bound.parts["nelbo"], by_bound.nats.sum())
    noised = one.noise(x, None, batch_rng(), time.t_min)
    masked_nats = one.masked_nats(network, x, noised, None)
    torch.testing.assert_close(
        by_one.parts["cross_entropy"], (per_token(noised.importance) * masked_nats).sum().float()
    )
    assert by_one.total < by_bound.total


@pytest.mark.parametrize("name", ["adlm", "a2r"])
def test_after_its_end_the_anchor_term_is_not_in_the_loss(name):
    anchored = settings(name, anchor=Anchor(gamma=0.4, warm_up=False, until=0.5))
    plain = replace(anchored, anchor=Anchor(gamma=0.0))
    network = random_network(anchored)

    def loss(config, progress):
        return method_of(config).loss(network, text(), None, progress, batch_rng())

    assert loss(anchored, 0.5).total > loss(plain, 0.5).total
    ended = loss(anchored, 0.51)
    assert ended.total == loss(plain, 0.51).total
    assert "anchor" not in ended.parts


def test_in_discrete_time_with_remasking_the_anchor_term_has_the_same_weight():
    """T (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), for both terms; the released code drops the anchors here."""
    config = settings("adlm", anchor=Anchor(gamma=0.4, tau=1), time=Time(steps=20, sigma=0.3))
    method, network, x = method_of(config), random_network(config), text()
    noised = noising(x, discrete=True)
    loss = method.loss_at(network, x, noised)
    weight = 20 * (0.55 - 0.7 * 0.5) / 0.5
    denoised = network(noised.z)
    denoised[..., MASK] = -torch.inf
    right = -denoised.log_softmax(-1).gather(-1, x[..., None])[..., 0]
    anchored = -network.anchor_logits(noised.z).log_softmax(-1).gather(-1, x[..., None])[..., 0]
    masked, anchors = noised.z == MASK, anchor_mask(x, 1, 12)
    torch.testing.assert_close(loss.total, (weight * (masked * right + 0.4 * anchors * anchored)).sum())


def test_the_a2r_loss_is_next_tokens_and_next_anchors():
    config = settings("a2r", anchor=Anchor(gamma=0.4, tau=1))
    method, network, x = method_of(config), random_network(config), text()
    loss = method.loss(network, x, None, 1.0, batch_rng())
    logits, anchor_logits = network(x[:, :-1]), network.anchor_logits(x[:, :-1])
    logits[..., MASK] = -torch.inf
    right, anchored = (-each.log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0] for each in (logits, anchor_logits))
    anchors = anchor_mask(x, 1, 12)[:, 1:]
    torch.testing.assert_close(loss.total, (right + 0.4 * anchors * anchored).sum())
    torch.testing.assert_close(loss.nats[:, 1:], right.detach())
    assert loss.num_tokens == 4 * 7


@pytest.mark.parametrize("name", ["adlm", "a2r"])
def test_the_anchor_term_is_trained_but_is_not_in_the_nats(name):
    method, x = method_of(settings(name)), text()
    network = random_network(settings(name))
    with_anchor = method.loss(network, x, None, 1.0, batch_rng())
    without = method_of(settings(name, anchor=Anchor(gamma=0.0))).loss(network, x, None, 1.0, batch_rng())
    assert torch.equal(with_anchor.nats, without.nats)
    assert with_anchor.total > without.total
    assert torch.equal(method.loss(network, x, None, 0.0, batch_rng()).total, without.total)  # gamma starts at 0


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_the_left_to_right_bound_is_the_exact_likelihood(name):
    """Two words, four tokens: the likelihoods of all texts with one first token sum to 1, each a product of beliefs."""
    config = settings(name, vocabulary=Vocabulary(3, 2), length=4)
    method, network = method_of(config), random_network(config).double()
    texts = torch.cartesian_prod(*[torch.arange(2)] * 4)
    nats = method.bound(network, texts, None, batch_rng())
    likelihood = (-nats.sum(dim=1)).exp()
    for first in (0, 1):
        torch.testing.assert_close(likelihood[texts[:, 0] == first].sum(), torch.ones((), dtype=torch.float64))
    log_next = method.log_beliefs(network, texts)
    by_hand = log_next[:, :-1].gather(-1, texts[:, 1:, None])[..., 0].sum(dim=1)
    torch.testing.assert_close(-nats.sum(dim=1), by_hand)
    assert (nats[:, 0] == 0).all()


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_left_to_right_samples_have_the_distribution_of_the_likelihood(name):
    config = settings(name, vocabulary=Vocabulary(3, 2, bos_id=0), length=3)
    method, network = method_of(config), random_network(config)
    drawn = list(method.generate(network, torch.full((5_000, 3), 2), Sampling(), rows(5_000)))[-1].ids
    assert (drawn[:, 0] == 0).all()
    texts = torch.tensor([[0, a, b] for a in (0, 1) for b in (0, 1)])
    expected = 5_000 * (-method.bound(network, texts, None, batch_rng()).sum(dim=1)).exp()
    counts = torch.bincount(2 * drawn[:, 1] + drawn[:, 2], minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom: once in a thousand seeds


def test_sedd_pays_what_mdlm_pays_for_the_same_beliefs():
    """With each row of logits shifted so that the scores sum as beliefs do, the score entropy is the cross-entropy."""
    config = settings("sedd")
    sedd, mdlm = method_of(config), method_of(replace(config, method="mdlm"))
    network, x = random_network(config), text()
    noised = noising(x)

    class Normalised(torch.nn.Module):
        """The network with log(V - 1) + log softmax for logits: scores derived from beliefs."""

        def forward(self, z, sigma=None, pad=None):
            logits = network(z, sigma, pad)
            clean = logits.index_fill(-1, torch.tensor(MASK), -torch.inf)
            return logits - clean.logsumexp(dim=-1, keepdim=True) + math.log(11)

        def nats_at_positions(self, z, where, objective, sigma=None, pad=None):
            rows = self(z, sigma, pad)[where]
            return torch.zeros(z.shape).masked_scatter(where, objective(rows, torch.arange(len(rows))))

    ours = sedd.loss_at(Normalised(), x, noised).nats
    theirs = mdlm.loss_at(network, x, noised).nats
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (sedd.loss_at(network, x, noised).nats.sum() - ours.sum()) > 0  # a wrong sum costs more


def test_d3pm_pays_what_mdlm_pays_when_it_has_no_belief_in_the_mask():
    config = settings("d3pm")
    d3pm, mdlm = method_of(config), method_of(replace(config, method="mdlm"))
    network, x = random_network(config), text()
    network.head.bias.data[MASK] = -1e4
    noised = noising(x, discrete=True)
    loss = d3pm.loss_at(network, x, noised)
    plain = mdlm.loss_at(network, x, noised)
    torch.testing.assert_close(loss.parts["divergence"], plain.parts["nelbo"], rtol=1e-4, atol=1e-4)
    log_right = network(x).log_softmax(-1).gather(-1, x[..., None]).sum()
    torch.testing.assert_close(loss.parts["reconstruction"], -log_right.detach(), rtol=1e-4, atol=1e-4)


ENDS = {
    "log-linear": Schedule(),
    "published": Schedule(eps=1e-3),
    "geometric": Schedule(name="geometric", sigma_min=0.05, sigma_max=2.0),
    "cosine": Schedule(name="cosine", eps=0.01),
    "linear": Schedule(name="linear", sigma_min=0.0, sigma_max=3.0),
}


@pytest.mark.parametrize(
    ("name", "schedule", "time"),
    [
        *((name, schedule, Time()) for name in ("adlm", "mdlm") for schedule in ENDS),
        *(("sedd", schedule, Time()) for schedule in ENDS if schedule != "log-linear"),  # sigma_1 must be finite
        ("adlm", "cosine", Time(steps=16)),
        ("mdlm", "linear", Time(steps=5, antithetic=False)),
        ("mdlm", "geometric", Time(steps=5)),
        ("mdlm", "log-linear", Time(steps=5, sigma=0.0)),
    ],
    ids=str,
)
def test_the_bound_of_an_untrained_network_is_log_v(name, schedule, time):
    smallest = Model(hidden=4, heads=1, blocks=1, denoiser_blocks=1, condition=4, dropout=0.0)  # uniform like any other
    method = method_of(settings(name, schedule=ENDS[schedule], time=time, model=smallest))
    nats = method.bound(method.build(), text(rows=4096), None, batch_rng()).mean(dim=1)
    error = nats.std() / math.sqrt(len(nats))
    assert abs(nats.mean() - math.log(11)) < 5 * error + 1e-4
    assert error < 0.1


def test_an_untrained_d3pm_pays_for_its_belief_in_the_mask():
    """Twelve symbols instead of eleven, and the reconstruction of every token at t = 0."""
    method = method_of(settings("d3pm"))
    nats = method.bound(method.build(), text(rows=4096), None, batch_rng()).mean(dim=1)
    assert nats.mean() > math.log(11) + math.log(12)
    assert nats.mean() < 2 * math.log(12) + 0.1


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_an_untrained_causal_network_pays_log_v_exactly(name):
    method = method_of(settings(name))
    nats = method.bound(method.build(), text(), None, batch_rng())
    torch.testing.assert_close(nats[:, 1:], torch.full((4, 7), math.log(11)))


@pytest.mark.parametrize("name", ["adlm", "mdlm"])
def test_the_training_loss_of_an_untrained_network_leaves_out_the_share_visible_at_t_1(name):
    method = method_of(settings(name, schedule=Schedule(eps=0.3), anchor=Anchor(gamma=0.0)))
    nats = method.loss(method.build(), text(rows=4096), None, 1.0, batch_rng()).nats.mean(dim=1)
    assert abs(nats.mean() - 0.7 * math.log(11)) < 5 * nats.std() / 64


@every_method
@pytest.mark.parametrize("pad_is", ["masked", "attended"])
def test_padding_is_in_no_loss_no_count_and_no_bound(name, pad_is):
    config = settings(name, data=Data(pad=pad_is), anchor=Anchor(gamma=0.5))
    method, network = method_of(config), random_network(config)
    x, pad = text(), torch.zeros(4, 8, dtype=torch.bool)
    pad[:, 5:] = True
    loss = method.loss(network, x, pad, 1.0, batch_rng())
    assert loss.num_tokens == method.predicted(x, pad).sum() == (20 if name in DIFFUSION else 16)
    assert (loss.nats[pad] == 0).all()
    assert (method.bound(network, x, pad, batch_rng())[pad] == 0).all()
    other = torch.where(pad, text(seed=9), x)  # other ids in the padding
    same = torch.equal(method.loss(network, other, pad, 1.0, batch_rng()).total, loss.total)
    assert same == (pad_is == "masked" or name not in DIFFUSION)  # causal networks never see later tokens


@every_diffusion
def test_a_time_conditioned_network_depends_on_the_time(name):
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0, time_conditioning=True)
    config = settings(name, model=model, schedule=Schedule(eps=1e-3))
    method, network = method_of(config), random_network(config)
    z = torch.full((2, 8), MASK)
    early, late = (method.log_beliefs(network, z, real([alpha] * 2)).exp() for alpha in (0.7, 1e-3))
    assert (early - late).abs().max() > 1e-3
    assert torch.allclose(method.log_beliefs(network, z).exp(), late)  # all masked means late
    frames = list(method.generate(network, z, Sampling(steps=3), rows(2)))
    assert (frames[-1].ids != MASK).all()


@every_diffusion
def test_without_time_conditioning_no_masks_are_counted(name):
    assert method_of(settings(name)).conditioning_sigma(torch.full((2, 8), MASK, device="meta"), None) is None


@every_diffusion
def test_a_time_conditioned_network_is_given_sigma_itself(name):
    """-log alpha_t, for every network of the method, in losses and in sampling runs."""
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0, time_conditioning=True)
    method = method_of(settings(name, model=model, schedule=Schedule(eps=1e-3), length=40))
    network, sigmas = method.build(), []
    trunks = [module for module in network.modules() if isinstance(module, TimeCondition)]
    for trunk in trunks:
        trunk.register_forward_hook(lambda module, given, result: sigmas.append(given[0].clone()))
    x = text(rows=2)
    t = torch.tensor([0.25, 0.75]).double()
    method.loss_at(network, x, NoisedBatch(torch.full_like(x, MASK), t, t - 0.05))
    expected = -torch.log(1 - 0.999 * t).float()
    torch.testing.assert_close(sigmas[: len(trunks)], [expected] * len(trunks))
    sigmas.clear()
    list(method.generate(network, torch.full((2, 40), MASK), Sampling(steps=2), rows(2)))
    expected = torch.stack([-torch.log(torch.tensor(1 - 0.999 * t)) for t in (1.0, 0.5)])
    torch.testing.assert_close(torch.stack(sigmas)[:: len(trunks), 0][:2], expected)
    assert len(trunks) == (2 if name == "adlm" else 1)


@every_method
def test_generated_text_has_no_masks_keeps_given_tokens_and_leaves_the_network_unchanged(name):
    base = settings(name)
    config = replace(base, model=replace(base.model, dropout=0.3))
    method, network = method_of(config), random_network(config).train()
    canvas = torch.full((5, 8), MASK)
    given = (2, 6) if name in DIFFUSION else (0, 1)
    canvas[:, given[0]], canvas[:, given[1]] = 1, 9
    remasking = Sampling(sampler="remdm-rescale", eta=0.5, steps=10)
    sampling = remasking if name in ("adlm", "mdlm", "sedd") else Sampling(steps=10)
    final = list(method.generate(network, canvas, sampling, rows(5)))[-1].ids
    assert (final != MASK).all()
    assert (final[:, given[0]] == 1).all()
    assert (final[:, given[1]] == 9).all()
    assert network.training
    again = list(method.generate(network, canvas, sampling, rows(5)))[-1].ids
    assert torch.equal(final, again)  # dropout was off


def can(name: str, sampler: str) -> bool:
    """Which sampler a method can use."""
    if name in ("ar", "a2r"):
        return sampler in ("ancestral", "left-to-right")
    if name == "d3pm":
        return sampler == "ancestral"
    return sampler != "anchor-first" or name == "adlm"


OTHERS = ("speculative", "rates")  # see test_block_causal.py and test_rates.py
SAMPLERS = [name for name in registry.SAMPLERS if name not in OTHERS]
PAIRS = [(name, sampler) for name in METHODS for sampler in SAMPLERS]


@pytest.mark.parametrize(("name", "sampler"), [pair for pair in PAIRS if not can(*pair)])
def test_a_sampler_of_another_method_is_refused(name, sampler):
    method = method_of(settings(name))
    with pytest.raises(UserError, match=rf"sampling.sampler {sampler}"):
        check_canvas(method, torch.full((3, 8), MASK), Sampling(sampler))


FAST = [("adlm", sampler) for sampler in SAMPLERS] + [(name, "ancestral") for name in METHODS] + [("sedd", "analytic")]


@pytest.mark.parametrize(("name", "sampler"), mostly_slow([pair for pair in PAIRS if can(*pair)], *FAST))
def test_a_network_and_its_frozen_form_draw_the_same_text(name, sampler):
    config = settings(name)
    method, network = method_of(config), random_network(config).double()
    canvas = torch.full((3, 8 if sampler != "semi-autoregressive" else 13), MASK)
    canvas[1, 0] = 1
    sampling = Sampling(sampler, steps=6, top_p=1.0 if sampler == "analytic" else 0.9)
    by_network, by_frozen = (
        list(method.generate(either, canvas, sampling, rows(3))) for either in (network, FrozenNetwork(network))
    )
    assert len(by_network) == len(by_frozen)
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(by_network, by_frozen, strict=True))
    assert (by_frozen[-1].ids != MASK).all()
    assert (by_frozen[-1].ids[1, 0] == 1).all()


@pytest.mark.parametrize(
    ("name", "sampler", "pad_is"),
    mostly_slow(
        [(*pair, pad_is) for pair in PAIRS if can(*pair) for pad_is in ("masked", "attended")],
        *((*pair, "masked") for pair in FAST),
        *(("adlm", sampler, "attended") for sampler in ("ancestral", "confidence", "remdm-conf")),
    ),
)
def test_rows_of_unequal_lengths_draw_as_if_each_were_alone(name, sampler, pad_is):
    config = settings(name, data=Data(pad=pad_is))
    method, network = method_of(config), FrozenNetwork(random_network(config).double())
    lengths, canvas = (8, 3, 5), torch.full((3, 8), 2)
    pad = torch.arange(8) >= torch.tensor(lengths)[:, None]
    canvas = torch.where(pad, canvas, MASK)
    canvas[:, 0] = 1
    sampling = Sampling(sampler, steps=5)
    *_, together = method.generate(network, canvas, sampling, rows(3), pad)
    for row, length in enumerate(lengths):
        *_, alone = method.generate(network, canvas[row : row + 1, :length], sampling, RowRng(0, [row]))
        assert torch.equal(alone.ids[0], together.ids[row, :length])


@pytest.mark.parametrize("sampler", ["confidence", "left-to-right"])
def test_the_conditioning_time_counts_the_masks_of_the_row_without_padding(sampler):
    model = Model(hidden=16, heads=2, blocks=2, condition=8, dropout=0.0, time_conditioning=True)
    config = settings("mdlm", model=model, schedule=Schedule(eps=1e-3))
    method, network = method_of(config), FrozenNetwork(random_network(config).double())
    canvas = torch.full((2, 8), MASK)
    pad = torch.arange(8) >= torch.tensor([[3], [8]])
    canvas[pad] = 1
    for seed in range(8):
        *_, together = method.generate(network, canvas, Sampling(sampler, steps=8), rows(2, seed), pad)
        *_, alone = method.generate(network, canvas[:1, :3], Sampling(sampler, steps=8), rows(1, seed))
        assert torch.equal(alone.ids[0], together.ids[0, :3])


def test_the_analytic_sampler_refuses_options_that_change_beliefs():
    method = method_of(settings("sedd"))
    with pytest.raises(
        UserError, match=r"sampling.temperature 0.5 changes beliefs, and analytic draws from the unchanged scores"
    ):
        check_canvas(method, torch.full((1, 8), MASK), Sampling("analytic", temperature=0.5))


@every_method
def test_beliefs_are_distributions_over_clean_tokens(name):
    config = settings(name)
    beliefs = method_of(config).log_beliefs(random_network(config), noising(text()).z).exp()
    torch.testing.assert_close(beliefs.sum(dim=-1), torch.ones(4, 8))
    assert (beliefs[..., MASK] == 0).all() == (name != "d3pm")  # d3pm may believe in the mask


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm", "ar"))
def test_training_lowers_the_bound_on_what_it_trains_on(name):
    """Two texts over eleven words: one token determines the rest."""
    base = settings(name, anchor=Anchor(gamma=0.1))
    config = replace(base, model=replace(base.model, bridge="hidden", time_conditioning=name in ("sedd", "d3pm")))
    method = method_of(config)
    torch.manual_seed(0)
    network, generator = method.build(), seeded()
    x = text(rows=2, seed=3).repeat(16, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for step in range(100):
        optimizer.zero_grad()
        method.loss(network, x, None, step / 100, BatchRng(generator)).mean.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    nats = method.bound(network, text(rows=2, seed=3).repeat(256, 1), None, batch_rng()).mean()
    assert nats < 0.4 * math.log(11)
    if name in DIFFUSION:
        assert nats > math.log(2) / 8 - 0.02  # choosing one of two texts costs at least log 2


@every_method
@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.full((2, 8), MASK), r"the text( x)? holds the mask id 7 at 16 of 16 positions"),
        (torch.tensor([[0, 12]]), r"the text( x)? holds id 12, outside the vocabulary of 12 symbols"),
        (torch.tensor([[0, -1]]), r"the text( x)? holds id -1, outside the vocabulary of 12 symbols"),
        (torch.zeros(2, 3), "must be int64 ids of shape"),
        (torch.zeros(0, 3, dtype=torch.int64), "must be int64 ids of shape"),
    ],
    ids=["all masked", "too large", "negative", "floats", "empty"],
)
def test_invalid_text_is_refused(name, x, sentence):
    lm = model(name)
    for call in (lambda: step_on(lm, MicroBatch(x)), lambda: lm.bound(x)):
        with pytest.raises(UserError, match=sentence):
            call()


@every_method
@pytest.mark.parametrize(
    ("canvas", "sentence"),
    [
        (torch.tensor([[1, MASK], [2, 3]]), "row 1 of the canvas has no mask id 7"),
        (torch.tensor([[12, MASK]]), "the canvas holds id 12"),
    ],
    ids=["nothing to fill", "outside"],
)
def test_a_canvas_that_cannot_be_filled_is_refused_before_the_first_frame(name, canvas, sentence):
    with pytest.raises(UserError, match=sentence):
        model(name).plan(SampleSettings(Sampling(), canvas=Canvas(canvas)))


@every_method
def test_a_canvas_longer_than_the_model_is_for_models_that_write_from_left_to_right(name):
    lm, settings = model(name), SampleSettings(Sampling(), canvas=Canvas(torch.full((1, 9), MASK)))
    if lm.method.cached:
        assert last_frame(lm.plan(settings).frames()).ids.shape == (1, 9)
        return
    with pytest.raises(UserError, match="the canvas is 9 tokens long and the model was made for length 8"):
        lm.plan(settings)


@every_method
@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        (Sampling(steps=0), "sampling.steps 0 must be at least 1"),
        (Sampling(steps=2.5), "sampling.steps 2.5 must be a whole number"),
        (Sampling(steps=10**11), "sampling.steps 100000000000 must be at most 1,000,000"),
        (Sampling("remdm-cap", eta=2), "sampling.eta 2 must be at most 1"),
        (Sampling("nope"), "sampling.sampler 'nope' is not one of ancestral"),
        (Sampling(t_end=1.0), "sampling.t_end 1.0 must be less than 1"),
        (Sampling(final="arg"), "sampling.final 'arg' is not one of argmax, draw"),
        (None, "sampling must be an adlm.config.schema.Sampling, not a NoneType"),
    ],
    ids=str,
)
def test_sampling_options_made_in_python_are_validated(name, sampling, sentence):
    with pytest.raises(UserError, match=sentence):
        model(name).plan(SampleSettings(sampling, canvas=Canvas(torch.full((1, 8), MASK))))


@every_method
@pytest.mark.parametrize(
    ("pad", "sentence"),
    [
        (torch.zeros(4, 8), "pad must be a boolean tensor"),
        (torch.zeros(4, 7, dtype=torch.bool), "pad must be a boolean tensor of the text's shape"),
        (torch.ones(4, 8, dtype=torch.bool), "pad is True everywhere"),
    ],
    ids=["floats", "too short", "everywhere"],
)
def test_invalid_padding_is_refused(name, pad, sentence):
    lm = model(name)
    for call in (lambda: step_on(lm, MicroBatch(text(), pad)), lambda: lm.bound(text(), pad)):
        with pytest.raises(UserError, match=sentence):
            call()


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_causal_methods_refuse_padding_before_the_text(name):
    method, pad = method_of(settings(name)), torch.zeros(4, 8, dtype=torch.bool)
    pad[:, :2] = True
    with pytest.raises(UserError, match="pad stands before text"):
        method.loss(method.build(), text(), pad, 1.0, batch_rng())


def test_sedd_is_finite_however_large_the_noise():
    config = settings("sedd", schedule=Schedule(name="linear", sigma_min=0.0, sigma_max=200.0))
    method, network = method_of(config), random_network(config)
    assert method.bound(network, text(rows=64), None, batch_rng()).isfinite().all()


@pytest.mark.parametrize("name", ["adlm", "a2r"])
@pytest.mark.parametrize("progress", [-0.1, 1.5, math.nan])
def test_progress_outside_zero_to_one_is_refused(name, progress):
    with pytest.raises(UserError, match="must be from 0 to 1"):
        step_on(model(name), MicroBatch(text()), progress)


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm", "ar"))
def test_the_bound_of_a_text_does_not_depend_on_its_row_in_the_batch(name):
    config = settings(name)
    method, network = method_of(config), random_network(config)
    x = text(rows=1).repeat(4, 1)
    generator = seeded()
    nats = torch.stack([method.bound(network, x, None, BatchRng(generator)).sum(dim=1) for _ in range(200)])
    error = nats.std(dim=0) / math.sqrt(200)
    assert ((nats.mean(dim=0) - nats.mean()).abs() <= 4 * error + 1e-4).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_method
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_method_call_runs_on_a_gpu_with_a_generator_on_either_device(name, device):
    config = settings(name)
    method = method_of(config)
    network, generator = random_network(config).cuda(), torch.Generator(device).manual_seed(0)
    with torch.autocast("cuda", torch.bfloat16):
        method.loss(network, text().cuda(), None, 1.0, BatchRng(generator)).mean.backward()
    assert method.bound(network, text().cuda(), None, BatchRng(generator)).isfinite().all()
    canvas = torch.full((2, 8), MASK, device="cuda")
    assert (list(method.generate(network, canvas, Sampling(steps=4), rows(len(canvas))))[-1].ids != MASK).all()


OPTIONS = [
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"temperature": 0.7, "repetition_penalty": 1.5},
]


def sampled_frames(config, network, device, options):
    """All frames of two rows sampled from masks alone."""
    canvas = torch.full((2, 8), MASK, device=device)
    return list(method_of(config).generate(network, canvas, Sampling("left-to-right", **options), rows(2)))


@pytest.mark.parametrize("name", ["ar", "a2r"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_frozen_network_samples_the_same_text_as_the_trained_one_with_any_options(name, options):
    config = settings(name)
    network = random_network(config).double()
    trained, frozen = (sampled_frames(config, each, "cpu", options) for each in (network, FrozenNetwork(network)))
    assert torch.equal(trained[-1].ids, frozen[-1].ids)
    torch.testing.assert_close(trained[-1].chance, frozen[-1].chance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["ar", "a2r"])
@pytest.mark.parametrize("options", OPTIONS)
def test_cuda_graphs_sample_the_same_frames_as_eager_calls_and_never_overwrite_them(name, options):
    config = settings(name)
    network = random_network(config).double().cuda()
    replayed, eager = (
        sampled_frames(config, FrozenNetwork(network, graphs=graphs, dtype=torch.float64), "cuda", options)
        for graphs in (True, False)
    )
    for ours, theirs in zip(replayed, eager, strict=True):
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.revealed, theirs.revealed)
        torch.testing.assert_close(ours.chance, theirs.chance)


@pytest.mark.parametrize(
    ("name", "canvas", "sampling", "sentence"),
    [
        ("ar", [[3, MASK, 4]], Sampling(), "gives a token after a mask, and ar writes from left to right"),
        (
            "a2r",
            [[3, MASK]],
            Sampling("remdm-cap"),
            "sampling.sampler remdm-cap does not work with method a2r; use ancestral or left-to-right",
        ),
        ("d3pm", [[3, MASK]], Sampling("remdm-cap"), "remdm-cap does not work with method d3pm; use ancestral"),
    ],
)
def test_unsupported_sampling_is_refused(name, canvas, sampling, sentence):
    method = method_of(settings(name))
    with pytest.raises(UserError, match=sentence):
        check_canvas(method, torch.tensor(canvas), sampling)


def test_causal_methods_need_a_first_token():
    method = method_of(settings("ar", vocabulary=Vocabulary(12, MASK)))
    with pytest.raises(UserError, match=r"begins with a mask, and ar needs a first token: vocabulary.bos_id is empty"):
        check_canvas(method, torch.tensor([[MASK, MASK]]), Sampling())


@every_diffusion
def test_batches_with_all_or_no_tokens_masked_are_valid(name):
    config = settings(name)
    method, network, x = method_of(config), random_network(config), text()
    early, late = torch.full((4,), 0.05).double(), torch.full((4,), 0.95).double()
    step = 0.05 if name == "d3pm" else None
    nothing = method.loss_at(network, x, NoisedBatch(x, early, step and early - step))
    assert nothing.parts[{"sedd": "score_entropy", "d3pm": "divergence"}.get(name, "nelbo")] == 0
    nothing.mean.backward()
    everything = method.loss_at(network, x, NoisedBatch(torch.full_like(x, MASK), late, step and late - step))
    assert (everything.nats > 0).all()
    assert everything.total.isfinite()


@every_diffusion
def test_a_text_of_one_token_is_valid(name):
    config = settings(name)
    method, network = method_of(config), random_network(config)
    assert method.loss(network, torch.tensor([[3]]), None, 1.0, batch_rng()).total.isfinite()
    assert list(method.generate(network, torch.tensor([[MASK]]), Sampling(steps=2), rows(1)))[-1].ids != MASK


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(anchor=Anchor(tau=-1)), "anchor.tau -1 must be at least 0"),
        (Config(model=Model(dropout=1.5)), "model.dropout 1.5 must be less than 1"),
        (Config(method="d3pm"), "time.steps 0 is continuous time, and d3pm is a method of discrete steps"),
        (
            Config(method="sedd", time=Time(steps=9)),
            "time.steps 9 is discrete time, and sedd is a method of continuous",
        ),
        (Config(method="sedd"), "schedule.eps 0.0 makes the noise at t = 1 infinite, and sedd is trained on noise"),
        (
            Config(method="d3pm", time=Time(steps=9), schedule=Schedule(name="geometric")),
            "schedule.name geometric masks tokens at t = 0 already",
        ),
        (Config(method="sedd", time=Time(masks="counted")), "time.masks counted is for adlm and mdlm, not for sedd"),
        (Config(method="sedd", time=Time(power=2.0)), "time.power 2.0 is for adlm and mdlm, not for sedd"),
        (Config(method="ar", time=Time(masks="counted")), "time.masks counted is for adlm and mdlm, not for ar"),
        (Config(method="a2r", time=Time(power=2.0)), "time.power 2.0 is for adlm and mdlm, not for a2r"),
        (Config(method="sedd", time=Time(weight="one")), "time.weight one is for adlm and mdlm, not for sedd"),
        (Config(method="ar", time=Time(weight="one")), "time.weight one is for adlm and mdlm, not for ar"),
        (
            Config(method="a2r", train=Train(random_length=0.1)),
            "train.random_length 0.1 is for methods that read whole rows, and a2r writes from left to right",
        ),
        (
            Config(method="mdlm", model=Model(block_length=4), train=Train(random_length=0.1)),
            "train.random_length 0.1 is for methods that read whole rows, and model.block_length 4 writes",
        ),
    ],
    ids=[
        "tau",
        "dropout",
        "d3pm steps",
        "sedd steps",
        "sedd noise",
        "d3pm start",
        "sedd masks",
        "sedd power",
        "ar",
        "a2r",
        "sedd weight",
        "ar weight",
        "a2r length",
        "block length",
    ],
)
def test_a_config_made_in_python_is_checked_like_one_from_a_file(config, sentence):
    with pytest.raises(UserError, match=sentence):
        method_of(config)


def test_a_network_cannot_be_built_before_the_vocabulary_is_set():
    with pytest.raises(UserError, match="the vocabulary is not set yet"):
        method_of(Config()).build()


@every_method
def test_micro_batches_have_the_draws_and_the_loss_of_the_whole_batch(name):
    """Neither ranks nor micro-batches change a run: every random number belongs to a row of the global batch."""
    config = settings(name, schedule=Schedule("linear") if name == "mdlm" else Schedule(eps=1e-3))
    method, network, x = method_of(config), random_network(config).double(), text(rows=6)
    portions = [BatchSlice(0, 6), BatchSlice(1, 6), BatchSlice(3, 6)]
    pieces = list(zip(portions, x.split([1, 2, 3]), strict=True))

    whole = method.loss(network, x, None, 1.0, batch_rng())
    parts = [method.loss(network, rows, None, 1.0, batch_rng(rows=portion)) for portion, rows in pieces]
    assert int(whole.num_tokens) == sum(int(part.num_tokens) for part in parts)
    torch.testing.assert_close(torch.cat([part.nats for part in parts]), whole.nats, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([part.total for part in parts]).sum(), whole.total, rtol=1e-12, atol=0)

    nats = method.bound(network, x, None, batch_rng())
    by_parts = [method.bound(network, rows, None, batch_rng(rows=portion)) for portion, rows in pieces]
    torch.testing.assert_close(torch.cat(by_parts), nats, rtol=1e-12, atol=1e-12)
