"""The choices of a hole, compared on the thread of a model: turn by turn, beside the batches of other requests."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from adlm.apps.server.batching import BatchWorker
from adlm.apps.server.bodies import ApiError, ComparisonRequest
from adlm.apps.server.completion import check_size
from adlm.errors import UserError
from adlm.likelihood.choices import score_choices
from adlm.likelihood.settings import ChoiceSettings

ROWS_A_TURN = 16


class ConsumerLeft(Exception):
    """Nobody waits for the result."""


def plan_choice(worker: BatchWorker, request: ComparisonRequest) -> Callable[[], Iterator[Any]]:
    """The work that compares choices. Wrong requests are user errors, some of them when the work begins."""
    lm, settings = worker.lm, ChoiceSettings(request.normalise, None, None, request.samples, request.seed, ROWS_A_TURN)
    check_size(lm, request.text, "text")
    for choice in request.choices:
        check_size(lm, choice, "choices")

    def score(report: Callable[[int], None]) -> dict[str, Any]:
        [found] = score_choices(
            lm.method, lm.network, lm.require_tokenizer(), [request.text], request.choices, settings, report
        )
        names = ("choices", "probabilities", "stderr", "log_scores", "log_score_stderr", "num_tokens", "is_bound")
        return {"best": found.best, **{name: getattr(found, name) for name in names}}

    def work() -> Iterator[Any]:
        try:
            yield from in_turns(score)
        except UserError as error:
            yield ApiError(400, str(error), error.option)
        yield None

    return work


def in_turns(work: Callable[[Callable[[int], None]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The progress that a function reports, and then its result. It runs between two `next` of the consumer only.

    The function has a thread of its own, which waits after each report. If the consumer leaves, it ends there.
    """
    results, turns, has_left = SimpleQueue[Any](), threading.Semaphore(0), threading.Event()

    def report(done: int) -> None:
        results.put({"done": done})
        turns.acquire()
        if has_left.is_set():
            raise ConsumerLeft

    def run() -> None:
        turns.acquire()
        try:
            results.put(work(report))
        except BaseException as error:  # noqa: BLE001 -- raised again by the consumer
            results.put(error)

    thread = threading.Thread(target=run, name="adlm-turns", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            turns.release()
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            yield result
            if "done" not in result:
                return
    finally:
        has_left.set()
        turns.release()
        thread.join()
