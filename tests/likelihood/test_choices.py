"""Tests of the probabilities of choices: enumeration, errors, normalisation, where tokens begin, user errors."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import mostly_slow, small_model

import adlm
from adlm.config.schema import Schedule
from adlm.errors import UserError
from adlm.methods import method_of

ALPHABET = " abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models in double precision, over 27 characters, bytes or the tokens of the box; alpha goes from 1 to 0."""
    folder, found = tmp_path_factory.mktemp("choices"), {}
    for method in ("ar", "mdlm", "adlm"):
        found[method] = small_model(folder / method, method, "text8")
    found["blocks"] = small_model(folder / "blocks", "mdlm", "bytes", block_length=2)
    found["words"] = small_model(folder / "words", "ar", "box", length=32)
    found["infilled words"] = small_model(folder / "infilled", "mdlm", "box", length=32)
    return {name: configured(adlm.load(path), schedule=Schedule()) for name, path in found.items()}


def configured(lm, **changes):
    """The model with another config, in double precision."""
    config = replace(lm.config, **changes)
    return replace(lm, config=config, method=method_of(config), network=lm.network.double())


def ids_of(lm, text):
    return torch.tensor([lm.tokenizer.encode(text)])


def softmax(values):
    return (np.exp(values) / np.exp(values).sum()).tolist()


def causal_log_prob(lm, text):
    """log p of a text after its first token, one prediction after the other."""
    ids = ids_of(lm, text)
    log_probs = lm.log_probs(ids)[0]
    return sum(float(log_probs[i - 1, ids[0, i]]) for i in range(1, ids.shape[1]))


def test_the_probabilities_of_all_symbols_are_the_posterior_given_both_sides(models):
    """p(x_2 | x_1, x_3, x_4) of a causal model, by listing all texts."""
    lm = models["ar"]
    scores = lm.choose("t[MASK]xy", list(ALPHABET))
    assert scores.probabilities == pytest.approx(softmax([causal_log_prob(lm, f"t{c}xy") for c in ALPHABET]))
    assert sum(scores.probabilities) == pytest.approx(1)
    following = lm.log_probs(ids_of(lm, "t"))[0, 0].exp()  # p(x_2 | x_1)
    total = sum(
        float(following[index]) * math.exp(causal_log_prob(lm, f"t{c}xy") - causal_log_prob(lm, f"t{c}"))
        for index, c in enumerate(ALPHABET)
    )
    assert math.fsum(map(math.exp, scores.log_scores)) == pytest.approx(total)  # p(x_3, x_4 | x_1)
    assert (set(scores.stderr), scores.gap_stderr, scores.is_bound) == ({0.0}, 0.0, False)
    assert scores.probabilities[scores.choices.index(scores.best)] == max(scores.probabilities)


@pytest.mark.parametrize("score", [None, "causal", "left-to-right"])
def test_block_causal_scores_are_differences_of_exact_likelihoods(models, score):
    lm, choices = models["blocks"], ["no", "yes", "maybe"]
    scores = lm.choose("He said [MASK]!", choices, score=score)
    likelihoods = []
    for choice in choices:
        x = torch.cat([torch.tensor([[256]]), ids_of(lm, f"He said {choice}!")], dim=1)
        nats = lm.method.causal_nats if score != "left-to-right" else lm.method.left_to_right_nats
        likelihoods.append(-float(nats(lm.network, x, None).sum()))
    assert scores.probabilities == pytest.approx(softmax(likelihoods), rel=1e-5)
    assert not scores.is_bound


@pytest.mark.parametrize("method", ["adlm", "mdlm"])
def test_the_bound_is_the_mean_over_the_exact_likelihoods_of_all_orders(models, method):
    lm = models[method]
    scores = lm.choose("the [MASK]t", ["ca", "a", "hea"])
    for choice, log_score in zip(scores.choices, scores.log_scores, strict=True):
        x = ids_of(lm, f"the {choice}t")[0]
        orders = list(itertools.permutations(range(4, len(x))))
        total = 0.0
        for order in orders:
            z = x.clone()
            z[4:] = lm.mask_id
            for place in order:
                total += float(lm.log_probs(z[None])[0, place, x[place]])
                z[place] = x[place]
        assert log_score == pytest.approx(total / len(orders), rel=1e-6)
    assert scores.is_bound


def test_one_token_at_the_end_has_the_belief_of_the_model(models):
    lm = models["mdlm"]
    scores = lm.choose("the ca[MASK]", ["t", "r", "b"])
    z = torch.cat([ids_of(lm, "the ca"), torch.tensor([[lm.mask_id]])], dim=1)
    beliefs = lm.log_probs(z)[0, -1]
    assert scores.probabilities == pytest.approx(softmax([float(beliefs[ALPHABET.index(c)]) for c in "trb"]), rel=1e-6)


@pytest.mark.parametrize("method", ["adlm", "mdlm"])
def test_infill_is_the_bound_of_the_choice_with_the_text_after_it_visible(models, method):
    lm = models[method]
    found = lm.choose("the [MASK]s of", ["dog", "ox"], score="infill")
    assert found.num_tokens == (3, 2)
    for choice, log_score in zip(found.choices, found.log_scores, strict=True):
        x, places = ids_of(lm, f"the {choice}s of")[0], range(4, 4 + len(choice))
        total, orders = 0.0, list(itertools.permutations(places))
        for order in orders:
            z = x.clone()
            z[places] = lm.mask_id
            for place in order:
                total += float(lm.log_probs(z[None])[0, place, x[place]])
                z[place] = x[place]
        assert log_score == pytest.approx(total / len(orders), rel=1e-6)
    text = "the [MASK]"  # with nothing after the hole, the scores are equal
    assert lm.choose(text, ["dog", "ox"], score="infill") == lm.choose(text, ["dog", "ox"])


def test_a_network_that_reads_both_sides_reads_eos_after_the_text(models):
    """The choice is one token before the full stop, and both are read as the end of a row."""
    lm, words = models["infilled words"], ["great", "good"]
    (bos,), (eos,) = lm.config.vocabulary.row_boundaries
    *before, dot = lm.tokenizer.encode("It was.")
    canvas = torch.tensor([[bos, *before, lm.mask_id, dot, eos]])
    log_probs = lm.log_probs(canvas)[0, -3]
    scores = lm.choose("It was [MASK].", words, score="infill").log_scores
    assert scores == pytest.approx([float(log_probs[lm.tokenizer.encode(f" {word}")]) for word in words])


def test_infill_keeps_a_token_that_merges_with_the_text_after_it(models):
    lm = models["infilled words"]
    whole = lm.choose("The old man [MASK] it", ["said", "sailed"], score="infill")
    cut = lm.choose("The old man [MASK]d it", ["sai", "saile"], score="infill")
    assert cut.probabilities == pytest.approx(whole.probabilities)


@pytest.mark.parametrize("normalise", mostly_slow(["none", "tokens", "prior"], "prior"))
def test_standard_errors_are_those_of_repeated_measurements(models, normalise):
    """Of log scores and of probabilities, for choices of two lengths: two of them share their masks."""
    lm, choices = models["mdlm"], ["dog", "cat", "horses"]
    options = {"normalise": normalise, "prior": "a [MASK]s" if normalise == "prior" else None}
    runs = [lm.choose("the [MASK]s", choices, samples=6, seed=seed, **options) for seed in range(150)]
    exact = lm.choose("the [MASK]s", choices, samples=256, **options)
    assert set(exact.stderr) == {0.0}
    for name, errors in (("log_scores", "log_score_stderr"), ("probabilities", "stderr")):
        values, found = (np.array([getattr(run, each) for run in runs]) for each in (name, errors))
        rms = np.sqrt((found**2).mean(axis=0))
        assert rms == pytest.approx(values.std(axis=0, ddof=1), rel=0.3)
        if name == "log_scores":
            assert np.abs(values.mean(axis=0) - getattr(exact, name)).max() < 4 * rms.max() / math.sqrt(len(runs))


@pytest.mark.parametrize(
    ("name", "choices", "samples"),
    [
        ("mdlm", ["dog", "cat"], 6),
        pytest.param("blocks", ["dog", "cat"], 2, marks=pytest.mark.slow),
        ("blocks", ["cat", "cathedral"], 2),
    ],
)
def test_the_standard_error_of_the_gap_knows_of_shared_masks(models, name, choices, samples):
    """Blocks of two choices share their masks where they are as long, also if one choice has more blocks."""
    runs = [models[name].choose("a [MASK]s", choices, samples=samples, seed=seed, score="bound") for seed in range(150)]
    gaps = np.array([run.log_scores[0] - run.log_scores[1] for run in runs])
    assert [run.gap for run in runs] == pytest.approx(np.abs(gaps).tolist())
    assert np.sqrt(np.mean([run.gap_stderr**2 for run in runs])) == pytest.approx(gaps.std(ddof=1), rel=0.3)
    if name == "mdlm":
        independent = np.hypot(*np.array([run.log_score_stderr for run in runs]).T)
        assert np.mean([run.gap_stderr for run in runs]) < 0.9 * independent.mean()


def test_normalisations_divide_or_subtract(models):
    lm, text, choices = models["words"], "The film was [MASK].", ["great", "terrible", "very good indeed"]
    plain = lm.choose(text, choices)
    assert len(set(plain.num_tokens)) > 1
    expected = {
        "tokens": np.array(plain.log_scores) / plain.num_tokens,
        "characters": np.array(plain.log_scores) / [len(choice) + 1 for choice in choices],
        "prior": np.array(plain.log_scores) - lm.choose(" [MASK]", choices).log_scores,
    }
    for normalise, log_scores in expected.items():
        found = lm.choose(text, choices, normalise=normalise)
        assert found.log_scores == pytest.approx(log_scores.tolist())
        assert found.probabilities == pytest.approx(softmax(log_scores))


def test_a_text_as_its_own_prior_leaves_nothing(models):
    found = models["mdlm"].choose("a [MASK]", ["cat", "dog"], normalise="prior", prior="a [MASK]", samples=4)
    assert found.log_scores == pytest.approx((0.0, 0.0), abs=1e-9)
    assert found.log_score_stderr == pytest.approx((0.0, 0.0), abs=1e-9)


@pytest.mark.parametrize("name", ["words", "infilled words"])
def test_the_space_before_a_hole_belongs_to_the_choice_as_the_tokenizer_writes_it(models, name):
    lm = models[name]
    found = lm.choose("The film was [MASK].", ["great", "terrible"])
    assert lm.choose("The film was[MASK].", [" great", " terrible"]).log_scores == found.log_scores
    assert found.num_tokens[0] == len(lm.tokenizer.encode(" great."))


def test_probabilities_do_not_depend_on_where_a_merged_word_is_cut(models):
    """The tokens of `said` and `sailor` begin inside of what stands before the hole; they are scored whole."""
    lm = models["words"]
    whole = lm.choose("The old man [MASK] it", ["said", "sailor"])
    cut = lm.choose("The old man sai[MASK] it", ["d", "lor"])
    assert lm.tokenizer.encode("The old man said")[:4] != lm.tokenizer.encode("The old man sai")[:4]
    assert cut.probabilities == pytest.approx(whole.probabilities)


def test_the_number_of_masks_and_the_name_of_the_hole_do_not_matter(models):
    found = [models["mdlm"].choose(f"the {hole}s", ["dog", "cat"]) for hole in ("[MASK]", "[MASK*9]", "[MASK*..4:pet]")]
    assert len({scores.log_scores for scores in found}) == 1


def test_a_list_of_texts_is_scored_as_each_alone(models):
    texts = ["the [MASK]s", "a [MASK]", "the [MASK]s"]
    for normalise in ("none", "prior"):
        together = models["mdlm"].choose(texts, ["dog", "cat"], samples=4, normalise=normalise)
        for text, scores in zip(texts, together, strict=True):
            alone = models["mdlm"].choose(text, ["dog", "cat"], samples=4, normalise=normalise)
            assert alone.text == scores.text == text
            assert alone.log_scores == pytest.approx(scores.log_scores)
            assert alone.stderr == pytest.approx(scores.stderr)
    assert models["mdlm"].choose([], ["dog", "cat"]) == []


@pytest.mark.parametrize(
    ("name", "text", "choices", "options", "message"),
    [
        ("mdlm", "the dog", ["a", "b"], {}, r"text 'the dog' has no hole; write \[MASK\] where the choices belong"),
        ("mdlm", "[MASK] [MASK]", ["a", "b"], {}, "has 2 holes; leave one"),
        ("mdlm", "the [MASK*", ["a", "b"], {}, "is not a hole"),
        ("mdlm", "[MASK]", ["a"], {}, "choices has 1 of them; give at least two"),
        ("mdlm", "[MASK]", "ab", {}, "choices must be a list of texts, not a str"),
        ("mdlm", "[MASK]", ["a", 5], {}, "choices must be text, not a int"),
        ("mdlm", "[MASK]", ["a", ""], {}, "choice 2 is empty"),
        ("mdlm", "[MASK]", ["a", "b", "a"], {}, "choice 'a' is given twice"),
        ("mdlm", "[MASK]", ["a", "[MASK]"], {}, r"choice '\[MASK\]' has a hole"),
        ("mdlm", "[MASK]", ["a", "É"], {}, "has no id for"),
        ("mdlm", "the [MASK]", ["a", "b" * 20], {}, "with choice 'b+' the text has 24 tokens, and the model reads 16"),
        ("ar", "[MASK] dogs", ["a", "b"], {}, "begins with the hole, and this causal model has no bos"),
        ("ar", "the [MASK]", ["a", "b"], {"normalise": "prior", "prior": "[MASK]"}, r"prior '\[MASK\]' begins with"),
        ("mdlm", "the [MASK]", ["a", "b"], {"normalise": "prior", "prior": "x"}, "prior 'x' has no hole"),
        ("mdlm", "the [MASK]", ["a", "b"], {"prior": "x [MASK]"}, "prior is an option of normalise prior, not of none"),
        ("mdlm", "the [MASK]", ["a", "b"], {"prior": 5, "normalise": "prior"}, "prior must be a text with a hole"),
        ("mdlm", "the [MASK]", ["a", "b"], {"normalise": "token"}, "normalise 'token' is not one of .*'tokens'"),
        ("mdlm", "the [MASK]", ["a", "b"], {"samples": 7}, "samples 7 must be an even number"),
        ("mdlm", "the [MASK]", ["a", "b"], {"seed": None}, "seed must be a whole number"),
        ("mdlm", "the [MASK]", ["a", "b"], {"sample": 4}, "there is no option 'sample'; did you mean 'samples'"),
        ("mdlm", "the [MASK]", ["a", "b"], {"score": "causal"}, "score causal is for block-causal models"),
        ("ar", "the [MASK]", ["a", "b"], {"score": "infill"}, "score infill is for models that read both sides"),
        ("blocks", "the [MASK]", ["a", "b"], {"score": "infill"}, "score infill is for models that read both sides"),
        ("mdlm", 5, ["a", "b"], {}, "text must be a text or a list of texts"),
    ],
)  # fmt: skip
def test_user_errors_name_what_is_wrong_and_the_remedy(models, name, text, choices, options, message):
    with pytest.raises(UserError, match=message):
        models[name].choose(text, choices, **options)


def test_a_causal_copy_that_was_not_trained_is_not_used(models):
    lm = models["blocks"]
    lm = configured(lm, train=replace(lm.config.train, causal_weight=0.0))
    by_default, left = (lm.choose("so [MASK]", ["a", "b"], score=score) for score in (None, "left-to-right"))
    assert by_default == left
    with pytest.raises(UserError, match="score causal needs a trained causal copy"):
        lm.choose("so [MASK]", ["a", "b"], score="causal")
