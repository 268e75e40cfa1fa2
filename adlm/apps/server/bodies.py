"""The bodies of requests: their fields and limits, how their JSON is read, and errors in the shape of OpenAI's API.

Independent of models.
"""

import json
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from json import JSONDecodeError
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from adlm.canvas import has_constrained_hole
from adlm.config.options import suggestion
from adlm.errors import printable

Text: TypeAlias = Annotated[str, Field(strict=True)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]

MAX_PROMPTS, MAX_MESSAGES, MAX_SAMPLES, MAX_HOLES, MAX_COMPARED = 128, 1024, 1024, 64, 64


class Body(BaseModel):
    """Refuses other fields, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored."""


class SamplingFields(Body):
    """The fields of every request that samples."""

    model: Text = Field(max_length=1000)
    temperature: Number | None = Field(default=None, ge=0)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1, description="By default random.")
    sampler: Text | None = Field(default=None, max_length=100, description="Sampling algorithm (default: the model's).")
    steps: int | None = Field(default=None, ge=1, description="Number of sampling steps (default: the model's).")


class NamedSchema(Body):
    json_schema: dict[str, Any] = Field(alias="schema")
    name: Text | None = Field(default=None, max_length=100, description="Ignored.")
    description: Text | None = Field(default=None, description="Ignored.")
    strict: bool | None = Field(default=None, description="Ignored: a schema is always obeyed.")


class ResponseFormat(Body):
    """OpenAI's form of a constraint."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(default=None, description="With type json_schema.")


class TextConstraint(Body):
    """What a text must satisfy: one of these."""

    regex: Text | None = Field(default=None, description="A regular expression that matches the whole text.")
    choice: list[Text] | None = Field(default=None, description="The texts that it may be.")
    json_schema: dict[str, Any] | Text | None = Field(
        default=None, alias="json", description="A JSON schema, or its text."
    )


class StructuredOutputs(TextConstraint):
    """vLLM's form of a constraint."""

    json_object: bool | None = Field(default=None, description="Whether the text is a JSON object.")


class ConstraintFields(BaseModel):
    """Constraints on the completion. A request has at most one."""

    response_format: ResponseFormat | None = Field(default=None, description="OpenAI's form.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="vLLM's form.")
    guided_json: dict[str, Any] | Text | None = Field(default=None, description="vLLM's older forms.")
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None

    @property
    def is_constrained(self) -> bool:
        return any(getattr(self, name) is not None for name in ConstraintFields.model_fields)


HoleName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,31}$")]
HoleConstraints: TypeAlias = Annotated[dict[HoleName, TextConstraint], Field(min_length=1, max_length=MAX_HOLES)]


class GenerationFields(SamplingFields, ConstraintFields):
    """The fields that completions and chat have in common."""

    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0, description="Tokens before the end of the text, at least.")
    n: int = Field(default=1, ge=1, description="Completions of each prompt.")
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Text | None = Field(default=None, description="Ignored.")
    frequency_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = Field(
        default=None, description="Not supported."
    )
    presence_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = Field(
        default=None, description="Not supported."
    )
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        default=None, description="Not supported."
    )

    @property
    def is_constrained(self) -> bool:
        return bool(self.min_tokens) or super().is_constrained

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationFields):
    """Fields of OpenAI's completions API, vLLM's constraints, `sampler`, `steps`. Other fields are refused."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        default="", description="One or several texts; [MASK], [MASK*4] and [MASK*..4] are holes to fill in."
    )
    suffix: Text | None = Field(default=None, description="Text after the completion: infilling.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens to fill in after the prompt (default: 16).")
    logprobs: int | None = Field(
        default=None, ge=0, le=5, description="If given, the log-probability each token was drawn with."
    )
    constraints: HoleConstraints | None = Field(
        default=None, description="What named holes of the prompt, such as [MASK*8:day], must be filled with."
    )
    echo: Literal[False] | None = Field(default=None, description="Not supported.")
    best_of: Literal[1] | None = Field(default=None, description="Not supported.")

    @property
    def is_constrained(self) -> bool:
        """Whether texts must satisfy something: holes of one name have the same text, and some have a least length."""
        return self.constraints is not None or super().is_constrained or any(map(has_constrained_hole, self.prompts))

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    role: Literal["system", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PROMPTS)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationFields):
    """Fields of OpenAI's chat API, vLLM's constraints, `sampler` and `steps`. Other fields are refused."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(
        default=None, ge=1, description="The longest reply (default: as long as fits the model)."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens.")
    logprobs: Literal[False] | None = Field(default=None, description="Not supported.")


class TraceRequest(SamplingFields):
    """A text with holes to fill in, and how."""

    text: Text = Field(description="A text with holes: [MASK] is one token, [MASK*4] four, [MASK*..4] up to four.")
    constraints: HoleConstraints | None = Field(
        default=None, description="What named holes, such as [MASK*8:day], must be filled with."
    )


class BoundRequest(Body):
    """A text without holes to score."""

    model: Text = Field(max_length=1000)
    text: Text = Field(min_length=1)
    samples: int = Field(
        default=128, ge=1, le=MAX_SAMPLES, description="Noisy versions of the text; one for autoregressive models."
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


class ComparisonRequest(Body):
    """Texts for the hole of a text, to be compared."""

    model: Text = Field(max_length=1000)
    text: Text = Field(min_length=1, description="A text with one hole, [MASK], of any length.")
    choices: Annotated[list[Text], Field(min_length=2, max_length=MAX_COMPARED)]
    normalise: Literal["none", "tokens", "characters", "prior"] = "none"
    samples: int = Field(
        default=64,
        ge=2,
        le=MAX_SAMPLES,
        multiple_of=2,
        description="Masked versions of each text; exact models need none.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
REMEDIES = {
    "prompt": "prompt must be a string or a list of 1 to 128 strings; token ids are not supported",
    "stop": "stop must be a text of 1 to 1000 characters, or a list of up to 4 of them",
    "messages": "messages must be a list of objects with role (system, user or assistant) and content, a text",
    "response_format": 'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
    '"json_schema": {"schema": {...}}}',
    "structured_outputs": 'structured_outputs must be {"json": {...}}, {"regex": "..."}, {"choice": ["...", ...]} or '
    '{"json_object": true}',
    "guided_json": "guided_json must be a JSON schema: an object, or its text",
    "guided_choice": "guided_choice must be a list of texts",
    "constraints": 'constraints must be an object with the names of holes and, for each, {"regex": "..."}, '
    '{"choice": ["...", ...]} or {"json": {...}}',
    "echo": "echo is not supported",
    "best_of": "best_of is not supported; use n",
    "logit_bias": "logit_bias is not supported",
    "frequency_penalty": "frequency_penalty is not supported",
    "presence_penalty": "presence_penalty is not supported",
}

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in (
        (400, "Wrong request"),
        (401, "Wrong API key"),
        (403, "Host header of another machine"),
        (404, "No such model"),
        (408, "Head of the request not received in time"),
        (413, "Body too large"),
        (429, "Queue full; see Retry-After"),
        (503, "Timeout or shutdown"),
    )
}


class ApiError(Exception):
    """An error with its HTTP status. `param` is the field of the request that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, printable(message), headers
        self.param = None if param is None else printable(param)

    def as_json(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": None}}


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.as_json(), error.status, dict(error.headers or {}))


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first problem of a body that does not match its schema, in one line without the value."""
    problem = problems[0]
    place = [str(part) for part in problem["loc"][1:]]
    name = place[0] if place else None
    if name is None:
        return ApiError(400, "the body must be a JSON object, sent with content-type application/json")
    if problem["type"] == "extra_forbidden":  # in an object of the body; those of the body itself are refused before
        return ApiError(400, f"{'.'.join(place)[:60]} is not a field of this request", name)
    if problem["type"] == "missing" and len(place) == 1:
        return ApiError(400, f"{name} is missing", name)
    detail = str(problem["msg"])
    return ApiError(400, REMEDIES.get(name, f"{name}: {detail[:1].lower()}{detail[1:]}"), name)


FIELDS = {  # of the bodies by path
    "/v1/completions": tuple(CompletionRequest.model_fields),
    "/v1/chat/completions": tuple(ChatRequest.model_fields),
    "/v1/trace": tuple(TraceRequest.model_fields),
    "/v1/bound": tuple(BoundRequest.model_fields),
    "/v1/choose": tuple(ComparisonRequest.model_fields),
}
MAX_FIELDS = 256
"""Fields of one object: more than any request has, and as many as a JSON schema may have."""
MAX_DIGITS = 40
OTHER_NAMES: dict[Any, str] = {"max_completion_tokens": "max_tokens"}  # of chat, in completions


def parse_body(body: bytes, fields: Collection[str]) -> Any:
    """The value of a body whose object may have these fields. An unknown field is refused before others are read."""

    def parse_int(digits: str) -> int:
        return 10**MAX_DIGITS if len(digits) > MAX_DIGITS else int(digits)

    try:
        value = json.loads(body, object_pairs_hook=_checked_object, parse_int=parse_int)
    except (JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    for name in value if isinstance(value, dict) else ():
        if name not in fields:
            name = name[:60]
            raise ApiError(
                400, f"{name} is not a field of this request{suggestion(OTHER_NAMES.get(name) or name, fields)}", name
            )
    return value


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS:
        name = pairs[0][0][:60]
        raise ApiError(400, f"the object with {name} has {len(pairs):,} fields; give at most {MAX_FIELDS}", name)
    checked: dict[str, Any] = {}
    for name, value in pairs:
        if name in checked:
            raise ApiError(400, f"{name[:60]} is given twice; give it once", name[:60])
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and abs(each) >= 10**MAX_DIGITS:
                raise ApiError(400, f"{name[:60]} has more than {MAX_DIGITS} digits; give a smaller number", name[:60])
            if isinstance(each, str) and (surrogate := re.search("[\ud800-\udfff]", each)):
                found = f"{surrogate[0]!a}, a lone surrogate"
                message = f"{name[:60]} contains {found}, which is not valid Unicode text; remove it"
                raise ApiError(400, message, name[:60])
        checked[name] = value
    return checked


class JsonRequest(Request):
    async def json(self) -> Any:
        return parse_body(await self.body(), FIELDS.get(self.url.path, ()))


class JsonRoute(APIRoute):
    """A route whose body is parsed by `parse_body`. FastAPI wraps what it raises in an HTTPException."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
