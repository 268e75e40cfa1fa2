"""After a kill before any file operation, rerunning sample, perplexity or judge completes the work.

The quick suite tests every third operation, since each costs two runs; the slow one, or ADLM_KILLS=1, every one.
"""

import os

import pytest
from kills import check_kills
from small_models import mostly_slow, small_model
from small_runs import corpus

STRIDE = int(os.environ.get("ADLM_KILLS", "0"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    small_model(folder / "model")
    small_model(folder / "ar", "ar")
    corpus(folder, 20)
    from adlm.cli.main import main

    words = ["sample", folder / "model", "--num", 3, "--steps", 2, "--out", folder / "samples.jsonl"]
    assert main([*map(str, words)]) == 0
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("stride", mostly_slow((3, 1), 3))
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["sample", "{model}", "--num", "3", "--batch", "2", "--steps", "2"], "s.jsonl"),
        pytest.param(["perplexity", "{ar}", "--data", "{rhymes.txt}"], "p.json", marks=pytest.mark.slow),
        pytest.param(
            ["judge", "{samples.jsonl}", "--metrics", "perplexity,entropy", "--model", "{ar}"],
            "cards/c.json",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_kill_before_any_file_operation_loses_nothing_and_leaves_nothing(command, name, stride, made, tmp_path):
    words = [str(made / word[1:-1]) if word.startswith("{") else word for word in command]
    out = tmp_path / "out"
    operations = check_kills([*words, "--out", str(out / name)], out, stride=STRIDE or stride)
    assert any("fsync" in operation for operation in operations)
