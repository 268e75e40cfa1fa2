"""Tests of `adlm train own`: one command from text files to a model, on a CPU, without other options."""

import json
import re
from pathlib import Path

import pytest
from small_runs import SMALL, corpus, logged

from adlm import load
from adlm.cli.main import main
from adlm.config.load import resolve, to_mapping
from adlm.config.schema import Train
from adlm.training.train import _rate_change

QUICK = ("train.steps=6", "train.batch_size=4", "train.valid_every=0", "train.valid_rows=4", "sampling.steps=4")
QUICK += ("model.hidden=16", "model.heads=2", "length=32", "train.samples=1")


def write_texts(folder):
    (folder / "texts").mkdir()
    for number in range(40):
        words = " ".join(f"line {number} of {other} has words and more words." for other in range(40))
        (folder / "texts" / f"{number}.txt").write_text(words)


def test_one_command_trains_on_own_text_in_a_folder_named_after_the_preset(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["train", "own", "data.path=texts/*.txt", "tokenizer=bpe-512", *QUICK]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == "runs/own"
    assert report["nats"] > 0, "some of the files are held out"
    assert load(tmp_path / "runs" / "own").config.train.num_warm_up_steps == 0
    config = (tmp_path / "runs" / "own" / "config.yaml").read_text()
    assert main(words) == 0
    assert "resuming from step 6" in capsys.readouterr().err
    assert (tmp_path / "runs" / "own" / "config.yaml").read_text() == config


def test_own_and_quickstart_use_the_same_training_config():
    own, quickstart = to_mapping(resolve(["own"])), to_mapping(resolve(["quickstart/adlm"]))
    assert own["data"].pop("name") == ""
    assert quickstart["data"].pop("name") == "sotu"
    for recipe in (own, quickstart):
        recipe.pop("sampling")
        for option in ("warm_up_steps", "samples", "sample_every", "valid_every", "valid_rows"):
            recipe["train"].pop(option)
    assert own == quickstart


@pytest.mark.slow
def test_a_prepared_folder_replaces_the_text_of_a_preset(tmp_path, capsys):
    small = [word for word in SMALL if not word.startswith("train.warm_up_steps")]
    words = ["quickstart/adlm", f"data.prepared={corpus(tmp_path, lines=100)}", *small, "train.warm_up_steps=2"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20
    data = load(tmp_path / "run").config.data
    assert (data.name, Path(data.path).suffix) == ("", ".txt"), "the config names the training text"


@pytest.mark.slow
def test_the_default_run_folder_is_not_the_model_folder_of_the_quickstart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word for word in SMALL if not word.startswith("train.warm_up_steps")]
    prepared = corpus(tmp_path, lines=100)
    assert (
        main(["train", "quickstart/adlm", f"data.prepared={prepared}", *words, "train.warm_up_steps=2", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["folder"] == "runs/quickstart-adlm"
    assert main(["train", "own", f"data.prepared={prepared}", "--out", "runs/quickstart-adlm/model"]) == 2
    assert "is a model folder, not a run" in capsys.readouterr().err


def test_extending_a_run_does_not_warm_up_again(tmp_path):
    words = [word for word in SMALL if not word.startswith(("train.warm_up_steps", "train.steps"))]
    begun = ["train", *words, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    assert main([*begun, "train.steps=20"]) == 0
    assert main([*begun, "train.steps=40"]) == 0
    assert load(tmp_path / "run").config.train.warm_up_steps == 2
    assert [line["learning_rate"] for line in logged(tmp_path / "run")][-1] == pytest.approx(
        resolve(words).train.learning_rate
    )


def test_overrides_without_a_preset_extend_a_finished_run(tmp_path, capsys):
    out, prepared = tmp_path / "run", corpus(tmp_path, lines=100)
    steps = [word for word in SMALL if word != "train.steps=20"]
    assert main(["train", *steps, "train.steps=10", f"data.prepared={prepared}", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["train", "--out", str(out), "train.steps=14", "--json"]) == 0
    captured = capsys.readouterr()
    assert "resuming from step 10" in captured.err
    assert json.loads(captured.out)["step"] == 14
    assert [line["step"] for line in logged(out)] == [2, 4, 6, 8, 10, 12, 14]
    assert main(["train", "--out", str(out), "anchor.gamma=0.5"]) == 2
    assert "anchor.gamma 0.1 -> 0.5" in capsys.readouterr().err


def test_training_says_which_rows_it_measured_what_to_type_next_and_that_an_extended_rate_starts_anew(tmp_path, capsys):
    out, prepared = tmp_path / "run", corpus(tmp_path, lines=100)
    decay = ("train.decay=trapezoid", "train.valid_rows=2")
    assert main(["train", *SMALL, *decay, f"data.prepared={prepared}", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    [rows] = set(re.findall(r"2 of [\d,]+ held-out rows", printed.out + printed.err))
    assert f"held-out tokens ({rows})" in printed.out
    assert f"validation on {rows}" in printed.err
    assert printed.out.splitlines()[-3:] == [
        f'  adlm sample {out} --prompt "The" --watch',
        f"  adlm perplexity {out} --data {prepared}",
        f"  adlm train --out {out} train.steps=40",
    ]
    assert main(["train", "--out", str(out), "train.steps=40"]) == 0
    assert "the learning rate had decayed to 0 and starts anew at 0.003" in capsys.readouterr().err
    assert not (out / "samples").exists(), "train.sample_every is 0"


def test_a_run_that_is_extended_during_its_warm_up_has_no_decay_to_speak_of():
    train = Train(steps=40, warm_up_steps=10, decay="cosine")
    assert _rate_change(train, {"steps": 20}, step=5) == ""
    assert "had decayed" in _rate_change(train, {"steps": 20}, step=15)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["own", "train.warm_up_steps=800"], "train.warm_up_steps 800 does not end within train.steps 800"),
        (["owt/adlm", "train.steps=2000"], "try train.warm_up_steps=200"),
        (["method=adlm"], "--out is not given"),
        (["own", "--out", "{tmp}"], "nothing says what to read"),
    ],
)
def test_a_user_error_is_one_line(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert sentence in error
    assert error.startswith("adlm: ")
    assert all(", output in runs/" in line for line in before), "only the line that announces the run"


def test_the_default_warm_up_fits_a_short_run_and_is_the_published_one_for_a_long_run():
    assert resolve(["train.steps=2000"]).train.num_warm_up_steps == 200
    assert resolve(["train.steps=1000000"]).train.num_warm_up_steps == 2500
    assert resolve(["own", "train.steps=5"]).train.num_warm_up_steps == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["onw", "data.path=texts/0.txt"], "did you mean 'own'?"),
        (["train.steps=10", "--out", "runs/nothing"], "runs/nothing holds no run to extend"),
        (["own", "data.path=nowhere.txt"], "nowhere.txt does not exist"),
        (
            ["own", "data.path=short.txt", "tokenizer=bytes"],
            "the training text has 7 tokens, less than one row",
        ),
    ],
)
def test_a_run_that_cannot_start_is_a_one_line_error_and_creates_no_files(
    words, sentence, tmp_path, monkeypatch, capsys
):
    write_texts(tmp_path)
    (tmp_path / "short.txt").write_text("Hello.")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "runs").glob("*"))


def test_fewer_steps_than_already_done_are_a_user_error_and_the_config_is_unchanged(tmp_path, capsys):
    words = [*SMALL, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    for steps in (10, 1):  # 1 is less than the steps of the warm-up too
        assert main(["train", "--out", str(tmp_path / "run"), f"train.steps={steps}"]) == 2
        assert f"train.steps {steps} is less than the 20 steps that" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_text() == config
