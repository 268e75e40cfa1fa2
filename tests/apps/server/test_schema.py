"""Requests generated from the OpenAPI schema never cause a server error."""

from dataclasses import replace

import hypothesis
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import PATIENCE, running
from small_models import mostly_slow

from adlm.apps.server.app import ServerSettings
from adlm.apps.server.completion import Limits

OPERATIONS = {
    "/v1/completions": 30, "/v1/chat/completions": 20, "/v1/models": 2, "/v1/models/{model}": 4, "/health": 2,
    "/metrics": 2, "/v1/studio": 2, "/v1/trace": 20, "/v1/bound": 20, "/v1/choose": 20,
}  # fmt: skip
"""Examples of valid and of invalid requests to each path; four times as many in the slow suite."""
MODEL_OPERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/trace", "/v1/bound", "/v1/choose")


@pytest.fixture(scope="module")
def schemathesis():
    """Imported here: it takes a second, and most processes of the test run do not need it."""
    return pytest.importorskip("schemathesis", reason="schemathesis is not installed; pip install 'adlm[dev]'")


@pytest.fixture(scope="module")
def schema(models, schemathesis):
    chat = {name: replace(lm, chat_template="{{ messages[-1].content }}") for name, lm in models.items()}
    with running(chat, ServerSettings(limits=Limits(rows=4, steps=8))) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.parametrize(
    ("path", "mode"),
    [*((path, "positive") for path in OPERATIONS), *((path, "negative") for path in MODEL_OPERATIONS)],
)
@pytest.mark.parametrize("times", mostly_slow([1, 4], 1))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_request_of_the_schema_is_a_server_error(schemathesis, schema, path, mode, times):
    [operation] = [each.ok() for each in schema.get_all_operations() if each.ok().path == path]
    cases = operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode.upper()))

    @hypothesis.settings(
        max_examples=times * OPERATIONS[path],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases)
    def holds(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body |= {"model": "adlm"}  # most other words are no names
            case.body |= (
                {"text": f"[MASK*2]{case.body.get('text')}"[:40]} if path in ("/v1/trace", "/v1/choose") else {}
            )
            case.body |= {"sampler": "confidence"} if path not in ("/v1/bound", "/v1/choose") else {}
        answer = case.call(timeout=PATIENCE)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text

    statuses: set[int] = set()
    holds()
    assert path not in MODEL_OPERATIONS or statuses >= ({200, 400} if mode == "positive" else {400})


def test_the_schema_names_every_path_and_no_422(schema):
    assert {operation.ok().path for operation in schema.get_all_operations()} == set(OPERATIONS)
    assert "422" not in str(schema.raw_schema)
