"""Laws of `adlm train`: it trains, tells, resumes, draws, and a mistake is one sentence."""

import json
import re

import pytest
from small_runs import SMALL, corpus

from adlm.interfaces.cli import main


def test_a_run_is_trained_told_resumed_and_drawn(tmp_path, capsys):
    out, prepared = tmp_path / "run", corpus(tmp_path, lines=100)
    words = ["train", *SMALL, f"data.prepared={prepared}", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["step"] == 20
    assert report["tokens"] == 20 * 8 * 16
    assert report["nats"] > report["stderr"] > 0
    assert "20/20  loss" in told.err
    assert "anchor" in told.err
    assert "held out <= " in told.err, "diffusion has an upper bound"
    assert "bound" not in told.err, "what is printed in training is none"
    assert main(["train", "--out", str(out)]) == 0  # as it is: there is nothing left to do
    assert "going on from step 20" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main(["train", "--plot", str(out)]) == 0
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "curves.svg").read_text()


def test_several_runs_are_drawn_on_one_pair_of_axes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for number, run in enumerate(runs):
        run.mkdir()
        line = {"step": 2, "nats": 4.0 + number, "valid_nats": 4.5 + number, "valid_stderr": 0.1}
        (run / "metrics.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'step': 4})}\n")
    assert main(["train", "--plot", *map(str, runs), "--json"]) == 0
    png, svg = json.loads(capsys.readouterr().out)
    assert (png, svg) == (str(runs[0] / "comparison.png"), str(runs[0] / "comparison.svg"))
    drawn = (runs[0] / "comparison.svg").read_text()
    assert drawn.count('<g id="axes_') == 1
    for run in runs:
        assert f"{run}, held out" in drawn
        assert f"{run}, in training" in drawn


@pytest.mark.parametrize(("method", "told"), [("ar", "held out "), ("mdlm", "held out <= ")])
def test_held_out_nats_are_named_by_what_they_are(method, told, tmp_path, capsys):
    words = [*SMALL, f"method={method}", "train.steps=3", f"data.prepared={corpus(tmp_path, lines=100)}"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr()
    assert re.search(rf"3/3  loss .*  {told}\d", output.err)
    assert ("upper bound on the loss of" in output.out) == (method != "ar")
    assert ("exact loss of" in output.out) == (method == "ar")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "{tmp}/run"], "nothing says what to train"),
        (
            ["owt/adlm", "data.prepared={tmp}/none", "--out", "{tmp}/run"],
            "has no manifest.json, so it is no prepared folder",
        ),
        (["train.stepps=3", "--out", "{tmp}/run"], "did you mean train.steps"),
        (["train.shard=2", "data.path=x.txt", "--out", "{tmp}/run"], "train.shard 2 does not fit 1 process"),
        (["train.device=cuda", "data.path=x.txt", "--out", "{tmp}/run"], "train.device cuda is not here"),
        (["--plot", "{tmp}"], "has no metrics.jsonl"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    *before, told = capsys.readouterr().err.splitlines()
    assert sentence in told
    assert told.startswith("adlm: ")
    assert len(before) <= 1, "what it was about to do"


@pytest.mark.parametrize("knob", ["train.tensorboard=true", "train.wandb=offline"])
def test_what_is_not_installed_is_told(knob, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["train", *SMALL, f"data.prepared={corpus(tmp_path, lines=100)}", knob, "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "which is not installed; try pip install" in capsys.readouterr().err
