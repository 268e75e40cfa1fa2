"""Tests of `adlm perplexity`: results and standard errors that do not depend on batch size or number of processes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import small_model
from torchrun import on_two

from adlm.checkpoints.model_folder import load_model_folder, save_model_folder
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.data.prepare.prepare import prepare
from adlm.diffusion.times import BatchRng
from adlm.language_model import load
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.settings import PerplexitySettings
from adlm.likelihood.text_sets import rows_of_texts

TEXT = "Fellow citizens of the Senate.\n\nThe state of the Union is strong.\n\nPeace, and order, and law.\n\n" * 6

SPEECHES = [text for text in TEXT.split("\n\n") if text]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Three models, a text and its prepared form."""
    folder = tmp_path_factory.mktemp("perplexity")
    for method in ("adlm", "mdlm", "ar"):
        small_model(folder / method, method)
    (folder / "speech.txt").write_text(TEXT)
    (folder / "speeches.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SPEECHES))
    words = [f"data.path={folder}/speeches.jsonl", "data.held_out=0", "tokenizer=bytes", "length=16"]
    prepare(resolve(words), folder / "prepared")
    return folder


def results(capsys, *words) -> dict:
    assert main(["perplexity", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_result_records_its_settings(world, capsys):
    found = results(capsys, world / "adlm", "--data", world / "prepared", "--samples", 3, "--seed", 5)
    [figure] = found["figures"]
    assert (figure["documents"], figure["unit"]) == (18, "document")
    assert figure["tokens"] == sum(len(text) + 1 for text in SPEECHES)  # with the eos after each, without the frames
    assert (figure["samples"], figure["seed"], figure["length"]) == (3, 5, 16)
    assert (figure["split"], figure["packing"], figure["estimator"], figure["exact"]) == (
        "train",
        "packed",
        "nelbo",
        False,
    )
    assert figure["bits"] == pytest.approx(figure["nats"] / np.log(2))
    assert any("raise --samples" in note for note in figure["notes"])  # one group, three replicates
    assert figure["perplexity"] == pytest.approx(np.exp(figure["nats"]))
    assert figure["interval"][0] < figure["nats"] < figure["interval"][1]
    assert figure["monte_carlo_stderr"] > 0
    assert figure["document_stderr"] is None or figure["document_stderr"] > 0


def test_a_file_is_the_same_text_as_its_prepared_form(world, capsys):
    by_file, by_folder = (
        results(capsys, world / "mdlm", "--data", world / name)["figures"][0] for name in ("speech.txt", "prepared")
    )
    assert by_file["documents"] == 1  # by default a file is one document
    assert abs(by_file["tokens"] - by_folder["tokens"]) < 200


@pytest.mark.parametrize("name", ["speech.txt", "speec[g-i].txt"])
def test_own_text_is_printed_without_a_split(name, world, capsys):
    words = ["perplexity", str(world / "adlm"), "--data", str(world / name)]
    assert main(words) == 0
    printed = "".join(capsys.readouterr().out.split())
    assert f"{world}/{name}<=" in printed
    assert main([*words, "--split", "valid"]) == 2
    assert f"{name} has train only; leave --split out" in capsys.readouterr().err


def test_a_result_on_training_text_is_marked(world, tmp_path, capsys):
    model = load_model_folder(world / "mdlm")
    config = replace(model.config, data=replace(model.config.data, prepared=str(world / "prepared")))
    save_model_folder(replace(model, config=config), tmp_path / "learnt")
    own, other = results(capsys, tmp_path / "learnt", world / "mdlm", "--data", world / "prepared")["figures"]
    marked, plain = ([note for note in each["notes"] if "is unknown" not in note] for each in (own, other))
    assert marked == [f"{tmp_path}/learnt was trained on this text or a part of it: not a held-out result"]
    assert plain == []


@pytest.mark.parametrize("trained_on", ["*.txt", "speech.txt", "."])
def test_a_result_on_files_of_the_training_text_is_marked(world, tmp_path, capsys, trained_on):
    model = load_model_folder(world / "mdlm")
    config = replace(model.config, data=replace(model.config.data, path=str(world / trained_on)))
    save_model_folder(replace(model, config=config), tmp_path / "learnt")
    (tmp_path / "other.txt").write_text("another text\n" * 20)
    data = (world / "speech.txt", world / "sp*.txt", tmp_path / "other.txt")
    same, by_glob, other = results(capsys, tmp_path / "learnt", "--data", *data, "--max-tokens", "100")["figures"]
    assert by_glob["nats"] == same["nats"]
    for figure, marked in ((same, 1), (by_glob, 1), (other, 0)):
        assert sum("was trained on this text" in note for note in figure["notes"]) == marked


def test_models_on_the_same_draws_are_compared(world, capsys):
    found = results(capsys, world / "adlm", world / "mdlm", world / "ar", "--data", world / "prepared")
    adlm, mdlm, ar = found["figures"]
    gap, to_ar = found["differences"]
    assert gap["nats"] == pytest.approx(adlm["nats"] - mdlm["nats"])
    assert gap["monte_carlo_stderr"] > 0
    assert ar["exact"]
    assert ar["monte_carlo_stderr"] == 0
    assert ar["tokens"] == adlm["tokens"]  # the bos of a row, which AR reads as context, is not counted
    assert to_ar["document_stderr"] is None or to_ar["document_stderr"] > 0


def test_a_difference_is_printed_with_its_standard_error_or_marked_if_there_is_none(world, tmp_path, capsys):
    model = load_model_folder(world / "mdlm")
    nudged = {name: weight * (1 + 1e-6) for name, weight in model.weights.items()}
    save_model_folder(replace(model, weights=nudged), tmp_path / "nudged")
    words = [str(world / "mdlm"), str(tmp_path / "nudged"), "--data", str(world / "speech.txt")]
    [gap] = results(capsys, *words, "--samples", 2)["differences"]
    assert gap["monte_carlo_stderr"] < 5e-5
    assert main(["perplexity", *words, "--samples", "2"]) == 0
    assert f"(+- {gap['monte_carlo_stderr']:.2g} Monte Carlo" in capsys.readouterr().out
    assert main(["perplexity", *words, "--samples", "1"]) == 0
    assert "nats per token (no standard error)" in capsys.readouterr().out


def test_the_autoregressive_result_is_the_exact_likelihood(world, capsys):
    lm = load(world / "ar")
    figure = results(capsys, world / "ar", "--data", world / "prepared")["figures"][0]
    from adlm.data.prepare.prepared import open_prepared

    rows = open_prepared(world / "prepared").rows("train")
    x, pad = rows.read(range(len(rows)))
    nats = 0.0
    for row, hidden in zip(x, pad, strict=True):
        ids = torch.from_numpy(row[~hidden])
        logs = lm.log_probs(ids[None])[0]
        nats -= float(logs[:-1].gather(-1, ids[1:, None]).double().sum())
    assert figure["nats"] * figure["tokens"] == pytest.approx(nats, rel=1e-5)


@pytest.mark.slow
@pytest.mark.processes
def test_results_do_not_depend_on_batch_size_or_number_of_processes(world, capsys, monkeypatch):
    monkeypatch.setattr("adlm.likelihood.measurement.TOKENS_A_GROUP", 160)
    words = [str(world / "adlm"), str(world / "ar"), "--data", str(world / "prepared"), "--samples", "2"]
    one, seven = (results(capsys, *words, "--batch", batch)["figures"] for batch in (1, 7))
    small_groups = "import adlm.likelihood.measurement as l; l.TOKENS_A_GROUP = 160"
    run = on_two(world, "perplexity", *words, "--json", first=small_groups)
    assert run.returncode == 0, run.stderr[-2000:]
    two = json.loads(run.stdout)["figures"]
    for other in (seven, two):
        for figure, same in zip(one, other, strict=True):
            for name in ("nats", "monte_carlo_stderr", "document_stderr"):
                assert same[name] == (None if figure[name] is None else pytest.approx(figure[name], rel=1e-6))


def test_the_table_names_both_standard_errors_and_the_settings(world, capsys):
    assert main(["perplexity", str(world / "adlm"), "--data", str(world / "prepared")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("+- Monte Carlo", "estimator nelbo, 4 replicates, seed 0; rows of 16 tokens, packed"):
        assert words in shown


def test_settings_are_printed_below_the_table_once_per_group_of_results(world, tmp_path, capsys):
    small_model(tmp_path / "long", "mdlm", length=32)
    words = [*map(str, (world / "adlm", world / "mdlm", world / "ar", tmp_path / "long"))]
    texts = [str(world / "prepared"), str(world / "speech.txt")]
    assert main(["perplexity", *words, "--data", *texts, "--samples", "2"]) == 0
    footer = [line for line in capsys.readouterr().out.splitlines() if "tokenizer" in line]
    tokenizer = f"tokenizer bytes (sha256 {load(world / 'ar').tokenizer.sha256[:8]})"
    drawn = "estimator nelbo, 2 replicates, seed 0"
    assert footer == [
        f"{words[0]}, {words[1]}: {drawn}; rows of 16 tokens, packed; {tokenizer}",
        f"{words[2]}: exact; rows of 16 tokens, packed; {tokenizer}",
        f"{words[3]}: {drawn}; rows of 32 tokens, packed; {tokenizer}",
    ]


def test_the_likelihood_of_an_order_is_exact_and_names_it(world, capsys):
    words = [str(world / "adlm"), "--data", str(world / "prepared"), "--estimator", "order"]
    [figure] = results(capsys, *words, "--order", "anchor-first", "--order-steps", 4)["figures"]
    assert (figure["estimator"], figure["order"], figure["order_steps"]) == ("order", "anchor-first", 4)
    assert (figure["exact"], figure["monte_carlo_stderr"], figure["samples"]) == (True, 0, 1)
    python = load(world / "adlm").perplexity(SPEECHES, estimator="order", order="anchor-first", order_steps=4)
    assert python.nats == pytest.approx(figure["nats"], rel=1e-6)
    assert python.stderr == 0
    [seven] = results(capsys, *words, "--order", "anchor-first", "--order-steps", 4, "--batch", 7)["figures"]
    assert seven["nats"] == pytest.approx(figure["nats"], rel=1e-6)
    assert main(["perplexity", *words]) == 0
    assert "exact, order left-to-right, one token a step; rows of 16" in " ".join(capsys.readouterr().out.split())


def test_the_bound_of_paths_names_its_steps_and_does_not_depend_on_the_batch(world, capsys):
    words = [str(world / "adlm"), "--data", str(world / "prepared"), "--estimator", "path"]
    [figure] = results(capsys, *words, "--order-steps", 4)["figures"]
    assert (figure["estimator"], figure["order"], figure["order_steps"]) == ("path", None, 4)
    assert (figure["exact"], figure["samples"]) == (False, 4)
    assert figure["monte_carlo_stderr"] > 0
    [seven] = results(capsys, *words, "--order-steps", 4, "--batch", 7)["figures"]
    assert seven["nats"] == pytest.approx(figure["nats"], rel=1e-6)
    python = load(world / "adlm").perplexity(SPEECHES, estimator="path", order_steps=4)
    assert abs(python.nats - figure["nats"]) < 0.2
    assert main(["perplexity", *words]) == 0
    steps = load(world / "adlm").config.sampling.steps
    assert f"estimator path in {steps} steps, 4 replicates" in " ".join(capsys.readouterr().out.split())


def test_results_are_written_and_no_other_file_is_left(world, tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert main(["perplexity", str(world / "adlm"), "--data", str(world / "prepared"), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["figures"][0]["method"] == "adlm"
    assert list(tmp_path.iterdir()) == [out]


def test_a_text_that_changed_after_an_interruption_is_measured_again(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adlm.likelihood.measurement.TOKENS_A_GROUP", 64)
    text, out = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("abcd" * 60)
    words = ["perplexity", str(world / "ar"), "--data", str(text), "--out", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr("adlm.likelihood.measurement.nats_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(words) == 130
    assert len(list(tmp_path.iterdir())) == 2  # the text and a journal
    text.write_text("wxyz" * 60)
    assert main(words) == 0
    fresh = results(capsys, world / "ar", "--data", text) if capsys.readouterr() else {}
    assert json.loads(out.read_text())["figures"][0]["nats"] == fresh["figures"][0]["nats"]


def test_output_follows_a_symbolic_link_and_a_folder_is_a_user_error(world, tmp_path, capsys):
    (tmp_path / "there.json").write_text('{"adlm": "0.1.0"}')
    (tmp_path / "link.json").symlink_to("there.json")
    words = ["perplexity", str(world / "ar"), "--data", str(world / "prepared"), "--out"]
    assert main([*words, str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert "figures" in json.loads((tmp_path / "there.json").read_text())
    assert main([*words, str(tmp_path)]) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_models_with_different_tokenizers_are_not_compared(world, tmp_path, capsys):
    small_model(tmp_path / "letters", "mdlm", tokenizer="text8")
    (tmp_path / "text.txt").write_text("peace and order and law")
    found = results(capsys, world / "mdlm", tmp_path / "letters", "--data", tmp_path / "text.txt")
    assert len(found["figures"]) == 2
    assert found["differences"] == []
    words = [str(world / "mdlm"), str(tmp_path / "letters"), "--data", str(tmp_path / "text.txt")]
    assert main(["perplexity", *words, "--samples", "1"]) == 0
    assert "text.txt: not paired, since their rows differ in length, packing or tokens" in capsys.readouterr().out


def reference_nats(lm, texts, seed, samples=4, repeats=1):
    """Reference implementation of nats per token: rows of [bos] 14 ids [eos], every document followed by eos."""
    eos, bos = lm.tokenizer.vocabulary.eos_id, lm.tokenizer.vocabulary.bos_id
    ids = [index for text in texts for index in (*lm.tokenizer.encode(text), eos)]
    rows = [[bos, *ids[start : start + 14], eos] for start in range(0, len(ids), 14)]
    if lm.method.exact:
        logs = [lm.log_probs(torch.tensor([row]))[0, :-1] for row in rows]
        nats = [-log.gather(-1, torch.tensor(row[1:])[:, None]).sum() for row, log in zip(rows, logs, strict=True)]
        return float(sum(nats)) / len(ids)
    width = max(map(len, rows))
    x = torch.tensor([row + [0] * (width - len(row)) for row in rows] * repeats)
    pad = torch.arange(width) >= torch.tensor([[len(row)] for row in rows] * repeats)
    total = 0.0
    for replicate in range(samples):
        state = np.random.SeedSequence(seed, spawn_key=(replicate, 0)).generate_state(1, np.uint64)
        rng = BatchRng(torch.Generator().manual_seed(int(state[0]) >> 1))
        total += float(lm.method.bound(lm.network, x, pad if pad.any() else None, rng).double().sum())
    return total / samples / repeats / len(ids)


@pytest.mark.parametrize("method", ["adlm", "mdlm", "ar"])
@pytest.mark.parametrize(("texts", "repeats"), [(["Peace."], 228), (SPEECHES[:1], 56), (SPEECHES, 4)])
def test_the_command_the_python_call_and_a_reference_implementation_agree(
    world, tmp_path, capsys, method, texts, repeats
):
    lm = load(world / method)
    place = tmp_path / "texts.jsonl"
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    by_command = results(capsys, world / method, "--data", place, "--seed", 3)["figures"][0]
    by_call = lm.perplexity(texts, seed=3)
    assert by_call.nats == by_command["nats"]
    assert by_call.nats_stderr == by_command["monte_carlo_stderr"]
    assert by_call.tokens == by_command["tokens"] == sum(len(text) + 1 for text in texts)
    assert by_call.nats == pytest.approx(reference_nats(lm, texts, 3, repeats=repeats), rel=1e-5)
    assert by_call.value == pytest.approx(np.exp(by_call.nats))
    if method == "ar" and len(texts) == 1:
        assert (by_call.stderr, by_call.document_stderr) == (0.0, None)


def test_the_standard_error_of_a_short_sentence_matches_its_spread_over_seeds(world):
    """The spread of the nats of one sentence over seeds agrees with the reported standard error."""
    lm = load(world / "mdlm")
    found = [lm.perplexity("Peace.", seed=seed) for seed in range(12)]
    nats = np.array([each.nats for each in found])
    assert nats.std(ddof=1) < 0.03 * nats.mean()
    assert sum(low <= np.exp(nats.mean()) <= high for low, high in (each.interval for each in found)) >= 9
    assert 0.5 < np.sqrt(np.mean([each.nats_stderr**2 for each in found])) / nats.std(ddof=1) < 2


def test_the_published_packing_counts_bos_and_eos_and_notes_it(world, capsys):
    ours, published = (
        results(capsys, world / "ar", "--data", world / "prepared", *words)["figures"][0]
        for words in ([], ["--packing", "packed-published"])
    )
    assert published["tokens"] == 15 * published["rows"]  # all except the bos, which is context
    assert any("counts the bos and eos of every row" in note for note in published["notes"])
    assert not any("bos" in note for note in ours["notes"])


def test_the_standard_error_treats_articles_and_blocks_of_lines_as_units(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("adlm.likelihood.text_sets.BLOCK", 60)
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" it is strong and so is the law\n" * 12)
    (tmp_path / "wikitext-2").mkdir()
    articles = "".join(f" = Law {n} = \n\n = = Of it = = \n\n The law of peace .\n\n" for n in range(3))
    (tmp_path / "wikitext-2" / "valid.txt").write_text(f" \n{articles}")
    (tmp_path / "text.txt").write_text("a line of a file\n" * 20)
    words = [f"data.path={tmp_path}/text.txt", "data.boundary=line", "data.held_out=0", "tokenizer=bytes", "length=16"]
    prepare(resolve(words), tmp_path / "lines")
    monkeypatch.setenv("ADLM_DATA", str(tmp_path))
    found = results(capsys, world / "ar", "--data", "ptb", "wikitext2", tmp_path / "lines")["figures"]
    units = [(figure["documents"], figure["unit"]) for figure in found]
    assert units == [(6, "block"), (4, "article"), (5, "block")]  # the blank line before the first title is alone
    assert all(figure["document_stderr"] is not None for figure in found)


def test_zero_shot_reads_the_available_corpora_and_labels_stand_ins(world, tmp_path, monkeypatch, capsys):
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.valid.txt").write_text("the state of the union\n it is strong\n")
    (tmp_path / "arxiv-standin").mkdir()
    (tmp_path / "arxiv-standin" / "papers.txt").write_text("We show that.\n\nIt follows.\n")
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "valid.txt").write_text(" = Law = \n\n The <unk> of peace .\n")
    monkeypatch.setenv("ADLM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = results(capsys, world / "mdlm", "--data", "zero-shot", "--samples", 1)["figures"]
    assert {figure["data"]: figure["split"] for figure in found} == {
        "ptb": "valid",
        "wikitext2": "valid",
        "arxiv": "train",
    }
    notes = " ".join(note for figure in found for note in figure["notes"])
    assert "lambada is not here" in notes
    assert "a stand-in for arxiv" in notes
    assert "writes <unk>" in notes


def test_zero_shot_lm1b_is_packed_and_lm1b_alone_is_padded_by_sentence(world, tmp_path, capsys, monkeypatch):
    held_out = tmp_path / "lm1b" / "heldout-monolingual.tokenized.shuffled"
    held_out.mkdir(parents=True)
    (held_out / "news.en.heldout-00000-of-00050").write_text("Peace .\nLaw and order .\n" * 20)
    monkeypatch.setenv("ADLM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("--samples", 1, "--max-tokens", 64)
    for data, packing in (("zero-shot", "packed-published"), ("lm1b", "padded")):
        [figure] = results(capsys, world / "mdlm", "--data", data, *words)["figures"]
        assert (figure["data"], figure["split"], figure["packing"]) == ("lm1b", "test", packing)
    [figure] = results(capsys, world / "mdlm", "--data", "zero-shot", "--packing", "packed", *words)["figures"]
    assert figure["packing"] == "packed"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{adlm}", "--data", "wikitext3"], "'wikitext3' is neither a named corpus"),
        (["{adlm}", "--data", "{prepared}", "--split", "test"], "has no split 'test'"),
        (["{adlm}", "--data", "{prepared}", "--samples", "0"], "samples 0 must be at least 1"),
        (["{adlm}", "--data", "{prepared}", "--estimator", "best"], "estimator 'best' is not one of"),
        (
            ["{adlm}", "--data", "{prepared}", "--estimator", "any-order"],
            "needs a schedule from all visible to all masked",
        ),
        (["{adlm}", "--data", "{prepared}", "--estimator", "order", "--order", "confidence"], "no exact likelihood"),
        (["{adlm}", "--data", "{prepared}", "--order", "entropy"], "is an option of estimator order, not of auto"),
        (["{adlm}", "--data", "{prepared}", "--estimator", "order", "--order-steps", "0"], "must be at least 1"),
        (["{adlm}", "--data", "{prepared}", "--tokenizer", "text8"], "has 28 symbols and"),
        (["{none}", "--data", "{prepared}"], "has no tokenizer, so it cannot read text; give --tokenizer"),
        (["nowhere", "--data", "{prepared}"], "nowhere is neither a model folder nor a .ckpt file"),
        (["{adlm}", "--data", "{prepared}", "--out", "{none}/no/figures.json"], "there is no folder"),
        (["{adlm}"], "--data"),
        (["--data", "{prepared}", "box"], "--data box is a model; write models before --data"),
        (["--data", "{prepared}", "{adlm}"], "adlm is a model; write models before --data and texts after it"),
        (["{adlm}", "--data", "{prepared}", "--packing", "xx"], "--packing 'xx' is not one of"),
        (["{adlm}", "--data", "{prepared}", "--batch", "0"], "batch 0 must be at least 1"),
    ],
)
def test_user_errors_are_one_line(world, words, sentence, capsys):
    without = world / "none"
    if not without.exists():
        small_model(without, tokenizer=None)
    places = {name: str(world / name) for name in ("adlm", "prepared", "none")}
    assert main(["perplexity", *(word.format(**places) for word in words)]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert shown.count("\n") == 1


def test_a_model_with_nan_weights_is_a_user_error(world, tmp_path, capsys):
    model = load_model_folder(world / "mdlm")
    model.weights["head.bias"].fill_(float("nan"))
    save_model_folder(model, tmp_path / "nan")
    assert main(["perplexity", str(tmp_path / "nan"), "--data", str(world / "prepared")]) == 2
    assert "holds a NaN or an infinity" in capsys.readouterr().err


def test_without_a_model_the_one_in_the_box_is_measured(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The old man looked at the sea.")
    found = results(capsys, "--data", tmp_path / "a.txt", "--samples", 1)
    assert [figure["model"] for figure in found["figures"]] == ["box"]


def test_progress_is_reported_in_tokens_before_the_first_group_is_done(world):
    lm, reported = load(world / "mdlm"), []
    rows = rows_of_texts(["peace and order " * 200], lm.tokenizer, lm.config.length)
    settings = PerplexitySettings(samples=2, batch=10)
    measure_nats(lm.method, lm.network, rows, settings, report_progress=lambda *each: reported.append(each))
    total = len(rows) * lm.config.length
    assert reported[0] == (0.0, total)
    assert reported[1] == (10 * lm.config.length / 2, total), "one of two replicates of ten rows"
    assert reported[-1] == (pytest.approx(total), total)


def test_an_unknown_error_over_documents_is_explained(world, capsys):
    for data, num, why in (
        ("speech.txt", 2, "the text is one document"),
        ("prepared", 1, "there is one replicate; raise --samples"),
    ):
        [figure] = results(capsys, world / "adlm", "--data", world / data, "--samples", num)["figures"]
        assert figure["document_stderr"] is None
        assert f"the error over documents is unknown: {why}" in figure["notes"]
