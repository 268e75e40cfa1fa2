"""The block of GPT-2: LayerNorm, attention and MLP, all with biases, and no rotary embedding: positions are learnt.

Independent of embeddings, heads and files.

Shapes: B sequences, L tokens, d wide, H heads of d / H each.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from adlm.config.schema import Model
from adlm.models.float8 import BlockLinear
from adlm.models.layers import self_attention


class Gpt2Block(nn.Module):
    """Attention, then an MLP, each applied to a LayerNorm and added to the residual stream."""

    def __init__(self, model: Model, causal: bool):
        super().__init__()
        width = model.hidden
        self.heads, self.dropout, self.causal = model.heads, model.dropout, causal
        self.norm1 = nn.LayerNorm(width)
        self.query, self.key, self.value = (BlockLinear(width, width) for _ in range(3))
        self.out = BlockLinear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen, self.narrow = BlockLinear(width, model.mlp_width), BlockLinear(model.mlp_width, width)

    def forward(
        self, h: Tensor, angles: tuple[Tensor, Tensor], condition: Tensor | None, visible: Tensor | None
    ) -> Tensor:
        """As `Block.forward`; there is no time condition, and angles are not used."""
        normed = self.norm1(h)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = self_attention(q, k, v, visible, self.causal)
        h = h + F.dropout(self.out(mixed), self.dropout, self.training)
        inner = F.gelu(self.widen(self.norm2(h)), approximate="tanh")
        return h + F.dropout(self.narrow(inner), self.dropout, self.training)
