"""`adlm serve` as a process: its address, its key, its shutdown and its user errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
httpx = pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import PATIENCE, wait_until  # noqa: E402

import adlm  # noqa: E402
from adlm.apps.server.app import CPU_BATCH, ServerSettings, make_app  # noqa: E402
from adlm.cli.main import main  # noqa: E402
from adlm.errors import UserError  # noqa: E402


@contextmanager
def serving(folder, *words):
    """The process of `adlm serve` and a client of it."""
    command = [sys.executable, "-m", "adlm", "serve", str(folder), "--port", "0", "--batch", "1", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"adlm: serving adlm at (http://127\.0\.0\.1:[1-9]\d*)\n", line)[1]
        with httpx.Client(base_url=address, headers={"authorization": "Bearer a-key"}, timeout=PATIENCE) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def num_rows_is(client, num, state):
    return f'adlm_{state}_rows{{model="adlm"}} {num}.0' in client.get("/metrics").text


def test_sigterm_finishes_what_has_begun_and_refuses_what_waits(folders, tmp_path):
    key = tmp_path / "key"
    key.write_text("a-key\n")
    with serving(folders["adlm"], "--api-key-file", str(key)) as (process, client), ThreadPoolExecutor(2) as pool:
        slow = {"model": "adlm", "max_tokens": 60, "sampler": "remdm-conf", "steps": 1024, "seed": 0}
        assert client.get("/health").status_code == 200
        begun = pool.submit(client.post, "/v1/completions", json=slow)
        wait_until(lambda: num_rows_is(client, 1, "running"))
        waiting = pool.submit(client.post, "/v1/completions", json=slow)
        wait_until(lambda: num_rows_is(client, 1, "queue"))
        process.send_signal(signal.SIGTERM)
        assert begun.result().status_code == 200
        assert len(begun.result().json()["choices"]) == 1
        assert waiting.result().status_code == 503
        assert "shutting down" in waiting.result().json()["error"]["message"]
        assert process.wait(PATIENCE) == -signal.SIGTERM
        statuses = [json.loads(line)["status"] for line in process.stderr.read().splitlines()]
        assert sorted(statuses)[-1] == 503


@pytest.mark.slow
def test_a_second_ctrl_c_ends_running_requests_with_an_error(folders):
    with serving(folders["adlm"]) as (process, client), ThreadPoolExecutor(4) as pool:
        slow = {"model": "adlm", "max_tokens": 60, "sampler": "remdm-cap", "steps": 1024, "n": 16}
        answers = [pool.submit(client.post, "/v1/completions", json={**slow, "stream": i == 3}) for i in range(4)]
        wait_until(lambda: num_rows_is(client, 4, "running"))
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        *whole, streamed = (answer.result() for answer in answers)
        assert [answer.status_code for answer in whole] == [503] * 3
        for answer in whole:
            assert answer.json()["error"]["message"] == "the server is shutting down"
        assert "the server is shutting down" in streamed.text
        assert process.wait(PATIENCE) == 130
        assert all(json.loads(line)["event"] == "request" for line in process.stderr.read().splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is neither a model folder"),
        (["MODEL", "MODEL"], "two models are called 'adlm'"),
        (["MODEL", "--host", "0.0.0.0"], "there is no API key"),
        (["MODEL", "--host", "no.such.host.invalid"], "there is no API key"),
        (["MODEL", "--port", "70000"], "--port 70000 must be at most 65,535"),
        (["MODEL", "--batch", "0"], "--batch 0 must be at least 1"),
        (["MODEL", "--timeout", "nan"], "--timeout nan must be above 0"),
        (["MODEL", "--queue", "1"], "--queue 1 is smaller than --max-rows 16"),
        (["MODEL", "--api-key-file", "EMPTY"], "must hold one key"),
    ],
)
def test_wrong_options_are_user_errors(words, message, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ADLM_API_KEY", raising=False)
    (tmp_path / "empty").write_text("\n")
    paths = {"MODEL": str(folders["adlm"]), "EMPTY": str(tmp_path / "empty")}
    assert main(["serve", *(paths.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_model_without_tokenizer_is_refused(tmp_path, capsys):
    from small_models import small_model

    assert main(["serve", str(small_model(tmp_path / "ids", tokenizer=None))]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_an_empty_key_in_the_environment_is_not_no_key(folders, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "ADLM_API_KEY", "")
    assert main(["serve", str(folders["adlm"])]) == 2
    assert "ADLM_API_KEY must hold one key" in capsys.readouterr().err


@pytest.mark.parametrize(("found", "names"), [(None, ["box"]), ("base.gguf", ["box", "smollm2"])])
def test_without_a_name_the_models_whose_weights_are_here_are_served(monkeypatch, found, names):
    loaded = []

    def load_models(paths, device):
        loaded.extend(paths)
        raise UserError("enough")

    monkeypatch.setattr("adlm.cli.serve.find_named_base", lambda name: found)
    monkeypatch.setattr("adlm.cli.serve._load_models", load_models)
    assert main(["serve"]) == 2
    assert loaded == names


def test_a_large_network_on_a_cpu_reads_one_row_at_a_time(folders, monkeypatch):
    lm = adlm.load(folders["adlm"])
    assert make_app({"adlm": lm}, ServerSettings()).state.workers["adlm"].batch == CPU_BATCH
    monkeypatch.setattr("adlm.apps.server.app.LARGE", 1000)
    assert make_app({"adlm": lm}, ServerSettings()).state.workers["adlm"].batch == 1
    assert make_app({"adlm": lm}, ServerSettings(batch=3)).state.workers["adlm"].batch == 3
