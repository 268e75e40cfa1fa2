"""Laws of a run: every method learns, nothing that happens to it loses a step, and what stands in its way is told."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import mostly_slow
from small_runs import NEEDS, Quiet, corpus, logged, run, start, weights

from adlm import load
from adlm.data.prepare.prepared import open_prepared
from adlm.errors import UserError
from adlm.methods import METHODS
from adlm.training import checkpoint as snapshot
from adlm.training import stopping, train


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


def unigram_nats(prepared: Path, name: str) -> float:
    """What a token of the held-out text costs by the frequencies of the training rows, the rows' bos and eos paid too.

    AR and A2R are given the bos.
    """
    rows = {split: open_prepared(prepared, sums=False).rows(split) for split in ("train", "valid")}
    (train, _), (x, pad) = (each.read(range(len(each))) for each in rows.values())
    seen = np.bincount(train.flatten(), minlength=258)
    paid = ~pad
    paid[:, 0] = name not in ("ar", "a2r")
    return float(-np.log(np.maximum(seen, 1) / seen.sum())[x[paid]].sum()) / rows["valid"].num_tokens


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm", "ar"))
def test_every_method_learns_more_than_frequencies_by_the_same_loop(name, prepared, tmp_path):
    words = (f"method={name}", *NEEDS.get(name, ()), "model.hidden=32", "model.blocks=1", "model.dropout=0.0")
    pace = ("train.steps=140", "train.warm_up_steps=4", "train.learning_rate=1e-2", "train.ema=0.9")
    watched = ("train.valid_every=0", "train.valid_rows=200", "train.samples=1", "train.sample_every=140")
    outcome = run(prepared, tmp_path, *words, "train.batch_size=16", *pace, *watched)
    assert outcome.measured is not None
    assert outcome.measured.nats + 2 * outcome.measured.stderr < unigram_nats(prepared, name)
    assert (tmp_path / "samples" / "step-00000140.txt").read_text().startswith("--- 1 ---\n")
    lm = load(tmp_path)  # the folder of a run is a model
    assert lm.config.method == name
    assert lm.tokenizer is not None


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm", "ar"))
def test_a_run_that_starts_at_the_unigrams_pays_their_cross_entropy_before_it_learns(name, prepared, tmp_path):
    """A rate of nearly 0 leaves the start as it was. D3PM names every token of the text once more, at t = 0."""
    still = ("train.steps=1", "train.warm_up_steps=0", "train.learning_rate=1e-12")
    knobs = ("train.unigram_start=true", *still, "train.valid_rows=200", "time.t_min=0")
    outcome = run(prepared, tmp_path, f"method={name}", *NEEDS.get(name, ()), *knobs)
    assert outcome.measured is not None
    times = 2 if name == "d3pm" else 1
    assert outcome.measured.nats == pytest.approx(
        times * unigram_nats(prepared, name), abs=4 * outcome.measured.stderr + 0.1
    )


RESUMED = ("train.snapshot_every=3", "train.valid_every=4", "train.keep=2")


@pytest.fixture(scope="module")
def unbroken(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with dropout, an average and every draw there is."""
    out = tmp_path_factory.mktemp("unbroken")
    run(prepared, out, *RESUMED)
    return out


def assert_same_run(out: Path, unbroken: Path) -> None:
    """To the last bit: weights that are kept, all tensors that are trained, and the logbook without its clocks."""
    for which in ("model", "best"):
        ours, theirs = weights(out, which), weights(unbroken, which)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert logged(out) == logged(unbroken)
    cards = [json.loads((place / "snapshots/step-00000020/snapshot.json").read_text()) for place in (out, unbroken)]
    assert cards[0]["counters"] == cards[1]["counters"]
    assert cards[0]["files"] == cards[1]["files"]


def newest(out: Path) -> str:
    return max((place.name for place in out.glob("snapshots/step-*")), default="")


@pytest.mark.processes
def test_a_run_killed_again_and_again_ends_in_the_same_bits(prepared, unbroken, tmp_path):
    """experiments/kill_train does this twenty times, to the whole command."""
    chance = random.Random(5)
    for _ in range(3):
        process = start(prepared, tmp_path, *RESUMED)
        seen = newest(tmp_path)
        while newest(tmp_path) == seen and process.is_alive():
            time.sleep(0.01)  # one more snapshot each time, or it would never end
        time.sleep(chance.uniform(0, 0.6))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    run(prepared, tmp_path, *RESUMED)
    assert_same_run(tmp_path, unbroken)
    steps = [line["step"] for line in logged(tmp_path)]
    assert steps == sorted(set(steps)) == list(range(2, 21, 2))


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_told_to_stop_saves_and_goes_on_in_the_same_bits(number, prepared, unbroken, tmp_path):
    process = start(prepared, tmp_path, *RESUMED)
    while not (tmp_path / "metrics.jsonl").exists() or len(logged(tmp_path)) < 2:
        time.sleep(0.01)
        assert process.is_alive()
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 128 + number
    stopped = snapshot.find_checkpoint(tmp_path / "snapshots", lambda sentence: None)
    assert stopped is not None
    assert 4 <= stopped.counters.step < 20
    assert (tmp_path / "model" / "model.safetensors").is_file()
    run(prepared, tmp_path, *RESUMED)
    assert_same_run(tmp_path, unbroken)


def half_way(unbroken: Path, tmp_path: Path) -> Path:
    """The run with its last snapshot gone."""
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    assert [place.name for place in sorted((out / "snapshots").iterdir())][-2:] == ["step-00000018", "step-00000020"]
    return out


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("__0_0.distcp", cut, "bytes and had"),
        ("__0_0.distcp", flip, "its checksum differs"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", Path.unlink, ".metadata is missing"),
        (".metadata", flip, "its checksum differs"),
        ("snapshot.json", Path.unlink, "snapshot.json is missing"),
        ("snapshot.json", cut, "snapshot.json cannot be read"),
    ],
)
def test_a_damaged_snapshot_is_told_and_the_one_before_it_taken(file, damage, told, prepared, unbroken, tmp_path):
    out, screen = half_way(unbroken, tmp_path), Quiet()
    damage(out / "snapshots" / "step-00000020" / file)
    outcome = run(prepared, out, *RESUMED, screen=screen)
    assert any("step-00000020 is damaged" in sentence and told in sentence for sentence in screen.said)
    assert any("going on from step 18" in sentence for sentence in screen.said)
    assert outcome.counters.step == 20
    assert_same_run(out, unbroken)


def test_where_every_snapshot_is_damaged_nothing_is_begun_again(prepared, unbroken, tmp_path):
    out = half_way(unbroken, tmp_path)
    for place in (out / "snapshots").iterdir():
        cut(place / "__0_0.distcp")
    with pytest.raises(UserError, match="every one is damaged; put one back, or move"):
        run(prepared, out, *RESUMED)


class Attack:
    def __reduce__(self):
        return (os.system, ("touch attacked",))


def test_a_snapshot_cannot_run_code(prepared, unbroken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = half_way(unbroken, tmp_path)
    place = out / "snapshots" / "step-00000020"
    (place / ".metadata").write_bytes(pickle.dumps(Attack()))
    card = json.loads((place / "snapshot.json").read_text())
    card["files"][".metadata"] = snapshot._described(place / ".metadata")
    card.pop("sha256")
    snapshot.write_card(place / "snapshot.json", card)
    with pytest.raises(UserError, match=r"does not fit this run: .*system has no place in a description of tensors"):
        run(prepared, out, *RESUMED)
    assert not (tmp_path / "attacked").exists()


def no_space(*values, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["shards", "card"])
def test_a_full_disk_ends_a_run_in_a_sentence_and_costs_nothing(where, prepared, unbroken, tmp_path, monkeypatch):
    """The snapshot of step 9 does not fit; that of step 6 is untouched, and with room again the run is the same."""
    saved, written = snapshot.save, snapshot.write_card
    failing = {"shards": ("save", saved), "card": ("write_card", written)}[where]

    def full(*values, **named):
        return no_space() if (tmp_path / "snapshots/step-00000006").exists() else failing[1](*values, **named)

    monkeypatch.setattr(snapshot, failing[0], full)
    with pytest.raises(
        UserError, match=r"step-00000009 cannot be written: No space left.*last snapshot is .*step-00000006"
    ):
        run(prepared, tmp_path, *RESUMED)
    assert not list(tmp_path.glob("snapshots/.*"))
    monkeypatch.undo()
    run(prepared, tmp_path, *RESUMED)
    assert_same_run(tmp_path, unbroken)


def mounted(options: str, place: Path) -> bool:
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root may mount")
def test_a_disk_that_is_really_full_or_read_only_costs_nothing(prepared, unbroken, tmp_path):
    """A file system of its own: first too small, then read only, then as it should be."""
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
        assert_same_run(tmp_path, unbroken)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_that_may_not_grow_is_a_sentence_too(prepared, tmp_path):
    """A real limit of the system, not a stand-in for one: no file of the child may exceed 100 kB."""
    process = start(prepared, tmp_path, "model.hidden=64", "train.steps=3", "limit=100000")
    process.join(30)
    assert process.exitcode == 2
    assert not list(tmp_path.glob("snapshots/step-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_told(prepared, tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="cannot be written: Permission denied; give another --out"):
        run(prepared, tmp_path / "run")


def test_a_place_that_is_no_folder_is_told(prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be written: Not a directory"):
        run(prepared, tmp_path / "file" / "run")


def test_a_shard_that_is_deleted_in_mid_run_stops_it_saved(prepared, unbroken, tmp_path, monkeypatch):
    out, text = tmp_path / "run", tmp_path / "prepared"
    shutil.copytree(prepared, text)
    stepped = train.train_step

    def step(*values):
        if (out / "snapshots" / "step-00000006").exists():
            (text / "train" / "tokens-00000.bin").unlink(missing_ok=True)
        return stepped(*values)

    monkeypatch.setattr("adlm.data.prepare.shards.Tokens._file", unmapped)
    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(UserError, match=r"tokens-00000.bin cannot be read.*steps done are saved, and the same command"):
        run(text, out, *RESUMED)
    monkeypatch.undo()
    shutil.copy(prepared / "train" / "tokens-00000.bin", text / "train" / "tokens-00000.bin")
    run(text, out, *RESUMED)
    assert_same_run(out, unbroken)


def unmapped(tokens, number):
    """As if every read were of a shard not opened before."""
    path = tokens.folder / f"tokens-{number:05}.bin"
    try:
        return np.fromfile(path, tokens.dtype)
    except FileNotFoundError:
        raise UserError(f"{path} cannot be read: No such file or directory; prepare the data again") from None


def test_a_run_goes_on_only_with_its_own_config(prepared, unbroken, tmp_path):
    out = half_way(unbroken, tmp_path)
    with pytest.raises(UserError, match=r"another config \(anchor.gamma 0.1 -> 0.2, train.seed 0 -> 1\)"):
        run(prepared, out, *RESUMED, "anchor.gamma=0.2", "train.seed=1")
    outcome = run(prepared, out, *RESUMED, "train.steps=22", "train.micro_batch=4", "train.log_every=1")
    assert outcome.counters.step == 22


def test_a_config_that_its_method_refuses_does_not_become_the_runs(prepared, tmp_path):
    """The remedy that the refusal names can be given to the same folder."""
    with pytest.raises(UserError, match="d3pm is a method of discrete steps"):
        run(prepared, tmp_path, "method=d3pm", "train.steps=3")
    assert run(prepared, tmp_path, "method=d3pm", *NEEDS["d3pm"], "train.steps=3").counters.step == 3


def test_a_run_goes_on_only_with_its_own_text(unbroken, tmp_path):
    out = half_way(unbroken, tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="a run on another text"):
        run(corpus(tmp_path / "other", lines=50), out, *RESUMED)


def test_a_folder_is_trained_by_one_at_a_time(prepared, tmp_path):
    with train.run_folder.held(tmp_path), pytest.raises(UserError, match="is being trained by another process"):
        run(prepared, tmp_path)


def test_a_folder_of_something_else_is_left_alone(prepared, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is no run of adlm and is not empty"):
        run(prepared, tmp_path)


def poisoned(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Steps whose gradient is infinite."""
    stepped, count = train.train_step, iter(range(1000))

    def step(method, network, *rest):
        weight = next(network.parameters())
        hook = weight.register_hook(lambda gradient: gradient * torch.inf) if next(count) in steps else None
        report = stepped(method, network, *rest)
        if hook is not None:
            hook.remove()
        return report

    monkeypatch.setattr(train, "train_step", step)


def test_steps_that_are_not_finite_are_skipped_and_counted(prepared, tmp_path, monkeypatch):
    poisoned(monkeypatch, {4, 5, 9})
    outcome = run(prepared, tmp_path, "train.skip_limit=2")
    assert outcome.counters.skipped == 3
    assert outcome.counters.skipped_in_a_row == 0
    assert outcome.counters.num_updates == outcome.counters.step - 3
    assert logged(tmp_path)[-1]["skipped"] == 3
    assert all(weight.isfinite().all() for weight in weights(tmp_path).values())
    assert [line["step"] for line in logged(tmp_path) if "nats" not in line] == [6]  # nothing of steps 5 and 6 counts


def test_too_many_of_them_in_a_row_end_the_run_by_name(prepared, tmp_path, monkeypatch):
    poisoned(monkeypatch, {7, 8, 9})
    sentence = r"not finite at 3 steps in a row, the last of them step 10 .*The last snapshot is .*step-00000005"
    with pytest.raises(UserError, match=sentence):
        run(prepared, tmp_path, "train.skip_limit=2", "train.snapshot_every=5")


def test_out_of_memory_names_the_knobs(tiny_config):
    config = replace(tiny_config, train=replace(tiny_config.train, batch_size=64))
    told = r"out of memory in step 8 with 64 sequences of 8 tokens.*train.micro_batch=32 .*train.recompute=true"
    with (
        pytest.raises(UserError, match=told),
        stopping.explain_out_of_memory(config, 64, 7, "there is no snapshot yet"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(UserError, match=told),
        stopping.explain_out_of_memory(config, 64, 7, "there is no snapshot yet"),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


def test_a_failure_of_the_compiler_names_its_cache(tiny_config):
    """A kill during compilation can leave an empty library in the cache; that of a small trial need not be it."""
    from torch._inductor.exc import InductorError

    told = r"torch.compile failed \(OSError: file too short\); delete its cache, .*train.compile=off; there is no"
    with (
        pytest.raises(UserError, match=told),
        stopping.explain_out_of_memory(tiny_config, 64, 7, "there is no snapshot yet"),
    ):
        raise InductorError(OSError("file too short"), None)


def test_nats_of_training_are_without_the_anchor_term_and_only_held_out_ones_have_a_perplexity(unbroken):
    for line in logged(unbroken):
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


def test_a_stream_is_trained_on_and_resumed_like_shards(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number of the union\n" for number in range(300)))
    words = (f"data.path={text}", "data.boundary=line", "tokenizer=bytes", "data.held_out=0.1", "data.prepared=")
    stream = ("data.streaming=true", "anchor.warm_up=false", "train.valid_every=0", *words)
    run(Path(""), tmp_path / "whole", *stream, "train.steps=6")
    run(Path(""), tmp_path / "parts", *stream, "train.steps=3")
    run(Path(""), tmp_path / "parts", *stream, "train.steps=6")
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
