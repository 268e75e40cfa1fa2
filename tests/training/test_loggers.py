"""TensorBoard and Weights & Biases receive the numbers of metrics.jsonl, read back from the files that they write."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from small_runs import corpus, run

from adlm.training.metrics import TensorBoard, read_metrics

SHORT = ("model.blocks=1", "train.log_every=1", "train.valid_every=2")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"), lines=100)


def metrics(out: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl by step, without missing values."""
    return {
        line["step"]: {name: value for name, value in line.items() if name != "step" and value is not None}
        for line in read_metrics(out / "metrics.jsonl")
    }


def tensorboard_scalars(folder: Path) -> dict[int, dict[str, float]]:
    """The scalars of all event files, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {}), "one value a step"
            found[event.step][name] = event.value
    return found


def assert_equal_lines(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> None:
    assert found.keys() == expected.keys()
    for step, line in expected.items():
        assert found[step] == pytest.approx(line, rel=1e-6)  # events are float32


def test_tensorboard_events_are_the_metrics_also_after_resuming(prepared, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra dev)")
    out = tmp_path / "run"
    for steps in (4, 6):
        run(prepared, out, *SHORT, "train.tensorboard=true", f"train.steps={steps}")
    expected = metrics(out)
    assert len(expected) == 6
    assert "valid_nats" in expected[6]
    assert_equal_lines(tensorboard_scalars(out / "tensorboard"), expected)


def test_tensorboard_events_after_the_checkpoint_are_replaced_on_resuming(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra dev)")
    for first, last, value in ((1, 5, 1.0), (4, 6, 2.0)):  # killed after step 5, resumed from the checkpoint of step 3
        sink = TensorBoard(tmp_path, first - 1)
        for step in range(first, last + 1):
            sink.write({"step": step, "nats": value, "valid_nats": None})
        sink.close()
    expected = {step: {"nats": 1.0 if step <= 3 else 2.0} for step in range(1, 7)}
    assert tensorboard_scalars(tmp_path) == expected


def wandb_history(file: Path) -> dict[int, dict[str, float]]:
    """The logged lines of a .wandb file, by step: protobuf records in LevelDB's log format.

    A record is one fragment, or several in blocks of 32 KiB: crc, length, kind (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto import wandb_internal_pb2

    content, header, block = file.read_bytes(), 7, 2**15
    found, record, offset = {}, b"", header  # the file begins with 7 bytes of its own
    while offset + header <= len(content):
        if block - offset % block < header:  # the rest of a block is padding
            offset += block - offset % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        record += content[offset + header : offset + header + length]
        offset += header + length
        if kind in (1, 4):
            parsed = wandb_internal_pb2.Record.FromString(record)
            items = {".".join(item.nested_key) or item.key: item.value_json for item in parsed.history.item}
            if items:
                line: dict[str, Any] = {name: json.loads(value) for name, value in items.items()}
                found[line["_step"]] = {name: value for name, value in line.items() if not name.startswith("_")}
            record = b""
    return found


@pytest.mark.slow
def test_wandb_logs_the_metrics_offline_and_a_resumed_run_keeps_its_id(prepared, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (extra dev)")
    for name, value in {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # otherwise in the home folder
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    out, found = tmp_path / "run", {}
    for steps in (4, 6):
        run(prepared, out, *SHORT, "train.wandb=offline", f"train.steps={steps}")
    wandb.teardown()  # ends the process that writes the files, as the end of a command does
    number = (out / "wandb-id").read_text()
    files = sorted((out / "wandb").glob(f"offline-run-*/run-{number}.wandb"), key=os.path.getmtime)
    assert len(files) == 2, "one file for each start, both of the same run"
    for file in files:
        found |= wandb_history(file)
    assert_equal_lines(found, metrics(out))
