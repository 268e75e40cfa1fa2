"""The estimator `order`: exact likelihoods of ordered samplers, by enumeration of all rows of tiny languages."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from worlds import batch_rng

from adlm.config.schema import Config, Data, Model, Sampling, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.likelihood.estimators import ESTIMATORS, estimator_of, order
from adlm.likelihood.settings import PerplexitySettings
from adlm.methods import method_of
from adlm.registry import ORDERS
from adlm.sampling.adaptive import sample_ordered
from adlm.sampling.frame import KnownText, last_frame
from adlm.sampling.rng import RowRng

MASK, BOS, LENGTH = 3, 0, 4
MODELS = {
    "mdlm": {},
    "adlm": {},
    "mdlm with time": {"time_conditioning": True},
    "mdlm of blocks": {"block_length": 2},
    "adlm of blocks": {"block_length": 3},
}
ORDERS_OF = [(name, each) for name in MODELS for each in ORDERS if "adlm" in name or each != "anchor-first"]
SOME_ORDERS = mostly_slow(ORDERS_OF, *(pair for pair in ORDERS_OF if pair[0] == "adlm" or pair[1] == "entropy"))


def config_of(name: str, length: int = LENGTH, **options) -> Config:
    """Three words, the first of which begins every row of blocks."""
    method, _, kind = name.partition(" ")
    model = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0, start="neighbours")
    if kind == "with time":
        options = {"schedule": Schedule(eps=1e-3), **options}
    return Config(
        method=method,
        vocabulary=Vocabulary(size=4, mask_id=MASK, bos_id=BOS, eos_id=BOS),
        length=length,
        model=replace(model, **MODELS.get(name, {})),
        **options,
    )


def built(config: Config):
    """The method and its network in float64, with random weights everywhere."""
    torch.manual_seed(0)
    method = method_of(config)
    network = method.build().double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return method, network


def all_rows(method, given: dict[int, int] | None = None) -> torch.Tensor:
    """All texts with the tokens that are given; block-causal models are given the first."""
    given = {**({0: BOS} if method.cached else {}), **(given or {})}
    return torch.tensor(list(itertools.product(*([given[i]] if i in given else range(3) for i in range(LENGTH)))))


def score(name: str, method, network, z: torch.Tensor, position: int, beliefs: torch.Tensor) -> float:
    """Of a masked position of one row z (L,) with beliefs (V,), written out; rounded, so that ties are ties."""
    likeliest = sorted(beliefs.exp().tolist(), reverse=True)
    found = {
        "left-to-right": -float(position),
        "certainty": likeliest[0],
        "margin": likeliest[0] - likeliest[1],
        "entropy": sum(p * math.log(p) for p in likeliest if p > 0),
    }
    if name == "anchor-first":
        sigma = method.conditioning_sigma(z[None], None)
        anchors = network.anchor_logits(z[None], sigma)[0, :, :MASK].softmax(dim=-1)
        filled = [int(anchors[i].argmax()) if z[i] == MASK else int(z[i]) for i in range(len(z))]
        share = filled.count(int(anchors[position].argmax())) / len(z)
        found[name] = float(anchors[position].max()) * -math.log(share)
    return round(found[name], 6)


@torch.no_grad()
def by_hand(name: str, method, network, x: torch.Tensor, steps: int, given: tuple[int, ...] = ()) -> torch.Tensor:
    """log p (R,) of the rows x, token by token in a loop over blocks, steps and masks."""
    block_length = method.config.model.block_length
    starts = range(1, x.shape[1], block_length) if block_length else [0]
    total = torch.zeros(len(x), dtype=torch.float64)
    for row, text in enumerate(x):
        for start in starts:
            stop = min(start + (block_length or x.shape[1]), x.shape[1])
            z, masks = text[:stop].clone(), [place for place in range(start, stop) if place not in given]
            z[masks] = MASK
            num, num_steps = len(masks), min(steps, len(masks))
            for step in range(num_steps):
                log_beliefs = method.log_beliefs(network, z[None])[0]
                scores = {place: score(name, method, network, z, place, log_beliefs[place]) for place in masks}
                best = sorted(masks, key=lambda place: (-scores[place], place))
                chosen = best[: num * (step + 1) // num_steps - (num - len(masks))]
                total[row] += sum(log_beliefs[place, text[place]] for place in chosen)
                z[chosen] = text[chosen]
                masks = [place for place in masks if place not in chosen]
            assert not masks
    return total


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(("name", "order_name"), SOME_ORDERS)
def test_the_likelihoods_of_all_rows_sum_to_1_and_are_those_of_a_plain_loop(name, order_name, steps):
    method, network = built(config_of(name))
    x = all_rows(method)
    log_p = -order(method, order_name, steps)(network, x, None, batch_rng()).sum(dim=1)
    assert log_p.dtype == torch.float64
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-12)
    some = torch.arange(0, len(x), 5)
    expected = by_hand(order_name, method, network, x[some], steps or LENGTH)
    torch.testing.assert_close(log_p[some], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("name", "order_name"), SOME_ORDERS)
def test_given_tokens_are_visible_from_the_start_and_cost_nothing(name, order_name):
    method, network = built(config_of(name))
    x = all_rows(method, {2: 1})
    given = torch.zeros_like(x, dtype=torch.bool)
    given[:, 2] = True
    nats = order(method, order_name)(network, x, None, batch_rng(), given)
    assert (nats[:, 2] == 0).all()
    assert float((-nats.sum(dim=1)).exp().sum()) == pytest.approx(1, abs=1e-12)
    expected = by_hand(order_name, method, network, x[::3], LENGTH, (2,))
    torch.testing.assert_close(-nats.sum(dim=1)[::3], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("name", "order_name", "steps"),
    mostly_slow(
        [("adlm", "anchor-first", 2), ("mdlm with time", "certainty", LENGTH), ("adlm of blocks", "entropy", 2)],
        ("adlm", "anchor-first", 2),
    ),
)
def test_samples_have_the_probabilities_that_the_estimator_gives(name, order_name, steps):
    method, network = built(config_of(name))
    x, num = all_rows(method), 6000
    expected = (-order(method, order_name, steps)(network, x, None, batch_rng()).sum(dim=1)).exp() * num
    canvas = torch.full((num, LENGTH), MASK)
    frames = method.generate(FrozenNetwork(network), canvas, Sampling(order_name, steps), RowRng(1, range(num)))
    counts = Counter(map(tuple, last_frame(frames).ids.tolist()))
    found = torch.tensor([counts[tuple(row)] for row in x.tolist()], dtype=torch.float64)
    assert found.sum() == num
    chi_square = ((found - expected) ** 2 / expected.clamp(min=1)).sum()
    assert chi_square < len(x) + 5 * math.sqrt(2 * len(x))


@pytest.mark.parametrize("pad_is", ["masked", "attended"])
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize(("name", "order_name"), SOME_ORDERS)
def test_a_row_among_others_has_the_nats_that_it_has_alone(name, order_name, steps, pad_is):
    method, network = built(config_of(name, length=9, data=Data(pad=pad_is)))
    x, lengths = torch.randint(3, (3, 9), generator=torch.Generator().manual_seed(1)), (9, 4, 7)
    x[:, 0] = BOS
    given = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    pad = torch.arange(9) >= torch.tensor(lengths)[:, None]
    measure = order(method, order_name, steps)
    together = measure(network, x.masked_fill(pad, MASK), pad, batch_rng(), given)  # padding may hold any id
    assert (together[pad] == 0).all()
    for row, length in enumerate(lengths):
        part = slice(row, row + 1), slice(length)
        alone = measure(network, x[part], None, batch_rng(), given[part])
        torch.testing.assert_close(together[part], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("with_given", [False, True])
@pytest.mark.parametrize(
    ("name", "anchor_every"), [("mdlm of blocks", 1), ("adlm of blocks", 1), ("adlm of blocks", 2)]
)
def test_left_to_right_is_the_estimator_of_block_causal_models(name, with_given, anchor_every):
    sampling = Sampling(steps=8, anchor_every=anchor_every)
    method, network = built(config_of(name, length=9, time=Time(steps=8), sampling=sampling))
    x = torch.randint(3, (5, 9), generator=torch.Generator().manual_seed(3))
    x[:, 0] = BOS
    given = None
    if with_given:
        given = torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < 0.3
        if anchor_every > 1:  # the passes of the other estimator count given tokens as steps of their block
            given = torch.arange(9).expand(5, 9) < 4
    nats = order(method)(network, x, None, batch_rng(), given)
    expected = ESTIMATORS["left-to-right"](method)(network, x, None, batch_rng(), given)
    torch.testing.assert_close(nats, expected, atol=1e-5, rtol=0, check_dtype=False)


def test_the_any_order_bound_is_the_mean_over_fixed_orders():
    """Orders are drawn before sampling: sum over k of 1/k E of the nats of k random masks."""
    method, network = built(config_of("mdlm"))
    x = all_rows(method)[::7]
    canvas, sampling = torch.full_like(x, MASK), Sampling("left-to-right", LENGTH)
    total = torch.zeros(len(x), dtype=torch.float64)
    for permutation in itertools.permutations(range(LENGTH)):
        number = torch.tensor(permutation).double()
        text = KnownText(x, torch.zeros(x.shape, dtype=torch.float64))
        run = method.sampling_run(FrozenNetwork(network), canvas, sampling, RowRng(0, range(len(x))), None)
        last_frame(sample_ordered(replace(run, text=text), by_position=lambda _, z, at, pad, n=number: -n[at % LENGTH]))
        total += text.nats.sum(dim=1) / math.factorial(LENGTH)
    bound = torch.zeros(len(x), dtype=torch.float64)
    for num in range(1, LENGTH + 1):
        for masks in itertools.combinations(range(LENGTH), num):
            z = x.clone()
            z[:, masks] = MASK
            right = method.log_beliefs(network, z).gather(2, x[..., None])[:, list(masks), 0]
            bound -= right.sum(dim=1) / num / math.comb(LENGTH, num)
    torch.testing.assert_close(total, bound, atol=1e-10, rtol=0)


def test_nats_do_not_underflow():
    text = KnownText(torch.tensor([[1, 0]]), torch.zeros(1, 2, dtype=torch.float64))
    drawn = text.reveal(torch.tensor([[-2000.0, 0.0], [-2000.0, 0.0]]), torch.tensor([[2, 2]]), torch.tensor([0, 1]))
    assert drawn.tokens.tolist() == [1, 0]
    assert text.nats.tolist() == [[0.0, 2000.0]]


@pytest.mark.parametrize(("own", "expected"), [("entropy", "entropy"), ("ancestral", "left-to-right")])
def test_the_order_is_by_default_that_of_the_models_own_sampler(own, expected):
    method, network = built(config_of("mdlm", sampling=Sampling(own, steps=2, temperature=0.5)))
    x = all_rows(method)[:10]
    settings = PerplexitySettings("order")
    assert settings.order_of(method) == expected
    nats = estimator_of(method, settings)(network, x, None, batch_rng())
    assert torch.equal(nats, order(method, expected, LENGTH)(network, x, None, batch_rng()))  # one a step, no shaping
    assert torch.equal(nats, order(method, expected, 10**15)(network, x, None, batch_rng()))


NEEDS = "estimator order needs beliefs in masked tokens, and"
OPTION = "is an option of estimator order, not of"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("ar", {}, f"{NEEDS} ar has an exact likelihood of its own; use auto"),
        ("sedd", {}, f"{NEEDS} sedd has none; use nelbo"),
        ("d3pm", {}, f"{NEEDS} d3pm has none; use nelbo"),
        ("mdlm", {"order": "anchor-first"}, "anchor-first needs an anchor network, and mdlm has none; use certainty"),
        ("mdlm", {"order": "confidence"}, "confidence has no exact likelihood: .* visible tokens alone; use left-to-"),
        ("mdlm", {"order": "threshold"}, "order threshold has no exact likelihood"),
        ("mdlm", {"order": "ancestral"}, "order ancestral has no exact likelihood"),
        ("mdlm", {"order": "entropi"}, "order 'entropi' is not one of .*; did you mean 'entropy'?"),
        ("mdlm", {"order_steps": 0}, "--order-steps 0 must be at least 1"),
        ("mdlm", {"order": "margin", "estimator": "nelbo"}, f"order margin {OPTION} nelbo"),
        (
            "mdlm",
            {"order_steps": 4, "estimator": "auto"},
            "order_steps 4 is an option of estimator order or path, not of auto",
        ),
    ],
)
def test_what_has_no_such_likelihood_is_refused_in_one_line(name, options, sentence):
    needed = {"sedd": {"schedule": Schedule(eps=1e-3)}, "d3pm": {"schedule": Schedule(eps=1e-3), "time": Time(steps=4)}}
    method = method_of(config_of(name, **needed.get(name, {})))
    with pytest.raises(UserError, match=sentence) as error:
        estimator_of(method, PerplexitySettings(**{"estimator": "order"} | options))
    assert "\n" not in str(error.value)
