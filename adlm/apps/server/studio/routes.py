"""The routes of the studio: its files, from a fixed table, and the endpoints that the page calls."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from adlm import __version__
from adlm.apps.server.batching import BatchWorker
from adlm.apps.server.completion import Limits
from adlm.apps.server.errors_json import ERROR_RESPONSES, ApiError, user_error
from adlm.apps.server.json_body import JsonRoute
from adlm.apps.server.studio.studio_request import BoundRequest, TraceRequest
from adlm.apps.server.studio.studio_run import describe_model, plan_bound, plan_trace
from adlm.apps.server.submission import EventStream, RunningTask, client_of, respond_unless_gone
from adlm.apps.trace.page import page_template, read_asset
from adlm.errors import UserError
from adlm.registry import SAMPLER_SUMMARIES

HTML, CSS, SCRIPT, SVG = "text/html", "text/css", "text/javascript", "image/svg+xml"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class PageFile:
    """One file of the page in memory: no request leads to a file."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def respond(self, request: Request) -> Response:
        headers = {"etag": self.etag, "cache-control": "no-cache", "content-security-policy": POLICY}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _own(name: str, media_type: str) -> PageFile:
    return PageFile(files("adlm.apps.server.studio").joinpath("page", name).read_bytes(), media_type)


def _shared(name: str, media_type: str) -> PageFile:
    """A file that is also part of every trace page."""
    return PageFile(read_asset(name).encode(), media_type)


@cache
def page_files() -> dict[str, PageFile]:
    """The files of the page by path."""
    return {
        "/": _own("studio.html", HTML),
        "/studio/studio.css": _own("studio.css", CSS),
        "/studio/theme.js": _own("theme.js", SCRIPT),
        "/studio/studio.js": _own("studio.js", SCRIPT),
        "/studio/connection.js": _own("connection.js", SCRIPT),
        "/studio/heat.js": _own("heat.js", SCRIPT),
        "/studio/icon.svg": _own("icon.svg", SVG),
        "/studio/viewer.css": _shared("viewer.css", CSS),
        "/studio/viewer.js": _shared("viewer.js", SCRIPT),
        "/studio/trace-page.html": PageFile(page_template().encode(), "text/plain"),  # filled in by the page
    }


def add_page(app: FastAPI) -> None:
    """Add the files of the page, which need no key: they contain nothing of the models."""
    for path, file in page_files().items():
        app.add_api_route(path, _responder(file), methods=["GET"], include_in_schema=False)


def _responder(file: PageFile) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        return file.respond(request)

    return respond


def studio_router(
    workers: Mapping[str, BatchWorker], worker_of: Callable[[str], BatchWorker], limits: Limits, timeout: float
) -> APIRouter:
    """The endpoints: what can be chosen, a sampling run step by step, and the bound of a text."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/v1/studio", responses=ERROR_RESPONSES)
    async def describe() -> dict[str, Any]:
        """The models with their samplers and defaults, what each sampler does, and the largest number of steps."""
        models = [describe_model(worker.name, worker.lm) for worker in workers.values()]
        return {
            "version": __version__,
            "max_steps": limits.steps,
            "models": models,
            "sampler_summaries": SAMPLER_SUMMARIES,
        }

    @router.post("/v1/trace", responses=ERROR_RESPONSES)
    async def trace(body: TraceRequest, request: Request) -> Response:
        """Fill in the holes of a text as server-sent events: `begin`, one `step` for every change, `end`."""
        worker = worker_of(body.model)
        try:
            plan, work = await asyncio.to_thread(plan_trace, worker, body, limits)
        except UserError as error:
            raise user_error(error) from None
        request.state.log_fields.update(
            model=worker.name, prompt_tokens=plan.prompt_tokens, completion_tokens=plan.completion_tokens
        )
        deadline = time.monotonic() + timeout
        return EventStream(_events(RunningTask(worker, work, deadline, client_of(request))), deadline)

    @router.post("/v1/bound", responses=ERROR_RESPONSES)
    async def bound(body: BoundRequest, request: Request) -> Response:
        """The bound on -log p(text), in nats, for the text and for each of its tokens."""
        worker = worker_of(body.model)
        try:
            row, work = await asyncio.to_thread(plan_bound, worker, body)
        except UserError as error:
            raise user_error(error) from None
        request.state.log_fields.update(model=worker.name, prompt_tokens=row.x.shape[1])
        task = RunningTask(worker, work, time.monotonic() + timeout, client_of(request))
        return await respond_unless_gone(request, _bound(worker.name, task))

    return router


async def _events(task: RunningTask) -> AsyncGenerator[str, None]:
    results = task.results()
    try:
        async for event in results:
            yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.as_json())}\n\n"
    finally:
        await results.aclose()  # type: ignore[attr-defined]


async def _bound(model: str, task: RunningTask) -> Response:
    answer: dict[str, Any] = {}
    async for result in task.results():
        answer = result.get("bound", answer)
    return JSONResponse({"model": model, **answer})
