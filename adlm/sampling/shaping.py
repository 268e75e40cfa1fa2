"""From beliefs to a token: temperature, top-k, nucleus, a guard against repetition, then one exact draw.

Knows no time and no network.

Shapes: N tokens to draw, V symbols.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.config.schema import Sampling
from adlm.sampling.rng import categorical


def shape(log_beliefs: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The distribution (N, V) that a token is drawn from, the knobs applied in the order everybody has them.

    `seen` (N, V) is True at symbols that the token's row shows already: they pay the repetition penalty.
    """
    if seen is not None:
        log_beliefs = torch.where(seen, log_beliefs * sampling.repetition_penalty, log_beliefs)
    if sampling.temperature == 0:
        return torch.zeros_like(log_beliefs).scatter(-1, log_beliefs.argmax(dim=-1, keepdim=True), 1.0)
    if seen is not None or sampling.temperature != 1:
        log_beliefs = torch.log_softmax(log_beliefs / sampling.temperature, dim=-1)
    beliefs = log_beliefs.exp()
    if 0 < sampling.top_k < beliefs.shape[-1]:
        beliefs = top_k(beliefs, sampling.top_k)
    if sampling.top_p < 1:
        beliefs = nucleus(beliefs, sampling.top_p, crossing=sampling.nucleus == "crossing")
    return beliefs


def top_k(beliefs: Tensor, k: int) -> Tensor:
    """The k likeliest symbols, normalised."""
    kept, index = beliefs.topk(k, dim=-1)
    return _put_back(kept, index, beliefs)


def nucleus(beliefs: Tensor, p: float, crossing: bool) -> Tensor:
    """The likeliest symbols that together have a probability of about p, normalised; the likeliest of all always.

    `crossing` keeps the symbol with which the sum passes p, as Hugging Face does; else it is dropped, as in the
    released code of ADLM and ReMDM.
    """
    ordered, index = beliefs.sort(dim=-1, descending=True)
    mass = ordered.double().cumsum(dim=-1)
    keep = mass - ordered < p if crossing else mass <= p
    keep[..., 0].fill_(True)
    return _put_back(ordered * keep, index, beliefs)


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens, and how likely each was where it was drawn."""

    tokens: Tensor
    """(N,)"""
    chance: Tensor
    """(N,), after shaping."""

    def but_likeliest(self, where: Tensor, log_beliefs: Tensor) -> "DrawnTokens":
        """The likeliest token (of beliefs as they are) at the places `where` (N,), the drawn one elsewhere."""
        log_best, best = log_beliefs.max(dim=-1)
        return DrawnTokens(
            torch.where(where, best, self.tokens), torch.where(where, log_best.exp().float(), self.chance)
        )


def draw_tokens(
    log_beliefs: Tensor, z: Tensor, places: Tensor, points: Tensor, sampling: Sampling, pad: Tensor | None = None
) -> DrawnTokens:
    """One token for each of the flat places (N,) of z (B, L), by its uniform number (N,); padding shows no symbol."""
    seen = seen_symbols(visible_ids(z, pad), places, log_beliefs.shape[-1]) if sampling.repetition_penalty > 1 else None
    return draw_shaped(shape(log_beliefs, sampling, seen), points)


def draw_shaped(beliefs: Tensor, points: Tensor) -> DrawnTokens:
    """One token from each row of beliefs (N, V), by its uniform number (N,)."""
    tokens = categorical(beliefs, points)
    return DrawnTokens(tokens, beliefs.gather(-1, tokens[:, None])[:, 0].float())


def visible_ids(z: Tensor, pad: Tensor | None) -> Tensor:
    """z (B, L) with the first token of its row, which it shows anyway, in place of padding."""
    return z if pad is None else torch.where(pad, z[:, :1], z)


def seen_symbols(z: Tensor, places: Tensor, num_symbols: int) -> Tensor:
    """(N, V), True at the symbols that stand in the row of each of the flat places (N,) of z (B, L)."""
    return symbols_of(z[torch.div(places, z.shape[1], rounding_mode="floor")], num_symbols)


def symbols_of(rows: Tensor, num_symbols: int) -> Tensor:
    """(N, V), True at the symbols that stand in each of the rows (N, L)."""
    return torch.zeros(len(rows), num_symbols, dtype=torch.bool, device=rows.device).scatter(-1, rows, True)


def _put_back(kept: Tensor, index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(-1, index, kept / kept.sum(dim=-1, keepdim=True))
