"""The JSON of a request's body, refused with the field that is wrong before it is compared with a schema."""

import json
from collections.abc import Callable, Collection, Coroutine
from json import JSONDecodeError
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from adlm.apps.server.completion_request import CompletionRequest
from adlm.apps.server.errors_json import ApiError, invalid_json
from adlm.apps.server.studio.studio_request import BoundRequest, TraceRequest
from adlm.config.options import suggestion

FIELDS = {  # of the bodies by path
    "/v1/completions": tuple(CompletionRequest.model_fields),
    "/v1/trace": tuple(TraceRequest.model_fields),
    "/v1/bound": tuple(BoundRequest.model_fields),
}
MAX_FIELDS = 64
"""Fields of an object that are looked at: more than any request has, so an object with more is refused for these."""
MAX_DIGITS = 40


def parse_body(body: bytes, fields: Collection[str]) -> Any:
    """The value of a body whose object may have these fields. An unknown field is refused before others are read."""
    try:
        value = json.loads(body, object_pairs_hook=_checked_object, parse_int=_capped)
    except (JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_json() from None
    for name in value if isinstance(value, dict) else ():
        if name not in fields:
            name = name[:60]
            raise ApiError(400, f"{name} is not a field of this request{suggestion(name, fields)}", name)
    return value


def _capped(digits: str) -> int:
    return 10**MAX_DIGITS if len(digits) > MAX_DIGITS else int(digits)


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in pairs[:MAX_FIELDS]:
        if name in checked:
            raise ApiError(400, f"{name[:60]} is given twice; give it once", name[:60])
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise ApiError(400, f"{name[:60]} has more than {MAX_DIGITS} digits; give a smaller number", name[:60])
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isascii():
                _check_unicode(name, text)
        checked[name] = value
    return checked


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ascii(text[error.start])
        message = f"{name[:60]} contains {surrogate}, a lone surrogate, which is not valid Unicode text; remove it"
        raise ApiError(400, message, name[:60]) from None


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
