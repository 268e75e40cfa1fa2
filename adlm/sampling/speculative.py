"""Draft and verify: several tokens a network call, with the distribution of the causal model, exactly.

A block-causal network is two models in one: its clean copy predicts the next token, and an open block of masks predicts
several tokens at once, each by itself. The second drafts and the first verifies. Draft d_i, drawn from q_i, is accepted
with probability min(1, p_i(d_i) / q_i(d_i)), where p_i is the causal model's distribution after the drafts before it.
At the first draft that is not accepted a token is drawn from max(0, p_i - q_i), normalised; if all are accepted, from
the causal model's next distribution. So every token has the causal distribution, whatever the drafts are; good drafts
only save calls. Drafts are verified in the same call that makes the next ones: one set for every number of drafts that
may be accepted, of which the right one is then used.

Shapes: B rows of L tokens, k drafts, V symbols.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.sampling.frame import Ending, Frame, end_texts, first_frame
from adlm.sampling.rng import RowRng, categorical
from adlm.sampling.shaping import TokenShaping, shape


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
        return cls(tokens, torch.nn.functional.one_hot(tokens, num_symbols).float())


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


SpeculativeModel = Callable[[Tensor, Tensor, Drafts, Tensor], Verified]
"""(text (B, L), number of known tokens of each row (B,), drafts, uniform numbers (B, 2 k + 1)) -> what is verified."""


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
    at = num_accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, at)[:, 0]
    q_next = torch.cat([drafts.chances, torch.zeros_like(p[:, :1])], dim=1).gather(1, at)[:, 0]
    left = (p_next.double() - q_next.double()).clamp(min=0)
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p_next.double())  # p = q up to rounding
    token = categorical(left, uniforms[:, num])
    chance = torch.cat([p_drafts, torch.zeros_like(p_drafts[:, :1])], dim=1)
    own = p_next.gather(1, token[:, None])
    return num_accepted, token, chance.scatter(1, num_accepted[:, None], own).float()


def draw_drafts(log_q: Tensor, uniforms: Tensor, sampling: TokenShaping) -> Drafts:
    """Drafts from log beliefs (B, k, V) and uniform numbers (B, k)."""
    q = shape(log_q.flatten(0, 1), sampling).view(log_q.shape)
    return Drafts(categorical(q, uniforms), q)


def sample_speculative(
    model: SpeculativeModel,
    canvas: Tensor,
    mask_id: int,
    drafts: Drafts,
    rng: RowRng,
    pad: Tensor | None = None,
    ending: Ending | None = None,
) -> Iterator[Frame]:
    """Fills every mask of the canvas (B, L), a prompt and then masks in every row; one Frame per network call.

    `ending` says which texts end with the first eos drawn, see `end_texts`.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    masked = canvas == mask_id
    known = (~masked).long().cumprod(dim=1).sum(dim=1)  # padding comes after the masks
    end = torch.full_like(known, canvas.shape[1]) if pad is None else (~pad).sum(dim=1)
    num_drafts, column = drafts.tokens.shape[1], torch.arange(canvas.shape[1], device=canvas.device)
    num_masks, uniforms = masked.sum(dim=1), torch.zeros(len(canvas), 2 * num_drafts + 1, dtype=torch.float64)
    while bool((known < end).any()):
        active = (known < end).cpu()[:, None].expand_as(uniforms)  # a finished row draws nothing more
        uniforms = uniforms.cpu().masked_scatter(active, rng.at_tokens(active)).to(canvas.device)
        before = drafts.tokens.clone()  # the call may overwrite them with the next ones
        verified = model(frame.ids, known, drafts, uniforms)
        tokens = torch.cat([before, verified.token[:, None]], dim=1)
        tokens = tokens.scatter(1, verified.num_accepted[:, None], verified.token[:, None])
        stop = torch.minimum(known + verified.num_accepted + 1, end)
        revealed = (column >= known[:, None]) & (column < stop[:, None])
        offset = (column - known[:, None]).clamp(0, num_drafts)
        frame = Frame(
            ids=torch.where(revealed, tokens.gather(1, offset), frame.ids),
            t=((end - stop).double() / num_masks.clamp(min=1)).cpu(),
            revealed=revealed,
            remasked=frame.remasked,  # nothing is ever remasked: all frames share one
            chance=torch.where(revealed, verified.chance.gather(1, offset), frame.chance),
            read=frame.ids,
            alpha=None,
        )
        frame = end_texts(frame, ending)
        known, drafts = (~(masked & (frame.ids == mask_id))).long().cumprod(dim=1).sum(dim=1), verified.drafts
        known = torch.minimum(known, end)
        yield frame
