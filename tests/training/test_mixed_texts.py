"""Training on several prepared folders, mixed by weight."""

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, RecordingReporter, corpus

from adlm.cli.main import main
from adlm.config.load import load_config, resolve
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import open_prepared, weighted_folders
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.training.run_folder import RunFolder
from adlm.training.text import open_text_task
from adlm.training.train import train

SHORT = (*SMALL, "method=mdlm", "model.blocks=1", "train.valid_every=0", "train.threads=1", "train.warm_up_steps=0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    capitals = folder / "capitals.txt"
    capitals.write_text("\n".join(letter * 12 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 9))
    words = [f"data.path={capitals}", "data.boundary=line", "data.held_out=0.1", "length=16"]
    prepare(resolve([*words, "tokenizer=bytes"]), folder / "capitals")
    prepare(resolve([*words, "tokenizer=bpe-300"]), folder / "subwords")
    return {"rhymes": corpus(folder), "capitals": folder / "capitals", "subwords": folder / "subwords"}


def config_of(folders, weights, *words):
    rhymes, capitals = weights
    return resolve([f"data.prepared={folders['rhymes']}={rhymes},{folders['capitals']}={capitals}", *SHORT, *words])


def run(folders, out, *words, weights=(3, 1)):
    reporter = RecordingReporter()
    train(config_of(folders, weights, *words), out, reporter)
    return reporter.messages


def test_a_run_on_two_texts_resumes_to_the_same_bits_and_says_their_shares(folders, tmp_path):
    messages = run(folders, tmp_path / "whole", "train.steps=6")
    for name, share, rows in (("rhymes", "75.0%", 36), ("capitals", "25.0%", 12)):
        epochs = rows / len(open_prepared(folders[name]).rows("train", 16, overlap=True))
        assert f"{folders[name]}: {share} of the rows of every batch, {epochs:.2g} epochs in all" in messages
    run(folders, tmp_path / "parts", "train.steps=4")
    run(folders, tmp_path / "parts", "train.steps=6", weights=(6, 2))  # the same shares
    expected, found = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    config = load_config(tmp_path / "whole/config.yaml")
    assert list(weighted_folders(config.data.prepared).values()) == [3, 1]
    assert load_config(tmp_path / "whole/model/config.yaml").data.prepared == "", "model folders name no local path"
    with pytest.raises(UserError, match="the order or the weights of its sources, has changed"):
        run(folders, tmp_path / "whole", "train.steps=7", weights=(1, 1))


@pytest.mark.parametrize(("weights", "num"), [((1, 1), 3), ((999, 1), 0), ((1, 2), 4)])
def test_held_out_rows_are_those_of_both_texts_in_their_shares(weights, num, folders, tmp_path):
    processes = Processes(0, 1, torch.device("cpu"), None)
    task = open_text_task(config_of(folders, weights), RunFolder(tmp_path), processes, print)
    x, pad, given = task.read_held_out(0, task.size.num_held_out)
    is_capitals = ((x >= ord("A")) & (x <= ord("Z"))).float().mean(dim=1) > 0.5
    assert (len(x), int(is_capitals.sum())) == (6, num)
    assert given is None
    parts = [task.read_held_out(start, start + 2) for start in (0, 2, 4)]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert pad is None or pad.shape == x.shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{rhymes}=1,{subwords}=1", "which differ in tokenizer; prepare both with the same tokenizer"),
        (
            "{rhymes}=1,{capitals}",
            "'{capitals}' has no weight above 0, such as 3 or 0.5; write FOLDER=WEIGHT,FOLDER=WEIGHT",
        ),
        ("{rhymes}=1,{capitals}=0", "'{capitals}=0' has no weight above 0"),
        ("{rhymes}=1,{capitals}=many", "has no weight above 0"),
        ("{rhymes}=1,{rhymes}=2", "names {rhymes} twice; give it once, with the sum of the weights"),
        ("{rhymes}=1,nowhere=2", "nowhere has no manifest.json, so it is not a prepared folder"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(given, message, folders, tmp_path, capsys):
    words = [f"data.prepared={given.format(**folders)}", *SHORT]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message.format(**folders) in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_the_command_names_the_texts_to_measure(folders, tmp_path, capsys):
    mixed = f"data.prepared={folders['rhymes']}=3,{folders['capitals']}=1"
    assert main(["train", mixed, *SHORT, "train.steps=1", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    for name in ("rhymes", "capitals"):
        assert f"adlm perplexity {tmp_path / 'run'} --data {folders[name]}" in printed
    assert main(["perplexity", str(tmp_path / "run"), "--data", str(folders["capitals"])]) == 0


def test_a_stream_has_no_prepared_text(tmp_path):
    with pytest.raises(UserError, match=r"streaming true reads text as it is, and data.prepared x is prepared; leave"):
        train(resolve([*SMALL, "data.prepared=x", "data.streaming=true"]), tmp_path / "run", RecordingReporter())
