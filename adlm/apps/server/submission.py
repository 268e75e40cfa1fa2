"""From a request handler to the worker of a model and back: submission, results, deadline, disconnected clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

from adlm.apps.server.batching import BatchWorker, QueueFull, ShuttingDown
from adlm.apps.server.errors_json import ApiError
from adlm.apps.server.jobs import Job, Task
from adlm.apps.server.request_guard import NOT_ANSWERED

Result = TypeVar("Result")
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


async def next_result(results: asyncio.Queue[Result], deadline: float) -> Result:
    """The next result, or 503 at the deadline (of `time.monotonic`)."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await results.get()
    except TimeoutError:
        raise ApiError(503, "the request timed out; try fewer tokens or steps, or later") from None


class RunningTask:
    """A task in the queue of a worker; it is submitted here."""

    def __init__(self, worker: BatchWorker, work: Callable[[], Iterator[Any]], deadline: float, client: str):
        self._worker, self._deadline = worker, deadline
        loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[tuple[Any, str | None]] = asyncio.Queue()

        def put(result: Any, error: str | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._results.put_nowait, (result, error))

        self._task = Task(work, lambda result: put(result, None), lambda error: put(None, error), client=client)
        submit(worker, self._task)

    async def results(self) -> AsyncIterator[Any]:
        """What the work yields, until the consumer stops: None is the end, which the work yields last."""
        try:
            while True:
                result, error = await next_result(self._results, self._deadline)
                if error is not None:
                    raise ApiError(503, error)
                if result is None:
                    return
                yield result
        finally:
            self._worker.cancel(self._task)


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
