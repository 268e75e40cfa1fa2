"""From a completion request to canvas rows, and from sampled ids to the text of a choice. Independent of HTTP."""

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adlm.apps.server.completion_request import CompletionRequest, RequestError
from adlm.apps.server.jobs import CanvasRow
from adlm.canvas import MAX_HOLE, check_holes, encode_canvas, num_masks
from adlm.config.schema import Sampling
from adlm.errors import UserError
from adlm.language_model import LanguageModel, SamplingOptions
from adlm.sampling.samplers import sampler_of
from adlm.tokens import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
SMALLEST_CHANCE = 1e-45  # of a float32
LONGEST_HOLE = len("[MASK*1000000]")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, besides the length of the model."""

    rows: int = 16
    """Prompts times n."""
    steps: int = 1024
    body_bytes: int = 1 << 18


@dataclass(frozen=True)
class Choice:
    """How the text of one choice is cut out of its row."""

    tokenizer: Tokenizer
    first: int
    """Position in the row where the returned text begins."""
    end: int
    """Position where it ends."""
    num_masks: int
    ends_at_eos: bool
    """Whether an eos token ends the text: not where something given follows."""
    drops_space: bool
    """Whether the prompt ends with a space, which is then not repeated."""
    stops: Sequence[str]

    def text(self, ids: Sequence[int], complete: bool) -> tuple[str, str | None]:
        """The text of the ids of a row, or of its first ids, and the finish reason if it is complete or stopped.

        Of an incomplete row, the end that later ids may change is left out: a part of a character, or of a stop text.
        """
        ids, stopped = self._until_eos(ids)
        text = self._decode(ids)
        found = [text.index(stop) for stop in self.stops if stop in text]
        if found:
            return text[: min(found)], "stop"
        if complete or stopped:
            return text, "stop" if stopped else "length"
        text = text.rstrip("\ufffd")
        return text[: len(text) - self._num_held_back(text)], None

    def logprobs(self, ids: Sequence[int], chance: Sequence[float]) -> dict[str, Any]:
        """OpenAI's `logprobs` of the tokens that begin in the returned text, which may end at eos or at a stop text.

        A token that continues a character begins where the character does.
        """
        text, _ = self.text(ids, complete=True)
        ids, _ = self._until_eos(ids)
        whole = self._decode(ids)
        positions = [i for i in range(self.first, min(len(ids), self.end)) if ids[i] not in self.tokenizer.special_ids]
        offsets = {position: _num_equal(self._decode(ids[:position]), whole) for position in positions}
        if text != whole:  # cut at a stop text
            offsets = {position: offset for position, offset in offsets.items() if offset < len(text)}
        return {
            "tokens": [self.tokenizer.decode([ids[position]]) for position in offsets],
            "token_logprobs": [math.log(max(chance[position], SMALLEST_CHANCE)) for position in offsets],
            "top_logprobs": None,
            "text_offset": list(offsets.values()),
        }

    def _until_eos(self, ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """The ids before the first eos that follows a token of the completion, and whether there is one."""
        special, eos = self.tokenizer.special_ids, self.tokenizer.vocabulary.eos_id
        if not self.ends_at_eos:
            return ids, False
        has_text = self.first > 0 and any(index not in special for index in ids[: self.first])
        for position in range(self.first, len(ids)):
            if ids[position] == eos and has_text:
                return ids[:position], True
            has_text = has_text or ids[position] not in special
        return ids, False

    def _decode(self, ids: Sequence[int]) -> str:
        """The text from `first` to `end`, decoded with what is before it: some decoders omit a leading space."""
        before = self.tokenizer.decode(ids[: self.first], special_tokens=False)
        text = self.tokenizer.decode(ids[: self.end], special_tokens=False)
        if self.first and not text.startswith(before):  # a character divided between prompt and completion
            text, before = self.tokenizer.decode(ids[self.first : self.end], special_tokens=False), ""
        text = text[len(before) :]
        return text.removeprefix(" ") if self.drops_space else text

    def _num_held_back(self, text: str) -> int:
        """Length of the longest end of the text that a stop text may begin with."""
        ends = (length for stop in self.stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(ends, default=0)


def _num_equal(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


@dataclass(frozen=True)
class CompletionPlan:
    """A checked request: its rows and how their texts are made."""

    rows: list[CanvasRow]
    choices: list[Choice]
    seed: int
    prompt_tokens: int
    completion_tokens: int
    streams_prefix: bool
    """Whether text can be streamed before a row is complete: the sampler never changes a revealed token."""


def plan_completion(lm: LanguageModel, request: CompletionRequest, limits: Limits) -> CompletionPlan:
    """The rows of a request. Everything about it is checked here; wrong requests are user errors."""
    num_rows = len(request.prompts) * request.n
    if num_rows > limits.rows:
        raise RequestError(
            f"{num_rows} completions (prompts times n) are more than {limits.rows}; send several requests",
            "prompt" if len(request.prompts) > limits.rows else "n",
        )
    sampling = _sampling(lm, request, limits)
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    made = [_choice(lm, prompt, request) for prompt in request.prompts]
    rows = [CanvasRow(tuple(ids), start, seed, 0, sampling) for _, ids, start in made]
    try:
        for row in rows:
            row.check(lm)
    except UserError as error:  # about the sampler, or about given tokens after a mask
        raise _request_error(error, "suffix" if request.suffix else "prompt") from None
    return CompletionPlan(
        rows=[
            CanvasRow(row.ids, row.start, seed, number * request.n + index, sampling)
            for number, row in enumerate(rows)
            for index in range(request.n)
        ],
        choices=[choice for choice, _, _ in made for _ in range(request.n)],
        seed=seed,
        prompt_tokens=sum(len(ids) - start - choice.num_masks for choice, ids, start in made),
        completion_tokens=sum(choice.num_masks for choice, _, _ in made) * request.n,
        streams_prefix=lm.method.causal or not sampler_of(sampling).remasks,
    )


def _sampling(lm: LanguageModel, request: CompletionRequest, limits: Limits) -> Sampling:
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "sampler", "steps")}
    options: SamplingOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    try:
        sampling = lm.sampling(**options)
    except UserError as error:
        raise _request_error(error, None) from None
    if sampling.steps > limits.steps:
        raise RequestError(
            f"steps {sampling.steps} must be at most {limits.steps} on this server; give fewer steps", "steps"
        )
    return sampling


def _request_error(error: UserError, param: str | None) -> RequestError:
    """The error about the sampling option that its message begins with, if any, else about `param`."""
    option = re.match(r"sampling\.(\w+)", str(error))
    if option is not None:
        param = option[1] if option[1] in CompletionRequest.model_fields else None
    return RequestError(str(error).replace("sampling.", ""), param)  # fields of a request have no section


def checked_num_masks(field: str, text: str) -> int:
    """Number of masks in the holes of a field; RequestError if something in it looks like a hole and is none."""
    try:
        check_holes(text)
    except UserError as error:
        raise RequestError(error, field) from None
    return num_masks(text)


def check_size(lm: LanguageModel, text: str, param: str) -> None:
    """Refuse a text that has more characters than the tokens of the model can hold, before it is tokenized."""
    assert lm.tokenizer is not None, "checked when the model was loaded"
    most = lm.config.length * max(LONGEST_HOLE, lm.tokenizer.longest_symbol)
    if len(text) > most:
        raise RequestError(
            f"{param} has {len(text):,} characters, and the model's length of {lm.config.length} tokens holds at most "
            f"{most:,}; shorten it",
            param,
        )


def _choice(lm: LanguageModel, prompt: str, request: CompletionRequest) -> tuple[Choice, list[int], int]:
    """How the text of a prompt's choices is made, the ids of their row and where its text starts."""
    tokenizer, suffix = lm.tokenizer, request.suffix or ""
    assert tokenizer is not None, "checked when the model was loaded"
    has_holes = checked_num_masks("prompt", prompt) > 0
    if has_holes and (suffix or request.max_tokens is not None):
        name = "suffix" if suffix else "max_tokens"
        raise RequestError(f"{name} cannot be combined with a prompt that has holes ([MASK*N]); leave it out", name)
    if checked_num_masks("suffix", suffix):
        raise RequestError(
            "suffix contains a hole ([MASK*N]); give the whole text with its holes as the prompt", "suffix"
        )
    num = num_masks(prompt) if has_holes else request.max_tokens or DEFAULT_MAX_TOKENS
    if num > lm.config.length:
        # num_masks does not count larger holes exactly
        amount = f"more than {MAX_HOLE:,}" if has_holes and num > MAX_HOLE else num
        raise RequestError(
            f"{amount} tokens to fill in are too many for the model's length {lm.config.length}; give fewer",
            "prompt" if has_holes else "max_tokens",
        )
    for name, text in (("prompt", prompt), ("suffix", suffix)):
        check_size(lm, text, name)
    try:
        ids = encode_canvas(prompt if has_holes else f"{prompt}[MASK*{num}]{suffix}", tokenizer)
    except UserError as error:
        raise RequestError(error, None if suffix else "prompt") from None
    prefix = lm.bos_prefix(ids)
    ids = prefix + ids
    if len(ids) > lm.config.length:
        raise RequestError(
            f"prompt, suffix and completion have {len(ids)} tokens, and the model's length is {lm.config.length}; "
            "shorten the prompt or lower max_tokens",
            "prompt" if has_holes else None,
        )
    first = len(prefix) if has_holes else ids.index(lm.mask_id)
    end = len(ids) if has_holes else first + num
    drops_space = not has_holes and tokenizer.joins_spaces and prompt.endswith(" ")
    ends_at_eos = not has_holes and not suffix
    choice = Choice(tokenizer, first, end, num, ends_at_eos, drops_space, request.stops)
    return choice, ids, len(prefix)
