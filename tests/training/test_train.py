"""Properties of a training run: every method learns, no step is lost, and errors are reported to the user."""

import errno
import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from small_models import mostly_slow
from small_runs import NEEDS, RecordingReporter, corpus, logged, run, start, weights

from adlm import load
from adlm.data.prepare.prepared import open_prepared
from adlm.errors import UserError
from adlm.registry import METHODS
from adlm.training import run_checkpoints, saving, stopping, train


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


def unigram_nats(prepared: Path, name: str) -> float:
    """Nats per held-out token under the unigram frequencies of the training rows, including the rows' bos and eos.

    AR and A2R do not predict the bos.
    """
    rows = {split: open_prepared(prepared, sums=False).rows(split) for split in ("train", "valid")}
    (train, _), (x, pad) = (split.read(range(len(split))) for split in rows.values())
    counts = np.bincount(train.flatten(), minlength=258)
    predicted = ~pad
    predicted[:, 0] = name not in ("ar", "a2r")
    return float(-np.log(np.maximum(counts, 1) / counts.sum())[x[predicted]].sum()) / rows["valid"].num_tokens


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm"))
def test_every_method_learns_more_than_unigram_frequencies(name, prepared, tmp_path):
    steps = 140 if name == "sedd" else 100  # the validation of sedd has the largest standard error
    words = (f"method={name}", *NEEDS.get(name, ()), "model.hidden=32", "model.blocks=1", "model.dropout=0.0")
    pace = (f"train.steps={steps}", "train.warm_up_steps=4", "train.learning_rate=1e-2", "train.ema=0.9")
    watched = ("train.valid_every=0", "train.valid_rows=200", "train.samples=1", f"train.sample_every={steps}")
    outcome = run(prepared, tmp_path, *words, "train.batch_size=16", *pace, *watched)
    assert outcome.measured is not None
    assert outcome.measured.nats + 2 * outcome.measured.stderr < unigram_nats(prepared, name)
    assert (tmp_path / "samples" / f"step-{steps:08}.txt").read_text().startswith("--- 1 ---\n")
    lm = load(tmp_path)  # the folder of a run is a model
    assert lm.config.method == name
    assert lm.tokenizer is not None


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm"))
def test_a_run_with_unigram_start_begins_at_the_unigram_cross_entropy(name, prepared, tmp_path):
    """With a learning rate of nearly 0 the weights do not change. D3PM predicts every token once more, at t = 0."""
    frozen = ("train.steps=1", "train.warm_up_steps=0", "train.learning_rate=1e-12")
    options = ("train.unigram_start=true", *frozen, "train.valid_rows=200", "time.t_min=0")
    outcome = run(prepared, tmp_path, f"method={name}", *NEEDS.get(name, ()), *options)
    assert outcome.measured is not None
    times = 2 if name == "d3pm" else 1
    assert outcome.measured.nats == pytest.approx(
        times * unigram_nats(prepared, name), abs=4 * outcome.measured.stderr + 0.1
    )


TENSORS = "tensors-00001-of-00001.safetensors"
RESUMED = ("train.steps=14", "train.checkpoint_every=3", "train.valid_every=4", "train.keep=2")


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with dropout, an average and every draw there is."""
    out = tmp_path_factory.mktemp("uninterrupted")
    run(prepared, out, *RESUMED)
    return out


def assert_same_run(out: Path, uninterrupted: Path) -> None:
    """To the last bit: weights that are kept, all tensors that are trained, and the logbook without its clocks."""
    for which in ("model", "best"):
        ours, theirs = weights(out, which), weights(uninterrupted, which)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert logged(out) == logged(uninterrupted)
    manifests = [
        json.loads((path / "checkpoints/step-00000014/checkpoint.json").read_text()) for path in (out, uninterrupted)
    ]
    assert manifests[0]["counters"] == manifests[1]["counters"]
    assert manifests[0]["files"] == manifests[1]["files"]


def newest(out: Path) -> str:
    return max((path.name for path in out.glob("checkpoints/step-*")), default="")


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_killed_several_times_ends_with_the_same_bits(prepared, uninterrupted, tmp_path):
    """experiments/kill_train does this twenty times, with the command line."""
    rng = random.Random(5)
    for _ in range(3):
        process = start(prepared, tmp_path, *RESUMED)
        before = newest(tmp_path)
        while newest(tmp_path) == before and process.is_alive():
            time.sleep(0.01)  # one more checkpoint each time, or the test would not terminate
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
    run(prepared, tmp_path, *RESUMED)
    assert_same_run(tmp_path, uninterrupted)
    steps = [line["step"] for line in logged(tmp_path)]
    assert steps == sorted(set(steps)) == list(range(2, 15, 2))


@pytest.mark.processes
@pytest.mark.parametrize("number", mostly_slow([signal.SIGTERM, signal.SIGINT], signal.SIGINT))
def test_a_run_stopped_by_a_signal_saves_and_resumes_to_the_same_bits(number, prepared, uninterrupted, tmp_path):
    process = start(prepared, tmp_path, *RESUMED, f"signal={number}")
    process.join()
    assert process.exitcode == 128 + number
    stopped = run_checkpoints.find_checkpoint(tmp_path / "checkpoints", lambda message: None)
    assert stopped is not None
    assert stopped.counters.step == 5
    assert (tmp_path / "model" / "model.safetensors").is_file()
    run(prepared, tmp_path, *RESUMED)
    assert_same_run(tmp_path, uninterrupted)


def copy_of(uninterrupted: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, whose checkpoints may be damaged."""
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    assert [path.name for path in sorted((out / "checkpoints").iterdir())][-2:] == ["step-00000012", "step-00000014"]
    return out


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [
    (TENSORS, flip, "its checksum differs"),
    ("checkpoint.json", cut, "checkpoint.json cannot be read"),
    (TENSORS, cut, "bytes instead of"),
    (TENSORS, Path.unlink, f"{TENSORS} is missing"),
    ("checkpoint.json", Path.unlink, "checkpoint.json is missing"),
]


@pytest.mark.parametrize(("file", "damage", "problem"), mostly_slow(DAMAGES, *DAMAGES[:2]))
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    file, damage, problem, prepared, uninterrupted, tmp_path
):
    out, reporter = copy_of(uninterrupted, tmp_path), RecordingReporter()
    damage(out / "checkpoints" / "step-00000014" / file)
    outcome = run(prepared, out, *RESUMED, reporter=reporter)
    assert any("step-00000014 is damaged" in message and problem in message for message in reporter.messages)
    assert any("resuming from step 12" in message for message in reporter.messages)
    assert outcome.counters.step == 14
    assert_same_run(out, uninterrupted)


def test_if_every_checkpoint_is_damaged_the_run_does_not_start_again(prepared, uninterrupted, tmp_path):
    out = copy_of(uninterrupted, tmp_path)
    for path in (out / "checkpoints").iterdir():
        cut(path / TENSORS)
    reporter = RecordingReporter()
    with pytest.raises(UserError, match="all of them damaged; restore one, or move"):
        run(prepared, out, *RESUMED, reporter=reporter)
    assert "using the one before it" in reporter.messages[0]
    assert "using the one before it" not in reporter.messages[-1], "there is none"


def test_a_run_without_a_checkpoint_says_that_it_starts_again(prepared, uninterrupted, tmp_path):
    out, reporter = copy_of(uninterrupted, tmp_path), RecordingReporter()
    shutil.rmtree(out / "checkpoints")
    run(prepared, out, *RESUMED, reporter=reporter)
    assert f"{out} has no checkpoint yet; it starts again from step 1" in reporter.messages


class Attack:
    def __reduce__(self):
        return (os.system, ("touch attacked",))


def replace_tensors(path: Path, content: bytes) -> None:
    """Replace the tensors of a checkpoint and correct its checksums."""
    (path / TENSORS).write_bytes(content)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"] = {TENSORS: run_checkpoints.size_and_checksum(path / TENSORS)}
    manifest.pop("sha256")
    run_checkpoints.write_manifest(path / "checkpoint.json", manifest)


def test_a_checkpoint_cannot_run_code(prepared, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = copy_of(uninterrupted, tmp_path)
    for attack in (pickle.dumps(Attack()), torch_file(Attack())):
        replace_tensors(out / "checkpoints" / "step-00000014", attack)
        with pytest.raises(UserError, match=r"step-00000014 does not fit this run: .*header"):
            run(prepared, out, *RESUMED)
        assert not (tmp_path / "attacked").exists()


def torch_file(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize(("shape", "error"), [(None, "weights.*"), ((), "has shape"), ((1, 1, 1), "has shape")])
def test_tensors_of_another_model_are_a_user_error(shape, error, prepared, uninterrupted, tmp_path):
    """Without one of the tensors, or with one of another shape, even one that would broadcast."""
    out = copy_of(uninterrupted, tmp_path)
    path = out / "checkpoints" / "step-00000014"
    tensors = load_file(path / TENSORS)
    name = min(tensor for tensor in tensors if tensor.startswith("weights."))
    del tensors[name]
    replace_tensors(path, save(tensors if shape is None else {**tensors, name: torch.zeros(shape)}))
    with pytest.raises(UserError, match=rf"step-00000014 does not fit this run: .*{error}.*another version of adlm"):
        run(prepared, out, *RESUMED)


def no_space(*values, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", mostly_slow(["write_rows", "write_manifest"], "write_manifest"))
def test_a_full_disk_is_a_user_error_and_loses_nothing(name, prepared, uninterrupted, tmp_path, monkeypatch):
    """The checkpoint of step 9 does not fit; that of step 6 is intact, and with free space the run ends the same."""
    original = getattr(saving, name)

    def full(*values, **named):
        return no_space() if (tmp_path / "checkpoints/step-00000006").exists() else original(*values, **named)

    monkeypatch.setattr(saving, name, full)
    with pytest.raises(
        UserError, match=r"step-00000009 cannot be written: No space left.*last checkpoint is .*step-00000006"
    ):
        run(prepared, tmp_path, *RESUMED)
    assert not list(tmp_path.glob("checkpoints/.*"))
    monkeypatch.undo()
    run(prepared, tmp_path, *RESUMED)
    assert_same_run(tmp_path, uninterrupted)


def mounted(options: str, path: Path) -> bool:
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root may mount")
def test_a_real_file_system_that_is_full_or_read_only_loses_nothing(prepared, uninterrupted, tmp_path):
    """A separate file system: first too small, then read-only, then large enough and writable."""
    if not mounted("size=1200k", tmp_path):
        pytest.skip("file systems cannot be mounted here")
    try:
        with pytest.raises(UserError, match=r"No space left on device"):
            run(prepared, tmp_path, *RESUMED)
        assert mounted("remount,ro,size=50m", tmp_path)
        with pytest.raises(UserError, match=r"cannot be written: Read-only file system"):
            run(prepared, tmp_path, *RESUMED)
        assert mounted("remount,rw,size=50m", tmp_path)
        assert newest(tmp_path)
        run(prepared, tmp_path, *RESUMED)
        assert_same_run(tmp_path, uninterrupted)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_size_limit_is_a_user_error(prepared, tmp_path):
    """A real resource limit: no file of the child process may exceed 100 kB."""
    process = start(prepared, tmp_path, "model.hidden=64", "train.steps=3", "limit=100000")
    process.join(30)
    assert process.exitcode == 2
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_a_user_error(prepared, tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="cannot be written: Permission denied; give another --out"):
        run(prepared, tmp_path / "run")


def test_a_path_below_a_file_is_a_user_error(prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be written: Not a directory"):
        run(prepared, tmp_path / "file" / "run")


def test_a_shard_deleted_during_a_run_stops_it_after_saving(prepared, uninterrupted, tmp_path, monkeypatch):
    out, text = tmp_path / "run", tmp_path / "prepared"
    shutil.copytree(prepared, text)
    original, steps = train.train_step, count(1)

    def step(*values):
        if next(steps) == 7:
            end = time.monotonic() + 60
            while not (out / "checkpoints" / "step-00000006").exists() and time.monotonic() < end:
                time.sleep(0.01)  # it is saved in the background
            (text / "train" / "tokens-00000.bin").unlink()
        return original(*values)

    monkeypatch.setattr("adlm.data.prepare.shards.Tokens._file", unmapped)
    monkeypatch.setattr(train, "train_step", step)
    error = r"tokens-00000.bin cannot be read.*steps are saved: restore the text and rerun the same command"
    with pytest.raises(UserError, match=error):
        run(text, out, *RESUMED)
    monkeypatch.undo()
    shutil.copy(prepared / "train" / "tokens-00000.bin", text / "train" / "tokens-00000.bin")
    run(text, out, *RESUMED)
    assert_same_run(out, uninterrupted)


def unmapped(tokens, number):
    """As if every read opened the shard anew."""
    path = tokens.folder / f"tokens-{number:05}.bin"
    try:
        return np.fromfile(path, tokens.dtype)
    except FileNotFoundError:
        raise UserError(f"{path} cannot be read: No such file or directory; prepare the data again") from None


def test_a_run_resumes_only_with_its_own_config(prepared, uninterrupted, tmp_path):
    out = copy_of(uninterrupted, tmp_path)
    with pytest.raises(UserError, match=r"another config \(anchor.gamma 0.1 -> 0.2, train.seed 0 -> 1\)"):
        run(prepared, out, *RESUMED, "anchor.gamma=0.2", "train.seed=1")
    outcome = run(prepared, out, *RESUMED, "train.steps=16", "train.micro_batch=4", "train.log_every=1")
    assert outcome.counters.step == 16


def test_a_config_that_its_method_rejects_is_not_saved_in_the_run(prepared, tmp_path):
    """The remedy that the error names works with the same folder."""
    with pytest.raises(UserError, match="d3pm is a method of discrete steps"):
        run(prepared, tmp_path, "method=d3pm", "train.steps=3")
    assert run(prepared, tmp_path, "method=d3pm", *NEEDS["d3pm"], "train.steps=3").counters.step == 3


def test_a_run_resumes_only_with_its_own_text(uninterrupted, tmp_path):
    out = copy_of(uninterrupted, tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="a run on another text"):
        run(corpus(tmp_path / "other", lines=50), out, *RESUMED)


def test_only_one_process_trains_in_a_folder(prepared, tmp_path):
    with train.run_folder.open_run_folder(tmp_path), pytest.raises(UserError, match="another process is training in"):
        run(prepared, tmp_path)


def test_a_folder_that_is_not_a_run_is_left_alone(prepared, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not a run of adlm and is not empty"):
        run(prepared, tmp_path)
    with pytest.raises(UserError, match="is a file, and a run is a folder; give another --out"):
        run(prepared, tmp_path / "thesis.tex")


def make_gradients_infinite(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """At these steps."""
    original, count = train.train_step, iter(range(1000))

    def step(state, *rest):
        weight = next(state.network.parameters())
        hook = weight.register_hook(lambda gradient: gradient * torch.inf) if next(count) in steps else None
        report = original(state, *rest)
        if hook is not None:
            hook.remove()
        return report

    monkeypatch.setattr(train, "train_step", step)


def test_steps_that_are_not_finite_are_skipped_and_counted(prepared, tmp_path, monkeypatch):
    make_gradients_infinite(monkeypatch, {4, 5, 9})
    outcome = run(prepared, tmp_path, "train.skip_limit=2")
    assert outcome.counters.skipped == 3
    assert outcome.counters.skipped_in_a_row == 0
    assert outcome.counters.num_updates == outcome.counters.step - 3
    assert logged(tmp_path)[-1]["skipped"] == 3
    assert all(weight.isfinite().all() for weight in weights(tmp_path).values())
    assert [line["step"] for line in logged(tmp_path) if "nats" not in line] == [6]  # steps 5 and 6 were both skipped


def test_too_many_consecutive_skipped_steps_are_a_user_error(prepared, tmp_path, monkeypatch):
    make_gradients_infinite(monkeypatch, {7, 8, 9})
    error = r"not finite at 3 steps in a row, the last of them step 10 .*The last checkpoint is .*step-00000005"
    with pytest.raises(UserError, match=error):
        run(prepared, tmp_path, "train.skip_limit=2", "train.checkpoint_every=5")


def test_out_of_memory_names_the_options_to_change(tiny_config):
    config = replace(tiny_config, train=replace(tiny_config.train, batch_size=64))
    same = r"\(now 64; the result is the same up to rounding\)"
    error = rf"in step 8 with 64 sequences of up to 8 tokens.*train.micro_batch=32 {same}.*train.recompute=true"
    with (
        pytest.raises(UserError, match=error),
        stopping.explain_out_of_memory(config, 64, 7, lambda: "there is no checkpoint yet"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(UserError, match=error),
        stopping.explain_out_of_memory(config, 64, 7, lambda: "there is no checkpoint yet"),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    with_dropout = replace(config, model=replace(config.model, dropout=0.1))
    with (
        pytest.raises(UserError, match="the result is the same in distribution"),
        stopping.explain_out_of_memory(with_dropout, 64, 7, lambda: "there is no checkpoint yet"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_compiler_failure_names_the_compilers_cache(tiny_config):
    """A process killed while compiling can leave an empty library in the cache, which the small trial may not use."""
    from torch._inductor.exc import InductorError

    error = r"torch.compile failed \(OSError: file too short\); delete its cache, .*train.compile=off; there is no"
    with (
        pytest.raises(UserError, match=error),
        stopping.explain_out_of_memory(tiny_config, 64, 7, lambda: "there is no checkpoint yet"),
    ):
        raise InductorError(OSError("file too short"), None)


def test_training_nats_exclude_the_anchor_term_and_only_validation_has_a_perplexity(uninterrupted):
    for line in logged(uninterrupted):
        assert line["nats"] == pytest.approx(line["nelbo"], rel=1e-5)
        assert line["loss"] > line["nats"]
        assert "perplexity" not in line
        if "valid_nats" in line:
            assert line["valid_perplexity"] == pytest.approx(np.exp(line["valid_nats"]))


def test_a_run_prepares_its_own_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the state of the union is strong\n" * 200)
    words = (f"data.path={text}", "data.boundary=line", "tokenizer=bytes", "data.held_out=0.1", "train.steps=3")
    outcome = run(Path(""), tmp_path / "run", *words, "data.prepared=")
    assert outcome.measured is not None
    assert (tmp_path / "run" / "data" / "manifest.json").is_file()


def test_training_on_a_stream_resumes_like_training_on_shards(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number of the union\n" for number in range(300)))
    words = (f"data.path={text}", "data.boundary=line", "tokenizer=bytes", "data.held_out=0.1", "data.prepared=")
    stream = ("data.streaming=true", "anchor.warm_up=false", "train.valid_every=0", *words)
    run(Path(""), tmp_path / "at once", *stream, "train.steps=6")
    run(Path(""), tmp_path / "resumed", *stream, "train.steps=3")
    run(Path(""), tmp_path / "resumed", *stream, "train.steps=6")
    ours, theirs = weights(tmp_path / "resumed"), weights(tmp_path / "at once")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
