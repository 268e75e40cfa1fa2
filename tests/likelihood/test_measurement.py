"""Likelihood estimates: unbiased, with correct standard errors, independent of batches, processes and interruptions."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from worlds import batch_rng, quadrature, randomized, seeded

from adlm import distributed
from adlm.config.schema import Anchor, Config, Data, Model, Schedule, Time, Vocabulary
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.diffusion.objectives import prior_nats
from adlm.errors import UserError
from adlm.likelihood import measurement as likelihood
from adlm.likelihood.measurement import chosen_rows, delete_journal, measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.standard_errors import Estimate, Nats, difference, summarize, t_quantile
from adlm.methods import method_of
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.registry import METHODS

MASK, LENGTH = 4, 4
Once = partial(PerplexitySettings, repeats=1)  # every row once in a replicate, however short the text


def settings(name: str, **options) -> Config:
    conditioned = name in ("sedd", "d3pm")
    base = Config(
        method=name,
        vocabulary=Vocabulary(size=5, mask_id=MASK, bos_id=3),
        length=LENGTH,
        model=Model(8, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0, time_conditioning=conditioned),
        schedule=Schedule(eps=0.2 if conditioned else 0.0),
        time=Time(steps=6 if name == "d3pm" else 0),
        anchor=Anchor(gamma=0.0),
    )
    return replace(base, **options)


@dataclass(frozen=True)
class Texts:
    """Rows in memory; every `together` tokens are a document, the first and last `framed` of a row are not text."""

    x: np.ndarray
    pad: np.ndarray | None = None
    together: int = LENGTH
    framed: int = 0

    @property
    def length(self):
        return self.x.shape[1]

    def __len__(self):
        return len(self.x)

    def read(self, rows):
        return self.x[rows], None if self.pad is None else self.pad[rows]

    def given(self, rows):
        return None

    def counted(self, x, pad):
        used = np.full(len(x), x.shape[1]) if pad is None else (~pad).sum(axis=1)
        place = np.arange(x.shape[1])
        return (place >= self.framed) & (place < used[:, None] - self.framed)

    def documents(self, rows):
        return (np.asarray(rows)[:, None] * self.length + np.arange(self.length)) // self.together


def random_texts(num=40, pad=False, **options) -> Texts:
    x = torch.randint(0, MASK, (num, LENGTH), generator=seeded(5)).numpy()
    lengths = torch.randint(1, LENGTH + 1, (num, 1), generator=seeded(6)).numpy()
    return Texts(x, np.arange(LENGTH) >= lengths if pad else None, **options)


def network_of(config, scale=0.2):
    return randomized(method_of(config).build().double(), scale=scale)


def masks_of(x):
    """x with every subset of its tokens masked, and the size of each subset."""
    masked = torch.tensor(list(itertools.product((False, True), repeat=x.shape[-1])))
    return x.masked_fill(masked, MASK), masked.sum(dim=1)


@torch.no_grad()
def exact_bound(method, network, x):
    """The expectation of the estimate for one text, in total nats: over all masks, and over time by quadrature."""
    z, num = masks_of(x)
    if method.exact:
        return float(-clean_log_beliefs(network(x[None, :-1])[0], MASK).gather(-1, x[1:, None]).sum())
    schedule, config = method.schedule, method.config
    if config.time.steps:
        grid = torch.arange(1, config.time.steps + 1).double() / config.time.steps
        times, weights, before = grid, torch.full_like(grid, 1 / len(grid)), grid - 1 / len(grid)
    else:
        (times, weights), before = quadrature(40), None
    hidden = schedule.mask_chance(times)[:, None]
    chance = weights[:, None] * hidden**num * (1 - hidden) ** (len(x) - num)  # (times, masks)
    t, s = (None if each is None else each.repeat_interleave(len(z)) for each in (times, before))
    noised = NoisedBatch(z.repeat(len(times), 1), t, s)
    nats = method.loss_at(network, x.expand_as(noised.z), noised).nats.sum(dim=1)
    return float(chance.flatten() @ nats) + len(x) * float(prior_nats(schedule, method.config.vocabulary.num_clean))


@pytest.mark.parametrize("name", METHODS)
def test_the_estimate_is_unbiased_for_the_enumerated_bound(name):
    config = settings(name)
    method, network, texts = method_of(config), network_of(settings(name)), random_texts(8)
    wanted = sum(exact_bound(method, network, torch.from_numpy(row)) for row in texts.x)
    found = summarize(measure_nats(method, network, texts, PerplexitySettings(samples=20, repeats=30)))
    tokens = 8 * (LENGTH - method.exact)
    assert found.tokens == tokens
    assert abs(found.nats - wanted / tokens) <= 4 * found.monte_carlo + 1e-9
    assert found.monte_carlo < 0.05
    assert (found.monte_carlo == 0) == method.exact


@pytest.mark.parametrize("name", ["adlm", "mdlm"])
@pytest.mark.parametrize("pad", [False, True])
def test_any_order_estimates_the_same_bound_with_less_noise(name, pad):
    method, network, texts = method_of(settings(name)), network_of(settings(name)), random_texts(40, pad)
    by_time, by_count = (
        summarize(measure_nats(method, network, texts, PerplexitySettings(kind, samples=40, repeats=5)))
        for kind in ("nelbo", "any-order")
    )
    error = math.hypot(by_time.monte_carlo, by_count.monte_carlo)
    assert by_time.tokens == by_count.tokens
    assert abs(by_time.nats - by_count.nats) < 4 * error
    assert by_count.monte_carlo < 0.7 * by_time.monte_carlo


@pytest.mark.parametrize("name", ["adlm", "mdlm"])
@pytest.mark.parametrize(
    "time", [Time(masks="counted"), Time(masks="counted", power=2.0), Time(power=2.0, t_min=0.0)], ids=str
)
def test_the_training_loss_has_the_mean_of_the_enumerated_bound(name, time):
    """With counted masks and with times of any density, once t_min leaves nothing out."""
    method = method_of(settings(name, time=time))
    network, x = network_of(settings(name)), torch.from_numpy(random_texts(8).x)
    wanted = sum(exact_bound(method_of(settings(name)), network, row) for row in x) / x.numel()
    with torch.no_grad():
        draws = [method.loss(network, x.repeat(50, 1), None, 1.0, batch_rng(seed)).nats.mean() for seed in range(20)]
    mean, stderr = torch.stack(draws).mean(), torch.stack(draws).std() / len(draws) ** 0.5
    assert abs(mean - wanted) < 4 * stderr
    assert stderr < 0.02


@pytest.mark.parametrize(
    "time",
    [Time(t_min=0.0), Time(t_min=0.0, power=2.0), Time(masks="counted"), Time(masks="counted", power=2.0)],
    ids=str,
)
def test_with_weight_one_the_loss_has_the_mean_over_numbers_of_masks(time):
    """Uniform t has 0, ..., n masks equally often, counted masks 1, ..., n: total nats sum_k S_k / (n + 1) or / n."""
    method, network = method_of(settings("mdlm", time=replace(time, weight="one"))), network_of(settings("mdlm"))
    x = torch.from_numpy(random_texts(1).x)
    z, num = masks_of(x[0])
    with torch.no_grad():
        noised = NoisedBatch(z, torch.full((len(z),), 0.5).double())
        nats = method.masked_nats(network, x.expand_as(z), noised, None).sum(dim=1)
        by_number = sum(nats[num == number].mean() for number in range(1, LENGTH + 1))
        wanted = by_number / (LENGTH + (time.masks == "independent"))
        rows = x.repeat(400, 1)
        draws = [method.loss(network, rows, None, 1.0, batch_rng(seed)).total / 400 for seed in range(20)]
    mean, stderr = torch.stack(draws).mean(), torch.stack(draws).std() / len(draws) ** 0.5
    assert abs(mean - wanted) < 4 * stderr
    assert stderr < 0.01 * wanted


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (settings("sedd"), r"any-order needs beliefs in masked tokens, and sedd has none"),
        (settings("d3pm"), r"any-order needs beliefs in masked tokens, and d3pm has none"),
        (settings("mdlm", schedule=Schedule(eps=1e-3)), r"needs a schedule from all visible to all masked"),
        (settings("mdlm", time=Time(steps=10)), r"needs continuous time"),
        (settings("mdlm", data=Data(pad="attended")), r"data.pad attended masks padding too"),
    ],
)
def test_any_order_is_refused_where_it_is_not_the_bound(config, sentence):
    with pytest.raises(UserError, match=sentence):
        measure_nats(method_of(config), method_of(config).build(), random_texts(), Once("any-order"))


def test_the_published_estimate_has_no_terms_at_the_ends_of_time():
    """A uniform network has log V nats at each position that the published schedule masks, and no terms at the ends."""
    config = settings("mdlm")
    method = method_of(config)
    found = summarize(measure_nats(method, method.build().double(), random_texts(4000), Once("published", samples=9)))
    assert found.nats == pytest.approx((1 - 1e-3) * math.log(4), abs=4 * found.monte_carlo)
    assert found.monte_carlo < 0.02


def test_the_published_estimate_does_not_depend_on_how_the_model_was_trained():
    config, texts, once = settings("mdlm"), random_texts(50), Once("published", samples=2)
    network = network_of(config)
    expected = measure_nats(method_of(config), network, texts, once).documents
    for time in (Time(t_min=0.3, t_max=0.8), Time(masks="counted", power=2.0), Time(weight="one")):
        found = measure_nats(method_of(replace(config, time=time)), network, texts, once).documents
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["mdlm", "ar"])
def test_bos_and_eos_of_a_row_add_nats_but_are_not_counted(name):
    """Nats of all predicted tokens, divided by the tokens of the text: the same count for both kinds of method."""
    method, network = method_of(settings(name)), network_of(settings(name))
    unframed = measure_nats(method, network, random_texts(50), Once(samples=2))
    framed = measure_nats(method, network, random_texts(50, framed=1), Once(samples=2))
    assert np.array_equal(framed.documents, unframed.documents)
    assert unframed.tokens.tolist() == [LENGTH - method.exact] * 50
    assert framed.tokens.tolist() == [LENGTH - 2] * 50


def test_a_short_text_is_scored_repeatedly_for_the_same_bound_with_less_noise():
    method, network, texts = method_of(settings("mdlm")), network_of(settings("mdlm")), random_texts(2)
    wanted = sum(exact_bound(method, network, torch.from_numpy(row)) for row in texts.x) / (2 * LENGTH)
    by_once, by_often = (
        measure_nats(method, network, texts, kind("nelbo", samples=60)) for kind in (Once, PerplexitySettings)
    )
    assert np.allclose(by_often.documents.sum(axis=0), by_often.groups.sum(axis=0))
    once, often = summarize(by_once), summarize(by_often)
    assert once.tokens == often.tokens == 2 * LENGTH
    assert abs(often.nats - wanted) < 4 * often.monte_carlo
    assert often.monte_carlo < 0.1 * once.monte_carlo


def test_a_row_alone_is_scored_without_its_padding():
    """Attention ignores padding, so the nats are the same; a network that does not read it is faster on short texts."""
    config = settings("ar")
    method, network = method_of(config), network_of(config)
    x, pad = random_texts(1).x, np.array([[False, False, False, True]])
    read, embed = [], network.embedding
    embed.register_forward_pre_hook(lambda module, given: read.append(given[0].shape[1]))
    alone = measure_nats(method, network, Texts(x, pad), Once())
    beside = measure_nats(method, network, Texts(np.repeat(x, 2, axis=0), np.repeat(pad, 2, axis=0)), Once())
    assert np.allclose(alone.groups, beside.groups / 2)
    assert read == [2, 3]  # all but the last token


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["nelbo", "any-order"])
def test_the_monte_carlo_interval_covers_the_exact_bound_in_95_percent_of_runs(estimator):
    config = settings("mdlm")
    method, network, texts = method_of(config), network_of(config), random_texts(16)
    wanted = sum(exact_bound(method, network, torch.from_numpy(row)) for row in texts.x) / (16 * LENGTH)
    covered = 0
    for seed in range(400):
        low, high = summarize(
            measure_nats(method, network, texts, Once(estimator, samples=8, seed=seed, batch=16))
        ).interval()
        covered += low <= wanted <= high
    assert 0.91 <= covered / 400 <= 0.99


def test_the_error_over_documents_agrees_with_the_bootstrap():
    draws = np.random.default_rng(0)
    tokens = draws.integers(5, 200, 300)
    nats = Nats(np.zeros((1, 2)), (tokens * draws.gamma(4.0, 0.5, 300))[:, None], tokens, True)
    again = []
    for _ in range(2000):
        picked = draws.integers(0, 300, 300)
        again.append(nats.documents[picked, 0].sum() / tokens[picked].sum())
    assert summarize(nats).over_documents == pytest.approx(np.std(again), rel=0.1)


def test_the_error_over_documents_excludes_the_monte_carlo_variance():
    """All documents have the same expected nats, plus noise: replicates separate the noise from the documents."""
    draws, tokens = np.random.default_rng(0), np.full(400, 50)
    noisy = 150 + draws.normal(0, 20, (400, 8))
    first = Nats(np.zeros((1, 8)), noisy, tokens, False)
    more = [summarize(Nats(np.zeros((1, 8)), 150 + draws.normal(0, 20, (400, 8)), tokens, False)) for _ in range(40)]
    errors = [found.over_documents for found in (summarize(first), *more)]
    assert all(error is None or error < 0.4 * 20 / 50 / 20 / math.sqrt(8) for error in errors)
    assert 10 < errors.count(None) < 31  # an unbiased estimate of 0 is negative half the time: None, not 0


def test_the_combined_error_covers_the_expectation_over_documents():
    """New documents each time, each with its own noise: `stderr` combines both errors."""
    draws, covered = np.random.default_rng(1), 0
    for _ in range(400):
        tokens = draws.integers(5, 60, 80)
        cost = tokens * draws.gamma(9.0, 1 / 3, 80)
        noisy = cost[:, None] + draws.normal(0, 8, (80, 4))
        found = summarize(Nats(noisy.sum(axis=0, keepdims=True), noisy, tokens, False))
        covered += abs(found.nats - 3.0) < 1.99 * found.stderr  # 79 degrees of freedom
    assert 0.91 <= covered / 400 <= 0.99


@pytest.mark.parametrize("name", ["adlm", "sedd", "ar"])
@pytest.mark.parametrize("pad", [False, True])
def test_the_batch_size_does_not_change_the_result(name, pad, monkeypatch):
    monkeypatch.setattr(likelihood, "TOKENS_A_GROUP", 16 * LENGTH)
    method, network, texts = method_of(settings(name)), network_of(settings(name)), random_texts(25, pad)
    one, seven, all_ = (measure_nats(method, network, texts, Once(samples=2, batch=batch)) for batch in (1, 7, 16))
    for other in (seven, all_):
        assert np.allclose(one.groups, other.groups, rtol=1e-9)
        assert np.allclose(one.documents, other.documents, rtol=1e-9)
    assert one.groups.shape == (2, 1 if name == "ar" else 2)


def test_common_noise_cancels_in_the_difference_of_two_models():
    config = settings("mdlm")
    method, network, texts = method_of(config), network_of(config), random_texts(200)
    nearly = network_of(config)
    with torch.no_grad():
        nearly.head.bias += 0.05 * torch.randn(5, generator=seeded(), dtype=torch.float64)
    ours, theirs = (measure_nats(method, each, texts, Once("nelbo", samples=4)) for each in (network, nearly))
    gap = difference(ours, theirs)
    assert gap.nats == pytest.approx(summarize(ours).nats - summarize(theirs).nats)
    assert gap.monte_carlo < 0.2 * summarize(ours).monte_carlo
    assert gap.stderr < 0.2 * summarize(ours).stderr


def test_models_measured_on_other_rows_are_not_compared():
    first = Nats(np.ones((2, 2)), np.ones((3, 2)), np.ones(3, np.int64), False)
    second = Nats(np.ones((2, 2)), np.ones((4, 2)), np.ones(4, np.int64), False)
    with pytest.raises(UserError, match=r"measured on different rows"):
        difference(first, second)


def test_a_document_in_several_rows_and_groups_is_counted_once(monkeypatch):
    monkeypatch.setattr(likelihood, "TOKENS_A_GROUP", 2 * LENGTH)
    method, network = method_of(settings("mdlm")), network_of(settings("mdlm"))
    nats = measure_nats(method, network, random_texts(9, together=12), Once(samples=2))
    assert nats.tokens.tolist() == [12, 12, 12]
    assert np.allclose(nats.documents.sum(axis=0), nats.groups.sum(axis=0))


def test_max_tokens_takes_evenly_spaced_rows():
    assert chosen_rows(random_texts(100), None).tolist() == list(range(100))
    assert chosen_rows(random_texts(100), 10 * LENGTH).tolist() == list(range(0, 100, 10))
    assert chosen_rows(random_texts(100), 1).tolist() == [0]


def test_an_interrupted_measurement_resumes_to_the_same_result(tmp_path, monkeypatch):
    monkeypatch.setattr(likelihood, "TOKENS_A_GROUP", 8 * LENGTH)
    method, network, texts, once = method_of(settings("mdlm")), network_of(settings("mdlm")), random_texts(), Once()
    uninterrupted, journal, read = measure_nats(method, network, texts, once), tmp_path / "journal", []

    class Enough(Exception):
        pass

    def report_progress(done, total):
        if done > 2 * 8 * LENGTH:  # in the third group
            raise Enough

    with pytest.raises(Enough):
        measure_nats(method, network, texts, once, journal, report_progress)
    [file] = tmp_path.iterdir()
    file.write_text(file.read_text() + '\n{"group": 3, "nats"')  # an incomplete line

    class Counting(Texts):
        def read(self, rows):
            read.append(len(rows))
            return super().read(rows)

    again = measure_nats(method, network, Counting(texts.x), once, journal)
    assert np.array_equal(again.groups, uninterrupted.groups)
    assert np.array_equal(again.documents, uninterrupted.documents)
    assert sum(read) == 24  # three of five groups
    delete_journal(journal)
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_resumes_with_another_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(likelihood, "TOKENS_A_GROUP", 8 * LENGTH)
    method, network, texts, once = method_of(settings("mdlm")), network_of(settings("mdlm")), random_texts(), Once()
    uninterrupted, journal, done = measure_nats(method, network, texts, once), tmp_path / "journal[1]", []
    with monkeypatch.context() as patched:
        patched.setattr(distributed, "rank_and_size", lambda: (1, 2))
        measure_nats(method, network, texts, once, journal)
        [file] = tmp_path.iterdir()
        file.write_text(file.read_text()[:-5])  # cut off: of groups 1 and 3 the first is left
    again = measure_nats(method, network, texts, once, journal, lambda *progress: done.append(progress))
    assert done[0] == (8 * LENGTH, 40 * LENGTH)
    assert done[-1] == (pytest.approx(40 * LENGTH), 40 * LENGTH)
    assert np.array_equal(again.groups, uninterrupted.groups)
    delete_journal(journal)
    assert list(tmp_path.iterdir()) == []


def test_nan_nats_are_an_error(tmp_path):
    config = settings("mdlm")
    network = method_of(config).build()
    with torch.no_grad():
        network.head.bias.fill_(torch.nan)
    with pytest.raises(UserError, match=r"nats are not finite"):
        measure_nats(method_of(config), network, random_texts(), Once(), tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []  # no journal without entries is left behind


@pytest.mark.parametrize("freedom", [1, 1.3, 1.5, 2, 2.5, 3, 7, 30, 1e6])
def test_95_percent_of_students_distribution_lie_within_its_quantile(freedom):
    """By the trapezoid rule on the density, x = sqrt(freedom) tan(theta): cos(theta)^(freedom - 1) up to a constant."""
    theta = np.linspace(0, math.pi / 2, 400_001)
    density = np.cos(theta) ** (freedom - 1)
    within = theta <= math.atan(t_quantile(freedom) / math.sqrt(freedom))
    assert density[within].sum() / density.sum() == pytest.approx(0.95, abs=1e-3 if freedom > 1e4 else 1e-5)


def test_an_unknown_error_is_none_not_zero():
    """One document, or one replicate of documents that share a row's noise, give no estimate of the variance."""
    tokens = np.full(30, 50)
    nats = 150 + np.random.default_rng(0).normal(0, 20, (30, 1))
    one_document = summarize(Nats(nats[:1], nats[:1], tokens[:1], exact=True))
    assert (one_document.monte_carlo, one_document.over_documents, one_document.stderr) == (0.0, None, None)
    one_draw = summarize(Nats(nats.sum(axis=0, keepdims=True), nats, tokens, exact=False))
    assert (one_draw.monte_carlo, one_draw.over_documents, one_draw.stderr) == (None, None, None)
    assert summarize(Nats(nats, nats, tokens, exact=True)).over_documents > 0


@pytest.mark.parametrize("samples", [2, 4])
def test_the_combined_error_covers_where_documents_of_a_row_share_its_noise(samples):
    """Eight documents per row share one noise level; documents and noise are sampled anew each time."""
    draws, covered = np.random.default_rng(2), 0
    for _ in range(400):
        rows, each = 25, 8
        tokens = np.full(rows * each, 20)
        cost = tokens * draws.gamma(9.0, 1 / 3, rows * each)
        common = np.repeat(draws.normal(0, 25, (rows, samples)), each, axis=0)
        noisy = cost[:, None] + common + draws.normal(0, 5, (rows * each, samples))
        groups = noisy.reshape(rows, each, samples).sum(axis=1)
        found = summarize(Nats(groups, noisy, tokens, False))
        error = found.monte_carlo if found.stderr is None else found.stderr
        covered += abs(found.nats - 3.0) < 2.0 * error
    assert 0.91 <= covered / 400 <= 0.985


def test_bits_and_perplexity_are_functions_of_the_nats():
    found = Estimate(math.log(8), 0.3, 0.4, 3, 10, 2)
    assert found.bits == pytest.approx(3)
    assert found.perplexity == pytest.approx(8)
    assert found.stderr == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"estimator": "best"},
            r"estimator 'best' is not one of auto, nelbo, any-order, left-to-right",
        ),
        ({"samples": 0}, r"samples 0 must be at least 1"),
        ({"batch": 0}, r"batch 0 must be at least 1"),
        ({"seed": -1}, r"seed -1 must be 0 or more"),
        ({"max_tokens": 0}, r"--max-tokens 0 must be at least 1"),
        ({"repeats": 0}, r"repeats 0 must be at least 1"),
    ],
)
def test_invalid_settings_are_user_errors(options, sentence):
    with pytest.raises(UserError, match=sentence):
        PerplexitySettings(**options)
