"""Work that processes share: each does some of it, then all have the whole. Knows neither the work nor the processes.

One process alone takes the same way, and there is nothing to exchange.
"""

from typing import TypeVar

import torch.distributed as dist

from adlm.errors import UserError

Item = TypeVar("Item")


def rank_and_size() -> tuple[int, int]:
    """Which process this is, and of how many."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(share: list[Item]) -> list[Item]:
    """The shares of all processes, one after the other."""
    shares: list[list[Item]] = [share]
    if dist.is_initialized():
        shares = [[] for _ in range(dist.get_world_size())]
        try:
            dist.all_gather_object(shares, share)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"another process stopped before its share of the work was done ({reason})") from None
    return [item for each in shares for item in each]
