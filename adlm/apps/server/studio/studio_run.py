"""What the studio computes on a worker's thread: a sampling run as trace events, and the bound of a text by token.

Independent of HTTP.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from adlm.apps.server.batching import BatchWorker
from adlm.apps.server.completion import CompletionPlan, Limits, check_size, checked_num_masks, plan_completion
from adlm.apps.server.completion_request import CompletionRequest, RequestError
from adlm.apps.server.studio.studio_request import BoundRequest, TraceRequest
from adlm.apps.trace.recording import TraceInfo, pieces_to_dict, trace_events
from adlm.apps.trace.token_text import token_bytes
from adlm.canvas import num_masks
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.likelihood.token_nats import TokenNats, TokenRow, draw_token_nats, mean_token_nats, token_row
from adlm.methods.inputs import check_sampler
from adlm.registry import SAMPLERS
from adlm.sampling.frame import Frame

Work = Callable[[], Iterator[Any]]
"""Results for the client, then None at the end."""


def describe_model(name: str, lm: LanguageModel) -> dict[str, Any]:
    """What the page needs to know to offer a model."""
    sampling = lm.config.sampling
    return {
        "name": name,
        "method": lm.config.method,
        "anchored": lm.method.anchored,
        "causal": lm.method.causal,
        "exact": lm.method.exact,
        "length": lm.config.length,
        "samplers": [sampler for sampler in SAMPLERS if _works_with(lm, sampler)],
        "sampling": {"sampler": sampling.sampler, "steps": sampling.steps, "temperature": sampling.temperature},
    }


def plan_trace(worker: BatchWorker, request: TraceRequest, limits: Limits) -> tuple[CompletionPlan, Work]:
    """The plan of a sampling run and its work, the events of its trace. Wrong requests are user errors.

    It samples the same row as a completion of the same text, options and seed, and so the same tokens.
    """
    if not checked_num_masks("text", request.text):
        raise RequestError("the text has no hole; write [MASK] for one token, or [MASK*4] for four", "text")
    if num_masks(request.text) <= worker.lm.config.length:  # else the number of masks is the better reason
        check_size(worker.lm, request.text, "text")
    options = {name: value for name, value in request.model_dump().items() if value is not None and name != "text"}
    try:
        plan = plan_completion(worker.lm, CompletionRequest(prompt=request.text, **options), limits)
    except RequestError as error:
        raise RequestError(error, "text" if error.param == "prompt" else error.param) from None
    [row] = plan.rows
    info = TraceInfo(worker.name, row.sampling.sampler, row.sampling.steps, plan.seed)

    def work() -> Iterator[Any]:
        frames = (_cut(worker.lm, frame, len(row.ids)) for frame in worker.frames([row]))
        yield from trace_events(worker.lm, frames, info)
        yield None

    return plan, work


def plan_bound(worker: BatchWorker, request: BoundRequest) -> tuple[TokenRow, Work]:
    """The row of a text and the work that scores it. Wrong requests are user errors."""
    lm = worker.lm
    assert lm.tokenizer is not None, "checked when the model was loaded"
    check_size(lm, request.text, "text")
    if num_masks(request.text):
        raise RequestError("the text has holes; fill them in before it is scored", "text")
    try:
        row = token_row(lm.method, request.text, lm.tokenizer)
    except UserError as error:
        raise RequestError(error, "text") from None

    def work() -> Iterator[Any]:
        drawn = []
        for part in draw_token_nats(lm.method, lm.network, row, request.samples, request.seed):
            drawn.append(part)
            yield {"samples": sum(map(len, drawn))}
        yield {"bound": _bound_to_dict(lm, row, mean_token_nats(lm.method, row, torch.cat(drawn)))}
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
    names = ("ids", "revealed", "remasked", "chance", "read")
    cut = replace(frame, **{name: getattr(frame, name)[:, :length] for name in names})
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
