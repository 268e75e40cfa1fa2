"""Laws that tie the methods to each other, to the mathematics and to their users."""

import math
from dataclasses import replace

import pytest
import torch
from worlds import seeded, wake

from adlm.config.schema import Anchor, Config, Data, Model, Sampling, Schedule, Time, Vocabulary
from adlm.diffusion.anchors import anchor_mask
from adlm.errors import UserError
from adlm.methods import METHODS, method_of
from adlm.methods.masked_diffusion import Noised

MASK = 7
CLEAN = torch.tensor([i for i in range(12) if i != MASK])
every_method = pytest.mark.parametrize("name", METHODS)


def text(rows: int = 4, length: int = 8, seed: int = 0) -> torch.Tensor:
    return CLEAN[torch.randint(len(CLEAN), (rows, length), generator=seeded(seed))]


def awake(config: Config):
    return wake(method_of(config).build())


def test_adlm_without_anchors_is_mdlm(tiny_config, mdlm_config):
    """gamma 0 and no second network: the same weights, losses, gradients, bounds and samples, to the last bit."""
    model = replace(tiny_config.model, denoiser_blocks=0, dropout=0.1)
    alone = method_of(replace(tiny_config, model=model, anchor=Anchor(gamma=0.0)))
    plain = method_of(replace(mdlm_config, model=model))
    runs = []
    for method in (alone, plain):
        torch.manual_seed(1)
        network = method.build()
        optimizer, draws, losses = torch.optim.AdamW(network.parameters(), lr=1e-2), seeded(), []
        for step in range(5):
            loss = method.loss(network, text(seed=step), None, step / 5, draws)
            optimizer.zero_grad()
            loss.mean.backward()
            optimizer.step()
            losses.append(loss.mean.detach())
        bound = method.bound(network, text(), None, seeded(1))
        canvas = torch.full((3, 8), MASK)
        sample = list(method.generate(network, canvas, Sampling(steps=6), seeded(2)))[-1].ids
        runs.append((losses, bound, sample, list(network.parameters())))
    for ours, theirs in zip(*runs, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_the_loss_is_the_anelbo_written_out(tiny_config):
    """weight * (masked cross-entropy + gamma * anchor cross-entropy at anchors), summed over tokens."""
    config = replace(tiny_config, anchor=Anchor(gamma=0.4, tau=1), schedule=Schedule(eps=1e-3))
    method, network, x = method_of(config), awake(config), text()
    z = x.masked_fill(torch.rand(x.shape, generator=seeded(1)) < 0.5, MASK)
    t = torch.tensor([0.2, 0.4, 0.6, 0.9]).double()
    loss = method.loss_at(network, x, Noised(z, t))
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
        at_masked.loss_at(network, x, Noised(z, t)).total,
        (weight * masked * (right + 0.4 * anchors * anchored)).sum(),
    )


def test_the_anchor_term_trains_the_anchor_network_but_is_not_in_the_nats(tiny_config):
    method, x = method_of(tiny_config), text()
    network = awake(tiny_config)
    with_anchor = method.loss(network, x, None, 1.0, seeded())
    without = method_of(replace(tiny_config, anchor=Anchor(gamma=0.0))).loss(network, x, None, 1.0, seeded())
    assert torch.equal(with_anchor.nats, without.nats)
    assert with_anchor.total > without.total
    assert torch.equal(method.loss(network, x, None, 0.0, seeded()).total, without.total)  # gamma starts at 0


@every_method
@pytest.mark.parametrize(
    ("schedule", "time"),
    [
        (Schedule(), Time()),
        (Schedule(eps=1e-3), Time()),
        (Schedule(name="geometric", sigma_min=0.05, sigma_max=2.0), Time()),
        (Schedule(name="cosine"), Time(steps=16)),
        (Schedule(name="linear", sigma_min=0.0, sigma_max=3.0), Time(steps=5, antithetic=False)),
    ],
    ids=str,
)
def test_a_fresh_network_knows_nothing_and_its_bound_is_log_v(tiny_config, name, schedule, time):
    config = replace(tiny_config, method=name, schedule=schedule, time=time)
    method = method_of(config)
    nats = method.bound(method.build(), text(rows=4096), None, seeded())
    rows = nats.mean(dim=1)
    error = rows.std() / math.sqrt(len(rows))
    assert abs(rows.mean() - math.log(11)) < 5 * error + 1e-6
    assert error < 0.1


@every_method
def test_the_training_loss_of_a_fresh_network_leaves_out_what_the_schedule_shows(tiny_config, name):
    config = replace(tiny_config, method=name, schedule=Schedule(eps=0.3), anchor=Anchor(gamma=0.0))
    method = method_of(config)
    nats = method.loss(method.build(), text(rows=4096), None, 1.0, seeded()).nats.mean(dim=1)
    assert abs(nats.mean() - 0.7 * math.log(11)) < 5 * nats.std() / 64


@every_method
@pytest.mark.parametrize("pad_is", ["masked", "attended"])
def test_padding_enters_no_loss_no_count_and_no_bound(tiny_config, name, pad_is):
    config = replace(tiny_config, method=name, data=Data(pad=pad_is), anchor=Anchor(gamma=0.5))
    method, network = method_of(config), awake(config)
    x, pad = text(), torch.zeros(4, 8, dtype=torch.bool)
    pad[:, 5:] = True
    loss = method.loss(network, x, pad, 1.0, seeded())
    assert loss.num_tokens == 20
    assert (loss.nats[pad] == 0).all()
    assert (method.bound(network, x, pad, seeded())[pad] == 0).all()
    other = torch.where(pad, text(seed=9), x)  # what stands in the padding
    assert torch.equal(method.loss(network, other, pad, 1.0, seeded()).total, loss.total) == (pad_is == "masked")


@every_method
def test_a_network_told_the_time_answers_by_it(tiny_config, name):
    model = replace(tiny_config.model, time_conditioning=True)
    config = replace(tiny_config, method=name, model=model, schedule=Schedule(eps=1e-3))
    method, network, x = method_of(config), awake(config), text()
    z = torch.full_like(x, MASK)
    early, late = (method.loss_at(network, x, Noised(z, torch.full((4,), t).double())).nats * t for t in (0.3, 1.0))
    assert (early - late).abs().max() > 1e-3
    frames = list(method.generate(network, z, Sampling(steps=3), seeded()))
    assert (frames[-1].ids != MASK).all()


@every_method
def test_generated_text_is_clean_keeps_what_was_given_and_leaves_the_network_as_it_was(tiny_config, name):
    config = replace(tiny_config, method=name, model=replace(tiny_config.model, dropout=0.3))
    method, network = method_of(config), awake(config).train()
    canvas = torch.full((5, 8), MASK)
    canvas[:, 2], canvas[:, 6] = 1, 9
    sampling = Sampling(sampler="remdm-rescale", eta=0.5, steps=10)
    frames = list(method.generate(network, canvas, sampling, seeded()))
    final = frames[-1].ids
    assert (final != MASK).all()
    assert (final[:, 2] == 1).all()
    assert (final[:, 6] == 9).all()
    assert network.training
    again = list(method.generate(network, canvas, sampling, seeded()))[-1].ids
    assert torch.equal(final, again)  # dropout was off


@every_method
def test_training_lowers_the_bound_on_what_it_trains_on(tiny_config, name):
    """Two texts of eleven words: knowing one token tells the rest."""
    config = replace(
        tiny_config, method=name, anchor=Anchor(gamma=0.1), model=replace(tiny_config.model, bridge="hidden")
    )
    method = method_of(config)
    torch.manual_seed(0)
    network, draws = method.build(), seeded()
    x = text(rows=2, seed=3).repeat(16, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for step in range(150):
        optimizer.zero_grad()
        method.loss(network, x, None, step / 150, draws).mean.backward()
        optimizer.step()
    nats = method.bound(network, text(rows=2, seed=3).repeat(256, 1), None, seeded()).mean()
    assert nats < 0.3 * math.log(11)
    assert nats > math.log(2) / 8 - 0.02  # one of two texts costs log 2 at the least


@every_method
@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.full((2, 8), MASK), "the text holds the mask id 7 at 16 of 16 positions"),
        (torch.tensor([[0, 12]]), "the text holds id 12, outside the vocabulary of 12 symbols"),
        (torch.tensor([[0, -1]]), "the text holds id -1, outside the vocabulary of 12 symbols"),
        (torch.zeros(2, 3), "must be int64 ids of shape"),
        (torch.zeros(0, 3, dtype=torch.int64), "must be int64 ids of shape"),
    ],
)
def test_text_that_is_no_text_is_refused_in_a_sentence(tiny_config, name, x, sentence):
    method = method_of(replace(tiny_config, method=name))
    network = method.build()
    for verb in (
        lambda: method.loss(network, x, None, 1.0, seeded()),
        lambda: method.bound(network, x, None, seeded()),
    ):
        with pytest.raises(UserError, match=sentence):
            verb()


@every_method
@pytest.mark.parametrize(
    ("canvas", "sentence"),
    [
        (torch.tensor([[MASK, 1], [2, 3]]), "row 1 of the canvas has no mask id 7"),
        (torch.tensor([[MASK, 12]]), "the canvas holds id 12"),
        (torch.full((1, 9), MASK), "the canvas is 9 tokens long and the model was made for length 8"),
    ],
)
def test_a_canvas_that_cannot_be_filled_is_refused_before_the_first_frame(tiny_config, name, canvas, sentence):
    method = method_of(replace(tiny_config, method=name))
    with pytest.raises(UserError, match=sentence):
        method.generate(method.build(), canvas, Sampling(), seeded())


def test_all_masked_or_none_masked_are_ordinary_batches(tiny_config):
    method, network, x = method_of(tiny_config), awake(tiny_config), text()
    nothing = method.loss_at(network, x, Noised(x, torch.full((4,), 1e-3).double()))
    assert (nothing.nats == 0).all()
    everything = method.loss_at(network, x, Noised(torch.full_like(x, MASK), torch.ones(4).double()))
    assert (everything.nats > 0).all()
    assert everything.total.isfinite()


def test_one_token_alone_is_a_text_too(tiny_config):
    method, network = method_of(tiny_config), awake(tiny_config)
    assert method.loss(network, torch.tensor([[3]]), None, 1.0, seeded()).total.isfinite()
    assert list(method.generate(network, torch.tensor([[MASK]]), Sampling(steps=2), seeded()))[-1].ids != MASK


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(method="sedd", vocabulary=Vocabulary(12, 7)), "method sedd has a preset but no code yet"),
        (Config(anchor=Anchor(tau=-1)), "anchor.tau -1 must be at least 0"),
        (Config(model=Model(dropout=1.5)), "model.dropout 1.5 must be less than 1"),
    ],
)
def test_a_config_made_in_python_is_checked_like_one_from_a_file(config, sentence):
    with pytest.raises(UserError, match=sentence):
        method_of(config)


def test_a_network_cannot_be_built_before_the_vocabulary_is_settled():
    with pytest.raises(UserError, match="vocabulary is not settled yet"):
        method_of(Config()).build()
