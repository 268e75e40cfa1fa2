"""Tests of `adlm train`: train, report, resume and plot; user errors are one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import SMALL, corpus, forked, with_closed_terminal, with_repeated_ctrl_c, without_reader

from adlm.cli.main import main


def test_a_run_that_diverged_names_its_learning_rate_and_fails(tmp_path, capsys):
    words = [*SMALL, f"data.prepared={corpus(tmp_path, lines=100)}", "train.steps=3", "train.warm_up_steps=0"]
    assert main(["train", *words, "train.learning_rate=1e30", "--out", str(tmp_path / "run")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("training diverged")
    assert last.endswith("a lower train.learning_rate (now 1e+30)")


def test_a_run_is_trained_reported_resumed_and_plotted(tmp_path, capsys):
    out, prepared = tmp_path / "run", corpus(tmp_path, lines=100)
    words = ["train", *SMALL, f"data.prepared={prepared}", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["step"] == 20
    assert report["tokens"] == 20 * 8 * 16
    assert report["nats"] > report["stderr"] > 0
    assert "20/20  loss" in captured.err
    assert "anchor" in captured.err
    assert "held out <= " in captured.err, "diffusion has an upper bound"
    assert "bound" not in captured.err, "training nats are not a bound"
    assert main(["train", "--out", str(out)]) == 0  # already finished
    error = capsys.readouterr().err
    assert "resuming from step 20" in error
    assert "all 20 steps are done; a larger train.steps trains the run longer" in error
    pytest.importorskip("matplotlib")
    assert main(["train", "--plot", str(out)]) == 0
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "curves.svg").read_text()


def test_several_runs_are_plotted_on_one_pair_of_axes(tmp_path, capsys):
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


@pytest.mark.parametrize(("method", "label"), [("ar", "held out "), ("mdlm", "held out <= ")])
def test_held_out_nats_are_labelled_as_exact_or_as_a_bound(method, label, tmp_path, capsys):
    words = [*SMALL, f"method={method}", "train.steps=3", f"data.prepared={corpus(tmp_path, lines=100)}"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr()
    assert re.search(rf"3/3  loss .*  {label}\d", output.err)
    assert ("upper bound on the loss of" in output.out) == (method != "ar")
    assert ("exact loss of" in output.out) == (method == "ar")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "{tmp}/run"], "no preset or option is given"),
        (
            ["owt/adlm", "data.prepared={tmp}/none", "--out", "{tmp}/run"],
            "has no manifest.json, so it is not a prepared folder",
        ),
        (["train.stepps=3", "--out", "{tmp}/run"], "did you mean train.steps"),
        (["train.shard=2", "data.path=x.txt", "--out", "{tmp}/run"], "train.shard 2 does not fit 1 process"),
        (
            ["train.device=cuda", "data.path=x.txt", "--out", "{tmp}/run"],
            "train.device 'cuda' is not one that torch",
        ),
        (["--plot", "{tmp}"], "has no metrics.jsonl"),
        (["--plot", "{tmp}", "--out", "{tmp}/run"], "takes no other option; leave out --out"),
        (["train.steps=3", "--plot", "{tmp}"], "takes no other option; leave out train.steps=3"),
        ([], "no preset is given; try `adlm train own init=box data.path=FILE`"),
        (["own", "--steps", "5"], "as a config option: train.steps=... or time.steps=..."),
    ],
)
def test_a_user_error_is_one_line(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert sentence in error
    assert error.startswith("adlm: ")
    assert len(before) <= 1, "only the line that announces the run"


@pytest.mark.parametrize("option", ["train.tensorboard=true", "train.wandb=offline"])
def test_a_missing_package_is_a_user_error(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["train", *SMALL, f"data.prepared={corpus(tmp_path, lines=100)}", option, "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "which is not installed; try pip install" in capsys.readouterr().err


SHORT = ("model.blocks=1", "train.steps=4", "train.log_every=1", "train.valid_every=0")


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_with_closed_standard_streams_trains_to_the_end(tmp_path):
    words = ["train", *SMALL, *SHORT, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    assert forked(without_reader, words) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.processes
@pytest.mark.parametrize("signals", [[], [signal.SIGHUP, signal.SIGTERM]])
def test_a_run_whose_terminal_is_closed_saves_a_checkpoint_and_stops(signals, tmp_path):
    """The kernel sends SIGHUP, and writing to standard error fails; a shell may send more signals."""
    words = ["train", *SMALL, *SHORT, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    assert forked(with_closed_terminal, [*words, "train.steps=5000"], signals) == 128 + signal.SIGHUP
    saved = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    assert 3 <= int(saved[0].name[5:]) < 5000
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.processes
def test_repeated_ctrl_c_prints_no_traceback(tmp_path):
    """During startup and during training: exit code 130, and the same command then completes."""
    words = ["train", *SMALL, *SHORT, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "adlm", *words, "train.steps=5000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "output in" in process.stderr.readline()
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        printed = process.stderr.read()
        assert process.wait(120) == 130
    errors = tmp_path / "errors"
    assert forked(with_repeated_ctrl_c, [*words, "train.steps=5000"], errors) == 130
    assert "Traceback" not in printed + errors.read_text()
    assert main([*words, "train.steps=5"]) == 0


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "the environment variable RANK 'x' must be a whole number from 0; start"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "the environment variable WORLD_SIZE 'x' must be a whole number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "\u00b2"},
            "the environment variable LOCAL_RANK '\u00b2' must be a whole number",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set; start several processes with torchrun, or unset"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK 3 must be from 0 to 1, since WORLD_SIZE is 2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
            "the environment variable MASTER_PORT 'x' must be a whole number from 1",
        ),
    ],
)
def test_an_invalid_torchrun_environment_is_a_one_line_error(environment, sentence, tmp_path, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "data.path=x.txt", *SMALL, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_single_torchrun_variable_is_ignored(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(name, "x")
    words = ["train", *SMALL, *SHORT, f"data.prepared={corpus(tmp_path, lines=100)}", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert "4 steps" in capsys.readouterr().out


def test_the_remedy_for_a_wrong_mesh_names_each_option_once(tmp_path, capsys):
    assert main(["train", "train.shard=2", "data.path=x.txt", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.endswith("; try train.shard=1\n")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("data.path={tmp}/fifo", "fifo is a FIFO, not a regular file"),
        ("data.path={tmp}/*o", "is a FIFO, not a regular file"),
        ("data.path=/dev/null", "data.path /dev/null is a device, not a regular file"),
        ("data.path=~nouser/x", "data.path ~nouser/x begins with the home folder of a user that does not exist"),
        ("data.prepared=~nouser/x", "data.prepared ~nouser/x begins with the home folder"),
        ("data.root=~nouser/x", "data.root ~nouser/x begins with the home folder"),
    ],
)
def test_a_path_that_is_not_a_regular_file_is_a_user_error(word, sentence, tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    named = ["data=wikitext2"] if word.startswith("data.root") else []
    tokenizer = [] if word.startswith("data.prepared") else ["tokenizer=bytes"]
    words = [*tokenizer, *SMALL, *named, word.replace("{tmp}", str(tmp_path))]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_prepared_text_has_its_own_tokenizer(tmp_path, capsys):
    words = [*SMALL, f"data.prepared={tmp_path}", "tokenizer=bytes", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 2
    assert "has a tokenizer of its own; leave out tokenizer=" in capsys.readouterr().err
    assert main(["train", *words[:-2], f"data.path={tmp_path / 'none.txt'}", *words[-2:]]) == 2
    assert "none.txt does not exist" in capsys.readouterr().err, "the later option is read"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "prepare", "quickstart"])
@pytest.mark.parametrize(("name", "sentence"), [("x" * 300, "cannot be "), ("a\0b", "a\\x00b has a null byte")])
def test_an_invalid_folder_name_is_a_one_line_error(command, name, sentence, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("words " * 100)
    words = [f"data.path={tmp_path / 'text.txt'}", "tokenizer=bytes"]
    assert main([command, *words, "--out", str(tmp_path / name)]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_files_whose_names_are_not_utf8_are_read(tmp_path, capsys):
    for number in range(12):
        Path(os.fsdecode(os.fsencode(tmp_path) + f"/{number}".encode() + b"\xff.txt")).write_text(
            "words and words " * 40
        )
    words = [f"data.path={tmp_path}/*.txt", "tokenizer=bytes", *SMALL, *SHORT, "data.held_out=0.3"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    assert main(["prepare", *words, "--out", str(tmp_path / "prepared"), "--inspect"]) == 0
