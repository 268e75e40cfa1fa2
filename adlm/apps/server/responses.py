"""From a request handler to the worker of a model and back: submission, results, deadline, disconnected clients."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from adlm.apps.server.batching import BatchWorker, Job, QueueFull, RowUpdate, ShuttingDown, Task
from adlm.apps.server.bodies import ApiError, CompletionRequest
from adlm.apps.server.completion import CompletionPlan
from adlm.apps.server.guard import NOT_ANSWERED, PrometheusMonitor

AFTER_DEADLINE_SECONDS = 30.0
"""How long after its deadline a stream may wait for a client that does not read."""


def submit(worker: BatchWorker, job: Job | Task) -> None:
    """Append to the worker's queue; 429 if it is full, 503 at shutdown."""
    try:
        worker.submit(job)
    except QueueFull as error:
        raise ApiError(429, str(error), headers={"retry-after": str(error.retry_after)}) from None
    except ShuttingDown as error:
        raise ApiError(503, str(error)) from None


def client_of(request: Request) -> str:
    """The address of the client; those behind one proxy are one client."""
    return request.client.host if request.client is not None else ""


def queue_from_thread() -> tuple[asyncio.Queue[Any], Callable[[Any], None]]:
    """A queue of the running loop, and a function with which other threads put results into it."""
    loop, results = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def put(result: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(results.put_nowait, result)

    return results, put


async def next_result(results: asyncio.Queue[Any], deadline: float) -> Any:
    """The next result, or 503 at the deadline (of `time.monotonic`)."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await results.get()
    except TimeoutError:
        raise ApiError(503, "the request timed out; try fewer tokens or steps, or later") from None


def submit_task(
    worker: BatchWorker, work: Callable[[], Iterator[Any]], deadline: float, client: str
) -> AsyncGenerator[Any, None]:
    """What the work of a task yields, until the consumer stops: None is the end, which the work yields last."""
    results, put = queue_from_thread()
    task = Task(work, put, lambda error: put(ApiError(503, error)), client=client)
    submit(worker, task)

    async def until_the_end() -> AsyncGenerator[Any, None]:
        try:
            while (result := await next_result(results, deadline)) is not None:
                if isinstance(result, ApiError):
                    raise result
                yield result
        finally:
            worker.cancel(task)

    return until_the_end()


class EventStream(StreamingResponse):
    """Server-sent events until the deadline, also if the client stays connected and does not read them."""

    def __init__(self, events: AsyncGenerator[str, None], deadline: float):
        super().__init__(events, media_type="text/event-stream")
        self._events, self._deadline = events, deadline

    async def stream_response(self, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._deadline + AFTER_DEADLINE_SECONDS - time.monotonic()):
                await super().stream_response(send)
        await self._events.aclose()


async def respond_unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The response; if the client disconnects before, the coroutine is cancelled."""
    answering = asyncio.create_task(answer)
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=NOT_ANSWERED)  # nobody reads it
        return answering.result()
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Completion:
    """One completion request from submission to response."""

    def __init__(
        self,
        worker: BatchWorker,
        body: CompletionRequest,
        plan: CompletionPlan,
        monitor: PrometheusMonitor,
        deadline: float,
        client: str,
    ):
        self.worker, self.body, self.plan, self.monitor, self.deadline = worker, body, plan, monitor, deadline
        self.header = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self.header["model"] = worker.name
        self._updates, notify = queue_from_thread()
        self.job = Job(plan.rows, notify, streams=body.stream and plan.streams_prefix, client=client)

    async def updates(self) -> AsyncGenerator[RowUpdate, None]:
        """Updates until all rows are complete. The job is cancelled if that does not happen."""
        num_left = len(self.plan.rows)
        try:
            while num_left:
                update: RowUpdate = await next_result(self._updates, self.deadline)
                if update.error is not None:
                    raise ApiError(503, update.error)
                num_left -= update.complete
                yield update
            self.monitor.count_tokens(self.worker.name, self.plan.prompt_tokens, self.plan.completion_tokens)
        finally:
            if num_left:
                self.worker.cancel(self.job)

    async def respond(self) -> Response:
        """The whole response."""
        choices: dict[int, dict[str, Any]] = {}
        async for update in self.updates():
            if update.complete:
                text, reason = self.plan.choices[update.row].text(update.ids, complete=True)
                choices[update.row] = self._choice(update.row, text, reason, await self._logprobs(update))
        ordered = [choices[row] for row in sorted(choices)]
        return JSONResponse({**self.header, "choices": ordered, "usage": self._usage(), "seed": self.plan.seed})

    async def stream(self) -> AsyncGenerator[str, None]:
        """Server-sent events: pieces of each choice's text from left to right, as far as they are final."""
        sent, finished = [""] * len(self.plan.rows), set[int]()
        updates = self.updates()
        try:
            async for update in updates:
                row = update.row
                if row in finished:
                    continue
                text, reason = self.plan.choices[row].text(update.ids, update.complete)
                piece = text.removeprefix(sent[row])
                if not update.complete and self.body.logprobs is not None:
                    reason = None  # the log-probabilities come with the last piece, from the complete row
                if reason is not None:
                    finished.add(row)
                if piece or reason is not None:
                    sent[row] = text
                    logprobs = await self._logprobs(update) if update.complete else None
                    yield self._event([self._choice(row, piece, reason, logprobs)])
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield self._event([], usage=self._usage())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.as_json())}\n\n"
        finally:
            await updates.aclose()

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self.header, 'choices': choices, 'seed': self.plan.seed, **more})}\n\n"

    async def _logprobs(self, update: RowUpdate) -> dict[str, Any] | None:
        if self.body.logprobs is None or update.chance is None:
            return None
        return await asyncio.to_thread(self.plan.choices[update.row].logprobs, update.ids, update.chance)

    @staticmethod
    def _choice(row: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        prompt, completion = self.plan.prompt_tokens, self.plan.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
