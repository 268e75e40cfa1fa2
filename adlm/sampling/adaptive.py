"""Samplers whose positions depend on the network: ordered decoding, and ReMDM's confidence-based remasking.

Ordered decoding scores every masked position in each step and reveals those with the best scores. With exact beliefs
and one token a step, an order that depends only on visible tokens (left-to-right, certainty, margin, entropy,
anchor-first) samples the exact distribution. An order that depends on the token just drawn (confidence, threshold) does
not, however many steps it takes: it favours likely texts.

An order that depends only on visible tokens can reveal a text in one way. So the probability of a text is known
exactly, for any beliefs and any number of steps: with `SamplingRun.text` the sampler reveals it and records its nats.

Shapes: B sequences, L tokens, N masked positions, V symbols. Positions are flat: row * L + position.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adlm.diffusion.masking import order_by_clocks, remasking_ceiling
from adlm.sampling.constrained import HolesOfCanvas, draw_in_holes, hole_steps
from adlm.sampling.frame import DenoiserOutput, Frame, NoisyRows, SamplingRun, first_frame
from adlm.sampling.shaping import DrawnTokens, draw_tokens

SCORE_RESOLUTION = 1e-6  # without absolute positions, an all-masked row has equal scores everywhere up to rounding
_CHUNK = 512  # positions per head call: with GPT-2's vocabulary their beliefs are 200 MB in double precision


def confidence(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """The belief in the drawn token, as in LLaDA."""
    return log_beliefs.gather(-1, tokens[:, None])[:, 0].exp()


def certainty(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """The belief in the likeliest token, whichever was drawn."""
    return log_beliefs.max(dim=-1).values.exp()


def margin(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """The belief in the likeliest token minus that in the second likeliest."""
    best = log_beliefs.topk(2, dim=-1).values.exp()
    return best[:, 0] - best[:, 1]


def entropy(log_beliefs: Tensor, tokens: Tensor) -> Tensor:
    """Minus the entropy: the position with the least uncertainty comes first."""
    return torch.neg(torch.special.entr(log_beliefs.exp()).sum(dim=-1))


def leftmost(output: DenoiserOutput, z: Tensor, positions: Tensor, pad: Tensor | None) -> Tensor:
    return -(positions % z.shape[1]).double()


def anchor_first(output: DenoiserOutput, z: Tensor, positions: Tensor, pad: Tensor | None) -> Tensor:
    """The anchor network's belief in its argmax token, times -log of that token's share of the row.

    The share is counted with every argmax token filled in, so a token predicted everywhere scores 0. Tokens that are
    rare in their row, the anchors of training, come first.
    """
    beliefs, guesses = [], []
    for chunk in torch.split(positions, _CHUNK):
        best = output.anchor_log_beliefs(chunk).max(dim=-1)
        beliefs.append(best.values.double().exp())
        guesses.append(best.indices)
    tokens = torch.cat(guesses)
    filled = z.flatten().index_copy(0, positions, tokens).view(z.shape)
    is_text = torch.ones_like(z, dtype=torch.bool) if pad is None else ~pad
    row = torch.div(positions, z.shape[1], rounding_mode="floor")
    share = ((filled[row] == tokens[:, None]) & is_text[row]).sum(dim=-1) / is_text[row].sum(dim=-1)
    return torch.cat(beliefs) * -share.double().log()


BeliefScore = Callable[[Tensor, Tensor], Tensor]
"""(log beliefs (N, V), drawn tokens (N,)) -> scores (N,)."""
PositionScore = Callable[[DenoiserOutput, Tensor, Tensor, Tensor | None], Tensor]
"""(output, z (B, L), positions (N,), pad) -> scores (N,)."""


def sample_ordered(
    run: SamplingRun,
    by_beliefs: BeliefScore | None = None,
    by_position: PositionScore | None = None,
    threshold: bool = False,
) -> Iterator[Frame]:
    """One Frame per step: a token is drawn at each mask, and those with the best scores of their row are revealed.

    The score is `by_beliefs` or `by_position`; ties go to the leftmost position. A row's masks are spread evenly over
    the steps, one a step if there are fewer masks than steps; with `threshold`, every position is revealed whose score
    reaches `sampling.threshold`, and at least one. A score by position needs no token, so tokens are then drawn only
    where they are revealed. With `run.text`, its tokens take the place of drawn ones.
    """
    mask_id, sampling = run.mask_id, run.sampling
    frame = first_frame(run.canvas, mask_id)
    yield frame
    num_masks = (run.canvas == mask_id).sum(dim=1)
    num_steps = num_masks.clamp(max=sampling.steps)
    for step in range(int(num_masks.max())):
        masked = frame.ids == mask_id
        if not masked.any():
            break
        positions = masked.flatten().nonzero()[:, 0]
        output, uniforms = run.denoiser(NoisyRows(frame.ids, pad=run.pad)), run.rng.at_tokens(masked)
        if by_position is not None:
            score = by_position(output, frame.ids, positions, run.pad)
        else:
            drawn, score = _draw_and_score(run, output, frame.ids, positions, uniforms, by_beliefs)
        scores = torch.full(masked.shape, -torch.inf, dtype=torch.float64, device=masked.device)
        scores.view(-1)[positions] = (score.double() / SCORE_RESOLUTION).round() * SCORE_RESOLUTION
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if threshold:
            chosen = masked & ((scores >= sampling.threshold) | (rank == 0))
        else:
            num_revealed = num_masks * (step + 1) // num_steps.clamp(min=1)  # in all, after this step
            chosen = masked & (rank < (num_revealed - (num_masks - masked.sum(dim=1)))[:, None])
        if by_position is not None:
            is_chosen = chosen.view(-1)[positions]
            positions, uniforms = positions[is_chosen], uniforms[is_chosen]
            drawn, _ = _draw_and_score(run, output, frame.ids, positions, uniforms, None)
        frame = _reveal(frame, chosen, positions, drawn, mask_id, num_masks)
        yield frame


def sample_by_rates(run: SamplingRun) -> Iterator[Frame]:
    """One Frame per step, in the order of a network that predicts it. Masks are spread over steps as in other orders.

    The positions of a step are drawn one after the other without replacement, each in proportion to its rate before
    the step, and their tokens independently. So with one token a step this draws from the model's distribution.
    """
    mask_id = run.mask_id
    frame = first_frame(run.canvas, mask_id)
    yield frame
    num_masks = (run.canvas == mask_id).sum(dim=1)
    num_steps = num_masks.clamp(max=run.sampling.steps)
    for step in range(int(num_steps.max())):
        masked = frame.ids == mask_id
        output: Any = run.denoiser(NoisyRows(frame.ids, pad=run.pad))
        log_rates = torch.full(masked.shape, -torch.inf, dtype=torch.float64, device=masked.device)
        log_rates[masked] = output.log_rates(masked.flatten().nonzero()[:, 0]).double()
        order = order_by_clocks(log_rates, run.rng.at_positions(masked)).masked_fill(~masked, -torch.inf)
        rank = order.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        num_revealed = num_masks * (step + 1) // num_steps.clamp(min=1)  # in all, after this step
        chosen = masked & (rank < (num_revealed - (num_masks - masked.sum(dim=1)))[:, None])
        positions = chosen.flatten().nonzero()[:, 0]
        drawn, _ = _draw_and_score(run, output, frame.ids, positions, run.rng.at_tokens(chosen), None)
        frame = _reveal(frame, chosen, positions, drawn, mask_id, num_masks)
        yield frame


def _draw_and_score(
    run: SamplingRun,
    output: DenoiserOutput,
    z: Tensor,
    positions: Tensor,
    uniforms: Tensor,
    score: BeliefScore | None,
) -> tuple[DrawnTokens, Tensor]:
    """A token for every position (N,) and its score (N,), in chunks: beliefs for all N would not fit in memory.

    Tokens in constrained holes are then drawn again, with scores by their conditioned marginals.
    """
    tokens, chances, scores = [], [], []
    for chunk, chunk_uniforms in zip(torch.split(positions, _CHUNK), torch.split(uniforms, _CHUNK), strict=True):
        log_beliefs = output.log_beliefs(chunk)
        if run.text is None:
            drawn = draw_tokens(log_beliefs, z, chunk, chunk_uniforms, run.sampling, run.mask_id, run.pad)
        else:
            drawn = run.text.reveal(log_beliefs, z, chunk)
        tokens.append(drawn.tokens)
        chances.append(drawn.chance)
        scores.append(drawn.chance if score is None else score(log_beliefs, drawn.tokens))
    drawn, all_scores = DrawnTokens(torch.cat(tokens), torch.cat(chances)), torch.cat(scores)
    if not run.holes:
        return drawn, all_scores
    touched = HolesOfCanvas(run.holes, *z.shape).touched(positions.cpu().numpy())
    for hole in hole_steps(run, output, z, [*touched]):
        own = hole.draw(uniforms[hole.index])
        own_scores = own.chance if score is None else score(hole.log_marginals(own.tokens), own.tokens)
        drawn = drawn.with_tokens(hole.index, own)
        all_scores = all_scores.index_copy(0, hole.index, own_scores.to(all_scores))
    return drawn, all_scores


def _reveal(
    frame: Frame, chosen: Tensor, positions: Tensor, drawn: DrawnTokens, mask_id: int, num_masks: Tensor
) -> Frame:
    """The next frame; its time is the share of the row's masks that are left."""
    ids, chance = frame.ids.clone(), frame.chance.clone()
    is_chosen = chosen.view(-1)[positions]
    ids.view(-1)[positions[is_chosen]] = drawn.tokens[is_chosen]
    chance.view(-1)[positions[is_chosen]] = drawn.chance[is_chosen]
    t = (ids == mask_id).sum(dim=1).double() / num_masks.clamp(min=1)
    return Frame(ids, t.cpu(), chosen, torch.zeros_like(chosen), chance, frame.ids, None)


def confident_remasking(chance: Tensor, drawn: Tensor, ceiling: Tensor) -> Tensor:
    """remask (B, L) = ceiling * softmax(-chance) over the positions with drawn tokens, 0 elsewhere.

    `chance` (B, L) is the probability each token was drawn with. A row without drawn tokens has remask 0.
    """
    weights = torch.where(drawn, -chance.double(), -torch.inf).softmax(dim=-1)
    return torch.where(drawn, weights, 0.0) * ceiling.to(weights)


def sample_remdm_conf(run: SamplingRun) -> Iterator[Frame]:
    """One Frame per step in which something changes. Tokens drawn with a low probability are remasked more often.

    Masked tokens are revealed as in ancestral sampling. Which positions change at a step depends on the step before,
    but not on the beliefs of the step itself. So they are drawn first, the head runs only at the revealed positions,
    and a step that reveals nothing needs no network call. The masked positions and the probabilities live on the host,
    which waits for the device once a step.
    """
    canvas, mask_id, steps, rng = run.canvas, run.mask_id, run.steps, run.rng
    frame = first_frame(canvas, mask_id)
    yield frame
    (num_rows, _), device, end = canvas.shape, canvas.device, len(steps.reveal)
    to_fill = (canvas == mask_id).cpu()
    masked, chance = to_fill, (~to_fill).float()
    ceilings = remasking_ceiling(steps.alpha_s, steps.alpha_t)
    reached = torch.full((num_rows,), -1)  # no step yet
    for step in range(end + 1):
        if step < end:
            uniforms = rng.at_positions(to_fill)
            reveals = masked & (uniforms < steps.reveal[step])
            remasks = uniforms < confident_remasking(chance, to_fill & ~masked, ceilings[step])
        else:
            reveals, remasks = masked, torch.zeros_like(masked)
        if not (reveals | remasks).any():
            continue
        t, alpha = (each[step].expand(num_rows) for each in (steps.end_time, steps.conditioning_alpha))
        reached = torch.where(reveals.any(dim=1), step, reached)  # a row that reveals nothing waits for the others
        revealed, remasked = reveals.to(device), remasks.to(device)
        ids, chance = frame.ids.masked_fill(remasked, mask_id), chance.masked_fill(remasks, 0.0)
        positions = reveals.flatten().nonzero()[:, 0].to(device)
        if len(positions):
            output = run.denoiser(NoisyRows(frame.ids, alpha, run.pad, step=reached))
            log_beliefs = output.log_beliefs(positions)
            token_uniforms = rng.at_tokens(reveals).to(device)
            drawn = draw_tokens(log_beliefs, frame.ids, positions, token_uniforms, run.sampling, mask_id, run.pad)
            is_final = torch.ones_like(positions, dtype=torch.bool) if step == end else None
            if is_final is not None and run.sampling.final == "argmax":
                drawn = drawn.with_argmax(is_final, log_beliefs)
            if run.holes:
                drawn = draw_in_holes(run, output, frame.ids, positions, token_uniforms, drawn, is_final)
            ids.view(-1).index_copy_(0, positions, drawn.tokens)
            chance[reveals] = drawn.chance.cpu()
        masked = masked ^ reveals ^ remasks
        frame = Frame(ids, t, revealed, remasked, chance.to(device), frame.ids, alpha)
        yield frame
