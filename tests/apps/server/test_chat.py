"""Chat and completions with block-causal models, as the openai client sees them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_models import small_model
from tiny_bases import tokenizer_engine

import adlm
from adlm.chat.template import encode_chat
from adlm.checkpoints.model_folder import load_model_folder, save_model_folder

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
openai = pytest.importorskip("openai", reason="openai is not installed; pip install 'adlm[dev]'")

from running_server import running  # noqa: E402

from adlm.apps.server.app import ServerSettings  # noqa: E402
from adlm.apps.server.completion import Limits  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the man"}]
SAMPLERS = ["speculative", "ancestral", "confidence", "remdm-cap"]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A block-causal model with a chat template; it ends a message after a dozen tokens or so."""
    root = tmp_path_factory.mktemp("blocks")
    tokenizer_engine().save(str(root / "tokenizer.json"))
    folder = small_model(root / "blocks", "mdlm", str(root / "tokenizer.json"), length=96, block_length=4)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lm = adlm.load(folder)
    end = lm.tokenizer.engine.token_to_id("<|im_end|>")
    lm.network.head.bias[end] += lm.network.head.bias.max() + 3.5
    return lm


@pytest.fixture(scope="module")
def client(blocks, models):
    with (
        running(
            {"blocks": blocks, "adlm": models["adlm"]}, ServerSettings(batch=3, limits=Limits(steps=128))
        ) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def test_the_template_of_a_model_folder_stays_with_it(blocks, tmp_path, models):
    assert (blocks.chat_template, models["adlm"].chat_template) == (TEMPLATE, None)
    folder = small_model(tmp_path / "plain")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    save_model_folder(load_model_folder(folder), tmp_path / "copy")
    assert adlm.load(tmp_path / "copy").chat_template == "{{ messages }}"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_reply_ends_with_its_message_and_is_the_same_in_pieces(client, blocks, sampler):
    named = {"model": "blocks", "messages": MESSAGES, "seed": 5, "n": 4, "extra_body": {"sampler": sampler, "steps": 8}}
    whole = client.chat.completions.create(**named)
    usage = {"include_usage": True}
    pieces = list(client.chat.completions.create(**named, stream=True, stream_options=usage))
    assert whole.usage.prompt_tokens == len(encode_chat(blocks.tokenizer, TEMPLATE, MESSAGES))
    assert pieces[-1].usage == whole.usage
    for choice in whole.choices:
        own = [each.choices[0] for each in pieces[:-1] if each.choices[0].index == choice.index]
        assert own[0].delta.role == choice.message.role == "assistant"
        assert "".join(each.delta.content for each in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        assert "<|im_end|>" not in choice.message.content
    assert "stop" in {choice.finish_reason for choice in whole.choices}
    room = blocks.config.length - 1 - whole.usage.prompt_tokens
    assert whole.usage.completion_tokens < 4 * room, "nothing is sampled after the end of a message"


def test_a_reply_is_limited_by_max_tokens_and_by_stop_texts(client):
    named = {"model": "blocks", "messages": MESSAGES, "temperature": 0.9}
    replies = [client.chat.completions.create(**named, seed=seed, max_tokens=3) for seed in range(6)]
    cut = next(reply for reply in replies if reply.choices[0].finish_reason == "length")
    assert cut.usage.completion_tokens == 3
    seed, text = cut.seed, cut.choices[0].message.content
    newer = client.chat.completions.create(**named, seed=seed, max_completion_tokens=3)
    assert newer.choices[0].message.content == text
    stopped = client.chat.completions.create(**named, seed=seed, max_tokens=3, stop=text[-1])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        text[: text.index(text[-1])],
        "stop",
    )


def test_contents_in_parts_are_joined(client):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "man"}]
    in_parts = client.chat.completions.create(
        model="blocks", messages=[{"role": "user", "content": parts}], seed=1, max_tokens=5
    )
    at_once = client.chat.completions.create(model="blocks", messages=MESSAGES, seed=1, max_tokens=5)
    assert in_parts.choices[0].message == at_once.choices[0].message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "adlm"}, "this model has no chat template; use /v1/completions"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "the man " * 60}]}, "shorten them"),
        ({"messages": [{"role": "user"}]}, "with role .* and content, a text"),
        ({"max_tokens": 90}, "max_tokens 90 is more than the"),
        ({"max_completion_tokens": 90}, "max_completion_tokens 90 is more than the"),
        ({"n": 17}, "n 17 is more than 16 completions"),
        ({"extra_body": {"sampler": "semi-autoregressive"}}, "sampler semi-autoregressive does not work"),
    ],
)
def test_wrong_chat_requests_are_one_line(client, changed, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": "blocks", "messages": MESSAGES} | changed)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_streamed_completion_of_blocks_equals_the_text_at_once(client, sampler):
    named = {"model": "blocks", "prompt": "the man", "max_tokens": 40, "seed": 3, "n": 2}
    named["extra_body"] = {"sampler": sampler, "steps": 8}
    whole = client.completions.create(**named)
    pieces = list(client.completions.create(**named, stream=True))
    for choice in whole.choices:
        own = [each.choices[0] for each in pieces if each.choices[0].index == choice.index]
        assert "".join(each.text for each in own) == choice.text
        assert len([each for each in own if each.text]) > 3, "text comes block by block"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_reply_satisfies_its_constraint_and_is_the_same_in_pieces(client, sampler):
    """Mixed with replies without constraints."""
    schema = {"type": "object", "properties": {"man": {"enum": ["the man", "a dog"]}}, "required": ["man"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "man", "schema": schema, "strict": True}}
    named = {"model": "blocks", "messages": MESSAGES, "seed": 5, "n": 3, "extra_body": {"sampler": sampler, "steps": 8}}
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(client.chat.completions.create, **named, max_tokens=9)
        whole = client.chat.completions.create(**named, response_format=format_)
        assert free.result().choices == client.chat.completions.create(**named, max_tokens=9).choices
    pieces = list(client.chat.completions.create(**named, response_format=format_, stream=True))
    for choice in whole.choices:
        assert json.loads(choice.message.content)["man"] in ("the man", "a dog")
        assert choice.finish_reason == "stop"
        own = [each.choices[0] for each in pieces if each.choices[0].index == choice.index]
        assert "".join(each.delta.content for each in own) == choice.message.content
        assert own[-1].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="the constraint of the completion cannot be satisfied") as refused:
        client.chat.completions.create(**named, max_tokens=2, response_format=format_)
    assert refused.value.param == "response_format"
