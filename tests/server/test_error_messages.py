"""The messages of wrong requests name the field as the client wrote it, and what to write instead."""

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
httpx = pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import running  # noqa: E402

from adlm.server.app import ServerSettings  # noqa: E402


@pytest.fixture(scope="module")
def address(models):
    with running(models, ServerSettings(batch=1)) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"temprature": 1}, "temprature is not a field of this request; did you mean 'temperature'?"),
        ("completions", {"max_completion_tokens": 1}, "did you mean 'max_tokens'?"),
        ("completions", {"zzz": 1}, "zzz is not a field of this request"),
        ("trace", {"txt": "[MASK]"}, "txt is not a field of this request; did you mean 'text'?"),
        ("completions", {"model": "other"}, "there is no model 'other'; this server has adlm, ar"),
        ("completions", {"sampler": "ancestrl"}, "sampler 'ancestrl' is not one of ancestral"),
    ],
)
def test_a_wrong_request_is_answered_with_what_to_write_instead(address, path, body, message):
    text = {"text": "[MASK]"} if path == "trace" else {}
    answer = httpx.post(f"{address}/v1/{path}", json={"model": "adlm", **text, **body})
    assert answer.status_code in (400, 404)
    found = answer.json()["error"]["message"]
    assert message in found
    assert "sampling." not in found, "options of the config are not fields of a request"
