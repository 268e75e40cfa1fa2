"""experiments/growth: its rows fit the GPU they are for, and a row that fails costs no other."""

import json
import sys

import pytest
from growth import run as growth

from adlm.errors import UserError

STEP = {
    "row": "train-1b",
    "kind": "step",
    "words": "owt/mdlm model=1b",
    "batch": 8,
    "planned": {"parameters": 10**9, "gib": 11.0, "tokens_per_second": 900.0},
    "peak_gib": 10.0,
    "tokens_per_second": 1000.0,
    "of_product": 0.5,
    "of_datasheet": 0.4,
    "profile": [["matrix products", 3.0], ["idle", 1.0]],
}
SAMPLE = {"kind": "sample", "milliseconds_a_call": 1.0, "tokens_per_second": 8.0, "peak_gib": 1.5}
SAMPLES = [
    {**SAMPLE, "row": f"sample-{length}x{batch}", "length": length, "batch": batch}
    | {"seconds": 0.5 * length * batch, "seconds_per_sequence": 0.5 * length}
    for length, batch in ((4, 1), (8, 1), (8, 2))
]


@pytest.fixture
def call(monkeypatch):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, words)])
        growth.main()

    return run


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [STEP, *SAMPLES]))
    return path


@pytest.mark.parametrize("row", [row for row in growth.ROWS if "3b" in row.name], ids=lambda row: row.name)
def test_the_rows_of_3b_fit_one_gpu_with_what_is_kept_without_compilation(row):
    """A benchmark counts the operations of one step before it compiles, except where blocks are recomputed."""
    found = growth.planned((*row.words, "train.compile=off") if row.kind == "step" else row.words, row.batch)
    assert found["gib"] < found["usable_gib"]
    assert 2.9e9 < found["parameters"] < 3.2e9


def test_rows_are_measured_once_and_a_failed_one_again(call, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.jsonl"
    monkeypatch.setitem(growth.MEASURES, "serve", lambda row, setting: 1 / 0)
    monkeypatch.setattr(growth, "FAILURES", (UserError, ArithmeticError))
    call("measure", "--small", "--only", "sample", "serve", "--out", out)
    first = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["row"] for row in first] == ["sample-16x1", "sample-32x1", "sample-32x2", "serve-small"]
    assert first[2]["seconds_per_sequence"] == first[2]["seconds"] / 2
    assert first[3]["error"] == "ZeroDivisionError: division by zero"
    monkeypatch.setitem(growth.MEASURES, "serve", lambda row, setting: {"clients": []})
    call("measure", "--small", "--only", "sample", "serve", "--out", out)
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()[4:]] == ["serve-small"]
    assert growth.read_results(out).keys() == {row["row"] for row in first}
    assert capsys.readouterr().out == out.read_text()


def test_tables_compare_plans_with_what_was_measured(call, results, capsys):
    call("table", "--results", results)
    tables = capsys.readouterr().out
    assert "| `owt/mdlm model=1b` | 8 | 1.00B | 10.0 | 11.0 (+10.0%) | 1.0k | 0.9k (-10.0%) | 50% | 40% |" in tables
    assert "| 1.00B, 8 | 75.0% | 25.0% |" in tables
    assert "| 8 | 2 | 8.000 | 4.000 | 1.00 | 8 | 1.5 |" in tables


def test_a_figure_is_the_same_for_the_same_results(call, results, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "other.svg"):
        call("plot", "--results", results, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


@pytest.mark.slow
def test_every_kind_of_row_is_measured_on_a_cpu(call, tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    out = tmp_path / "results.jsonl"
    call("measure", "--small", "--save-seconds", "120", "--out", out, "--scratch", tmp_path)
    found = {row["row"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert found.keys() == {row.name for row in growth.SMALL_ROWS}
    assert not any("error" in row for row in found.values())
    assert [line["step"] for line in found["run-small"]["lines"]] == [2, 4, 6]
    assert found["run-small"]["saved"]
    assert found["run-small"]["bytes"]["checkpoints"] > 2.9 * found["run-small"]["bytes"]["model"]
    assert all(of["answers"] and not of["wrong"] for of in found["serve-small"]["clients"])
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
