"""Properties of checkpoints: any number of processes resumes what any other has saved, while training goes on."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from kills import contents, without_timings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import small_model
from small_runs import RecordingReporter, corpus, logged, run, run_on

from adlm.checkpoints.tensor_files import METADATA, OFFSETS
from adlm.errors import UserError
from adlm.training import run_checkpoints, saving, train
from adlm.training.run_folder import COMMITS

SHORT = ("train.steps=6", "train.checkpoint_every=3", "train.valid_every=3", "train.threads=1", "train.keep=2")
EXACT = (*SHORT, "model.blocks=1", "train.precision=float64", "model.dropout=0.0")
SHARDS = {1: "train.shard=1", 2: "train.shard=2", 4: "train.shard=2"}  # of four processes, two replicas of two shards
NORMAL = {"metrics.jsonl": without_timings, COMMITS: lambda content: b""}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"), lines=100)


def killed(out: Path, folder: Path) -> Path:
    """A copy of a finished run, as if it had been killed before its last checkpoint was published."""
    shutil.copytree(out, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    return folder


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of the last checkpoint, by name, from the files of all processes."""
    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for path in (out / "checkpoints" / "step-00000006").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name, place in json.loads(file.metadata()[METADATA]).items():
                parts.setdefault(name, []).append((place[OFFSETS], file.get_tensor(name)))
    ordered = {name: [rows for _, rows in sorted(part, key=lambda rows: rows[0])] for name, part in parts.items()}
    return {name: torch.cat(rows) if rows[0].ndim else rows[0] for name, rows in ordered.items()}


def check_same_run(ours: Path, theirs: Path, same_number: bool) -> None:
    """Of as many processes the same files, of others the same numbers but for rounding."""
    if same_number:
        assert contents(ours, NORMAL) == contents(theirs, NORMAL), ours
        return
    assert logged(ours) == [pytest.approx(line, rel=1e-6) for line in logged(theirs)], ours
    tensors, expected = tensors_of(ours), tensors_of(theirs)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-10, atol=1e-10, msg=f"{ours}: {name}")


@pytest.mark.processes
def test_two_processes_resume_to_the_same_bytes_and_one_process_to_the_same_numbers(prepared, tmp_path):
    words = (*EXACT, "train.shard=2")
    run_on(2, prepared, {"whole": (tmp_path / "whole", words)})
    files = {path.name: path.stat().st_size for path in (tmp_path / "whole/checkpoints/step-00000006").iterdir()}
    shares = [files.pop(f"tensors-0000{number}-of-00002.safetensors") for number in (1, 2)]
    assert list(files) == ["checkpoint.json"]
    assert max(shares) < 1.2 * min(shares), "no process writes more than its part"
    for num in (1, 2):
        killed(tmp_path / "whole", tmp_path / f"on {num}")
    run_on(2, prepared, {"on 2": (tmp_path / "on 2", words)})
    run(prepared, tmp_path / "on 1", *EXACT, "train.shard=1")
    check_same_run(tmp_path / "on 2", tmp_path / "whole", same_number=True)
    check_same_run(tmp_path / "on 1", tmp_path / "whole", same_number=False)


@pytest.mark.slow
@pytest.mark.processes
def test_any_number_of_processes_resumes_what_any_other_has_saved(prepared, tmp_path):
    base = small_model(tmp_path / "base")
    kinds = {
        "ema": ("train.ema=0.9",),
        "muon": ("train.optimizer=muon",),
        "lora": (f"init={base}", "train.lora_rank=2", "train.lora_norms=true", "model.blocks=2", "model.bridge=logits"),
        "blocks": ("method=mdlm", "model.block_length=4", "train.causal_weight=0.5", "train.optimizer=muon"),
    }
    for num in SHARDS:
        cases = {kind: (tmp_path / f"{kind} {num}", (*EXACT, SHARDS[num], *words)) for kind, words in kinds.items()}
        run_on(num, prepared, cases)
    for after in SHARDS:
        cases = {
            f"{kind} {before}": (
                killed(tmp_path / f"{kind} {before}", tmp_path / f"{kind} {before} {after}"),
                (*EXACT, SHARDS[after], *words),
            )
            for kind, words in kinds.items()
            for before in SHARDS
        }
        run_on(after, prepared, cases)
        for name, (out, _) in cases.items():
            check_same_run(out, tmp_path / name, same_number=name.endswith(f" {after}"))


def test_training_goes_on_while_a_checkpoint_is_written(prepared, tmp_path, monkeypatch):
    """The file of step 3 is written after step 5 has begun, and has the bytes of step 3."""
    run(prepared, tmp_path / "plain", *EXACT)
    write, step, fifth, steps = saving.write_rows, train.train_step, threading.Event(), []

    def late(*values):
        assert fifth.wait(60)
        write(*values)

    def counting(*values):
        steps.append(len(steps))
        if len(steps) == 5:
            assert not (tmp_path / "late/checkpoints/step-00000003").exists()
            fifth.set()
        return step(*values)

    monkeypatch.setattr(saving, "write_rows", late)
    monkeypatch.setattr(train, "train_step", counting)
    run(prepared, tmp_path / "late", *EXACT)
    assert contents(tmp_path / "late", NORMAL) == contents(tmp_path / "plain", NORMAL)


def test_an_error_after_a_checkpoint_names_it_and_loses_nothing(prepared, tmp_path, monkeypatch):
    """The step after it fails at once."""
    step, steps = train.train_step, []

    def failing(*values):
        steps.append(len(steps))
        if len(steps) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(*values)

    monkeypatch.setattr(train, "train_step", failing)
    with pytest.raises(UserError, match=r"the last checkpoint is .*step-00000003"):
        run(prepared, tmp_path, *EXACT)
    latest = run_checkpoints.find_checkpoint(tmp_path / "checkpoints", print)
    assert latest is not None
    assert latest.counters.step == 3


def test_a_checkpoint_of_the_format_before_is_read(prepared, tmp_path):
    """One file of whole tensors."""
    run(prepared, tmp_path / "whole", *EXACT)
    out = killed(tmp_path / "whole", tmp_path / "run")
    path = out / "checkpoints" / "step-00000003"
    (saved,) = path.glob("*.safetensors")
    save_file(load_file(saved), path / "tensors.safetensors", {"format": "pt"})
    saved.unlink()
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["files"], manifest["sha256"]
    manifest |= {"format": 3, "tensors": run_checkpoints.size_and_checksum(path / "tensors.safetensors")}
    run_checkpoints.write_manifest(path / "checkpoint.json", manifest)
    reporter = RecordingReporter()
    run(prepared, out, *EXACT, "train.keep=1", reporter=reporter)
    assert any("resuming from step 3" in message for message in reporter.messages)
    check_same_run(out, tmp_path / "whole", same_number=False)
