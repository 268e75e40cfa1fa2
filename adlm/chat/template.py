"""Chat templates: messages -> text -> ids, and the id that ends a message.

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
    special = _special_tokens(tokenizer)
    names = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    marked = [
        {name: names.sub(lambda found: found[0][0] + MARK + found[0][1:], value) for name, value in message.items()}
        for message in messages
    ]
    text, ids, start = render_chat(tokenizer, template, marked), list[int](), 0
    for found in names.finditer(text):
        ids += [*tokenizer.encode(text[start : found.start()].replace(MARK, "")), special[found[0]]]
        start = found.end()
    return ids + tokenizer.encode(text[start:].replace(MARK, ""))


def end_of_message(tokenizer: Tokenizer, template: str) -> int | None:
    """The special token right after a message of the assistant; None if there is none."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the reply"}]
    after = render_chat(tokenizer, template, messages, reply=False).rpartition("the reply")[2].lstrip()
    special = _special_tokens(tokenizer)
    return next((special[name] for name in sorted(special, key=len, reverse=True) if after.startswith(name)), None)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    added = tokenizer.engine.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special}
