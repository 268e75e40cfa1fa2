"""The messages of wrong requests name the field as the client wrote it, and what to write instead."""

import json

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
httpx = pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import NO_TLS, PATIENCE, running  # noqa: E402

from adlm.apps.server.app import ServerSettings  # noqa: E402


@pytest.fixture(scope="module")
def address(models):
    with running(models, ServerSettings(batch=1)) as address:
        yield address


def post(url, body):
    content = body if isinstance(body, bytes) else json.dumps(body)  # httpx's own JSON cannot have surrogates
    headers = {"content-type": "application/json"}
    return httpx.post(url, content=content, headers=headers, timeout=PATIENCE, verify=NO_TLS)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"temprature": 1}, "temprature is not a field of this request; did you mean 'temperature'?"),
        ("completions", {"max_completion_tokens": 1}, "did you mean 'max_tokens'?"),
        ("completions", {"zzz": 1}, "zzz is not a field of this request"),
        ("completions", {f"f{number}": 1 for number in range(9999)}, "has 10,000 fields; give at most 256"),
        ("completions", {"\ud800": 1}, r"\ud800 is not a field of this request"),
        ("completions", {"stream_options": {"zzz": 1}}, "stream_options.zzz is not a field of this request"),
        ("completions", {"stop": [""]}, "stop must be a text of 1 to 1000 characters, or a list of up to 4"),
        ("completions", {"n": 10**4000, "prompt": ["a"] * 128}, "n has more than 40 digits; give a smaller number"),
        ("completions", {"prompt": "x" * 99_999}, "prompt has 99,999 characters, and the model's length of 64 tokens"),
        ("completions", {"suffix": "x" * 99_999}, "suffix has 99,999 characters"),
        ("trace", {"text": "[MASK]" + "x" * 99_999}, "text has 100,005 characters"),
        ("bound", {"text": "x" * 99_999}, "text has 99,999 characters"),
        ("trace", {"txt": "[MASK]"}, "txt is not a field of this request; did you mean 'text'?"),
        ("completions", {"model": "other"}, "there is no model 'other'; this server has adlm, ar"),
        ("completions", {"sampler": "ancestrl"}, "sampler 'ancestrl' is not one of ancestral"),
        ("completions", {"prompt": "The [MASK*4 was"}, "[MASK*4 is not a hole; write [MASK] for one token"),
        ("trace", {"text": "The [MASK*4 was"}, "[MASK*4 is not a hole; write [MASK] for one token"),
    ],
)
def test_a_wrong_request_is_answered_with_what_to_write_instead(address, path, body, message):
    text = {"text": "[MASK]"} if path == "trace" else {}
    answer = post(f"{address}/v1/{path}", {"model": "adlm", **text, **body})
    assert answer.status_code in (400, 404)
    found = answer.json()["error"]["message"]
    assert message in found
    assert "sampling." not in found, "options of the config are not fields of a request"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"temperature": -1}, "temperature"),
        ("completions", {"temperature": 2e300}, "temperature"),
        ("completions", {"steps": 2000}, "steps"),
        ("completions", {"steps": 10**7}, "steps"),
        ("completions", {"sampler": "foo"}, "sampler"),
        ("completions", {"model": "ar", "sampler": "remdm-cap"}, "sampler"),
        ("completions", {"n": 17}, "n"),
        ("completions", {"prompt": ["a"] * 17}, "prompt"),
        ("completions", {"prompt": "[MASK]", "suffix": "x"}, "suffix"),
        ("completions", {"prompt": "[MASK]", "max_tokens": 2}, "max_tokens"),
        ("completions", {"suffix": "[MASK]"}, "suffix"),
        ("completions", {"suffix": "a\ud800"}, "suffix"),
        ("completions", {"stop": ["a", "\udfff"]}, "stop"),
        ("completions", {"stop": [""]}, "stop"),
        ("completions", {"model": "ar", "suffix": "x"}, "suffix"),
        ("completions", {"max_tokens": 65}, "max_tokens"),
        ("completions", {"prompt": "[MASK*65]"}, "prompt"),
        ("completions", {"prompt": "[MASK*0]"}, "prompt"),
        ("completions", {"prompt": "[MASK] [mask]"}, "prompt"),
        ("completions", {"prompt": "The [MASK*4 was"}, "prompt"),
        ("completions", {"prompt": "The", "suffix": "[MASK*4 was"}, "suffix"),
        ("completions", {"prompt": "x" * 60}, None),  # prompt, suffix and max_tokens together
        ("trace", {"text": "no hole"}, "text"),
        ("trace", {"text": "[MASK*65]"}, "text"),
        ("trace", {"text": "[MASK] [MASK*4 was"}, "text"),
        ("trace", {"text": "[MASK]", "sampler": "foo"}, "sampler"),
        ("bound", {"text": "[MASK]"}, "text"),
        ("bound", {"text": "x" * 100}, "text"),
    ],
    ids=str,
)
def test_an_error_about_one_field_names_it_as_param(address, path, body, param):
    answer = post(f"{address}/v1/{path}", {"model": "adlm", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"{", b'{"prompt": "\xff"}', b"[" * 200_000, b'{"a":' * 50_000])
def test_a_body_that_cannot_be_parsed_is_not_valid_json(address, body):
    answer = post(f"{address}/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body is not valid JSON"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"model": "adlm", "seed": ' + b"9" * 5000 + b"}", "seed has more than 40 digits", "seed"),
        (b'{"model": "adlm", "prompt": "a", "prompt": "b"}', "prompt is given twice; give it once", "prompt"),
    ],
    ids=["5,000 digits", "given twice"],
)
def test_what_json_allows_and_a_request_does_not_is_refused_by_name(address, body, message, param):
    answer = post(f"{address}/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] == param


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(address, monkeypatch):
    def fail(*given):
        raise AssertionError("tokenized")

    monkeypatch.setattr("adlm.language_model.encode_canvas", fail)
    monkeypatch.setattr("adlm.apps.server.studio.token_row", fail)
    hole = {"completions": "", "bound": "", "trace": "[MASK]"}
    for path, name in (("completions", "prompt"), ("completions", "suffix"), ("trace", "text"), ("bound", "text")):
        answer = post(f"{address}/v1/{path}", {"model": "adlm", name: hole[path] + "a" * 200_000})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
