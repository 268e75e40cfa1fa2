"""The studio: the files of its page, from a fixed table, and the endpoints that the page calls.

A worker's thread computes a sampling run as trace events, and the bound of a text by token.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from adlm import __version__
from adlm.apps.server.batching import BatchWorker
from adlm.apps.server.bodies import (
    ERROR_RESPONSES,
    ApiError,
    BoundRequest,
    ComparisonRequest,
    CompletionRequest,
    JsonRoute,
    TraceRequest,
)
from adlm.apps.server.choosing import plan_choice
from adlm.apps.server.completion import CompletionPlan, Limits, check_size, checked_num_masks, plan_completion
from adlm.apps.server.constraints import PlanThreads
from adlm.apps.server.responses import EventStream, client_of, respond_unless_gone, submit_task
from adlm.apps.trace.page import page_template, read_asset
from adlm.apps.trace.recording import TraceInfo, pieces_to_dict, trace_events
from adlm.canvas import num_masks
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.likelihood.measurement import TokenNats, TokenRow, draw_token_nats, mean_token_nats, token_row
from adlm.methods.inputs import check_sampler
from adlm.registry import SAMPLER_SUMMARIES, SAMPLERS
from adlm.sampling.frame import Frame
from adlm.tokens import token_bytes

Work = Callable[[], Iterator[Any]]
"""Results for the client, then None at the end."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class PageFile:
    """One file of the page in memory: no request leads to a file."""

    content: bytes
    media_type: str

    async def respond(self, request: Request) -> Response:
        etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        headers = {"etag": etag, "cache-control": "no-cache", "content-security-policy": POLICY}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


@cache
def page_files() -> dict[str, PageFile]:
    """The files of the page by path. They need no key: they contain nothing of the models."""
    folder = files("adlm.apps.server").joinpath("page")
    own = {
        name: PageFile(folder.joinpath(name).read_bytes(), TYPES[Path(name).suffix])
        for name in (
            "studio.html",
            "studio.css",
            "theme.js",
            "studio.js",
            "connection.js",
            "constraints.js",
            "heat.js",
            "icon.svg",
        )
    }
    shared = {  # with every trace page
        name: PageFile(read_asset(name).encode(), TYPES[Path(name).suffix]) for name in ("viewer.css", "viewer.js")
    }
    template = PageFile(page_template().encode(), "text/plain")  # filled in by the page
    found = {"/": own.pop("studio.html"), "/studio/trace-page.html": template}
    return found | {f"/studio/{name}": file for name, file in (own | shared).items()}


def studio_router(
    workers: Mapping[str, BatchWorker],
    worker_of: Callable[[str], BatchWorker],
    limits: Limits,
    timeout: float,
    threads: PlanThreads,
) -> APIRouter:
    """The endpoints: what can be chosen, a sampling run step by step, the bound of a text, choices compared."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/v1/studio", responses=ERROR_RESPONSES)
    async def describe() -> dict[str, Any]:
        """The models with their samplers and defaults, what each sampler does, and the largest number of steps."""
        models = [describe_model(worker.name, worker.lm) for worker in workers.values()]
        return {
            "version": __version__,
            "max_steps": limits.steps,
            "models": models,
            "choose": True,
            "sampler_summaries": SAMPLER_SUMMARIES,
        }

    @router.post("/v1/trace", responses=ERROR_RESPONSES)
    async def trace(body: TraceRequest, request: Request) -> Response:
        """Fill in the holes of a text as server-sent events: `begin`, one `step` for every change, `end`."""
        worker = worker_of(body.model)
        given = (plan_trace, worker, body, limits)
        plan, work = await threads.run(True, client_of(request), *given)
        request.state.log_fields.update(
            model=worker.name, prompt_tokens=plan.prompt_tokens, completion_tokens=plan.completion_tokens
        )
        deadline = time.monotonic() + timeout
        return EventStream(_events(submit_task(worker, work, deadline, client_of(request))), deadline)

    @router.post("/v1/bound", responses=ERROR_RESPONSES)
    async def bound(body: BoundRequest, request: Request) -> Response:
        """The bound on -log p(text), in nats, for the text and for each of its tokens."""
        worker = worker_of(body.model)
        row, work = await asyncio.to_thread(plan_bound, worker, body)
        request.state.log_fields.update(model=worker.name, prompt_tokens=row.x.shape[1])
        results = submit_task(worker, work, time.monotonic() + timeout, client_of(request))
        return await respond_unless_gone(request, _last(worker.name, results))

    @router.post("/v1/choose", responses=ERROR_RESPONSES)
    async def choose(body: ComparisonRequest, request: Request) -> Response:
        """How probable each choice is in the hole of a text."""
        worker = worker_of(body.model)
        work = await asyncio.to_thread(plan_choice, worker, body)
        request.state.log_fields.update(model=worker.name, rows=len(body.choices))
        results = submit_task(worker, work, time.monotonic() + timeout, client_of(request))
        return await respond_unless_gone(request, _last(worker.name, results))

    return router


async def _events(results: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    try:
        async for event in results:
            yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.as_json())}\n\n"
    finally:
        await results.aclose()


async def _last(model: str, results: AsyncGenerator[Any, None]) -> Response:
    """The last result of a task; those before are its progress."""
    answer: dict[str, Any] = {}
    async for result in results:
        answer = result
    return JSONResponse({"model": model, **answer})


def describe_model(name: str, lm: LanguageModel) -> dict[str, Any]:
    """What the page needs to know to offer a model."""
    sampling = lm.config.sampling
    return {
        "name": name,
        "method": lm.config.method,
        "anchored": lm.method.anchored,
        "left_to_right": lm.method.cached and lm.config.model.hole_id is None,
        "exact": lm.method.exact,
        "length": lm.config.length,
        "constraints": lm.method.constrained,
        "samplers": [sampler for sampler in SAMPLERS if _works_with(lm, sampler)],
        "sampling": {"sampler": sampling.sampler, "steps": sampling.steps, "temperature": sampling.temperature},
    }


def plan_trace(worker: BatchWorker, request: TraceRequest, limits: Limits) -> tuple[CompletionPlan, Work]:
    """The plan of a sampling run and its work, the events of its trace. Wrong requests are user errors.

    It samples the same row as a completion of the same text, options and seed, and so the same tokens.
    """
    if not checked_num_masks("text", request.text):
        raise UserError("the text has no hole; write [MASK] for one token, or [MASK*4] for four", "text")
    if num_masks(request.text) <= worker.lm.config.length:  # else the number of masks is the better reason
        check_size(worker.lm, request.text, "text")
    options = {name: value for name, value in dict(request).items() if value is not None and name != "text"}
    try:
        plan = plan_completion(worker.lm, CompletionRequest(prompt=request.text, **options), limits)
    except UserError as error:
        raise UserError(error, "text" if error.option == "prompt" else error.option) from None
    [row] = plan.rows
    info = TraceInfo(worker.name, row.sampling.sampler, row.sampling.steps, plan.seed)

    def work() -> Iterator[Any]:
        frames = (_cut(worker.lm, frame, row.canvas.ids.shape[1]) for frame in worker.frames([row]))
        yield from trace_events(worker.lm, frames, info, holes=row.holes)
        yield None

    return plan, work


def plan_bound(worker: BatchWorker, request: BoundRequest) -> tuple[TokenRow, Work]:
    """The row of a text and the work that scores it. Wrong requests are user errors."""
    lm = worker.lm
    assert lm.tokenizer is not None, "checked when the model was loaded"
    check_size(lm, request.text, "text")
    if num_masks(request.text):
        raise UserError("the text has holes; fill them in before it is scored", "text")
    try:
        row = token_row(lm.method, request.text, lm.tokenizer)
    except UserError as error:
        raise UserError(error, "text") from None

    def work() -> Iterator[Any]:
        drawn = []
        for part in draw_token_nats(lm.method, lm.network, row, request.samples, request.seed):
            drawn.append(part)
            yield {"samples": sum(map(len, drawn))}
        yield _bound_to_dict(lm, row, mean_token_nats(lm.method, row, torch.cat(drawn)))
        yield None

    return row, work


def _bound_to_dict(lm: LanguageModel, row: TokenRow, bound: TokenNats) -> dict[str, Any]:
    ids = row.x[0].tolist()
    return {
        "exact": lm.method.exact,
        "nats": bound.total,
        "nats_stderr": bound.total_stderr,
        "num_tokens": bound.tokens,
        "nats_per_token": bound.per_token,
        "perplexity": min(bound.perplexity, 1e300),  # JSON has no infinity
        "ids": ids,
        "token_nats": [float(f"{value:.4g}") for value in bound.nats.tolist()],
        "token_stderr": [float(f"{value:.3g}") for value in bound.stderr.tolist()],
        "hidden": sorted(lm.tokenizer.special_ids) if lm.tokenizer else [],
        **pieces_to_dict({index: token_bytes(lm.tokenizer, index) for index in sorted(set(ids))}),
    }


def _cut(lm: LanguageModel, frame: Frame, length: int) -> Frame:
    """The frame without the padding of its batch; the time of causal models is the share of positions that are left."""
    names = ("ids", "revealed", "remasked", "chance", "read", "open", "place")
    cut = replace(frame, **{name: value[:, :length] for name in names if (value := getattr(frame, name)) is not None})
    if not lm.method.causal:
        return cut
    share = (cut.ids == lm.mask_id).double().mean(dim=1).to(frame.t)
    return replace(cut, t=torch.where(frame.t < 1, share, frame.t))


def _works_with(lm: LanguageModel, sampler: str) -> bool:
    try:
        check_sampler(lm.method, replace(lm.config.sampling, sampler=sampler))
    except UserError:
        return False
    return True
