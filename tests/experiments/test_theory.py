"""The theory's experiments are right before they are believed."""

import itertools

import numpy as np
import pytest
from em import em
from tables import errors, excess, excess_dlm, num_entries, predicted, random_language, states_of


@pytest.fixture
def draws():
    return np.random.default_rng(1)


def test_a_language_is_a_distribution_in_which_tokens_hang_on_their_anchors_alone(draws):
    language = random_language(2, 5, 1, draws)
    chance, texts = language.probabilities(), language.texts()
    assert chance.sum() == pytest.approx(1)
    (anchor,) = language.anchors[4]
    for word, rest in itertools.product((0, 1), (0, 1)):
        other = next(place for place in range(4) if place != anchor)
        given = (texts[:, anchor] == word) & (texts[:, other] == rest)
        share = chance[given & (texts[:, 4] == 1)].sum() / chance[given].sum()
        assert share == pytest.approx(language.tables[4][word, 1])


def test_the_true_tables_have_no_error(draws):
    language = random_language(3, 4, 2, draws)
    assert excess(language, language.anchors, list(language.tables)) == pytest.approx(0, abs=1e-12)


def test_exact_beliefs_have_no_error_in_any_order(draws):
    """The bound of a perfect DLM is the entropy: what makes its excess a fair error."""
    language = random_language(2, 3, 1, draws)
    texts, chance = language.texts(), language.probabilities()
    beliefs = np.full((27, 3, 2), 0.5)
    for state in itertools.product((0, 1, 2), repeat=3):
        masked = np.array(state) == 2
        fits = ((texts == state) | masked).all(axis=1)
        index = states_of(np.array([state]), masked[None], 2)[0]
        for place in np.nonzero(masked)[0]:
            beliefs[index, place] = [
                chance[fits & (texts[:, place] == word)].sum() / chance[fits].sum() for word in (0, 1)
            ]
    assert excess_dlm(language, beliefs) == pytest.approx(0, abs=1e-12)


def test_with_many_texts_each_model_errs_as_its_order_predicts(draws):
    language = random_language(2, 4, 1, draws)
    runs = [errors(language, 200_000, draws) for _ in range(20)]
    for name, order in predicted(language).items():
        found = 200_000 * np.mean([run[name] for run in runs])
        assert found == pytest.approx(order, rel=0.35), name  # chi-square noise of a few contexts


def test_the_tables_grow_as_the_proposition_says(draws):
    """K^L, L (K+1)^(L-1) K and L K^(d+1) entries."""
    small, large = (num_entries(random_language(3, length, 1, draws)) for length in (4, 5))
    assert large["AR"] / small["AR"] == pytest.approx(3, rel=0.05)
    assert large["DLM"] / small["DLM"] == pytest.approx(4 * 5 / 4)
    assert large["anchored"] - small["anchored"] == 3**2


def test_em_never_lowers_the_likelihood_and_its_bound_meets_it_after_every_e_step(draws):
    rounds = list(em(random_language(2, 4, 2, draws), 3, 30, draws))
    for before, after in itertools.pairwise(rounds):
        assert before.bound_after_e == pytest.approx(before.log_likelihood, abs=1e-10)
        assert before.bound_after_m >= before.bound_after_e - 1e-12
        assert after.log_likelihood >= before.bound_after_m - 1e-12
    assert rounds[-1].log_likelihood > rounds[0].log_likelihood + 0.1
