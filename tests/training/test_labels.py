"""Training with anchors that the text labels: the same weights after resuming, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_runs import RecordingReporter, corpus

from adlm import load
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.errors import UserError
from adlm.training.metrics import read_metrics
from adlm.training.train import train

NETWORK = ("model.hidden=32", "model.heads=2", "model.blocks=1", "model.denoiser_blocks=1", "model.condition=8")
QUICK = ("model.dropout=0", "train.batch_size=4", "train.warm_up_steps=0", "train.threads=1", "train.sample_every=0")
SYNTAX = ("method=adlm", "anchor.rule=syntax", "anchor.gamma=0.5", "anchor.warm_up=false", *NETWORK, *QUICK)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "code.jsonl"
    texts = [f"def f{number}(x):\n    return x + {number}  # a comment\n" * 4 for number in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [f"data.path={path}", "data.labels=python", "data.held_out=0.1", "tokenizer=bytes", "length=32"]


def run(out, *words):
    return train(resolve(words), out, RecordingReporter())


def test_a_run_resumes_to_the_same_weights_and_micro_batches_change_nothing(programs, tmp_path):
    words = [*programs, *SYNTAX, "train.checkpoint_every=2"]
    run(tmp_path / "whole", *words, "train.steps=4", "train.log_every=1")
    run(tmp_path / "parts", *words, "train.steps=2")
    run(tmp_path / "parts", *words, "train.steps=4")
    whole, parts = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    prepared = [f"data.prepared={tmp_path / 'whole/data'}", "length=32", *SYNTAX, "train.steps=4"]
    run(tmp_path / "again", *prepared, "train.micro_batch=2")
    again = load_file(tmp_path / "again/model/model.safetensors")
    for name in whole:
        torch.testing.assert_close(whole[name], again[name], atol=1e-5, rtol=1e-4)
    assert load(tmp_path / "again").config.data.labels == "python"
    shares = [line["anchor_share"] for line in read_metrics(tmp_path / "whole/metrics.jsonl")]
    assert all(0.2 < share < 0.6 for share in shares)  # about 15 of 38 characters are in names


def test_inspect_marks_the_labelled_tokens(programs, tmp_path, capsys):
    assert main(["prepare", *programs, "--out", str(tmp_path / "data"), "--inspect", "anchor.rule=syntax"]) == 0
    shown = capsys.readouterr().out
    assert "(labelled names and keywords)" in shown
    assert "{def} {f" in shown


@pytest.mark.parametrize("words", [["method=a2r"], ["model.block_length=4"], ["rates.rule=text", "time.masks=counted"]])
def test_all_methods_with_anchors_take_labels(words, programs, tmp_path):
    run(tmp_path / "run", *programs, *SYNTAX, *words, "train.steps=1")
    assert 0.2 < read_metrics(tmp_path / "run/metrics.jsonl")[-1]["anchor_share"] < 0.6


def test_a_bound_of_a2r_needs_no_statistics_of_the_text(programs, tmp_path):
    run(tmp_path / "run", *programs, *SYNTAX, "method=a2r", "anchor.rule=rare", "train.steps=1")
    assert read_metrics(tmp_path / "run/metrics.jsonl")[-1]["valid_nats"] > 0


def test_a_method_without_anchors_ignores_labels(programs, tmp_path):
    words = ["method=mdlm", "anchor.rule=syntax", *NETWORK, *QUICK, "train.steps=1"]
    plain = [word for word in programs if word != "data.labels=python"]
    run(tmp_path / "labelled", *programs, *words)
    run(tmp_path / "plain", *plain, *words)
    labelled, plain = (load_file(tmp_path / name / "model/model.safetensors") for name in ("labelled", "plain"))
    assert all(torch.equal(labelled[name], plain[name]) for name in labelled)


def test_the_rule_is_refused_without_labels(programs, tmp_path):
    prepared = f"data.prepared={corpus(tmp_path, 50)}"
    with pytest.raises(UserError, match=r"anchor.rule syntax needs labels, and .* has none; prepare the text with"):
        run(tmp_path / "a", prepared, *SYNTAX, "train.steps=1", "length=16")
    with pytest.raises(UserError, match=r"has labels none, and data.labels is python; prepare it with"):
        run(tmp_path / "b", prepared, *SYNTAX, "train.steps=1", "length=16", "data.labels=python")
    streamed = [word for word in programs if word != "data.labels=python"]
    with pytest.raises(UserError, match=r"anchor.rule syntax needs the labels of prepared text; use data.streaming=f"):
        run(tmp_path / "c", *streamed, *SYNTAX, "train.steps=1", "data.streaming=true")
    infill = ["model.block_length=4", "model.hole_id=0", "train.infill=0.5"]
    with pytest.raises(UserError, match=r"anchor.rule syntax needs train.infill=0"):
        run(tmp_path / "d", *programs, *SYNTAX, *infill, "train.steps=1")
