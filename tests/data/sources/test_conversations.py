"""Records of prompts and answers: what is read from them, and errors that name file and line."""

import json

import pytest

from adlm.data.sources.conversations import Conversation
from adlm.data.sources.source import HubSplit, resolve_source
from adlm.errors import UserError

PAIR = {"prompt": "2 + 2?", "answer": "4", "source": "a book"}
MESSAGES = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def read(tmp_path, resolve_config):
    """The conversations of a file of these lines."""

    def read(*lines, name="pairs.jsonl", words=()):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / name).write_text(text)
        config = resolve_config(f"data.path={tmp_path / name}", "data.format=pairs", "data.held_out=0", *words)
        [part] = resolve_source(config.data).parts
        return [Conversation.of_document(chunk.text) for chunk in part.chunks()]

    return read


def test_a_pair_and_the_same_messages_are_the_same_conversation(read):
    pair, messages, both = read(PAIR, "", {"messages": MESSAGES}, {"messages": MESSAGES, "prompt": "x", "answer": "y"})
    assert pair.messages == messages.messages == both.messages == MESSAGES
    assert (pair.where, messages.where) == ("line 1 of pairs.jsonl", "line 3 of pairs.jsonl")


def test_a_json_list_is_read_too(read):
    assert [found.where for found in read(json.dumps([PAIR, PAIR]), name="pairs.json")] == [
        "entry 0 of pairs.json",
        "entry 1 of pairs.json",
    ]


def test_a_long_conversation_is_one_document(read):
    [found] = read({"prompt": "word " * 100_000, "answer": "4"})
    assert len(found.messages[0]["content"]) == 500_000


ERRORS = {
    "not JSON": ('{"prompt": "2', "line 2 of pairs.jsonl is not JSON"),
    "no record": ("[1]", "line 2 of pairs.jsonl has neither .* nor \"messages\"; it is '\\[1\\]'"),
    "missing key": ({"prompt": "2?", "reply": "4"}, 'line 2 of .* has neither "prompt" and "answer" .*prompt, reply'),
    "empty answer": (PAIR | {"answer": " \n"}, "line 2 of pairs.jsonl: message 2, an answer, is empty"),
    "answer of another type": (PAIR | {"answer": 4}, "message 2 has a content of type int, not a string"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1 has a content of type NoneType"),
    "unknown role": (
        {"messages": [*MESSAGES[:1], {"role": "tool", "content": "4"}]},
        "line 2 of pairs.jsonl: message 2 has the role 'tool'; give one of system, user, assistant",
    ),
    "last turn of the user": ({"messages": MESSAGES[:1]}, "line 2 of .*: the last message must be the assistant's"),
    "no messages": ({"messages": []}, "the last message must be the assistant's"),
    "messages of another type": ({"messages": "2?"}, "messages must be a list of records"),
    "half a character": ('{"prompt": "\\ud800", "answer": "4"}', "line 2 of pairs.jsonl: message 1 holds half a char"),
}


@pytest.mark.parametrize(("line", "message"), ERRORS.values(), ids=ERRORS)
def test_a_bad_record_is_one_line_with_its_file_and_line(read, line, message):
    with pytest.raises(UserError, match=message) as error:
        read(PAIR, line)
    assert "\n" not in str(error.value)


def test_damaged_text_is_replaced_if_asked(read):
    [found] = read('{"prompt": "a\\u0000", "answer": "4"}', words=["data.damaged=replace"])
    assert found.messages[0]["content"] == "a\ufffd"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.path={folder}/text.txt"],
            "data.format pairs is read from .jsonl, .ndjson, .json, and not from text.txt",
        ),
        (["data=sotu"], "data.format pairs is for your own files and the hub"),
        (["data.path={folder}/text.txt", "data.streaming=true"], "data.streaming true is for running text"),
    ],
)
def test_sources_that_have_no_pairs_are_refused(tmp_path, resolve_config, words, message):
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(UserError, match=message):
        resolve_source(resolve_config(*(word.format(folder=tmp_path) for word in words), "data.format=pairs").data)


def test_records_of_the_hub_are_read_too(monkeypatch, resolve_config):
    monkeypatch.setattr(HubSplit, "split_names", lambda self: ["train"])
    monkeypatch.setattr(HubSplit, "_records", lambda self: iter([PAIR, {"messages": MESSAGES[:1]}]))
    source = resolve_source(resolve_config("data.hub=owner/name", "data.format=pairs").data)
    chunks = source.parts[0].chunks()
    assert Conversation.of_document(next(chunks).text).messages == MESSAGES
    assert source.packing == "pairs"
    with pytest.raises(UserError, match="record 2 of owner/name train: the last message must be the assistant's"):
        next(chunks)
