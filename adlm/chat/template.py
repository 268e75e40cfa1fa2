"""Chat templates: messages -> text -> ids, which of them the assistant writes, and the id that ends a message.

A template is a program in Jinja's language, from the files of a model that anybody may have made. So it runs in Jinja's
sandbox, in a process with limits on time and memory (`renderer.py`).
"""

import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from adlm.errors import UserError
from adlm.tokens import Tokenizer

MAX_SECONDS = 10.0
"""For one rendering, including the start of the process."""
MARK = "\ue000"
"""Stands inside the name of a special token that a message contains, so that it is not taken for the token."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
"""For models without a template: the messages as they are, one after the other, with eos after the assistant's."""

Message = Mapping[str, str]
"""role and content."""


class _Renderer:
    """The process that renders one template."""

    def __init__(self, template: str):
        self.template, self._lock = template, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, variables: Mapping[str, object]) -> str:
        with self._lock:
            lines: list[object] = [variables]
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, "-I", str(Path(__file__).with_name("renderer.py"))]
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                weakref.finalize(self, _end, self._process)
                lines = [self.template, variables]
            answer = _ask(self._process, "".join(json.dumps(line) + "\n" for line in lines))
            if not answer:
                _end(self._process)
                raise UserError(
                    f"the chat template of this model needs more than {MAX_SECONDS:g} s or too much memory; give a "
                    "model with another one"
                )
        result: dict[str, str] = json.loads(answer)
        if "error" in result:
            reason = " ".join(result["error"].split())
            raise UserError(f"the chat template of this model refuses the messages: {reason:.300}", "messages")
        return result["text"]


def _ask(process: subprocess.Popen[bytes], lines: str) -> bytes:
    """The line that answers; b"" if the process ends, which it does after MAX_SECONDS."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(MAX_SECONDS, process.kill)
    timer.start()
    try:
        process.stdin.write(lines.encode())
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes and waits
        process.kill()


_renderer = lru_cache(maxsize=8)(_Renderer)


def render_chat(tokenizer: Tokenizer, template: str, messages: Sequence[Message], reply: bool = True) -> str:
    """The text of a conversation; with `reply`, up to where the assistant's next message begins."""
    vocabulary, name_of = tokenizer.vocabulary, tokenizer.engine.id_to_token
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": reply,
        "bos_token": "" if vocabulary.bos_id is None else name_of(vocabulary.bos_id),
        "eos_token": "" if vocabulary.eos_id is None else name_of(vocabulary.eos_id),
    }
    return _renderer(template).render(variables)


def encode_chat(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation up to where the assistant's reply begins.

    Names of special tokens in the text of the template are those tokens; in messages they are ordinary text.
    """
    return _encode(tokenizer, render_chat(tokenizer, template, _marked(tokenizer, messages)))


def encode_conversation(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and which of them the assistant writes: its messages, each with what ends it.

    A message ends with the first special token after its text; where the template has none, eos follows the last one.
    The text before a message is encoded apart from it, as `encode_chat` does, so a model reads the same ids when it is
    trained and when it replies.
    """
    names, marked = _names(tokenizer), _marked(tokenizer, messages)
    ids, is_answer, text, ends = list[int](), list[bool](), "", list[int]()
    for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        before = render_chat(tokenizer, template, marked[:number])
        after = render_chat(tokenizer, template, marked[: number + 1], reply=False)
        start = len(before)
        if not before.startswith(text) or not after.startswith(before) or not after[start:].strip():
            raise UserError(
                "the chat template of this model does not append an answer to the text before it, so it cannot be used "
                "for training; give each answer as a conversation of its own, or another model",
                "messages",
            )
        ends = [found.end() for found in names.finditer(after, start) if after[start : found.start()].strip()]
        end = ends[0] if ends else len(after)
        for part, by_assistant in ((before[len(text) :], False), (after[start:end], True)):
            encoded = _encode(tokenizer, part)
            ids, is_answer = ids + encoded, is_answer + [by_assistant] * len(encoded)
        text = after[:end]
    eos_id = tokenizer.vocabulary.eos_id
    if not ends and eos_id is not None:
        ids, is_answer = [*ids, eos_id], [*is_answer, True]
    return ids, is_answer


def end_of_message(tokenizer: Tokenizer, template: str) -> int | None:
    """The special token right after a message of the assistant; None if there is none."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the reply"}]
    after = render_chat(tokenizer, template, messages, reply=False).rpartition("the reply")[2].lstrip()
    found = _names(tokenizer).match(after)
    return None if found is None else _special_tokens(tokenizer)[found[0]]


def _marked(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    """The messages with MARK inside the names of special tokens."""
    names = _names(tokenizer)
    return [
        {name: names.sub(lambda found: found[0][0] + MARK + found[0][1:], value) for name, value in message.items()}
        for message in messages
    ]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text with names of special tokens, and with MARK in those that are none."""
    special, ids, start = _special_tokens(tokenizer), list[int](), 0
    for found in _names(tokenizer).finditer(text):
        ids += [*tokenizer.encode(text[start : found.start()].replace(MARK, "")), special[found[0]]]
        start = found.end()
    return ids + tokenizer.encode(text[start:].replace(MARK, ""))


def _names(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the name of a special token, the longest at a place."""
    names = sorted(_special_tokens(tokenizer), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of special tokens by name; bos, eos and pad are among them, also where the tokenizer's file differs."""
    added, name_of = tokenizer.engine.get_added_tokens_decoder(), tokenizer.engine.id_to_token
    return {token.content: index for index, token in added.items() if token.special} | {
        str(name_of(index)): index for index in tokenizer.special_ids
    }
