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
from adlm.apps.server.bodies import ApiError, CompletionRequest, GenerationFields
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

    id_prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        worker: BatchWorker,
        body: GenerationFields,
        plan: CompletionPlan,
        monitor: PrometheusMonitor,
        deadline: float,
        client: str,
    ):
        self.worker, self.body, self.plan, self.monitor, self.deadline = worker, body, plan, monitor, deadline
        self.wants_logprobs = isinstance(body, CompletionRequest) and body.logprobs is not None
        self.ends_early = worker.lm.method.cached  # nothing after the end of a text has been sampled then
        self.header = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.piece_object if body.stream else self.whole_object,
            "created": int(time.time()),
            "model": worker.name,
        }
        self.num_sampled = [choice.num_masks for choice in plan.choices]
        """Tokens sampled for each row; fewer than asked for where the text ended early."""
        self._updates, notify = queue_from_thread()
        streams = plan.streams_prefix and (body.stream or self.ends_early)
        self.job = Job(plan.rows, notify, streams=streams, client=client)

    async def updates(self) -> AsyncGenerator[tuple[RowUpdate, str, str | None], None]:
        """Updates of unfinished texts, with text and finish reason. At the end the job is cancelled, if rows are left.

        A text is finished when its row is complete, or at its eos or stop text; with log-probabilities, which only
        complete rows have, not before.
        """
        finished, num_incomplete = set[int](), len(self.plan.rows)
        try:
            while len(finished) < len(self.plan.rows):
                update: RowUpdate = await next_result(self._updates, self.deadline)
                if update.error is not None:
                    raise ApiError(503, update.error)
                row, choice = update.row, self.plan.choices[update.row]
                num_incomplete -= update.complete
                if row in finished:
                    continue
                text, reason = choice.text(update.ids, update.complete)
                if not update.complete and self.wants_logprobs:
                    reason = None
                if reason is not None:
                    finished.add(row)
                    if self.ends_early:
                        self.num_sampled[row] = choice.num_sampled(update.ids)
                yield update, text, reason
            self.monitor.count_tokens(self.worker.name, self.plan.prompt_tokens, sum(self.num_sampled))
        finally:
            if num_incomplete:
                self.worker.cancel(self.job)

    async def respond(self) -> Response:
        """The whole response."""
        choices: dict[int, dict[str, Any]] = {}
        async for update, text, reason in self.updates():
            if reason is not None:
                choices[update.row] = self._choice(update.row, text, reason, await self._logprobs(update))
        ordered = [choices[row] for row in sorted(choices)]
        return JSONResponse({**self.header, "choices": ordered, "usage": self._usage(), "seed": self.plan.seed})

    async def stream(self) -> AsyncGenerator[str, None]:
        """Server-sent events: pieces of each choice's text from left to right, as far as they are final."""
        sent = [""] * len(self.plan.rows)
        updates = self.updates()
        try:
            for row in range(len(sent)):
                if (first := self._first_piece(row)) is not None:
                    yield self._event([first])
            async for update, text, reason in updates:
                row = update.row
                piece = text.removeprefix(sent[row])
                if piece or reason is not None:
                    sent[row] = text
                    yield self._event([self._piece(row, piece, reason, await self._logprobs(update))])
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
        if not self.wants_logprobs or update.chance is None:
            return None
        return await asyncio.to_thread(self.plan.choices[update.row].logprobs, update.ids, update.chance)

    def _choice(self, row: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _piece(self, row: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A choice of a stream: text that follows what was sent before."""
        return self._choice(row, text, reason, logprobs)

    def _first_piece(self, row: int) -> dict[str, Any] | None:
        """What a stream sends before any text."""
        return None

    def _usage(self) -> dict[str, int]:
        prompt, completion = self.plan.prompt_tokens, sum(self.num_sampled)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChatCompletion(Completion):
    """The same in the shape of OpenAI's chat API: a message of the assistant instead of a text."""

    id_prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, row: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": row, "message": message, "logprobs": None, "finish_reason": reason}

    def _piece(self, row: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": row, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}

    def _first_piece(self, row: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": row, "delta": delta, "logprobs": None, "finish_reason": None}
