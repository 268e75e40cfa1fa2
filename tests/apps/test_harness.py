"""Tests of the models in the lm-evaluation-harness, by its Python interface; tests/cli/test_lm_eval.py runs tasks."""

import json
import math
import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from small_models import infilling_model, small_model

from adlm.cli.main import main
from adlm.errors import UserError
from adlm.language_model import load

pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its dependencies

TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models over letters, without bos and eos, and over bytes, with both."""
    folder = tmp_path_factory.mktemp("harness")
    for method in ("adlm", "ar"):
        small_model(folder / method, method, "text8", length=32)
        small_model(folder / f"{method}-bytes", method, length=32)
    small_model(folder / "blocks", "mdlm", length=32, block_length=4)
    infilling_model(folder)
    return folder


def model(path, **arguments):
    from adlm.apps.harness import HarnessModel

    return HarnessModel(str(path), device="cpu", **arguments)


def requests(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, 0) for each in arguments]


def scores(lm, *pairs):
    return lm.loglikelihood(requests(*pairs), disable_tqdm=True)


def rolling(lm, *texts):
    return lm.loglikelihood_rolling(requests(*((text,) for text in texts)), disable_tqdm=True)


def generated(lm, *pairs):
    return lm.generate_until(requests(*pairs), disable_tqdm=True)


def perplexity(capsys, folder, text, tmp_path, *words):
    """The nats of the text by `adlm perplexity`, and their Monte Carlo standard error."""
    (tmp_path / "text.txt").write_text(text)
    assert main(["perplexity", str(folder), "--data", str(tmp_path / "text.txt"), "--json", *words]) == 0
    [figure] = json.loads(capsys.readouterr().out)["figures"]
    return figure["nats"] * figure["tokens"], figure["monte_carlo_stderr"] * figure["tokens"]


def test_without_context_a_diffusion_model_agrees_with_adlm_perplexity(world, capsys, tmp_path):
    nats, stderr = perplexity(capsys, world / "adlm", TEXT, tmp_path, "--samples", "16")
    lm = model(world / "adlm", samples=256)
    [(log_likelihood, _)] = scores(lm, ("", TEXT))
    tolerance = math.hypot(stderr, lm.stderrs[0])
    assert 0 < tolerance < 0.05 * nats
    assert abs(-log_likelihood - nats) < 4 * tolerance


def test_without_context_an_ar_model_agrees_exactly_with_adlm_perplexity(world, capsys, tmp_path):
    nats, _ = perplexity(capsys, world / "ar", TEXT, tmp_path)
    [(log_likelihood, _)] = scores(model(world / "ar"), ("", TEXT))
    assert -log_likelihood == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize("score", [None, "left-to-right", "causal"])
def test_exact_scores_of_a_block_causal_model(world, capsys, tmp_path, score):
    lm = model(world / "blocks", score=score)
    whole, first, second = scores(lm, ("thecats", "attedhere"), ("thecats", "atted"), ("thecatsatted", "here"))
    assert whole[0] == pytest.approx(first[0] + second[0], rel=1e-5), "the chain rule, where a block ends"
    loaded = load(world / "blocks")
    x = torch.tensor([[*lm.bos, *loaded.tokenizer.encode("thecatsattedhere")]])
    nats = loaded.method.causal_nats if score == "causal" else loaded.method.left_to_right_nats
    assert -whole[0] == pytest.approx(float(nats(loaded.network, x, None)[0, 8:].sum()), rel=1e-5)
    total, _ = perplexity(capsys, world / "blocks", TEXT, tmp_path, "--estimator", score or "left-to-right")
    assert -rolling(lm, TEXT)[0] == pytest.approx(total, rel=1e-5)
    assert (lm.get_model_info()["exact"], set(lm.stderrs)) == (True, {0.0})


def test_the_bound_of_a_block_causal_model_is_a_choice_and_other_models_have_no_other(world):
    lm = model(world / "blocks", score="bound", samples=2)
    assert scores(lm, ("the cat", " sat on the"))[0][0] < 0
    assert lm.stderrs[0] > 0
    with pytest.raises(UserError, match="score 'exact' cannot be used; use bound or left-to-right or causal"):
        model(world / "blocks", score="exact")
    with pytest.raises(UserError, match="leave it out: the model is not block-causal"):
        model(world / "adlm", score="causal")


@pytest.mark.parametrize("sampler", ["speculative", "ancestral", "remdm-cap"])
def test_a_block_causal_model_writes_until_every_text_has_its_stop_string(world, sampler, monkeypatch):
    lm, options = model(world / "blocks", sampler=sampler, steps=4), {"do_sample": True, "max_gen_toks": 16}
    whole = generated(lm, ("the cat", options), ("a dog", options))
    stops = [text[3] for text in whole]
    cut = generated(lm, *((prompt, options | {"until": stops}) for prompt in ("the cat", "a dog")))
    assert cut == [min((text.partition(stop)[0] for stop in stops), key=len) for text in whole]
    masks = []
    monkeypatch.setattr(lm, "_text", lambda row, ids: masks.append(ids.count(lm.model.mask_id)) or "")
    generated(lm, *((prompt, options | {"until": stops}) for prompt in ("the cat", "a dog")))
    assert (sum(masks) > 0) == (sampler != "remdm-cap"), "text of a remasking sampler is not final at once"


def test_with_bos_and_eos_it_differs_by_the_eos_of_text_and_row(world, capsys, tmp_path):
    nats, _ = perplexity(capsys, world / "ar-bytes", TEXT, tmp_path)
    [(log_likelihood, _)] = scores(model(world / "ar-bytes"), ("", TEXT))
    lm = load(world / "ar-bytes")
    eos = lm.config.vocabulary.eos_id
    row = torch.tensor([[eos, *lm.tokenizer.encode(TEXT), eos, eos]])
    log_probs = lm.log_probs(row)[0]
    assert -log_likelihood - float(log_probs[-3, eos] + log_probs[-2, eos]) == pytest.approx(nats, rel=1e-5)


def test_networks_that_read_both_sides_are_given_eos_after_the_continuation(world):
    loaded, lm = load(world / "adlm-bytes"), model(world / "adlm-bytes")
    eos, mask_id = loaded.config.vocabulary.eos_id, loaded.mask_id
    z = torch.tensor([[*lm.bos, *loaded.tokenizer.encode("the c"), mask_id, eos]])
    [(log_likelihood, _)] = scores(lm, ("the c", "a"))
    [token] = loaded.tokenizer.encode("a")
    log_prob, eps = float(loaded.log_probs(z)[0, -2, token]), loaded.config.schedule.eps  # the prior's share is eps
    prior = -math.log(loaded.config.vocabulary.num_clean)
    assert log_likelihood == pytest.approx((1 - eps) * log_prob + eps * prior, rel=1e-6)
    assert lm.stderrs == [0.0], "one mask, enumerated"


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_rolling_agrees_with_adlm_perplexity_in_windows(world, capsys, tmp_path, method):
    text = TEXT * 4
    nats, stderr = perplexity(capsys, world / f"{method}-bytes", text, tmp_path, "--samples", "16")
    lm = model(world / f"{method}-bytes", samples=64)
    [log_likelihood, nothing] = rolling(lm, text, "")
    assert (stderr > 0) == (lm.stderrs[0] > 0) == (method == "adlm")
    assert abs(-log_likelihood - nats) <= 4 * math.hypot(stderr, lm.stderrs[0]) + 1e-5 * nats
    assert nothing == 0


PAIRS = [("the cat", " sat on the mat"), ("the cat", " sat on the cat"), ("", "dog"), ("a dog ", "barks"), ("cat", "")]


@pytest.mark.parametrize("name", ["adlm", "adlm-bytes", "ar"])
def test_scores_depend_on_the_seed_and_on_nothing_else(world, name):
    one_by_one = [scores(model(world / name, samples=8, batch_size=1), pair)[0] for pair in PAIRS]
    together = scores(model(world / name, samples=8, batch_size="auto"), *reversed(PAIRS))[::-1]
    for alone, (log_likelihood, greedy) in zip(one_by_one, together, strict=True):
        assert alone == (pytest.approx(log_likelihood, rel=1e-5), greedy)
    assert scores(model(world / name, samples=8), *PAIRS) == scores(model(world / name, samples=8), *PAIRS)
    other = scores(model(world / name, samples=8, seed=1), *PAIRS)
    assert (other == together) == (name == "ar")
    assert one_by_one[-1] == (0.0, True)


def test_spaces_at_the_end_of_a_context_are_scored_with_the_continuation(world):
    lm = model(world / "ar")
    assert scores(lm, ("a dog ", "barks")) == scores(lm, ("a dog", " barks"))


def test_long_contexts_are_cut_on_the_left_with_one_warning(world, caplog):
    lm = model(world / "ar", length=16)
    with caplog.at_level("WARNING", logger="lm_eval.models.adlm"):
        long = scores(lm, (TEXT, " dog"), (TEXT * 2, " dog"))
    assert long == scores(lm, (TEXT[-12:], " dog")) * 2
    assert [record.message for record in caplog.records] == [
        "contexts are cut on the left to fit the length of 16 tokens"
    ]


def test_long_continuations_are_scored_in_blocks(world):
    lm = model(world / "ar", length=16)
    letters = TEXT.replace(" ", "x")
    whole, _ = scores(lm, ("a", letters))[0]
    blocks = [("a" + letters[:start], letters[start : start + 8]) for start in (0, 8, 16)]
    assert whole == pytest.approx(sum(score for score, _ in scores(lm, *blocks)))


def test_generated_text_ends_at_the_first_stop_string(world):
    lm = model(world / "adlm")
    [text] = generated(lm, ("the cat", {"max_gen_toks": 12}))
    assert len(text) == 12
    stops = [text[6], text[4]]
    assert generated(lm, ("the cat", {"until": stops, "max_gen_toks": 12})) == [
        text[: min(text.index(stop) for stop in stops)]
    ]


def test_generated_text_ends_at_eos(world):
    from adlm.apps.harness import Generation

    lm = model(world / "adlm-bytes")
    ids = [*b"ab", *b"cd", lm.text_tokenizer.vocabulary.eos_id, *b"ef"]
    assert lm._text(Generation((), 2, (), lm.model.sampling(), 0), ids) == "cd"


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_generation_depends_on_the_seed_and_on_nothing_else(world, method):
    options = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    pairs = [("the cat", options), ("a", options), ("a dog barks", {**options, "max_gen_toks": 4})]
    alone = [generated(model(world / method), pair)[0] for pair in pairs]
    together = generated(model(world / method, batch_size=2), *pairs, pairs[0])
    assert together[:3] == alone
    assert together[3] != alone[0]  # a repeated request
    assert [len(text) for text in together] == [10, 10, 4, 10]
    assert generated(model(world / method, seed=1), *pairs) != alone


def test_by_default_generation_is_greedy(world):
    lm = model(world / "ar")
    canvas = torch.tensor([lm.text_tokenizer.encode("the cat") + [lm.model.mask_id] * 5])
    written = lm.model.complete(canvas, temperature=0.0)[0, 7:].tolist()
    assert generated(lm, ("the cat", {"max_gen_toks": 5})) == [lm.text_tokenizer.decode(written)]


def test_a_context_that_leaves_no_room_is_cut(world, caplog):
    lm = model(world / "adlm", length=16)
    with caplog.at_level("WARNING", logger="lm_eval.models.adlm"):
        texts = generated(lm, (TEXT * 3, {"max_gen_toks": 100}), (TEXT, {"max_gen_toks": 4}))
    assert [len(text) for text in texts] == [8, 4]
    assert len(caplog.records) == 2  # one about the context, one about max_gen_toks


def test_holes_are_filled_and_the_text_around_them_is_kept(world):
    [text] = generated(model(world / "adlm"), ("the [MASK*3] sat on [MASK]", {"until": [" "], "max_gen_toks": 4}))
    assert len(text) == len("the xxx sat on x")
    assert text.startswith("the ")
    assert text[7:-1] == " sat on "
    with pytest.raises(UserError, match="ar writes from left to right"):
        generated(model(world / "ar"), ("the [MASK*3] sat", {}))


def test_a_hole_at_the_end_of_a_context_is_followed_by_eos(world, monkeypatch):
    lm, canvases = model(world / "adlm-bytes"), []
    monkeypatch.setattr(lm, "_generate", lambda rows: canvases.extend(row.ids for row in rows) or [""] * len(rows))
    generated(lm, ("the [MASK*2]", {}), ("the [MASK*2]s", {}))
    assert [canvas[-1] == lm.end[0] for canvas in canvases] == [True, False]


def test_holes_of_unknown_length_are_filled_by_models_that_can(world):
    contexts = ["(A[MASK*]B[MASK*2]C)", "(A[MASK*..4]B)", "(A[MASK*..4]"]
    options = {"do_sample": True, "temperature": 1.0}
    texts = generated(model(world / "infilling"), *((context, options) for context in contexts * 4))
    for text, pattern in zip(texts, [r"\(A.{,16}B.*C\)", r"\(A.{,4}B\)", r"\(A.{,4}"] * 4, strict=True):
        assert re.fullmatch(pattern, text, re.DOTALL)
    assert len({len(text) for text in texts[1::3]}) > 1
    with pytest.raises(UserError, match="hole of unknown length"):
        generated(model(world / "blocks"), ("(A[MASK*..4]", {}))


def test_the_results_record_the_mean_standard_error(world):
    lm = model(world / "adlm", samples=8)
    scores(lm, *PAIRS)
    info = lm.get_model_info()["loglikelihood_stderr"]
    assert info["requests"] == len(PAIRS)
    assert info["mean"] == pytest.approx(sum(lm.stderrs) / len(PAIRS))
    assert info["max"] == max(lm.stderrs) > 0
    assert lm.stderrs[2] == 0  # all seven masks of three tokens


def test_a_target_error_draws_more_samples_where_they_are_needed(world, caplog):
    lm = model(world / "adlm", samples=8)
    plain = scores(lm, ("the cat", " sat on the mat"), ("", "dog"))
    target = lm.stderrs[0] / 2.5  # 6.25 times as many samples, so 8 times
    refined = model(world / "adlm", samples=8, target_stderr=target)
    long, short = scores(refined, ("the cat", " sat on the mat"), ("", "dog"))
    assert long == scores(model(world / "adlm", samples=64), ("the cat", " sat on the mat"))[0] != plain[0]
    assert short == plain[1]  # enumerated
    assert refined.stderrs[0] < lm.stderrs[0]
    with caplog.at_level("WARNING", logger="lm_eval.models.adlm"):
        capped = scores(model(world / "adlm", samples=8, target_stderr=1e-3, max_samples=40), ("a", " sat on the mat"))
    assert capped == scores(model(world / "adlm", samples=32), ("a", " sat on the mat"))
    assert "1 of 1 log-likelihoods have a standard error above target_stderr=0.001; raise max_samples=40" in caplog.text


def test_questions_whose_answers_differ_by_less_than_the_error_are_counted_in_a_warning(world, caplog):
    from lm_eval.api.instance import Instance

    pairs = [(0, " sat on the mat"), (0, " ran to a house"), (1, "s"), (1, "t"), (2, " sings")]
    requests = [Instance("loglikelihood", {}, ("the cat", text), 0, ("task", doc, 1)) for doc, text in pairs]
    lm = model(world / "adlm", samples=2, seed=1)
    with caplog.at_level("WARNING", logger="lm_eval.models.adlm"):
        lm.loglikelihood(requests, disable_tqdm=True)
    assert lm.get_model_info()["undecided_questions"] == {"num": 1, "of": 2}
    assert [record.message.partition(":")[0] for record in caplog.records] == ["1 of 2 questions"]
    assert "target_stderr=0.5" in caplog.text
    exact = model(world / "ar")
    exact.loglikelihood(requests, disable_tqdm=True)
    assert exact.get_model_info()["undecided_questions"] == {"num": 0, "of": 2}


def test_simple_evaluate_finds_the_model_by_name(world):
    import lm_eval.api.registry

    import adlm.apps.harness

    by_string = lm_eval.api.registry.get_model("adlm").create_from_arg_string(
        f"path={world / 'ar'},samples=4,device=cpu", {"batch_size": 2, "device": "cuda:0", "max_batch_size": None}
    )
    assert isinstance(by_string, adlm.apps.harness.HarnessModel)
    assert (by_string.samples, by_string.settings.batch, str(by_string.device)) == (4, 2, "cpu")


def test_the_entry_point_is_one_that_the_registry_of_the_harness_can_load():
    """Releases after 0.4.13 register the entry points of the group lm_eval.models so."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import Registry

    from adlm.apps.harness import HarnessModel

    (entry,) = entry_points(group="lm_eval.models", name="adlm")
    registry = Registry("model", base_cls=LM)
    registry.register(entry.name, target=entry)
    assert registry.get("adlm") is HarnessModel


@pytest.mark.slow
@pytest.mark.processes
def test_adlm_and_its_command_line_do_not_import_lm_eval():
    script = "import sys, adlm, adlm.language_model, adlm.cli.lm_eval; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
