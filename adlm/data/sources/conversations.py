"""Prompts with answers, and conversations of several turns: records checked, and passed on as documents in JSON.

    {"prompt": "2 + 2?", "answer": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

A record may have other fields. Of one that has both forms, the messages are read.
"""

import json
from typing import Any, NamedTuple

from adlm.data.sources.decoding import check_text
from adlm.errors import UserError

ROLES = ("system", "user", "assistant")


class Conversation(NamedTuple):
    where: str
    """The location of its record for error messages: line 3 of a.jsonl."""
    messages: list[dict[str, str]]
    """Each with role and content; the last one is the assistant's."""

    @classmethod
    def of_document(cls, document: str) -> "Conversation":
        """From the JSON of `conversation_document`."""
        return cls(*json.loads(document))

    @property
    def text(self) -> str:
        """All messages, to train a tokenizer on."""
        return "\n".join(message["content"] for message in self.messages)


def conversation_document(record: Any, damaged: str, where: str) -> str:
    """The Conversation of a record, as JSON; a user error if it has no valid one."""
    fields = record if isinstance(record, dict) else {}
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise UserError(f"{where}: messages must be a list of records with role and content")
    elif "prompt" in fields and "answer" in fields:
        messages = [
            {"role": role, "content": fields[key]} for role, key in (("user", "prompt"), ("assistant", "answer"))
        ]
    else:
        has = f"it has {', '.join(fields)[:80]}" if fields else f"it is {str(record)[:40]!r}"
        raise UserError(f'{where} has neither "prompt" and "answer" nor "messages"; {has}')
    checked = []
    for number, message in enumerate(messages, 1):
        role, content, what = message.get("role"), message.get("content"), f"{where}: message {number}"
        if role not in ROLES:
            raise UserError(f"{what} has the role {str(role)[:40]!r}; give one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{what} has a content of type {type(content).__name__}, not a string")
        if role == "assistant" and not content.strip():
            raise UserError(f"{what}, an answer, is empty; leave the record out")
        checked.append({"role": role, "content": check_text(content, damaged, what)})
    if not checked or checked[-1]["role"] != "assistant":
        raise UserError(f"{where}: the last message must be the assistant's; add it, or leave the record out")
    return json.dumps(Conversation(where, checked))
