"""The HTTP application: OpenAI's completions and chat over the batch workers, the studio, models, health, metrics."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from adlm import __version__
from adlm.apps.server.batching import BatchWorker
from adlm.apps.server.bodies import (
    ERROR_RESPONSES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    JsonRoute,
    error_response,
    validation_error,
)
from adlm.apps.server.completion import CompletionPlan, Limits, plan_chat, plan_completion
from adlm.apps.server.constraints import PlanThreads
from adlm.apps.server.guard import PrometheusMonitor, RequestGuard
from adlm.apps.server.responses import (
    ChatCompletion,
    Completion,
    EventStream,
    client_of,
    respond_unless_gone,
    submit,
)
from adlm.apps.server.studio import page_files, studio_router
from adlm.errors import UserError
from adlm.language_model import NO_TOKENIZER, LanguageModel
from adlm.models.transformer import num_parameters

CPU_BATCH, GPU_BATCH = 4, 16
LARGE = 50_000_000  # parameters


@dataclass(frozen=True)
class ServerSettings:
    """How models are served."""

    batch: int | None = None
    """Rows that the network reads at once; by default those of `default_batch`. All calls have this many, so one row
    alone costs as much as `batch`."""
    max_waiting: int = 256
    """Rows that may wait for each model."""
    timeout: float = 300.0
    """Seconds until a request is given up."""
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)


def default_batch(lm: LanguageModel) -> int:
    """On a CPU, a row of a large network takes all the time there is: more rows only make each of them slower."""
    if lm.device.type == "cuda":
        return GPU_BATCH
    return CPU_BATCH if num_parameters(lm.network) < LARGE else 1


def make_app(models: Mapping[str, LanguageModel], settings: ServerSettings) -> FastAPI:
    """The application for models by name. Its workers start and stop with it; `app.state.workers` are the workers."""
    for name, lm in models.items():
        if lm.tokenizer is None:
            raise UserError(f"{name}: {NO_TOKENIZER}")
    monitor, created, threads = PrometheusMonitor(), int(time.time()), PlanThreads()
    workers = {
        name: BatchWorker(name, lm, settings.batch or default_batch(lm), settings.max_waiting, monitor)
        for name, lm in models.items()
    }

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for worker in workers.values():
            worker.start()
        yield
        for worker in workers.values():
            worker.stop()
        for worker in workers.values():
            await asyncio.to_thread(worker.join)
        threads.stop()

    app = FastAPI(title="adlm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.workers = workers
    app.add_middleware(
        RequestGuard,
        monitor=monitor,
        api_key=settings.api_key,
        max_body_bytes=settings.limits.body_bytes,
        without_key=frozenset({"/health", *page_files()}),
    )
    _report_errors_as_json(app)

    def worker_of(model: str) -> BatchWorker:
        if model not in workers:
            raise ApiError(404, f"there is no model {model[:100]!r}; this server has {', '.join(workers)}", "model")
        return workers[model]

    def describe(model: str) -> dict[str, Any]:
        takes = workers[model].lm.method.constrained
        return {"id": model, "object": "model", "created": created, "owned_by": "adlm", "structured_outputs": takes}

    async def answer(
        kind: type[Completion], worker: BatchWorker, body: GenerationFields, plan: CompletionPlan, request: Request
    ) -> Response:
        request.state.log_fields.update(
            model=worker.name,
            rows=len(plan.rows),
            prompt_tokens=plan.prompt_tokens,
            completion_tokens=plan.completion_tokens,
        )
        completion = kind(worker, body, plan, monitor, time.monotonic() + settings.timeout, client_of(request))
        submit(worker, completion.job)
        if body.stream:
            return EventStream(completion.stream(), completion.deadline)
        return await respond_unless_gone(request, completion.respond())

    @app.post("/v1/completions", responses=ERROR_RESPONSES)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Complete or infill texts. Holes in the prompt, [MASK*4], are filled in and the whole text is returned."""
        worker = worker_of(body.model)
        given = (plan_completion, worker.lm, body, settings.limits)
        plan = await threads.run(body.is_constrained, client_of(request), *given)
        return await answer(Completion, worker, body, plan, request)

    @app.post("/v1/chat/completions", responses=ERROR_RESPONSES)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Reply to a conversation, by the chat template of the model's files; refused if it has none."""
        worker = worker_of(body.model)
        given = (plan_chat, worker.lm, body, settings.limits)
        plan = await threads.run(body.is_constrained, client_of(request), *given)
        return await answer(ChatCompletion, worker, body, plan, request)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(name) for name in workers]}

    @app.get("/v1/models/{model:path}", responses=ERROR_RESPONSES)
    async def get_model(model: str) -> dict[str, Any]:
        return describe(worker_of(model).name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """FastAPI's own page loads scripts from elsewhere."""
        return RedirectResponse("/openapi.json")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(monitor.as_text(), media_type=CONTENT_TYPE_LATEST)

    for path, file in page_files().items():
        app.add_api_route(path, file.respond, methods=["GET"], include_in_schema=False)
    app.include_router(studio_router(workers, worker_of, settings.limits, settings.timeout, threads))
    return app


def _report_errors_as_json(app: FastAPI) -> None:
    """All errors in OpenAI's shape; a body that does not match the schema has status 400, also in /openapi.json."""

    @app.exception_handler(ApiError)
    async def report(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(UserError)
    async def report_user_error(request: Request, error: UserError) -> Response:
        return error_response(ApiError(400, str(error), error.option))

    @app.exception_handler(RequestValidationError)
    async def report_validation(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def report_http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # of the JSON parser, wrapped by FastAPI
            return error_response(error.__cause__)
        return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))

    make_schema = app.openapi

    def schema_without_422() -> dict[str, Any]:
        schema = make_schema()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = schema_without_422  # type: ignore[method-assign]
