"""Properties of resuming: a rejected resume changes nothing, and damage is always reported."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from kills import contents, without_timings
from small_runs import RecordingReporter, corpus, logged, run, weights

from adlm import load
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.errors import UserError
from adlm.models.transformer import num_parameters
from adlm.training import run_checkpoints, run_folder, train
from adlm.training.metrics import ValidationResult
from adlm.training.task import TextTask

SHORT = ("model.blocks=1", "train.steps=4", "train.checkpoint_every=2", "train.valid_every=2")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"), lines=100)


@pytest.fixture(scope="module")
def finished(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(prepared, out, *SHORT)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def files_of(folder: Path) -> dict[str, bytes]:
    return contents(folder, {"metrics.jsonl": without_timings})


def make_model_stale(out: Path) -> None:
    """As if the process had been killed between writing the last checkpoint and writing the model."""
    stale = out / "model" / "model.safetensors"
    stale.write_bytes(stale.read_bytes()[:-8] + bytes(8))


def test_a_run_killed_between_its_last_checkpoint_and_its_model_writes_the_model_on_resuming(prepared, finished, out):
    make_model_stale(out)
    assert run(prepared, out, *SHORT).counters.step == 4
    assert files_of(out) == files_of(finished)


@pytest.mark.parametrize("words", [("model.tie_heads=true",), ("model.bridge=none",), ("train.optimizer=muon",)])
def test_pairs_that_share_parts_and_muon_resume_to_the_same_bits_and_load(words, prepared, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(prepared, whole, *SHORT, *words)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000004")
    make_model_stale(resumed)
    run(prepared, resumed, *SHORT, *words)
    assert files_of(resumed) == files_of(whole)
    lm = load(whole)
    assert num_parameters(lm.network) == sum(weight.numel() for weight in weights(whole).values())
    assert len(lm.sample(2, length=8, steps=4, seed=0)) == 2


def test_a_run_stopped_before_its_first_step_writes_the_model_of_its_checkpoint(prepared, out, tmp_path, monkeypatch):
    save_model, training_loop, models = train._save_model, train._training_loop, []

    def recording_save_model(context, path):
        save_model(context, path)
        models.append((path.name, weights(path.parent, path.name)))

    def stopped(context, counters):
        context.stop.signal = signal.SIGTERM
        return training_loop(context, counters)

    monkeypatch.setattr(train, "_save_model", recording_save_model)
    run(prepared, tmp_path / "uninterrupted", *SHORT)
    of_step_2 = next(model for name, model in models if name == "model")
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    make_model_stale(out)
    monkeypatch.setattr(train, "_training_loop", stopped)
    outcome = run(prepared, out, *SHORT)
    assert (outcome.signal, outcome.counters.step) == (signal.SIGTERM, 2)
    assert all(torch.equal(weights(out)[name], of_step_2[name]) for name in of_step_2)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path, tuple[str, ...]]:
    """A run that prepared its own text, the text, and the options of the run."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number of the union\n" for number in range(60)))
    words = (
        *SHORT,
        f"data.path={text}",
        "data.boundary=line",
        "tokenizer=bytes",
        "data.held_out=0.1",
        "data.prepared=",
    )
    run(Path(), tmp_path / "run", *words)
    return tmp_path / "run", text, words


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("appended", r"text\.txt is not what .*data was prepared from; put it back.*data.prepared=.*data to resume"),
        ("deleted", r"does not exist.*add data.prepared=.*data to resume with the text as it was prepared"),
        ("data.held_out=0.2", r"another config \(data.held_out 0.1 -> 0.2\)"),
        ("tokenizer=bpe-300", r"was prepared with tokenizer=bytes, not bpe-300"),
        ("tokenizer=text8", r"was prepared with another tokenizer than now"),
        ("data.seed=4", r"another config \(data.seed 0 -> 4\)"),
    ],
)
def test_a_rejected_resume_leaves_the_run_and_its_text_unchanged(own, change, error):
    out, text, words = own
    before = files_of(out)
    if change == "appended":
        text.write_text(text.read_text() + "one more line\n")
    elif change == "deleted":
        text.unlink()
    with pytest.raises(UserError, match=error):
        run(Path(), out, *words, *([change] if "=" in change else []))
    assert files_of(out) == before
    if change in ("appended", "deleted"):  # the remedy in the error message
        more = [word for word in words if not word.startswith(("data.", "tokenizer"))]
        assert run(out / "data", out, *more, "data.held_out=0.1", "data.boundary=line").counters.step == 4


def test_a_run_that_has_started_never_prepares_its_text_again(own):
    out, _, words = own
    shutil.rmtree(out / "data")
    with pytest.raises(
        UserError, match=r"there is no prepared data in .*data; restore it, or give a folder with the same data"
    ):
        run(Path(), out, *words)
    assert not (out / "data").exists()


def test_a_changed_stream_is_reported_with_the_remedy(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number of the union\n" for number in range(100)))
    words = (*SHORT, f"data.path={text}", "data.boundary=line", "tokenizer=bytes", "data.held_out=0", "data.prepared=")
    stream = (*words, "data.streaming=true", "train.steps=200", "train.valid_every=0")
    original, step = text.read_text(), train.train_step

    def appending(*values):
        text.write_text(f"{original} and more")
        return step(*values)

    monkeypatch.setattr(train, "train_step", appending)
    error = r"changed while .* steps are saved: restore the text and rerun the same command"
    with pytest.raises(UserError, match=error):
        run(Path(), tmp_path / "run", *stream)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"a run on another text: .* restore it"):
        run(Path(), tmp_path / "run", *stream)
    text.write_text(original)
    latest = run_checkpoints.find_checkpoint(tmp_path / "run" / "checkpoints", print)
    assert latest is not None
    steps = latest.counters.step
    assert run(Path(), tmp_path / "run", *stream, f"train.steps={steps + 1}").counters.step == steps + 1


@pytest.mark.parametrize("nats", [math.nan, math.inf])
def test_a_validation_bound_that_is_not_finite_never_replaces_the_best_model(nats, prepared, tmp_path, monkeypatch):
    validate, reporter = TextTask.validate, RecordingReporter()
    monkeypatch.setattr(TextTask, "validate", lambda *values: ValidationResult(nats, nats, 10, 2))
    outcome = run(prepared, tmp_path / "run", *SHORT, reporter=reporter)
    assert outcome.counters.step == 4
    assert not (tmp_path / "run" / "best").exists()
    assert sum(f"held-out rows is {nats} at step" in message for message in reporter.messages) == 2
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000004/checkpoint.json").read_text())
    assert manifest["nats"] is None
    assert logged(tmp_path / "run")[-1]["valid_nats"] is None
    monkeypatch.setattr(TextTask, "validate", validate)
    outcome = run(prepared, tmp_path / "run", *SHORT, "train.steps=6")
    assert outcome.counters.best_step == 6
    assert (tmp_path / "run" / "best").is_dir()


def test_shards_rewritten_with_the_same_size_are_rejected(prepared, out, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(prepared, text)
    shard = text / "train" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"a\0")
    for path in (out, tmp_path / "new"):
        with pytest.raises(UserError, match=r"tokens-00000\.bin is not what was written \(its checksum differs\)"):
            run(text, path, *SHORT)


def test_comparing_the_checksums_of_large_shards_is_reported(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.training.text.LARGE", 100)
    reporter = RecordingReporter()
    run(prepared, tmp_path / "run", *SHORT, reporter=reporter)
    assert any("comparing the checksums of" in message for message in reporter.messages)


@pytest.mark.parametrize("change", [("row", 8), ("step", "x"), ("window", [])])
def test_a_changed_number_in_a_checkpoint_is_detected(change, prepared, finished, out):
    path, reporter = out / "checkpoints" / "step-00000004" / "checkpoint.json", RecordingReporter()
    manifest = json.loads(path.read_text())
    manifest["counters"][change[0]] = change[1]
    path.write_text(json.dumps(manifest, indent=1))
    run(prepared, out, *SHORT, reporter=reporter)
    assert any("step-00000004 is damaged (checkpoint.json was modified" in message for message in reporter.messages)
    shutil.rmtree(out / "checkpoints" / "step-00000004.damaged")
    assert files_of(out) == files_of(finished)


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", "null", "3", "", "\xff", '{"format": 2}'])
def test_a_checkpoint_with_an_invalid_manifest_is_damaged(content, out):
    (out / "checkpoints" / "step-00000004" / "checkpoint.json").write_bytes(content.encode("latin-1"))
    messages: list[str] = []
    latest = run_checkpoints.find_checkpoint(out / "checkpoints", messages.append)
    assert latest is not None
    assert latest.counters.step == 2
    assert "step-00000004 is damaged" in messages[0]


def test_an_edited_config_is_rejected_or_reported(prepared, out):
    config = out / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("seed: 0\n", "seed: 1\n").replace("gamma: 0.1\n", "gamma: 0.2\n"))
    before = files_of(out)
    with pytest.raises(UserError, match=r"another config \(.*anchor.gamma 0.1 -> 0.2"):
        train.train(resolve([], run_folder.RunFolder(out).config), out, RecordingReporter())
    assert files_of(out) == before
    config.write_text(text.replace("steps: 4\n", "steps: 6\n", 1))
    reporter = RecordingReporter()
    outcome = train.train(resolve([], run_folder.RunFolder(out).config), out, reporter)
    assert outcome.counters.step == 6
    assert "train.steps 4 -> 6" in reporter.messages


def test_a_run_records_the_commits_that_trained_it(prepared, out, monkeypatch):
    for commit in ("aaaaaaa", "aaaaaaa", "bbbbbbb", "unknown"):
        monkeypatch.setattr(run_folder, "code_commit", lambda commit=commit: commit)
        run(prepared, out, *SHORT)
    assert run_folder.read_commits(out)[-2:] == ["aaaaaaa", "bbbbbbb"]


DAMAGE = [
    b"\xff\xfe not text",
    b'{"step": "x", "nats": 1}',
    b"[1, 2]",
    b'{"nats": 3}',
    b"[" * 10**5,
    b'{"step": 1e999}',
]


def test_a_damaged_line_of_metrics_loses_that_line_only(prepared, finished, out, capsys):
    metrics, reporter = out / "metrics.jsonl", RecordingReporter()
    first, second = metrics.read_bytes().splitlines()
    damaged = b"\n".join((first, *DAMAGE, second, b'{"step": 9, "to'))
    metrics.write_bytes(damaged)
    run(prepared, out, *SHORT, reporter=reporter)
    assert logged(out) == logged(finished)
    assert (out / "metrics.jsonl.damaged").read_bytes() == damaged
    assert sum(f"{len(DAMAGE)} damaged line" in message for message in reporter.messages) == 1
    metrics.write_bytes(damaged)
    pytest.importorskip("matplotlib")
    assert main(["train", "--plot", str(out)]) == 0
    assert f"has {len(DAMAGE)} damaged line(s), which are left out" in capsys.readouterr().err


def test_an_incomplete_last_line_of_metrics_is_dropped_without_a_message(prepared, finished, out):
    metrics, reporter = out / "metrics.jsonl", RecordingReporter()
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 6, "nats": 3.')
    run(prepared, out, *SHORT, reporter=reporter)
    assert logged(out) == logged(finished)
    assert not list(out.glob("metrics.jsonl.*"))
    assert not any("damaged" in message for message in reporter.messages)


def test_temporary_files_of_killed_processes_are_deleted(prepared, finished, tmp_path):
    """Also before the config exists, and everywhere in the folder."""
    out = tmp_path / "run"
    for name in (
        ".text.sha256.new1",
        ".config.yaml.new12",
        "checkpoints/.step-00000002.new",
        "samples/.step-00000004.txt.new5",
    ):
        (out / f"{name}.adlm-part").parent.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.adlm-part").write_text("half")
    for name in (".best.new3", ".model.old4"):
        (out / f"{name}.adlm-part").mkdir()
        (out / f"{name}.adlm-part" / "config.yaml").write_text("half")
    shutil.rmtree(out / "checkpoints")
    shutil.rmtree(out / "samples")
    run(prepared, out, *SHORT)
    assert files_of(out) == files_of(finished)


def test_a_model_does_not_name_the_folder_of_the_shards_it_was_trained_on(prepared, finished):
    assert str(prepared) in (finished / "config.yaml").read_text()
    assert str(prepared) not in (finished / "model/config.yaml").read_text()


def test_a_model_folder_is_not_trained_into(prepared, finished, tmp_path):
    shutil.copytree(finished / "model", tmp_path / "model")
    before = contents(tmp_path / "model")
    with pytest.raises(UserError, match="is a model folder, not a run"):
        run(prepared, tmp_path / "model", *SHORT)
    assert contents(tmp_path / "model") == before


def test_a_run_given_a_relative_data_path_resumes_from_another_folder(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared.parent)
    run(Path(prepared.name), tmp_path / "run", *SHORT)
    monkeypatch.chdir(tmp_path)
    config = run_folder.RunFolder(tmp_path / "run").config
    assert config is not None
    assert os.path.isabs(config.data.prepared)
    assert train.train(resolve(["train.steps=5"], config), tmp_path / "run", RecordingReporter()).counters.step == 5
