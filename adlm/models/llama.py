"""The block of Llama and its relatives (SmolLM2, TinyLlama, Qwen2): RMSNorm, grouped-query attention, SwiGLU, no adaLN.

Independent of embeddings, heads and files.

Shapes: B sequences, L tokens, d wide, H query heads and K key and value heads of d / H each.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from adlm.config.schema import Model
from adlm.models.float8 import BlockLinear
from adlm.models.layers import RMSNorm, apply_rotary, self_attention


class LlamaBlock(nn.Module):
    """Attention, then a gated MLP, each applied to an RMSNorm and added to the residual stream."""

    def __init__(self, model: Model, causal: bool):
        super().__init__()
        width, head_width = model.hidden, model.hidden // model.heads
        self.heads, self.kv_heads, self.dropout, self.causal = model.heads, model.num_kv_heads, model.dropout, causal
        self.norm1 = RMSNorm(width, model.norm_epsilon)
        self.query = BlockLinear(width, width, bias=model.qkv_bias)
        self.key, self.value = (BlockLinear(width, self.kv_heads * head_width, bias=model.qkv_bias) for _ in range(2))
        self.out = BlockLinear(width, width, bias=False)
        self.norm2 = RMSNorm(width, model.norm_epsilon)
        self.gate, self.widen = (BlockLinear(width, model.mlp_width, bias=False) for _ in range(2))
        self.narrow = BlockLinear(model.mlp_width, width, bias=False)

    def forward(
        self, h: Tensor, angles: tuple[Tensor, Tensor], condition: Tensor | None, visible: Tensor | None
    ) -> Tensor:
        """As `Block.forward`; there is no time condition."""
        normed = self.norm1(h)
        q, k, v = (
            layer(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        mixed = self_attention(apply_rotary(q, angles), apply_rotary(k, angles), v, visible, self.causal)
        h = h + F.dropout(self.out(mixed), self.dropout, self.training)
        normed = self.norm2(h)
        inner = self.narrow(F.silu(self.gate(normed)) * self.widen(normed))
        return h + F.dropout(inner, self.dropout, self.training)
