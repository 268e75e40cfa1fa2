"""The completions API as the openai client and plain HTTP see it."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
httpx = pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")
openai = pytest.importorskip("openai", reason="openai is not installed; pip install 'adlm[dev]'")

from running_server import NO_TLS, PATIENCE, connected, get, metrics, running, wait_until  # noqa: E402

from adlm.apps.server.app import ServerSettings  # noqa: E402
from adlm.apps.server.completion import Choice, Limits  # noqa: E402
from adlm.apps.server.guard import JsonFormatter  # noqa: E402
from adlm.sampling.events import JoinedRows  # noqa: E402
from adlm.tokens import load_tokenizer, train_bpe  # noqa: E402

LIMITS = Limits(rows=24, steps=64, body_bytes=10_000)


@pytest.fixture(scope="module")
def address(models, infilling):
    with running({**models, "infilling": infilling}, ServerSettings(batch=4, limits=LIMITS)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def gate(monkeypatch):
    """Network calls of joined rows wait while the gate is closed; `entered` is set when the first one begins."""

    class Gate(threading.Event):
        entered = threading.Event()
        num_calls = 0

    gate, step = Gate(), JoinedRows.step
    gate.entered.clear()

    def gated_step(rows, turn):
        gate.entered.set()
        assert gate.wait(PATIENCE)
        gate.num_calls += 1
        return step(rows, turn)

    monkeypatch.setattr(JoinedRows, "step", gated_step)
    monkeypatch.setattr("adlm.apps.server.serving.PROBE_SECONDS", 0.05)  # until a client that is gone is noticed
    yield gate
    gate.set()


def post(address, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{address}/v1/completions",
        content=content,
        headers={"content-type": "application/json"} | headers,
        timeout=PATIENCE,
        verify=NO_TLS,
    )


def test_the_openai_client_completes_a_prompt(client, models):
    done = client.completions.create(model="adlm", prompt="Hello", max_tokens=12, seed=3, n=2)
    assert [choice.text for choice in done.choices] == [
        text.removeprefix("Hello") for text in models["adlm"].fill(["Hello[MASK*12]"] * 2, seed=3)
    ]
    assert [choice.index for choice in done.choices] == [0, 1]
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 24, 29)
    assert done.id.startswith("cmpl-")
    assert done.model == "adlm"


def test_the_openai_client_infills_between_prompt_and_suffix(client, models):
    done = client.completions.create(model="adlm", prompt="Hello", suffix=" you", max_tokens=9, seed=4, temperature=0.5)
    expected = models["adlm"].fill("Hello[MASK*9] you", seed=4, temperature=0.5)
    assert f"Hello{done.choices[0].text} you" == expected


def test_holes_in_a_prompt_are_filled_and_the_whole_text_is_returned(client, models):
    done = client.completions.create(model="adlm", prompt=["A [MASK*4] b [MASK] c", "[MASK]x"], seed=5)
    assert [choice.text for choice in done.choices] == models["adlm"].fill(["A [MASK*4] b [MASK] c", "[MASK]x"], seed=5)
    assert done.usage.completion_tokens == 6


@pytest.mark.parametrize("sampler", ["ancestral", "speculative"])
def test_a_suffix_of_a_model_that_infills_ends_a_hole_of_unknown_length(client, infilling, sampler):
    named = {"model": "infilling", "max_tokens": 9, "seed": 4, "n": 8, "extra_body": {"sampler": sampler}}
    done = client.completions.create(prompt="(A", suffix="B)", logprobs=0, **named)
    expected = infilling.fill("(A[MASK*..9]B)", num=8, seed=4, sampler=sampler)
    assert [f"(A{choice.text}B)" for choice in done.choices] == expected
    assert {choice.finish_reason for choice in done.choices} == {"stop", "length"}
    for choice in done.choices:
        assert (choice.finish_reason == "length") == (len(choice.text) == 9), "cut off, or ended by eos"
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs)
    num_drawn = sum(len(choice.text) + (choice.finish_reason == "stop") for choice in done.choices)
    assert done.usage.completion_tokens == num_drawn, "with the eos, without what is left of a hole"
    pieces = list(client.completions.create(prompt="(A", suffix="B)", stream=True, **named))
    for choice in done.choices:
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason


def test_holes_of_unknown_length_in_a_prompt_are_filled(client, infilling):
    texts = ["(A[MASK*..5]B[MASK*2]C)", "(A[MASK*]"]
    done = client.completions.create(model="infilling", prompt=texts, n=3, seed=1)
    assert [choice.text for choice in done.choices] == infilling.fill(texts, num=3, seed=1)
    assert "stop" in {choice.finish_reason for choice in done.choices}


def test_holes_of_unknown_length_are_refused_for_models_that_cannot_fill_them(address):
    response = post(address, {"model": "adlm", "prompt": "A[MASK*..5]B"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "give its length, such as [MASK*12]" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "sampler", "prompt"),
    [
        ("adlm", "ancestral", "Hello"),
        ("adlm", "confidence", "ab"),
        ("adlm", "left-to-right", "[MASK*9]x[MASK*9]"),
        ("adlm", "remdm-cap", "Hello"),
        ("ar", "left-to-right", "Hello"),
    ],
)
def test_a_streamed_text_equals_the_text_at_once(client, model, sampler, prompt):
    named = {"max_tokens": None if "[" in prompt else 40, "seed": 6, "n": 3, "extra_body": {"sampler": sampler}}
    named = {name: value for name, value in named.items() if value is not None}
    whole = client.completions.create(model=model, prompt=prompt, **named)
    pieces = list(client.completions.create(model=model, prompt=prompt, stream=True, **named))
    for choice in whole.choices:
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert (len(own) > 3) == (sampler in ("left-to-right",)) or sampler in ("ancestral", "confidence")


def test_a_stream_ends_with_usage_and_done(address):
    body = {"model": "adlm", "prompt": "a", "stream": True, "logprobs": 0, "seed": 0}
    body |= {"stream_options": {"include_usage": True}}
    lines = [line for line in post(address, body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 16
    last = json.loads(lines[-3].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] == "length"
    assert len(last["logprobs"]["tokens"]) == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_text(client, stream):
    named = {"model": "adlm", "prompt": "Hi", "max_tokens": 30, "seed": 7}
    text = client.completions.create(**named).choices[0].text
    middle = next(i for i in range(10, len(text)) if text[i].isascii() and text.index(text[i : i + 2]) == i)
    stop = text[middle : middle + 2]
    answer = client.completions.create(**named, stop=["never found", stop], stream=stream)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text[:middle]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_at_the_stop_text(client, stream):
    named = {"model": "adlm", "prompt": "Hi", "max_tokens": 30, "seed": 7, "logprobs": 0}
    whole = client.completions.create(**named).choices[0]
    middle = next(i for i in range(10, 30) if whole.text[i].isascii() and whole.text.index(whole.text[i : i + 2]) == i)
    answer = client.completions.create(**named, stop=whole.text[middle : middle + 2], stream=stream)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    logprobs, num = choices[-1].logprobs, sum(offset < middle for offset in whole.logprobs.text_offset)
    assert 0 < num < 30
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert getattr(logprobs, name) == getattr(whole.logprobs, name)[:num]


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("w", "hello ", ["hello", " world"]),
        (" ", "hello", ["hello"]),
        ("h", "", []),
        ("x", "hello world", ["hello", " world"]),
    ],
)
def test_a_token_in_which_the_stop_text_begins_is_kept_if_it_begins_before(stop, text, tokens):
    tokenizer = train_bpe(["hello world"] * 100, 300)
    ids = tokenizer.encode("hello world")
    choice = Choice(tokenizer, 0, len(ids), len(ids), ends_at_eos=True, drops_space=False, stops=[stop])
    assert choice.text(ids, complete=True)[0] == text
    assert choice.logprobs(ids, [0.5] * len(ids))["tokens"] == tokens


def test_all_tokens_of_a_character_before_the_stop_text_are_kept():
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("é.a")
    choice = Choice(tokenizer, 0, len(ids), len(ids), ends_at_eos=True, drops_space=False, stops=["."])
    logprobs = choice.logprobs(ids, [0.5] * len(ids))
    assert logprobs["text_offset"] == [0, 0]  # both bytes of the first character
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 2


def test_logprobs_are_those_of_the_draws(client, models):
    done = client.completions.create(model="ar", prompt="Hello", max_tokens=6, seed=1, logprobs=0).choices[0]
    *_, frame = models["ar"].watch("Hello[MASK*6]", seed=1)
    assert done.logprobs.token_logprobs == pytest.approx(frame.chance[0, -6:].log().tolist(), abs=1e-4)
    assert done.logprobs.text_offset[0] == 0


@pytest.mark.parametrize(("model", "sampler"), [("adlm", "remdm-loop"), ("adlm", "entropy"), ("ar", "ancestral")])
def test_a_seed_gives_the_same_text_alone_and_among_twenty_others(address, model, sampler):
    """To the last bit of the log-probabilities, which batches of other shapes change."""
    body = {"model": model, "prompt": "Some text", "max_tokens": 10, "seed": 11, "logprobs": 0, "sampler": sampler}
    alone = post(address, body).json()["choices"]
    others = [
        {**body, "prompt": "x" * (1 + number % 9), "max_tokens": 1 + number % 13, "seed": number}
        for number in range(20)
    ]
    requests = [*others[:10], body, *others[10:]]
    with ThreadPoolExecutor(21) as pool:
        answers = list(pool.map(lambda each: post(address, each), requests))
    assert {answer.status_code for answer in answers} == {200}
    assert answers[10].json()["choices"] == alone
    assert "adlm_call_rows_sum" in metrics(address)


def test_concurrent_requests_share_network_calls(models, gate):
    with running(models, ServerSettings(batch=4)) as address, ThreadPoolExecutor(9) as pool:
        first = pool.submit(post, address, {"model": "adlm", "max_tokens": 1})
        assert gate.entered.wait(PATIENCE)
        others = [pool.submit(post, address, {"model": "adlm", "max_tokens": 1}) for _ in range(8)]
        wait_until(lambda: 'adlm_queue_rows{model="adlm"} 8.0' in metrics(address))
        gate.set()
        assert {each.result().status_code for each in (first, *others)} == {200}
        wait_until(lambda: 'adlm_running_rows{model="adlm"} 0.0' in metrics(address))
        lines = metrics(address).splitlines()
    assert 'adlm_call_rows_count{model="adlm"} 3.0' in lines
    assert 'adlm_call_rows_sum{model="adlm"} 9.0' in lines


WRONG = [
    (b"", 400, "JSON object"),
    (b"{", 400, "not valid JSON"),
    (b"[" * 9000, 400, "not valid JSON"),
    (b"\xff\xfe", 400, "not valid JSON"),
    (b'{"model": "adlm", "prompt": "\xff"}', 400, "the body is not valid JSON"),
    (b'{"model": "adlm", "seed": ' + b"9" * 5000 + b"}", 400, ""),
    (b'{"model": "adlm", "temperature": NaN}', 400, "temperature"),
    (b'{"model": "adlm", "prompt": "\\ud800"}', 400, "surrogate"),
    ([], 400, "JSON object"),
    ({}, 400, "model is missing"),
    ({"model": "other"}, 404, "there is no model 'other'"),
    ({"model": "../../etc/passwd"}, 404, "there is no model"),
    ({"model": "adlm", "prompt": [1, 2]}, 400, "token ids are not supported"),
    ({"model": "adlm", "prompt": []}, 400, "prompt"),
    ({"model": "adlm", "prompt": {"file": "/etc/passwd"}}, 400, "prompt"),
    ({"model": "adlm", "max_tokens": "5"}, 400, "max_tokens"),
    ({"model": "adlm", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": "adlm", "max_tokens": 10**18}, 400, "the model's length 64"),
    ({"model": "adlm", "max_tokens": True}, 400, "max_tokens"),
    ({"model": "adlm", "prompt": "x" * 60}, 400, "the model's length is 64"),
    ({"model": "adlm", "prompt": "[MASK*999999]" * 500}, 400, "more than 1,000,000 tokens to fill in"),
    ({"model": "adlm", "prompt": "[MASK*999999999999]"}, 400, "more than 1,000,000 tokens to fill in"),
    ({"model": "adlm", "prompt": "[MASK*65]"}, 400, "65 tokens to fill in are too many for the model's length 64"),
    ({"model": "adlm", "prompt": "[MASK*0]"}, 400, ""),
    ({"model": "adlm", "prompt": "[MASK*2]", "suffix": "x"}, 400, "suffix cannot be combined"),
    ({"model": "adlm", "prompt": "[MASK*2]", "max_tokens": 2}, 400, "max_tokens cannot be combined"),
    ({"model": "adlm", "suffix": "[MASK]"}, 400, "suffix contains a hole"),
    ({"model": "adlm", "n": 25}, 400, "more than 24"),
    ({"model": "adlm", "n": 10**30}, 400, "more than 24"),
    ({"model": "adlm", "steps": 65}, 400, "at most 64"),
    ({"model": "adlm", "sampler": "magic"}, 400, "is not one of"),
    ({"model": "ar", "sampler": "remdm-cap"}, 400, "does not work with method ar"),
    ({"model": "ar", "prompt": "a", "suffix": "b"}, 400, "from left to right"),
    ({"model": "adlm", "temperature": -1}, 400, "temperature"),
    ({"model": "adlm", "temperature": 1e9}, 400, "temperature"),
    ({"model": "adlm", "top_p": 0}, 400, "top_p"),
    ({"model": "adlm", "seed": -1}, 400, "seed"),
    ({"model": "adlm", "stop": ["a"] * 5}, 400, "stop"),
    ({"model": "adlm", "echo": True}, 400, "echo is not supported"),
    ({"model": "adlm", "logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    ({"model": "adlm", "device": "cuda"}, 400, "device is not a field"),
    ({"model": "adlm", "prompt": "x" * 20_000}, 413, "larger than 10000 bytes"),
]


@pytest.mark.parametrize(("body", "status", "message"), WRONG, ids=lambda value: repr(value)[:50])
def test_a_wrong_request_is_refused_with_one_clear_message(address, body, status, message):
    answer = post(address, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_body_without_announced_length_is_limited_too(address):
    sent = (b"x" * 1000 for _ in range(50))
    try:
        status = httpx.post(f"{address}/v1/completions", content=sent, timeout=PATIENCE, verify=NO_TLS).status_code
    except httpx.WriteError:  # refused before all of it was sent
        return
    assert status == 413


def test_chat_unknown_paths_and_methods_are_refused_as_json(client, address):
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="adlm", messages=[{"role": "user", "content": "hi"}])
    for path, status in (("/../etc/passwd", 404), ("/v1/completions", 405)):
        answer = get(f"{address}{path}")
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_docs_leads_to_the_schema(address):
    answer = get(f"{address}/docs", follow_redirects=True)
    assert "/v1/completions" in answer.json()["paths"]


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["adlm", "ar", "infilling"]
    assert client.models.retrieve("ar").id == "ar"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_responses_have_strict_headers_and_their_own_ids(address):
    first, second = (get(f"{address}{path}") for path in ("/health", "/nowhere"))
    for answer in (first, second):
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_the_log_is_json_without_prompts(address, caplog):
    with caplog.at_level(logging.INFO, "adlm.apps.server"):
        answers = [post(address, {"model": "adlm", "prompt": "secret words", "seed": 0})]
        answers += [post(address, {"model": "secret words"})]
        logged = {}  # by request: the log of an earlier test's request may arrive during this one

        def read_log():
            lines = [JsonFormatter().format(record) for record in caplog.records]
            logged.update((json.loads(line)["request_id"], line) for line in lines)
            return all(answer.headers["x-request-id"] in logged for answer in answers)

        wait_until(read_log)
    assert "secret" not in "".join(logged.values())
    completed, refused = (json.loads(logged[answer.headers["x-request-id"]]) for answer in answers)
    assert (completed["status"], refused["status"]) == (200, 404)
    assert completed["prompt_tokens"] == 12


def test_a_key_is_needed_where_one_is_set(models):
    with running(models, ServerSettings(api_key="right-key")) as address:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer ä".encode()}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                answer = get(f"{address}{path}", headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
        assert get(f"{address}/health").status_code == 200
        with openai.OpenAI(base_url=f"{address}/v1", api_key="right-key") as client:
            assert [model.id for model in client.models.list()] == ["adlm", "ar"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("LOCALHOST", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("[::1]", 200)]
    + [(host, 403) for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "")],
)
def test_without_a_key_other_names_of_this_machine_are_refused(address, host, status):
    """A page on the web whose name resolves to 127.0.0.1 (DNS rebinding) sends its own name."""
    for path in ("/v1/models", "/", "/health"):
        answer = get(f"{address}{path}", headers={"host": host})
        assert answer.status_code == status
    if status == 403:
        assert "Host header must name this machine" in answer.json()["error"]["message"]


def test_with_a_key_any_name_is_accepted(models):
    with running(models, ServerSettings(api_key="right-key")) as address:
        headers = {"host": "adlm.example", "authorization": "Bearer right-key"}
        assert get(f"{address}/v1/models", headers=headers).status_code == 200


def test_a_full_queue_is_429_with_retry_after(models, gate):
    with running(models, ServerSettings(batch=1, max_waiting=2)) as address, ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(post, address, {"model": "adlm", "max_tokens": 2})]
        assert gate.entered.wait(PATIENCE)
        begun += [pool.submit(post, address, {"model": "adlm", "max_tokens": 2}) for _ in range(2)]
        wait_until(lambda: 'adlm_queue_rows{model="adlm"} 2.0' in metrics(address))
        refused = post(address, {"model": "adlm", "max_tokens": 2})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        gate.set()
        assert [each.result().status_code for each in begun] == [200] * 3


def test_a_request_that_takes_too_long_is_503(models, gate):
    with running(models, ServerSettings(timeout=0.2)) as address:
        answer = post(address, {"model": "adlm"})
        assert answer.status_code == 503
        assert "timed out" in answer.json()["error"]["message"]
        streamed = post(address, {"model": "adlm", "stream": True})
        assert "timed out" in streamed.text
        assert "[DONE]" not in streamed.text
        gate.set()


def test_a_row_whose_client_is_gone_leaves_its_batch(models, gate):
    with running(models, ServerSettings()) as address:
        with connected(address, {"model": "adlm", "max_tokens": 40, "steps": 1000, "seed": 0}):
            assert gate.entered.wait(PATIENCE)
        wait_until(lambda: 'route="/v1/completions",status="499"} 1.0' in metrics(address))
        gate.set()
        wait_until(lambda: 'adlm_running_rows{model="adlm"} 0.0' in metrics(address))
        assert gate.num_calls == 1


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_client_that_disconnects_are_dropped(models, gate, stream):
    with running(models, ServerSettings(batch=1)) as address, ThreadPoolExecutor(1) as pool:
        running_one = pool.submit(post, address, {"model": "adlm", "max_tokens": 2})
        assert gate.entered.wait(PATIENCE)
        with connected(address, {"model": "adlm", "max_tokens": 40, "n": 3, "stream": stream}):
            wait_until(lambda: 'adlm_queue_rows{model="adlm"} 3.0' in metrics(address))
        wait_until(lambda: 'adlm_queue_rows{model="adlm"} 0.0' in metrics(address))
        gate.set()
        assert running_one.result().status_code == 200
        wait_until(lambda: 'adlm_running_rows{model="adlm"} 0.0' in metrics(address))
        assert gate.num_calls <= 2  # those of the first request, which has two tokens


def test_a_bug_is_a_json_error_without_details(models, monkeypatch, caplog):
    def fail(*given):
        raise RuntimeError("secret words")

    monkeypatch.setattr("adlm.apps.server.app.plan_completion", fail)
    with caplog.at_level(logging.INFO, "adlm.apps.server"), running(models, ServerSettings()) as address:
        answer = post(address, {"model": "adlm"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-content-type-options"] == "nosniff"
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    lines = [line for line in lines if line.get("request_id") == answer.headers["x-request-id"]]  # not of other tests
    assert [line["event"] for line in lines] == ["bug", "request"]
    assert lines[0]["exception"] == "RuntimeError"
    del lines[0]["traceback"]
    assert "secret" not in answer.text + json.dumps(lines)


def test_a_failing_batch_is_an_error_and_the_next_request_works(models, monkeypatch):
    def fail(rows, turn):
        raise RuntimeError("private details")

    with running(models, ServerSettings()) as address:
        with monkeypatch.context() as patched:
            patched.setattr(JoinedRows, "step", fail)
            answer = post(address, {"model": "adlm"})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "sampling failed"
        assert post(address, {"model": "adlm"}).status_code == 200
