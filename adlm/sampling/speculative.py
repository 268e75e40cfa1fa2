"""Draft and verify: several tokens a network call, with the distribution of the causal model, exactly.

A block-causal network is two models in one: its clean copy predicts the next token, and an open block of masks predicts
several tokens at once, each by itself or, with a chain, each after the one before. The second drafts and the first
verifies. Draft d_i, drawn from q_i, is accepted with probability min(1, p_i(d_i) / q_i(d_i)), where p_i is the causal
model's distribution after the drafts before it.
At the first draft that is not accepted a token is drawn from max(0, p_i - q_i), normalised; if all are accepted, from
the causal model's next distribution. So every token has the causal distribution, whatever the drafts are; good drafts
only save calls. Drafts are verified in the same call that makes the next ones: one set for every number of drafts that
may be accepted, of which the right one is then used.

Shapes: B rows of L tokens, k drafts, V symbols.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.sampling.frame import Ending, Frame, first_frame
from adlm.sampling.rng import RowRng, categorical
from adlm.sampling.shaping import TokenShaping, shape

Item = TypeVar("Item")


@dataclass(frozen=True)
class Drafts:
    """Tokens that the causal model has not seen yet."""

    tokens: Tensor
    """(B, k)"""
    chances: Tensor
    """(B, k, V), the distributions q that they were drawn from."""

    @classmethod
    def none(cls, num_rows: int, num_drafts: int, mask_id: int, num_symbols: int, device: torch.device) -> "Drafts":
        """Masks, which the causal model never accepts."""
        tokens = torch.full((num_rows, num_drafts), mask_id, device=device)
        return cls(tokens, F.one_hot(tokens, num_symbols).float())


@dataclass(frozen=True)
class Verified:
    """The outcome of one call: drafts that were accepted, one more token, and the next drafts."""

    num_accepted: Tensor
    """(B,), from 0 to k."""
    token: Tensor
    """(B,), the token after them."""
    chance: Tensor
    """(B, k + 1), the causal model's probabilities of the accepted drafts and of the token after them."""
    drafts: Drafts


@dataclass(frozen=True)
class DraftedText:
    """What is known of all rows, and the drafts of the tokens after it."""

    ids: Tensor
    """(B, L), masks where nothing is known."""
    chance: Tensor
    """(B, L), the causal model's probability of each token; 1 at given ones, 0 at masks."""
    known: Tensor
    """(B,), the number of known tokens before the first mask."""
    drafts: Drafts

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.chance, self.known, self.drafts.tokens, self.drafts.chances

    @classmethod
    def of(cls, ids: Tensor, chance: Tensor, known: Tensor, tokens: Tensor, chances: Tensor) -> "DraftedText":
        """From its `tensors`."""
        return cls(ids, chance, known, Drafts(tokens, chances))


@dataclass(frozen=True)
class Unfilled:
    """What a canvas asks for: a prompt and then masks in every row, and padding."""

    masked: Tensor
    """(B, L), True at the masks of the canvas."""
    end: Tensor
    """(B,), the number of tokens of each row without padding."""
    may_end: Tensor
    """(B, L), True at masks that end with the first eos drawn there."""
    mask_id: int
    eos_id: int | None
    """None where nothing ends."""

    @classmethod
    def of(cls, canvas: Tensor, mask_id: int, pad: Tensor | None, ending: Ending | None) -> "Unfilled":
        end = torch.full((len(canvas),), canvas.shape[1], device=canvas.device) if pad is None else (~pad).sum(dim=1)
        masked = canvas == mask_id
        if ending is None:
            return cls(masked, end, torch.zeros_like(masked), mask_id, None)
        return cls(masked, end, ending.where, mask_id, ending.eos_id)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.masked, self.end, self.may_end

    def with_tensors(self, masked: Tensor, end: Tensor, may_end: Tensor) -> "Unfilled":
        """The same of another canvas."""
        return replace(self, masked=masked, end=end, may_end=may_end)

    def num_known(self, ids: Tensor) -> Tensor:
        """(B,), before the first mask of ids (B, L), or to the end."""
        return torch.minimum((ids != self.mask_id).long().cumprod(dim=1).sum(dim=1), self.end)

    def after(self, text: DraftedText, verified: Verified) -> DraftedText:
        """The text with what was verified. Never waits for the device."""
        known, num_drafts = text.known[:, None], text.drafts.tokens.shape[1]
        tokens = torch.cat([text.drafts.tokens, verified.token[:, None]], dim=1)
        tokens = tokens.scatter(1, verified.num_accepted[:, None], verified.token[:, None])
        column = torch.arange(text.ids.shape[1], device=text.ids.device)
        stop = torch.minimum(text.known + verified.num_accepted + 1, self.end)[:, None]
        revealed, offset = (column >= known) & (column < stop), (column - known).clamp(0, num_drafts)
        ids = torch.where(revealed, tokens.gather(1, offset), text.ids)
        chance = torch.where(revealed, verified.chance.gather(1, offset), text.chance)
        if self.eos_id is not None:
            ids, chance = Ending(self.eos_id, self.may_end)(ids, chance)
        return DraftedText(ids, chance, self.num_known(ids), verified.drafts)


SpeculativeModel = Callable[[DraftedText, Tensor], DraftedText]
"""(text, uniform numbers (B, 2 k + 1)) -> the text after one call. Its tensors may be overwritten by the next call, so
that call has to be given this text."""


def verify(log_p: Tensor, drafts: Drafts, uniforms: Tensor, sampling: TokenShaping) -> tuple[Tensor, Tensor, Tensor]:
    """The number of accepted drafts (B,), the token after them (B,), and the probabilities (B, k + 1).

    log_p (B, k + 1, V) are the causal model's log beliefs before each draft and after the last; uniforms (B, k + 1).
    """
    num = drafts.tokens.shape[1]
    p = shape(log_p.flatten(0, 1), sampling).view(log_p.shape)
    of_draft = drafts.tokens[..., None]
    p_drafts, q_drafts = (each.gather(-1, of_draft)[..., 0] for each in (p[:, :num], drafts.chances))
    accepted = uniforms[:, :num] * q_drafts.double() < p_drafts.double()
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(len(p), device=p.device)
    p_next = left = p[row, num_accepted]
    if num:
        q_next = drafts.chances[row, num_accepted.clamp(max=num - 1)] * (num_accepted < num)[:, None]
        left = (p_next - q_next).clamp(min=0)
        left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p_next)  # p = q up to rounding
    token = categorical(left, uniforms[:, num])
    own = p_next.gather(1, token[:, None])
    chance = F.pad(p_drafts, (0, 1)).scatter(1, num_accepted[:, None], own)
    return num_accepted, token, chance.float()


DraftBeliefs = Callable[[int, Tensor], Tensor]
"""(number of a draft, from 0; the token (B,) before it) -> its log beliefs (B, V). Called in order."""


ToLogBeliefs = Callable[[Tensor], Tensor]
"""Hidden states (N, d) -> log beliefs (N, V)."""
Chained = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(the state (B, d) of a place, that of the place before, the token (B,) before) -> the state that predicts a token."""


def draft_beliefs(states: Tensor, chained: Chained, to_log_beliefs: ToLogBeliefs) -> DraftBeliefs:
    """The beliefs in drafts, from the states (B, k + 1, d) of an open block, whose first one has been drawn from."""
    before = states[:, 0]

    def log_beliefs(number: int, token: Tensor) -> Tensor:
        nonlocal before
        before = chained(states[:, number + 1], before, token)
        return to_log_beliefs(before)

    return log_beliefs


def without_chain(state: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
    """Each draft by itself."""
    return state


def draw_drafts(log_beliefs: DraftBeliefs, token: Tensor, uniforms: Tensor, sampling: TokenShaping) -> Drafts:
    """Drafts of the tokens after `token` (B,), one for each of the uniform numbers (B, k)."""
    tokens, chances = [], []
    for number, uniform in enumerate(uniforms.unbind(dim=1)):
        chances.append(shape(log_beliefs(number, token), sampling))
        token = categorical(chances[-1], uniform)
        tokens.append(token)
    return Drafts(torch.stack(tokens, dim=1), torch.stack(chances, dim=1))


def draw_and_keep(
    unfilled: Unfilled,
    text: DraftedText,
    log_p: Tensor,
    log_beliefs: DraftBeliefs,
    uniforms: Tensor,
    sampling: TokenShaping,
) -> DraftedText:
    """The text with one token from the causal model's log beliefs (B, V), and with all drafts after it."""
    p, num = shape(log_p, sampling), text.drafts.tokens.shape[1]
    token = categorical(p, uniforms[:, 0])
    drafts = draw_drafts(log_beliefs, token, uniforms[:, 1 : num + 1], sampling)
    tokens = torch.cat([token[:, None], drafts.tokens], dim=1)
    q = drafts.chances.gather(2, drafts.tokens[..., None])[..., 0]
    chance = torch.cat([p.gather(1, token[:, None]), q], dim=1).float()
    kept = replace(text, drafts=Drafts(tokens[:, :num], drafts.chances))
    everything = torch.full_like(token, num)
    return unfilled.after(kept, Verified(everything, tokens[:, num], chance, text.drafts))


class LaterOnHost:
    """A copy of a tensor on the host. `get` waits for it, and for nothing that was begun on the device later."""

    def __init__(self, tensor: Tensor):
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=tensor.is_cuda)
        self.done = None
        if tensor.is_cuda:
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.copy


def ahead(items: Iterator[Item], num: int) -> Iterator[Item]:
    """The items, each after `num` more have been made."""
    made: deque[Item] = deque()
    for item in items:
        made.append(item)
        if len(made) > num:
            yield made.popleft()
    yield from made


def sample_speculative(
    model: SpeculativeModel, canvas: Tensor, unfilled: Unfilled, drafts: Drafts, rng: RowRng
) -> Iterator[Frame]:
    """Fills every mask of the canvas (B, L); one Frame per network call.

    A call reveals a token at least. So a row needs no more calls than it has masks, and draws the numbers of so many.
    """
    frame = first_frame(canvas, unfilled.mask_id)
    yield frame
    num_masks, num_uniforms = unfilled.masked.sum(dim=1).tolist(), 2 * drafts.tokens.shape[1] + 1
    uniforms = torch.zeros(len(canvas), max(num_masks), num_uniforms, dtype=torch.float64)
    for row, num in enumerate(num_masks):
        uniforms[row, :num] = torch.from_numpy(rng.for_tokens(row, num * num_uniforms)).view(num, num_uniforms)
    uniforms, end = uniforms.to(canvas.device), unfilled.end.cpu()
    text = DraftedText(canvas, frame.chance, unfilled.num_known(canvas), drafts)

    def calls() -> Iterator[tuple[Tensor, Tensor, LaterOnHost]]:
        nonlocal text
        for number in range(max(num_masks)):
            text = model(text, uniforms[:, number])
            yield text.ids.clone(), text.chance.clone(), LaterOnHost(text.known)

    # On a GPU, a call is begun before the result of the last one is looked at: the last call of a run is not needed.
    for ids, chance, num_known in ahead(calls(), num=1 if canvas.is_cuda else 0):
        known = num_known.get()
        frame = Frame(
            ids=ids,
            t=(end - known).double() / torch.tensor(num_masks).clamp(min=1),
            revealed=ids != frame.ids,
            remasked=frame.remasked,  # nothing is ever remasked: all frames share one
            chance=chance,
            read=frame.ids,
            alpha=None,
        )
        yield frame
        if bool((known >= end).all()):
            return
