"""Properties of `adlm train own`: one command from text files to a model, on a CPU, without other options."""

import json
from pathlib import Path

import pytest
from small_runs import SMALL, corpus, logged

from adlm import load
from adlm.cli.main import main
from adlm.config.load import resolve, to_mapping

QUICK = ("train.steps=6", "train.batch_size=4", "train.valid_every=0", "train.valid_rows=4", "sampling.steps=4")


def write_texts(folder):
    (folder / "texts").mkdir()
    for number in range(40):
        words = " ".join(f"line {number} of {other} has words and more words." for other in range(40))
        (folder / "texts" / f"{number}.txt").write_text(words)


def test_own_text_becomes_a_model_in_one_command_and_in_a_folder_of_the_presets_name(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["train", "own", "data.path=texts/*.txt", "tokenizer=bpe-512", *QUICK]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == "runs/own"
    assert told["nats"] > 0, "some of the files are held out"
    assert load(tmp_path / "runs" / "own").config.train.num_warm_up_steps == 0
    config = (tmp_path / "runs" / "own" / "config.yaml").read_text()
    assert main(words) == 0
    assert "resuming from step 6" in capsys.readouterr().err
    assert (tmp_path / "runs" / "own" / "config.yaml").read_text() == config


def test_the_recipe_is_the_quickstarts():
    own, quickstart = to_mapping(resolve(["own"])), to_mapping(resolve(["quickstart/adlm"]))
    assert own["data"].pop("name") == ""
    assert quickstart["data"].pop("name") == "sotu"
    for recipe in (own, quickstart):
        recipe.pop("sampling")
        for knob in ("warm_up_steps", "samples"):
            recipe["train"].pop(knob)
    assert own == quickstart


def test_a_prepared_folder_replaces_the_text_of_a_preset(tmp_path, capsys):
    small = [word for word in SMALL if not word.startswith("train.warm_up_steps")]
    words = ["quickstart/adlm", f"data.prepared={corpus(tmp_path, lines=100)}", *small, "train.warm_up_steps=2"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20
    learnt = load(tmp_path / "run").config.data
    assert (learnt.name, Path(learnt.path).suffix) == ("", ".txt"), "the model says which text it learnt"


def test_the_default_folder_of_a_run_is_not_the_quickstarts_model(tmp_path, monkeypatch, capsys):
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


def test_knobs_alone_extend_a_finished_run(tmp_path, capsys):
    out, prepared = tmp_path / "run", corpus(tmp_path, lines=100)
    steps = [word for word in SMALL if word != "train.steps=20"]
    assert main(["train", *steps, "train.steps=10", f"data.prepared={prepared}", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["train", "--out", str(out), "train.steps=14", "--json"]) == 0
    told = capsys.readouterr()
    assert "resuming from step 10" in told.err
    assert json.loads(told.out)["step"] == 14
    assert [line["step"] for line in logged(out)] == [2, 4, 6, 8, 10, 12, 14]
    assert main(["train", "--out", str(out), "anchor.gamma=0.5"]) == 2
    assert "anchor.gamma 0.1 -> 0.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["own", "train.warm_up_steps=800"], "train.warm_up_steps 800 does not end within train.steps 800"),
        (["owt/adlm", "train.steps=2000"], "try train.warm_up_steps=200"),
        (["method=adlm"], "--out is not given"),
        (["own", "--out", "{tmp}"], "nothing says what to read"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    *before, told = capsys.readouterr().err.splitlines()
    assert sentence in told
    assert told.startswith("adlm: ")
    assert all(", into runs/" in line for line in before), "what it was about to do"


def test_an_empty_warm_up_ends_within_a_short_run_and_is_the_published_one_in_a_long_one():
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
def test_what_cannot_be_trained_is_one_line_and_leaves_nothing_behind(words, sentence, tmp_path, monkeypatch, capsys):
    write_texts(tmp_path)
    (tmp_path / "short.txt").write_text("Hello.")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "runs" / "own" / "config.yaml").exists()
    assert not (tmp_path / "runs" / "nothing").exists()


def test_fewer_steps_than_a_run_has_done_are_refused_and_its_config_stays(tmp_path, capsys):
    words = [*SMALL, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert main(["train", "--out", str(tmp_path / "run"), "train.steps=10"]) == 2
    assert "train.steps 10 is less than the 20 steps that" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_text() == config
