"""From a completion request to canvas rows, and from sampled ids to the text of a choice. Independent of HTTP."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from adlm.apps.server.bodies import ChatRequest, CompletionRequest, GenerationFields
from adlm.apps.server.constraints import check_transitions, completion_constraint, hole_constraints
from adlm.canvas import (
    HOLE,
    MAX_HOLE,
    Canvas,
    Hole,
    check_holes,
    has_constrained_hole,
    has_unknown_length,
    hole_name,
    make_canvas,
    num_masks,
)
from adlm.chat.template import encode_chat, end_of_message
from adlm.constraints.kinds import ANY_TEXT, Constraint
from adlm.errors import UserError
from adlm.language_model import LanguageModel, Run
from adlm.sampling.samplers import sampler_of
from adlm.sampling.settings import SampleSettings, SamplingOptions
from adlm.tokens import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
SMALLEST_CHANCE = 1e-45  # of a float32
MAX_OPEN_HOLES = 16
"""Constrained holes of unknown length in a request to a model of whole rows."""
LONGEST_HOLE = len("[MASK*1000000..1000000:]") + 32
COMPLETION = "completion"
"""The name of the hole between prompt and suffix."""


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
    end_id: int | None = None
    """Another token than eos that ends the text: the end of a message."""
    open: frozenset[int] = frozenset()
    """The positions in holes of unknown length: the first eos ends the hole, the others fill what is left of it."""
    constrained: bool = False
    """Whether every hole has a constraint, so that the text ends by itself."""

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
            ends = {position for position in self.open if position + 1 not in self.open}
            stopped = stopped or (complete and self.constrained) or (bool(ends) and ends <= self._left_out(ids))
            return text, "stop" if stopped else "length"
        text = text.rstrip("\ufffd")
        begun = (length for stop in self.stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return text[: len(text) - max(begun, default=0)], None

    def num_sampled(self, ids: Sequence[int]) -> int:
        """Tokens that were sampled for the text of the first ids of a row, of a model that ends with the text."""
        before_end, stopped = self._until_eos(ids)
        left_out = self._left_out(ids)
        num_filled = sum(position - 1 in left_out for position in left_out)  # after the eos that was drawn
        return min(self.num_masks, len(before_end) + stopped - self.first) - num_filled

    def logprobs(self, ids: Sequence[int], chance: Sequence[float]) -> dict[str, Any]:
        """OpenAI's `logprobs` of the tokens that begin in the returned text, which may end at eos or at a stop text.

        A token that continues a character begins where the character does.
        """
        text, _ = self.text(ids, complete=True)
        ids, _ = self._until_eos(ids)
        whole = self._decode(ids)
        positions = [i for i in range(self.first, min(len(ids), self.end)) if ids[i] not in self.tokenizer.special_ids]
        before = {position: self._decode(ids[:position]) for position in positions}
        offsets = {position: len(commonprefix([part, whole])) for position, part in before.items()}  # noqa: RUF071
        if text != whole:  # cut at a stop text
            offsets = {position: offset for position, offset in offsets.items() if offset < len(text)}
        return {
            "tokens": [self.tokenizer.decode([ids[position]]) for position in offsets],
            "token_logprobs": [math.log(max(chance[position], SMALLEST_CHANCE)) for position in offsets],
            "top_logprobs": None,
            "text_offset": list(offsets.values()),
        }

    def _left_out(self, ids: Sequence[int]) -> set[int]:
        """The positions from the first eos to the end of each hole of unknown length."""
        left_out: set[int] = set()
        for position in sorted(position for position in self.open if position < len(ids)):
            if ids[position] == self.tokenizer.vocabulary.eos_id or position - 1 in left_out:
                left_out.add(position)
        return left_out

    def _until_eos(self, ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """The ids before the first eos that follows a token of the completion, and whether there is one."""
        special, eos = self.tokenizer.special_ids, self.tokenizer.vocabulary.eos_id
        if not self.ends_at_eos:
            return ids, False
        has_text = self.first > 0 and any(index not in special for index in ids[: self.first])
        for position in range(self.first, len(ids)):
            if ids[position] in (eos, self.end_id) and has_text:
                return ids[:position], True
            has_text = has_text or ids[position] not in special
        return ids, False

    def _decode(self, ids: Sequence[int]) -> str:
        """The text from `first` to `end`, decoded with what is before it: some decoders omit a leading space."""
        left_out = self._left_out(ids)

        def decode(start: int, stop: int) -> str:
            kept = [ids[position] for position in range(start, min(stop, len(ids))) if position not in left_out]
            return self.tokenizer.decode(kept, special_tokens=False)

        before, text = decode(0, self.first), decode(0, self.end)
        if self.first and not text.startswith(before):  # a character divided between prompt and completion
            text, before = decode(self.first, self.end), ""
        text = text[len(before) :]
        return text.removeprefix(" ") if self.drops_space else text


@dataclass(frozen=True)
class CompletionPlan:
    """A checked request: its rows and how their texts are made."""

    rows: list[Run]
    """One row each."""
    choices: list[Choice]
    seed: int
    prompt_tokens: int
    completion_tokens: int
    streams_prefix: bool
    """Whether text can be streamed before a row is complete: the sampler never changes a revealed token."""


def plan_completion(lm: LanguageModel, request: CompletionRequest, limits: Limits) -> CompletionPlan:
    """The rows of a request. Everything about it is checked here; the `option` of a user error is its field."""
    num_rows = len(request.prompts) * request.n
    if num_rows > limits.rows:
        raise UserError(
            f"{num_rows} completions (prompts times n) are more than {limits.rows}; send several requests",
            "prompt" if len(request.prompts) > limits.rows else "n",
        )

    field, constraints = _constraints(request)
    field = field or "min_tokens"

    def asked() -> dict[str, Any]:
        texts = [_text_with_holes(lm, prompt, request, COMPLETION in constraints) for prompt in request.prompts]
        is_constrained = bool(constraints) or any(map(has_constrained_hole, texts))
        # holes may become as short as one token; longer ones are chosen to fit
        num_open = sum(has_unknown_length(mark) for text in texts for mark in HOLE.finditer(text))
        if lm.open_id is None and num_open > MAX_OPEN_HOLES:
            raise UserError(
                f"{num_open} holes of unknown length are more than {MAX_OPEN_HOLES}, each of which this model reads at "
                "several lengths; give their lengths, or send several requests",
                "prompt",
            )
        first = {""} if request.min_tokens else ()  # a hole that begins a text begins after bos then
        shortest = [HOLE.sub("[MASK]", text) for text in texts] if is_constrained else texts
        canvas = lm.canvas(shortest, first, closed=any(map(num_masks, request.prompts)))
        length = canvas.ids.shape[1]
        if length > lm.config.length:
            raise UserError(
                f"prompt, suffix and completion have {length} tokens, and the model's length is {lm.config.length}; "
                "shorten the prompt or lower max_tokens",
                "prompt" if any(map(num_masks, request.prompts)) else "",
            )
        if is_constrained:
            return {"texts": texts, "constraints": constraints}
        return {"canvas": canvas, **_least_length(lm, canvas, request)}

    def choice(number: int, row: Run) -> Choice:
        return _choice(lm, request.prompts[number], row, request, set(constraints))

    return _plan(lm, request, limits, asked, choice, lambda error: _field_of(error, request, field))


def _least_length(lm: LanguageModel, canvas: Canvas, request: CompletionRequest) -> dict[str, Any]:
    """The fields of SampleSettings by which completions have at least `min_tokens`.

    A model of whole rows always fills in all tokens before a suffix.
    """
    if not request.min_tokens or (request.suffix and lm.open_id is None):
        return {}
    holes = []
    for row, ids in enumerate(canvas.ids.tolist()):
        masks = [position for position, index in enumerate(ids) if index in (lm.mask_id, lm.open_id)]
        hole = Hole(COMPLETION, masks[0], len(masks), after_space=False, is_open=True, least=request.min_tokens)
        holes.append((row, hole))
    return {"holes": holes, "constraints": {COMPLETION: ANY_TEXT}}


def _constraints(request: CompletionRequest) -> tuple[str | None, dict[str, Constraint]]:
    """The field of a request that has constraints, and these by the names of holes."""
    found = completion_constraint(request)
    if request.constraints is not None:
        if found is not None:
            raise UserError(f"{found[0]} and constraints are two constraints on one text; leave one out", "constraints")
        return "constraints", hole_constraints(request.constraints)
    if found is None:
        return None, {}
    if any(map(num_masks, request.prompts)):
        raise UserError(
            f"{found[0]} constrains what follows the prompt, and this prompt has holes; name them, such as "
            "[MASK*8:day], and give constraints",
            found[0],
        )
    return found[0], {COMPLETION: found[1]}


def plan_chat(lm: LanguageModel, request: ChatRequest, limits: Limits) -> CompletionPlan:
    """The rows of a chat request: the conversation by the model's chat template, then masks for the reply."""
    tokenizer, template, num_asked = lm.require_tokenizer(), lm.chat_template, request.max_tokens
    if template is None:
        raise UserError("chat is not supported: this model has no chat template; use /v1/completions", "model")
    if request.n > limits.rows:
        raise UserError(f"n {request.n} is more than {limits.rows} completions; send several requests", "n")
    if num_asked is not None and request.max_completion_tokens is not None:
        raise UserError("max_tokens and max_completion_tokens are given; leave max_tokens out", "max_tokens")
    num_asked = request.max_completion_tokens if num_asked is None else num_asked
    messages = [{"role": message.role, "content": message.text} for message in request.messages]
    for message in messages:
        check_size(lm, message["content"], "messages")
    end_id, found = end_of_message(tokenizer, template), completion_constraint(request)

    def asked() -> dict[str, Any]:
        ids = encode_chat(tokenizer, template, messages)
        bos = lm.bos_prefix(ids)
        room = lm.config.length - len(bos) - len(ids)
        if room < 1:
            raise UserError(
                f"the messages have {len(ids)} tokens and leave none of the model's {lm.config.length} for the reply; "
                "shorten them",
                "messages",
            )
        if num_asked is not None and num_asked > room:
            name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
            raise UserError(
                f"{name} {num_asked} is more than the {room} of the model's {lm.config.length} tokens that the "
                "messages leave; lower it or shorten them",
                name,
            )
        num, start, least = num_asked or room, len(bos) + len(ids), request.min_tokens or 0
        check_least(least, num)
        canvas = make_canvas([[*bos, *ids, *[lm.mask_id] * num]], lm.fill_id, [len(bos)])
        if found is None and not least:
            return {"canvas": canvas}
        hole = Hole(COMPLETION, start, num, after_space=False, is_open=True, least=least, end_id=end_id)
        constraint = ANY_TEXT if found is None else found[1]
        return {"canvas": canvas, "holes": [(0, hole)], "constraints": {COMPLETION: constraint}}

    def choice(number: int, row: Run) -> Choice:
        ids = row.canvas.ids[0].tolist()
        first, num = ids.index(lm.mask_id), ids.count(lm.mask_id)
        return Choice(
            tokenizer, first, len(ids), num, True, False, request.stops, end_id, constrained=found is not None
        )

    def field_of(error: UserError) -> str | None:
        own = "min_tokens" if found is None else found[0]
        return own if error.option == "constraints" else error.option

    return _plan(lm, request, limits, asked, choice, field_of)


def _plan(
    lm: LanguageModel,
    request: GenerationFields,
    limits: Limits,
    asked: Callable[[], dict[str, Any]],
    choice: Callable[[int, Run], Choice],
    field_of: Callable[[UserError], str | None],
) -> CompletionPlan:
    """`asked` gives the fields of SampleSettings that say what to fill in, a text or a row of a canvas for each prompt,
    and `choice(prompt, row)` how the text of a row is made."""
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "sampler", "steps")}
    options: SamplingOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    try:
        sampling = lm.sampling(**options)
        if sampling.steps > limits.steps:
            raise UserError(
                f"steps {sampling.steps} must be at most {limits.steps} on this server; give fewer steps", "steps"
            )
        run = lm.plan(SampleSettings(sampling, **asked(), num=request.n, seed=seed, batch=1))
        check_transitions(run.holes, lm.config.model.block_length or None)
    except UserError as error:
        message = str(error).replace("sampling.", "").replace(f"hole {COMPLETION}", "the completion")
        raise UserError(message, field_of(error)) from None
    rows = list(run.batches(1))
    choices = [choice(number // request.n, row) for number, row in enumerate(rows)]
    first_choices, starts = choices[:: request.n], [start for row in rows[:: request.n] for start in row.canvas.starts]
    lengths = [row.canvas.ids.shape[1] for row in rows[:: request.n]]
    return CompletionPlan(
        rows=rows,
        choices=choices,
        seed=seed,
        prompt_tokens=sum(lengths) - sum(starts) - sum(choice.num_masks for choice in first_choices),
        completion_tokens=sum(choice.num_masks for choice in choices),
        streams_prefix=lm.method.cached or not sampler_of(sampling).remasks,
    )


def _field_of(error: UserError, request: CompletionRequest, constrained_by: str | None) -> str | None:
    """The field of the request that an error of the library is about; None if it is about several."""
    option = "canvas" if error.option is None else error.option.removeprefix("sampling.")
    if option == "constraints":
        return constrained_by
    if option == "texts":  # what cannot be encoded
        return None if request.suffix else "prompt"
    if option == "canvas":  # given tokens after a mask
        return "suffix" if request.suffix else "prompt"
    return option if option in CompletionRequest.model_fields else None


def checked_num_masks(field: str, text: str) -> int:
    """Number of masks in the holes of a field; UserError if something in it looks like a hole and is none."""
    num = num_masks(text)
    if num <= MAX_HOLE:  # more are refused by their number
        check_holes(text, field)
    return num


def check_least(least: int | None, most: int | None) -> None:
    if least and most is not None and least > most:
        raise UserError(f"min_tokens {least} is more than max_tokens {most}; exchange them", "min_tokens")


def check_size(lm: LanguageModel, text: str, field: str) -> None:
    """Refuse a text that has more characters than the tokens of the model can hold, before it is tokenized."""
    most = lm.config.length * max(LONGEST_HOLE, lm.require_tokenizer().longest_symbol)
    if len(text) > most:
        raise UserError(
            f"{field} has {len(text):,} characters, and the model's length of {lm.config.length} tokens holds at most "
            f"{most:,}; shorten it",
            field,
        )


def _text_with_holes(lm: LanguageModel, prompt: str, request: CompletionRequest, is_constrained: bool) -> str:
    """The prompt if it has holes, else prompt, hole and suffix; checked before it is tokenized.

    A constrained completion has a name and, at most, as many tokens as were asked for.
    """
    suffix = request.suffix or ""
    has_holes = checked_num_masks("prompt", prompt) > 0
    if has_holes and (suffix or request.max_tokens is not None or request.min_tokens):
        field = "suffix" if suffix else "max_tokens" if request.max_tokens is not None else "min_tokens"
        raise UserError(f"{field} cannot be combined with a prompt that has holes ([MASK*N]); leave it out", field)
    if checked_num_masks("suffix", suffix):
        raise UserError("suffix contains a hole ([MASK*N]); give the whole text with its holes as the prompt", "suffix")
    num = num_masks(prompt) if has_holes else request.max_tokens or DEFAULT_MAX_TOKENS
    if num > lm.config.length:
        amount = num if num <= MAX_HOLE else f"more than {MAX_HOLE:,}"
        raise UserError(
            f"{amount} tokens to fill in are too many for the model's length {lm.config.length}; give fewer",
            "prompt" if has_holes else "max_tokens",
        )
    check_least(request.min_tokens, num if not has_holes else None)
    for field, text in (("prompt", prompt), ("suffix", suffix)):
        check_size(lm, text, field)
    if has_holes:
        return prompt
    if is_constrained:
        return f"{prompt}[MASK*{request.min_tokens or ''}..{num}:{COMPLETION}]{suffix}"
    return f"{prompt}[MASK*{'..' if suffix and lm.open_id is not None else ''}{num}]{suffix}"


def _choice(lm: LanguageModel, prompt: str, row: Run, request: CompletionRequest, constrained: set[str]) -> Choice:
    """How the text of a row is made; `constrained` are the names of holes with constraints."""
    tokenizer, [ids], [start] = lm.require_tokenizer(), row.canvas.ids.tolist(), row.canvas.starts
    masks = [position for position, index in enumerate(ids) if index in (lm.mask_id, lm.open_id)]
    num, has_holes = len(masks), num_masks(prompt) > 0
    first = start if has_holes else masks[0]
    return Choice(
        tokenizer,
        first=first,
        end=len(ids) if has_holes else first + num,
        num_masks=num,
        ends_at_eos=not has_holes and not request.suffix,
        drops_space=not has_holes and tokenizer.joins_spaces and prompt.endswith(" "),
        stops=request.stops,
        open=frozenset(position for position in masks if ids[position] == lm.open_id),
        constrained=bool(constrained) and (not has_holes or {*map(hole_name, HOLE.finditer(prompt))} <= constrained),
    )
