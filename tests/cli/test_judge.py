"""Tests of `adlm judge`: a card records how each metric was measured, nothing is recomputed, errors are one line."""

import json
import re

import numpy as np
import pytest
import torch
from judges import tiny_gpt2
from small_models import small_model
from texts import prose
from torchrun import close, on_two

import adlm
from adlm.apps.judge import pipeline as judging
from adlm.apps.judge.diversity import unigram_entropy
from adlm.apps.judge.generative_perplexity import (
    generative_perplexity,
    token_nats,
    truncate_texts,
    window_layout,
)
from adlm.apps.judge.inputs import JudgeSettings
from adlm.apps.judge.judges import HuggingFaceFeaturiser, OwnJudge
from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
from adlm.cli.main import main
from adlm.request import options_of
from adlm.samples_file import Provenance, Sample, open_samples, read_samples
from adlm.tokens import load_tokenizer

NUM = 25
CHEAP = ("--metrics", "perplexity,entropy,diversity")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Randomly initialized models, samples from one of them, and reference texts."""
    folder = tmp_path_factory.mktemp("judge")
    for method in ("adlm", "ar", "a2r"):
        small_model(folder / method, method)
    small_model(folder / "text8", "ar", tokenizer="text8")
    for steps in (2, 4):
        out = folder / f"samples-{steps}.jsonl"
        assert main(["sample", str(folder / "adlm"), "--num", str(NUM), "--steps", str(steps), "--out", str(out)]) == 0
    (folder / "texts.txt").write_text("".join(prose(4, seed).replace("\n", " ") + "\n" for seed in range(40)))
    return folder


@pytest.fixture(scope="module")
def gpt2(place):
    return tiny_gpt2(place / "gpt2-tiny")


@pytest.fixture
def mauve():
    pytest.importorskip("mauve", reason="mauve-text is not installed")


def judged(capsys, *words):
    assert main(["judge", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    """The error message, which must be one line."""
    assert main(["judge", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("adlm: ")
    assert captured.err.count("\n") == 1
    return captured.err


def write_samples(path, texts):
    """A samples file with these texts, tokenized as bytes."""
    made_by = Provenance(
        adlm="0",
        model="unknown",
        weights="",
        method="adlm",
        tokenizer="bytes",
        length=16,
        canvases=["[MASK*16]"],
        num=len(texts),
        seed=0,
        sampling={},
        batch=1,
        device="cpu",
        dtype="float32",
        tokenizer_sha256=load_tokenizer("bytes").sha256,
        about={},
    )
    with open_samples(path, made_by) as file:
        file.append([Sample(row, 0, 0, text, list(text.encode())) for row, text in enumerate(texts)])
    return path


def test_samples_are_judged_by_an_adlm_model(place, capsys):
    path = place / "samples-4.jsonl"
    card = judged(capsys, path, "--model", place / "ar", *CHEAP)
    samples, lm = list(read_samples(path)), adlm.load(place / "ar")
    judge = OwnJudge("ar", lm.config, lm.network, lm.tokenizer)
    rows = [sample.ids for sample in samples]
    reading = window_layout(judge.about, "bos", judge.about.context)
    read = truncate_texts(rows, reading, None)
    nats = token_nats(judge, read, 64, reading)
    expected = generative_perplexity(read, nats, judge.about.eos_id, "closing", "bos")
    assert (card["perplexity"]["start"], card["perplexity"]["eos"]) == ("bos", "closing")
    assert card["perplexity"]["pooled"]["value"] == pytest.approx(expected.pooled.value, rel=1e-6)
    assert card["perplexity"]["ids"] == "as-sampled"
    assert card["entropy"]["value"] == pytest.approx(np.mean([unigram_entropy(row) for row in rows]))
    assert card["entropy"]["num"] == NUM
    assert card["diversity"]["tokens"]["mean"]["value"] == 16


def test_the_card_records_every_option(place, capsys, tmp_path):
    out = tmp_path / "cards" / "one.json"
    words = (
        place / "samples-4.jsonl",
        "--model",
        place / "a2r",
        *CHEAP,
        "--eos",
        "first",
        "--start",
        "bos",
        "--max-tokens",
        9,
    )
    card = judged(capsys, *words, "--out", out)
    assert json.loads(out.read_text()) == card
    assert card["samples"]["made_by"]["sampling"]["steps"] == 4
    assert (card["samples"]["num"], card["samples"]["of"]) == (NUM, NUM)
    assert card["made_with"]["torch"]
    perplexity = card["perplexity"]
    assert (perplexity["eos"], perplexity["start"], perplexity["max_tokens"], perplexity["num_cut"]) == (
        "first",
        "bos",
        9,
        NUM,
    )
    settings = card["settings"]
    assert list(settings) == [option.name for option in options_of(JudgeSettings)]
    assert (settings["model"], settings["eos"], settings["max_tokens"]) == (str(place / "a2r"), "first", 9)
    assert perplexity["judge"]["weights"]
    assert perplexity["label"].startswith("not comparable with published perplexities: the judge is")
    assert perplexity["num_tokens"] <= 9 * NUM


def test_a_judge_with_another_tokenizer_retokenises_the_text(place, capsys, tmp_path):
    assert (
        main(["sample", str(place / "text8"), "--prompt", "a", "--num", "3", "--out", str(tmp_path / "a.jsonl")]) == 0
    )
    capsys.readouterr()
    card = judged(capsys, tmp_path / "a.jsonl", "--model", place / "ar", "--metrics", "perplexity")
    assert card["perplexity"]["ids"] == "retokenised"
    assert card["perplexity"]["num_tokens"] == 3 * 16
    own = judged(capsys, tmp_path / "a.jsonl", "--model", place / "text8", "--metrics", "perplexity")
    assert own["perplexity"]["ids"] == "as-sampled"
    anew = judged(
        capsys, tmp_path / "a.jsonl", "--model", place / "text8", "--metrics", "perplexity", "--ids", "retokenised"
    )
    assert anew["perplexity"]["pooled"] == own["perplexity"]["pooled"]  # single characters have only one tokenization


def test_samples_of_a_run_record_the_number_of_training_tokens(tmp_path, capsys):
    small_model(tmp_path / "run" / "model", "mdlm")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 10}\n{"step": 30}\n')
    for model in ("run", "run/model"):
        out = tmp_path / f"{model.replace('/', '-')}.jsonl"
        assert main(["sample", str(tmp_path / model), "--out", str(out)]) == 0
        config = adlm.load(tmp_path / "run").config
        trained = read_samples(out).made_by.about["tokens_trained"]
        assert trained == 30 * config.train.batch_size * config.length


def test_a_samples_file_identifies_its_tokenizer_without_the_model_folder(place, capsys, tmp_path):
    words = ["sample", str(small_model(tmp_path / "gone", "mdlm")), "--num", "3", "--out", str(tmp_path / "a.jsonl")]
    assert main(words) == 0
    (tmp_path / "gone").rename(tmp_path / "moved")
    capsys.readouterr()
    card = judged(capsys, tmp_path / "a.jsonl", "--model", place / "ar", "--metrics", "perplexity")
    assert card["perplexity"]["ids"] == "as-sampled"
    assert card["samples"]["tokenizer"] == {"name": "bytes", "sha256": card["perplexity"]["judge"]["tokenizer_sha256"]}
    about = card["samples"]["made_by"]["about"]
    weights = adlm.load(tmp_path / "moved").network.parameters()
    assert about["parameters"] == sum(weight.numel() for weight in weights)
    assert (about["symbols"], about["tokens_trained"]) == (258, None)


@pytest.mark.parametrize("batch", [3, 64])
def test_results_do_not_depend_on_the_batch_size(place, capsys, batch):
    words = (place / "samples-4.jsonl", "--model", place / "ar", "--metrics", "perplexity")
    one, other = judged(capsys, *words, "--batch", 1), judged(capsys, *words, "--batch", batch)
    assert one["perplexity"]["pooled"]["value"] == pytest.approx(other["perplexity"]["pooled"]["value"], rel=1e-6)


def test_a_hugging_face_judge_retokenises_and_mauve_is_reported_with_its_settings(place, gpt2, mauve, capsys):
    card = judged(
        capsys,
        place / "samples-4.jsonl",
        "--model",
        gpt2,
        "--features",
        gpt2,
        "--reference",
        place / "texts.txt",
        "--seeds",
        2,
    )
    assert card["perplexity"]["ids"] == "retokenised"
    found = card["mauve"]
    assert list(found["by_seed"]) == ["25", "26"]
    assert (found["num_samples"], found["num_reference"], found["num_clusters"]) == (NUM, NUM, 2)
    assert found["featuriser"]["pooling"] == "last"
    assert "not GPT-2 large" in found["label"]
    assert "fewer than 1,000" in found["label"]
    assert (card["reference"]["num"], card["reference"]["of"]) == (NUM, 40)


def test_adding_a_metric_recomputes_nothing(place, gpt2, mauve, capsys, tmp_path, monkeypatch):
    words = (place / "samples-4.jsonl", "--model", gpt2, "--out", tmp_path / "card.json")
    first = judged(capsys, *words, "--metrics", "perplexity")
    monkeypatch.setattr(judging, "token_nats", None)  # calling it would fail
    more = (*words, "--features", gpt2, "--reference", place / "texts.txt")
    second = judged(capsys, *more)
    assert first["perplexity"] == second["perplexity"]
    assert "mauve" in second
    monkeypatch.setattr(HuggingFaceFeaturiser, "features", None)
    assert judged(capsys, *more) == second
    other_count = judged(capsys, *more, "--eos", "all")  # which tokens count is chosen after the judge has read them
    assert other_count["perplexity"]["eos"] == "all"


def test_an_interrupted_evaluation_resumes(place, capsys, tmp_path, monkeypatch):
    path = write_samples(tmp_path / "many.jsonl", [f"text {number}" for number in range(150)])
    words = (path, "--model", place / "ar", "--metrics", "perplexity", "--out", tmp_path / "cards" / "card.json")
    token_nats, calls = judging.token_nats, []

    def interrupted_at_the_second_call(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return token_nats(*arguments)

    monkeypatch.setattr(judging, "token_nats", interrupted_at_the_second_call)
    assert main(["judge", *map(str, words)]) == 130
    assert "progress is saved; rerun the same command to resume" in capsys.readouterr().err
    assert judged(capsys, *words)["perplexity"]["num_samples"] == 150
    assert len(calls) == 4  # three parts, one of them begun twice


def test_running_out_of_memory_is_a_user_error_with_a_smaller_batch(place, capsys, monkeypatch):
    def too_large(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(judging, "token_nats", too_large)
    words = (place / "samples-4.jsonl", "--model", place / "ar", "--metrics", "perplexity", "--batch", 8)
    assert "--batch 8 does not fit the memory of the device; try --batch 4" in refused(capsys, *words)


SMALL_PARTS = """
import os, adlm.apps.judge.pipeline as judging
judging.TEXTS_PER_PART = 4
token_nats = judging.token_nats
def counted(judge, part, *more):
    with open(f"{__file__}.{os.environ['RANK']}", "a") as file:
        file.write("x")
    return token_nats(judge, part, *more)
judging.token_nats = counted
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_share_the_work_and_write_the_same_card_as_one(place, gpt2, mauve, capsys, tmp_path, monkeypatch):
    words = (place / "samples-4.jsonl", "--model", place / "ar", "--features", gpt2, "--seeds", 2)
    words += ("--reference", place / "texts.txt", "--judge-reference")
    monkeypatch.setattr("adlm.apps.judge.pipeline.TEXTS_PER_PART", 4)
    one = judged(capsys, *words, "--out", tmp_path / "one" / "card.json")
    two = tmp_path / "two" / "card.json"
    run = on_two(tmp_path, "judge", *words, "--json", "--out", two, first=SMALL_PARTS)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == json.loads(two.read_text())
    assert close(json.loads(run.stdout), one)
    assert [len((tmp_path / f"command.py.{rank}").read_text()) for rank in (0, 1)] == [8, 6]  # 7 parts of each of two
    parts = [{path.relative_to(folder) for path in folder.rglob("*.npz")} for folder in (tmp_path / "one", two.parent)]
    assert parts[0] == parts[1]
    monkeypatch.setattr(judging, "token_nats", None)  # one process reuses the cache of two
    assert close(judged(capsys, *words, "--out", two), one)


@pytest.mark.slow
@pytest.mark.processes
def test_a_user_error_on_one_of_two_ranks_is_printed_once(place, capsys, tmp_path, monkeypatch):
    words = (
        place / "samples-4.jsonl",
        "--model",
        place / "ar",
        "--metrics",
        "perplexity",
        "--out",
        tmp_path / "c.json",
    )
    monkeypatch.setattr("adlm.apps.judge.pipeline.TEXTS_PER_PART", 4)
    judged(capsys, *words)
    part = next(tmp_path.glob("judged/*/00001.npz"))
    part.write_bytes(part.read_bytes()[:40])
    run = on_two(
        tmp_path, "judge", *words, first="import adlm.apps.judge.pipeline as judging; judging.TEXTS_PER_PART = 4"
    )
    errors = [line for line in run.stderr.splitlines() if line.startswith("adlm: ")]
    assert len(errors) == 1
    assert "00001.npz is damaged; delete it" in errors[0]
    assert "all_gather" not in run.stderr


LATE = """
import os, time, adlm.apps.judge.pipeline as judging
from adlm.errors import UserError
token_nats = judging.token_nats
def one_fails(*words):
    if os.environ["RANK"] == "1":
        time.sleep(2)  # meanwhile the other waits
        raise UserError("the original error")
    return token_nats(*words)
judging.token_nats = one_fails
import adlm.apps.judge.pipeline as judging; judging.TEXTS_PER_PART = 20
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_fails_while_another_waits_reports_its_own_error(place, tmp_path):
    words = (place / "samples-4.jsonl", "--model", place / "ar", "--metrics", "perplexity")
    run = on_two(tmp_path, "judge", *words, first=LATE)
    assert [line for line in run.stderr.splitlines() if line.startswith("adlm: ")] == ["adlm: the original error"]


def test_empty_and_short_samples_are_counted_and_stated(place, capsys, tmp_path):
    path = write_samples(tmp_path / "odd.jsonl", ["", "a", "two words", "and three more"])
    card = judged(capsys, path, "--model", place / "ar", *CHEAP)
    assert card["samples"]["num_empty"] == 1
    assert (card["perplexity"]["num_samples"], card["perplexity"]["num_uncounted"]) == (3, 1)
    assert card["entropy"]["num"] == 3
    assert card["diversity"]["tokens"]["least"] == 0
    assert any("1 samples have no token that counts" in note for note in card["notes"])
    assert main(["judge", str(path), "--model", str(place / "ar"), *CHEAP]) == 0
    capsys.readouterr()
    empty = write_samples(tmp_path / "empty.jsonl", ["", ""])
    card = judged(capsys, empty, "--model", place / "ar", *CHEAP)
    assert card["perplexity"]["pooled"]["value"] is None
    assert main(["judge", str(empty), "--model", str(place / "ar"), *CHEAP]) == 0


def test_the_reference_can_be_judged_with_the_samples(place, capsys):
    words = (
        place / "samples-4.jsonl",
        "--reference",
        place / "samples-2.jsonl",
        "--judge-reference",
        "--model",
        place / "ar",
    )
    card = judged(capsys, *words, *CHEAP)
    alone = judged(capsys, place / "samples-2.jsonl", "--model", place / "ar", *CHEAP)
    for metric in ("perplexity", "entropy", "diversity"):
        assert card["reference_judged"][metric] == alone[metric]
    assert main(["judge", *map(str, words), *CHEAP]) == 0
    assert "reference" in capsys.readouterr().out.splitlines()[0]


def test_the_table_has_every_metric_and_its_label(place, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["judge", str(place / "samples-4.jsonl"), "--model", str(place / "ar"), *CHEAP]) == 0
    out = capsys.readouterr().out
    for name in ("gen-PPL, pooled", "unigram entropy", "distinct-4", "rep-4", "longest repeat", "length, characters"):
        assert name in out
    assert "not comparable with published perplexities: the judge is" in out


def test_given_features_need_no_model(place, mauve, capsys, tmp_path):
    draws = np.random.default_rng(0)
    for name, num in (("ours", NUM), ("theirs", 30)):
        np.save(tmp_path / f"{name}.npy", draws.normal(size=(num, 4)))
    both = ("--given-features", tmp_path / "ours.npy", tmp_path / "theirs.npy")
    card = judged(capsys, place / "samples-4.jsonl", "--metrics", "mauve", *both)
    assert (card["mauve"]["num_samples"], card["mauve"]["num_reference"]) == (NUM, 30)
    assert "given features" in card["mauve"]["label"]


def test_a_damaged_judge_is_refused(place, capsys, tmp_path):
    lm = adlm.load(place / "ar")
    weights = {name: value * float("nan") for name, value in lm.network.state_dict().items()}
    save_model_folder(ModelFolder(lm.config, weights, lm.tokenizer), tmp_path / "nan")
    error = refused(capsys, place / "samples-4.jsonl", "--model", tmp_path / "nan", *CHEAP)
    assert "holds a NaN or an infinity" in error


def test_user_errors_are_one_line(place, capsys, tmp_path):
    samples, ar = place / "samples-4.jsonl", place / "ar"
    few = write_samples(tmp_path / "few.jsonl", ["a text"] * 3)
    (tmp_path / "other.jsonl").write_text('{"text": "no samples"}\n')
    cases = [
        ((), "adlm judge takes one samples file, and none is given"),
        ((tmp_path / "none.jsonl",), "cannot be read"),
        ((tmp_path / "other.jsonl",), "is not a samples file"),
        ((samples, "--model", ar), "--reference is not given, and MAUVE compares"),
        ((samples, "--model", ar, "--reference", tmp_path / "none"), "--reference .* does not exist"),
        ((few, "--model", ar, "--reference", place / "texts.txt"), "MAUVE needs at least 20 samples"),
        (
            (samples, "--metrics", "perplexty"),
            "--metrics 'perplexty' is not one of perplexity, mauve, entropy, diversity; did you mean",
        ),
        ((samples, "--model", place / "adlm", *CHEAP), "only bounds a likelihood"),
        ((samples, "--model", "box", *CHEAP), "box is of method adlm, which only bounds a likelihood"),
        ((samples, "--model", place / "text8", *CHEAP), "tokenizer .* has no id for"),
        ((samples, "--model", place / "text8", "--ids", "as-sampled", *CHEAP), "is not the one that wrote the samples"),
        ((samples, "--model", tmp_path, *CHEAP), "was not loaded as a causal language model"),
        ((samples, "--model", ar, "--batch", 0, *CHEAP), "--batch 0 must be at least 1"),
        ((samples, "--model", ar, "--context", 1, *CHEAP), "--context 1 is too short"),
        ((samples, "--device", "abacus", "--model", ar, *CHEAP), "device 'abacus' is not one"),
        ((samples, "--judge-reference", *CHEAP), "--judge-reference needs a --reference"),
    ]
    for words, sentence in cases:
        error = refused(capsys, *words)
        assert re.search(sentence, error), error


def test_an_unknown_model_name_without_network_access_is_one_line(place, capsys, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr("adlm.checkpoints.pretrained.skip_unreachable_hub", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(capsys, place / "samples-4.jsonl", "--model", "nobody/no-such-judge", "--metrics", "perplexity")
    assert "nobody/no-such-judge was not loaded as a causal language model" in error


def test_the_plot_of_cards_names_their_judges(place, capsys, tmp_path):
    cards = []
    for steps, judge in ((2, "ar"), (4, "ar"), (4, "a2r")):
        cards.append(tmp_path / f"{judge}-{steps}.json")
        judged(capsys, place / f"samples-{steps}.jsonl", "--model", place / judge, *CHEAP, "--out", cards[-1])
    card = json.loads(cards[1].read_text())
    card["mauve"] = {"value": 0.5, "spread": 0.01, "featuriser": {"name": "minilm"}, "label": "another featuriser"}
    cards[1].write_text(json.dumps(card))
    assert main(["judge", "--plot", *map(str, cards), "--out", str(tmp_path / "fig.svg")]) == 0
    capsys.readouterr()
    drawn = (tmp_path / "fig.svg").read_text()
    for label in ("judges differ", "another featuriser", "MAUVE (minilm)"):
        assert f"<!-- {label}" in drawn or label in drawn
    assert "is not a metric card" in refused(capsys, "--plot", place / "samples-4.jsonl", "--out", tmp_path / "fig.png")
    assert "is not a plot file; it must end in .png, .svg, .pdf" in refused(
        capsys, "--plot", cards[0], "--out", tmp_path / "fig.json"
    )
    assert "--plot needs --out FILE for the plot" in refused(capsys, "--plot", cards[0])
    assert "none is given" in refused(capsys, "--plot", "--out", tmp_path / "fig.png")
