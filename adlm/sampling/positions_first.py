"""The reverse walk, positions first: the network is read only before a reveal, and its head only there.

Shapes: B sequences, L tokens, N revealed places, V symbols.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.denoiser import Denoiser
from adlm.sampling.events import plan_events
from adlm.sampling.frame import Frame, first_frame
from adlm.sampling.rng import RowRng
from adlm.sampling.shaping import draw_tokens
from adlm.sampling.steps import Steps


def sample_positions_first(
    denoiser: Denoiser,
    canvas: Tensor,
    mask_id: int,
    steps: Steps,
    sampling: Sampling,
    draws: RowRng,
    pad: Tensor | None = None,
) -> Iterator[Frame]:
    """From the canvas (B, L) to text, a Frame for every call of the network; the first Frame is the canvas.

    Tokens given on the canvas stay. Nothing here waits for the device: all that the host must know was drawn before.
    """
    yield first_frame(canvas, mask_id)
    plan = plan_events(steps, canvas == mask_id, draws)
    order, host_back = plan.order.to(canvas.device), plan.order.argsort()
    back = host_back.to(canvas.device)
    z, chance = canvas[order], (canvas != mask_id).float()[order]
    pad = None if pad is None else pad[order]
    for call in plan.calls:
        z.view(-1).index_fill_(0, call.hidden, mask_id)
        read = z[back]
        rows = _rows_to_read(call.rows, len(z))
        reading = denoiser(z[:rows], call.alpha[:rows], None if pad is None else pad[:rows])
        log_beliefs = reading.log_beliefs(call.revealed)
        drawn = draw_tokens(log_beliefs, z, call.revealed, call.points, sampling, pad)
        if call.last is not None and sampling.final == "argmax":
            drawn = drawn.but_likeliest(call.last, log_beliefs)
        z.view(-1).index_copy_(0, call.revealed, drawn.tokens)
        chance.view(-1).index_fill_(0, call.hidden, 0.0).index_copy_(0, call.revealed, drawn.chance)
        revealed, remasked = (_flags(z, places)[back] for places in (call.revealed, call.hidden))
        t, alpha = call.t[host_back], call.alpha[host_back]
        yield Frame(z[back], t, revealed, remasked, chance[back], read, alpha)


def _rows_to_read(needed: int, rows: int) -> int:
    """The batch, halved as long as the rows that are needed fit: a device sees few shapes, idle rows cost little."""
    while (rows + 1) // 2 >= needed and rows > 1:
        rows = (rows + 1) // 2
    return rows


def _flags(z: Tensor, places: Tensor) -> Tensor:
    return torch.zeros(z.numel(), dtype=torch.bool, device=z.device).index_fill_(0, places, True).view(z.shape)
