"""A few seconds of experiments/serve_load: no answer is lost or wrong, whatever other clients do."""

import argparse
import asyncio
import importlib.util
import os
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import running

from adlm.apps.server.app import ServerSettings

RUN = Path(__file__).parents[3] / "experiments" / "serve_load" / "run.py"


@pytest.fixture(scope="module")
def serve_load():
    """The module of experiments/serve_load/run.py."""
    spec = importlib.util.spec_from_file_location("serve_load_run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the experiment reads the memory from /proc")
def test_no_answer_is_lost_or_wrong_beside_slow_disconnecting_and_malformed_clients(models, serve_load):
    bodies = serve_load.bodies("adlm")
    with running({"adlm": models["adlm"]}, ServerSettings(batch=3)) as address:
        for seconds in (3.0, 15.0, 60.0):  # a busy machine needs longer for as many requests
            arguments = argparse.Namespace(clients=12, seconds=seconds, alone=seconds / 10)
            results = asyncio.run(serve_load.run_clients(address, os.getpid(), bodies, arguments))
            for figures in results:
                assert [figures[name] for name in ("lost", "wrong", "refused", "unexpected")] == [0, 0, 0, 0]
            alone, load = results
            if load["answers"] >= 16 and load["bad_clients"] >= 8:  # every kind of request
                break
    assert alone["answers"] >= 1
    assert load["answers"] >= 16
    assert load["bad_clients"] >= 8
    assert "| 3 | 12 |" in serve_load.table_of([{"batch": 3, **figures} for figures in results])


def test_a_short_request_is_answered_while_a_long_one_is_sampled(models, serve_load):
    with running({"adlm": models["adlm"]}, ServerSettings(batch=1)) as address:
        figures = asyncio.run(serve_load.measure_short_requests(address, "adlm", [(16, 1024)]))
    assert figures["n16_steps1024_was_running"]
