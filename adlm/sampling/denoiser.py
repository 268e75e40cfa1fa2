"""What a sampler asks of a network. Knows none.

Shapes: B sequences, L tokens, N places, V symbols. Places are flat: row * L + place.
"""

from typing import Protocol

from torch import Tensor


class DenoiserOutput(Protocol):
    """What a network says of one state, asked for where it is wanted: a head is as much work as a few blocks."""

    def log_beliefs(self, places: Tensor) -> Tensor:
        """(N, V), of the clean token at masked places (N,); -inf at the mask."""
        ...

    def anchor_log_beliefs(self, places: Tensor) -> Tensor:
        """The anchor network's (N, V)."""
        ...


class Denoiser(Protocol):
    def __call__(self, z: Tensor, alpha: Tensor | None, pad: Tensor | None) -> DenoiserOutput:
        """Reads z (B, L). A network that is told the noise is told -log alpha (B,), or goes by the share of masks."""
        ...
