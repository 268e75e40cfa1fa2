"""Decoding in an order of the network's own: at each step it says something of every mask, and the best are revealed.

An order that looks only at what is visible (left to right, margin, entropy, anchors) leaves exact beliefs their law as
long as one token is revealed a step. One that looks at the token just drawn (confidence, threshold) searches more than
it samples: the law of its texts is not the language's, however many steps it takes.

Shapes: B sequences, L tokens, N masked places, V symbols. Places are flat: row * L + place.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.frame import Denoiser, DenoiserOutput, Frame, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import DrawnTokens, draw_tokens
from adlm.sampling.steps import Steps

TIED = 1e-6  # of an all-masked row a network without absolute positions says the same everywhere, up to rounding
_PLACES = 512  # read by a head at once: with GPT-2's vocabulary their beliefs are 200 MB in double precision


def confidence(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """The belief in the drawn token, as LLaDA has it."""
    return log_beliefs.gather(-1, tokens[:, None])[:, 0].exp()


def margin(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """By how much the likeliest token leads the next."""
    best = log_beliefs.topk(2, dim=-1).values.exp()
    return best[:, 0] - best[:, 1]


def entropy(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """Minus the entropy: the surest place first."""
    return torch.neg(torch.special.entr(log_beliefs.exp()).sum(dim=-1))


def leftmost(reading: DenoiserOutput, z: Tensor, places: Tensor, pad: Tensor | None) -> Tensor:
    return -(places % z.shape[1]).double()


def anchor_first(reading: DenoiserOutput, z: Tensor, places: Tensor, pad: Tensor | None) -> Tensor:
    """How sure the anchor network is of its guess, times how telling the guess is: -log of its share of the row.

    The row is counted with every guess in its place, so a token guessed everywhere tells nothing. What is an anchor in
    training, a token seldom in its row, comes first.
    """
    sure, guess = [], []
    for chunk in torch.split(places, _PLACES):
        best = reading.anchor_log_beliefs(chunk).max(dim=-1)
        sure.append(best.values.double().exp())
        guess.append(best.indices)
    tokens = torch.cat(guess)
    filled = z.flatten().index_copy(0, places, tokens).view(z.shape)
    real = torch.ones_like(z, dtype=torch.bool) if pad is None else ~pad
    row = torch.div(places, z.shape[1], rounding_mode="floor")
    share = ((filled[row] == tokens[:, None]) & real[row]).sum(dim=-1) / real[row].sum(dim=-1)
    return torch.cat(sure) * -share.double().log()


BY_BELIEF: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "confidence": confidence,
    "threshold": confidence,
    "margin": margin,
    "entropy": entropy,
}
BY_PLACE: dict[str, Callable[[DenoiserOutput, Tensor, Tensor, Tensor | None], Tensor]] = {
    "left-to-right": leftmost,
    "anchor-first": anchor_first,
}


def sample_ordered(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """A Frame for every step: a token is drawn for each mask, and those with the best scores of their row are revealed.

    Of places that are tied the leftmost comes first. A row's masks are shared out evenly over the steps, or one a step
    where there are fewer masks than steps; with `threshold` as many are revealed as reach it.
    """
    frame = first_frame(canvas, mask_id)
    yield frame
    num_masks = (canvas == mask_id).sum(dim=1)
    num_steps = num_masks.clamp(max=sampling.steps)
    for step in range(int(num_masks.max())):
        masked = frame.ids == mask_id
        if not masked.any():
            break
        places = masked.flatten().nonzero()[:, 0]
        reading = denoiser(frame.ids, None, pad)
        drawn, score = _drawn(reading, frame.ids, places, draws.at_tokens(masked), sampling, pad)
        best = torch.full(masked.shape, -torch.inf, dtype=torch.float64, device=masked.device)
        best.view(-1)[places] = (score.double() / TIED).round() * TIED
        rank = best.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if sampling.sampler == "threshold":
            chosen = masked & ((best >= sampling.threshold) | (rank == 0))
        else:
            goal = num_masks * (step + 1) // num_steps.clamp(min=1)
            chosen = masked & (rank < (goal - (num_masks - masked.sum(dim=1)))[:, None])
        frame = _revealed(frame, chosen, places, drawn, mask_id, num_masks)
        yield frame


def _drawn(
    reading: DenoiserOutput, z: Tensor, places: Tensor, points: Tensor, sampling: Sampling, pad: Tensor | None
) -> tuple[DrawnTokens, Tensor]:
    """A token for every masked place and its score, by chunks: the beliefs of all would not fit."""
    tokens, chances, scores = [], [], []
    by_belief = BY_BELIEF.get(sampling.sampler)
    for chunk, its_points in zip(torch.split(places, _PLACES), torch.split(points, _PLACES), strict=True):
        log_beliefs = reading.log_beliefs(chunk)
        drawn = draw_tokens(log_beliefs, z, chunk, its_points, sampling, pad)
        tokens.append(drawn.tokens)
        chances.append(drawn.chance)
        if by_belief is not None:
            scores.append(by_belief(log_beliefs, drawn.tokens))
    score = torch.cat(scores) if by_belief is not None else BY_PLACE[sampling.sampler](reading, z, places, pad)
    return DrawnTokens(torch.cat(tokens), torch.cat(chances)), score


def _revealed(
    frame: Frame, chosen: Tensor, places: Tensor, drawn: DrawnTokens, mask_id: int, num_masks: Tensor
) -> Frame:
    ids, chance = frame.ids.clone(), frame.chance.clone()
    taken = chosen.view(-1)[places]
    ids.view(-1)[places[taken]] = drawn.tokens[taken]
    chance.view(-1)[places[taken]] = drawn.chance[taken]
    left = (ids == mask_id).sum(dim=1).double() / num_masks.clamp(min=1)
    return Frame(ids, left.cpu(), chosen, torch.zeros_like(chosen), chance, frame.ids, None)
