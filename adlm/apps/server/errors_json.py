"""Errors in the JSON shape of OpenAI's API: one message, a type and the status."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from adlm.apps.server.completion_request import RequestError
from adlm.errors import UserError, printable

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


def user_error(error: UserError) -> ApiError:
    """Status 400 with the message, and with the field where the error names one."""
    return ApiError(400, str(error), error.param if isinstance(error, RequestError) else None)


def invalid_json() -> ApiError:
    return ApiError(400, "the body is not valid JSON")


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first problem of a body that does not match its schema, in one line without the value."""
    problem = problems[0]
    place = [str(part) for part in problem["loc"][1:]]
    name = place[0] if place else None
    if name is None:
        return ApiError(400, "the body must be a JSON object, sent with content-type application/json")
    if problem["type"] == "extra_forbidden":  # in an object of the body; those of the body itself are refused before
        return ApiError(400, f"{'.'.join(place)[:60]} is not a field of this request", name)
    if problem["type"] == "missing":
        return ApiError(400, f"{name} is missing", name)
    detail = str(problem["msg"])
    return ApiError(400, REMEDIES.get(name, f"{name}: {detail[:1].lower()}{detail[1:]}"), name)
