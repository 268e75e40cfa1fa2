"""The operations of a frozen block, fused: norm, rotary embedding, cached attention, activations, single-row products.

On CUDA they are Triton kernels; elsewhere, and as test oracles, the plain forms run. `h` is the residual stream, in
float32 or float64; everything else has the dtype of the matrix products. Independent of networks.

Decoding one token of one text is a forward pass of a single row. It is bound by memory bandwidth and kernel launches:
each weight should be read once, by all multiprocessors, in few kernels. So its products are fused with the norm before
and the residual addition after them. For 8 rows a similar kernel was slower than cuBLAS (0.58 ms per token of AR small
on an H200, against 0.46).

Shapes: B sequences, L tokens, d wide, H query heads and K key and value heads of w each, M modulations: 1 for all
sequences, or B; C positions in a KV cache; rows (..., d) with O outputs each.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.models.heads import why_no_triton

FEW_TOKENS = 2048  # up to here, four warps per token are faster than one
WEIGHTS_PER_PROGRAM = 8192  # 16 KB in flight in bfloat16
NUM_MULTIPROCESSORS = 132  # of an H100 or H200; each should run at least one program
LAYER_NORM_EPSILON = 1e-5
SWIGLU_BLOCK = 1024
SOFTMAX_BLOCK = 4096
MAX_OPEN_TOKENS, OPEN_QUERIES, OPEN_PART = 32, 32, 64
"""Of the kernel for a few new tokens: their largest number, and the queries and positions of a program. A head has a
counter, so there must be as many queries in a program as tokens, at least."""
POSITIONS_PER_PART = 128  # a GPU has more multiprocessors than a token has heads, so a head's cache is split in parts


@dataclass(frozen=True)
class Norm:
    """One norm of a trunk and the gate before it, each (M, d), in float32 or float64."""

    gate: Tensor
    """Factor of the branch output that is added to the residual stream before this norm."""
    weight: Tensor
    """The norm's own weight times adaLN's 1 + scale."""
    shift: Tensor
    rms_epsilon: float | None = None
    """That of an RMSNorm; None for a LayerNorm."""


Activation = Literal["none", "gelu", "swiglu"]
"""Of a product's outputs: GELU in its tanh form; swiglu is silu of the first half of them times the second half."""


def can_use_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels can run on the tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and not why_no_triton()


def add_norm_(h: Tensor, added: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
    """h (B, L, d) <- h + gate * added, in place; returns norm(h) * weight + shift in `dtype`."""
    if not can_use_triton(h):
        return plain_add_norm_(h, added, norm, dtype)
    from adlm.inference.fused_kernels import add_norm_kernel  # Triton is imported only where it is used

    batch, length, width = h.shape
    normed = torch.empty_like(h, dtype=dtype)
    with torch.cuda.device(h.device):
        add_norm_kernel[(batch * length,)](
            h,
            h if added is None else added,
            norm.gate,
            norm.weight,
            norm.shift,
            normed,
            length,
            width,
            width if len(norm.weight) > 1 else 0,
            LAYER_NORM_EPSILON if norm.rms_epsilon is None else norm.rms_epsilon,
            added is not None,
            norm.rms_epsilon is None,
            next_power_of_two(width),
            num_warps=4 if batch * length <= FEW_TOKENS else 1,
        )
    return normed


def plain_add_norm_(h: Tensor, added: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
    if added is not None:
        h.addcmul_(norm.gate[:, None], added.to(h.dtype))
    if len(norm.weight) == 1 and norm.rms_epsilon is None:
        return F.layer_norm(h, h.shape[-1:], norm.weight[0], norm.shift[0], eps=LAYER_NORM_EPSILON).to(dtype)
    if norm.rms_epsilon is None:
        plain = F.layer_norm(h, h.shape[-1:], eps=LAYER_NORM_EPSILON)
    else:
        plain = F.rms_norm(h, h.shape[-1:], eps=norm.rms_epsilon)
    return torch.addcmul(norm.shift[:, None], plain, norm.weight[:, None]).to(dtype)


def split_heads(qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, L, H, w), keys and values (B, L, K, w) of qkv (B, L, H + 2 K, w)."""
    q, k, v = torch.split(qkv, [qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    return q, k, v


def apply_rotary_(qkv: Tensor, rotary: Tensor, kv_heads: int) -> None:
    """Rotary embedding, in place, of the queries and keys of qkv (B, L, H + 2 K, w).

    Coordinates 2i and 2i + 1 form a complex number, which is multiplied by rotary (L, w / 2) or (B, L, w / 2), of
    modulus 1.
    """
    if not can_use_triton(qkv):
        plain_apply_rotary_(qkv, rotary, kv_heads)
        return
    from adlm.inference.fused_kernels import rotary_kernel

    batch, length, heads, width = qkv.shape
    with torch.cuda.device(qkv.device):
        rotary_kernel[(batch * length,)](
            qkv,
            torch.view_as_real(rotary),
            length if rotary.ndim == 2 else batch * length,
            heads,
            heads - kv_heads,
            width,
            next_power_of_two(heads - kv_heads),
            next_power_of_two(width),
        )


def plain_apply_rotary_(qkv: Tensor, rotary: Tensor, kv_heads: int) -> None:
    qk = qkv[:, :, :-kv_heads]
    pairs = qk.view(*qk.shape[:-1], -1, 2)
    precise = torch.view_as_complex(pairs.to(rotary.real.dtype)).mul_(rotary[..., None, :])
    if qkv.dtype != rotary.real.dtype:
        pairs.copy_(torch.view_as_real(precise))


def attend_cached(
    qkv: Tensor,
    rotary: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    arrivals: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of n new tokens, qkv (B, n, H + 2 K, w), to the KV cache and to themselves: (B, n, H w).

    The first new token of a row is at `position` (B,) of the cache; the new keys and values are written into keys and
    values (B, K, C, w). Without `visible` there is one new token, and rotary (C, w / 2) covers all positions; else
    rotary (B, n, w / 2) is that of the new ones, which attend to each other where `visible` (1 or B, n, n) is True.
    The `bias` is then the `cached_attention_bias` of all that, made once for all layers, if `needs_bias` says so.
    arrivals (B, H), int32, is 0 before and after the call.
    """
    if visible is not None and not needs_bias(qkv, qkv.shape[1]):
        return attend_open(qkv, rotary, keys, values, position, arrivals, visible)
    if bias is not None or not can_use_triton(qkv):
        return plain_attend_cached(qkv, rotary, keys, values, position, bias)
    from adlm.inference.fused_kernels import attend_cached_kernel

    batch, kv_heads, _, width = keys.shape
    heads = qkv.shape[2] - 2 * kv_heads
    num_parts = -(-keys.shape[2] // POSITIONS_PER_PART)
    parts = torch.empty(batch, heads, num_parts, width, device=qkv.device)
    sums = torch.empty(batch, heads, num_parts, 2, device=qkv.device)
    mixed = qkv.new_empty(batch, 1, heads * width)
    dependent_launch = supports_dependent_launch(qkv.device)
    with torch.cuda.device(qkv.device):
        attend_cached_kernel[(batch, heads, num_parts)](
            qkv,
            torch.view_as_real(rotary),
            keys,
            values,
            position,
            parts,
            sums,
            arrivals,
            mixed,
            heads,
            kv_heads,
            keys.shape[2],
            width,
            width**-0.5,
            next_power_of_two(width),
            POSITIONS_PER_PART,
            next_power_of_two(num_parts),
            dependent_launch,
            launch_pdl=dependent_launch,
        )
    return mixed


def needs_bias(like: Tensor, num: int) -> bool:
    """Whether attention of `num` new tokens to a KV cache runs in the plain form: their kernel is for a few of them."""
    return num > MAX_OPEN_TOKENS or not can_use_triton(like) or not open_kernel_matches_plain_form(like.device)


@cache
def open_kernel_matches_plain_form(device: torch.device) -> bool:
    """As `kernel_matches_plain_form`, of `attend_open`."""
    generator = torch.Generator(device).manual_seed(0)
    qkv, angles, keys, values = (
        torch.randn(shape, generator=generator, device=device)
        for shape in ((2, 5, 8, 16), (2, 5, 8), *2 * ((2, 2, 80, 16),))
    )
    rotary, position = torch.polar(torch.ones_like(angles), angles), torch.tensor([3, 70], device=device)
    arrivals = torch.zeros(2, 4, dtype=torch.int32, device=device)
    visible = torch.ones(1, 5, 5, dtype=torch.bool, device=device).tril()
    inputs = (rotary, keys.clone(), values.clone(), position, arrivals, visible)
    try:
        ours = torch.stack([attend_open(qkv.clone(), *inputs, split) for split in (True, False)])
    except Exception:  # noqa: BLE001  (Triton's errors have no other common base class)
        return False
    bias = cached_attention_bias(position, 80, visible, 2, qkv.dtype)
    plain = plain_attend_cached(qkv, rotary, keys, values, position, bias)
    return torch.allclose(ours, plain.expand_as(ours), atol=1e-3)


def attend_open(
    qkv: Tensor,
    rotary: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    arrivals: Tensor,
    visible: Tensor,
    split: bool | None = None,
) -> Tensor:
    """With `split`, several programs share the cache of a row and head: by default where there are few of them."""
    from adlm.inference.fused_kernels import attend_open_kernel

    (batch, num), (_, kv_heads, capacity, width) = qkv.shape[:2], keys.shape
    heads = qkv.shape[2] - 2 * kv_heads
    group, padded_width = heads // kv_heads, max(16, next_power_of_two(width))
    num_tiles = kv_heads * -(-group * num // OPEN_QUERIES)
    split = batch * num_tiles < 2 * NUM_MULTIPROCESSORS if split is None else split
    queries, num_parts = OPEN_QUERIES, -(-capacity // OPEN_PART) + 1
    if not split:  # fewer programs, which read the cache less often: 20 us instead of 27 for 64 rows of 24 tokens
        queries, num_parts = min(2 * OPEN_QUERIES, max(OPEN_QUERIES, next_power_of_two(group * num))), 1
        num_tiles = kv_heads * -(-group * num // queries)
    parts = torch.empty(batch, num_tiles, num_parts, queries, padded_width, device=qkv.device)
    sums = torch.empty(batch, num_tiles, num_parts, queries, 2, device=qkv.device)
    mixed, dependent_launch = qkv.new_empty(batch, num, heads * width), supports_dependent_launch(qkv.device)
    with torch.cuda.device(qkv.device) if qkv.is_cuda else nullcontext():
        attend_open_kernel[(batch, num_tiles, num_parts)](
            qkv,
            torch.view_as_real(rotary),
            visible.view(torch.uint8),
            num * num if len(visible) > 1 else 0,
            keys,
            values,
            position,
            parts,
            sums,
            arrivals,
            mixed,
            num,
            heads,
            kv_heads,
            capacity,
            width,
            width**-0.5,
            group,
            queries,
            max(16, next_power_of_two(num)),
            padded_width,
            OPEN_PART,
            split,
            dependent_launch,
            launch_pdl=dependent_launch,
        )
    return mixed


def cached_attention_bias(position: Tensor, length: int, visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, group n, C), 0 where a new token attends to a position of the cache and -inf elsewhere.

    It attends to all positions before `position` (B,), and to new tokens as `visible` (1 or B, n, n) says. The rows are
    repeated for the `group` query heads that share a key.
    """
    num = visible.shape[-1]
    new = torch.arange(length, device=position.device) - position[:, None]  # (B, C)
    among_new = visible.expand(len(position), -1, -1).gather(2, new.clamp(0, num - 1)[:, None].expand(-1, num, -1))
    seen = (new < 0)[:, None] | (new < num)[:, None] & among_new
    bias = torch.zeros(seen.shape, dtype=dtype, device=position.device).masked_fill_(~seen, -torch.inf)
    return bias[:, None].repeat(1, 1, group, 1)


def plain_attend_cached(
    qkv: Tensor, rotary: Tensor, keys: Tensor, values: Tensor, position: Tensor, bias: Tensor | None
) -> Tensor:
    kv_heads = keys.shape[1]
    group = qkv.shape[2] // kv_heads - 2
    if bias is None:
        alone = qkv.new_ones(1, 1, 1, dtype=torch.bool)
        rotary, bias = (
            rotary[position[:, None]],
            cached_attention_bias(position, keys.shape[2], alone, group, qkv.dtype),
        )
    apply_rotary_(qkv, rotary, kv_heads)
    q, k, v = (part.transpose(1, 2) for part in split_heads(qkv, kv_heads))
    slots = (position[:, None] + torch.arange(qkv.shape[1], device=qkv.device))[:, None, :, None].expand_as(k)
    keys.scatter_(2, slots, k)
    values.scatter_(2, slots, v)
    shape = q.shape
    if group > 1:  # the queries that share a key become rows of one head, so that the cache need not be repeated
        q = q.reshape(len(q), kv_heads, -1, q.shape[-1])
    # cuDNN, PyTorch's first choice, would build a new plan for every prompt length: a tenth of a second each.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if qkv.is_cuda else nullcontext():
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    return mixed.reshape(shape).transpose(1, 2).flatten(-2)


def linear_gelu(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(W h + b), with the tanh approximation of GELU; on CUDA fused into the matrix product."""
    if not h.is_cuda or h.dtype == torch.float64:
        return F.gelu(F.linear(h, weight, bias), approximate="tanh")
    activations = torch._addmm_activation(bias, h.flatten(0, -2), weight.T, use_gelu=True)
    return activations.view(*h.shape[:-1], -1)


def linear_swiglu(h: Tensor, weight: Tensor) -> Tensor:
    """silu(W1 h) * (W2 h), for W1 above W2 in `weight` (2 O, d)."""
    gate, inner = F.linear(h, weight).chunk(2, dim=-1)
    if not can_use_triton(h):
        return F.silu(gate) * inner
    from adlm.inference.fused_kernels import swiglu_kernel

    width = inner.shape[-1]
    gated = torch.empty(inner.shape, dtype=h.dtype, device=h.device)
    with torch.cuda.device(h.device):
        swiglu_kernel[(gated.numel() // width, -(-width // SWIGLU_BLOCK))](gate, gated, width, SWIGLU_BLOCK)
    return gated


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Whether programmatic dependent launch is available: from Hopper (compute capability 9.0) on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def is_single_row(x: Tensor) -> bool:
    """Whether x (..., d) is a single row and the kernel can run on it."""
    return x.numel() == x.shape[-1] and can_use_triton(x) and kernel_matches_plain_form(x.device)


@cache
def kernel_matches_plain_form(device: torch.device) -> bool:
    """Whether the kernel equals the plain form on a small example.

    On other devices or Triton versions than it was written for, it may fail to compile or be miscompiled.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape, dtype in (((1, 96), torch.bfloat16), ((40, 96), torch.bfloat16), ((40,), torch.float32))
    )
    sums = torch.empty(1, 40, device=device)
    try:
        _launch_kernel(x, weight, sums, bias=bias)
    except Exception:  # noqa: BLE001  (Triton's errors have no other common base class)
        return False
    return torch.allclose(sums, x.float() @ weight.float().T + bias, atol=1e-2)


def normed_product(
    h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> Tensor:
    """The activation of W (norm(h) * norm.weight + norm.shift) + b, in the dtype of W (O, d).

    The tensors of the norm are (1, d). There is no bias with swiglu, whose result has O / 2 outputs.
    """
    if not is_single_row(h):
        return plain_normed_product(h, norm, weight, bias, activation)
    sums = weight.new_empty(*h.shape[:-1], len(weight) // 2 if activation == "swiglu" else len(weight))
    _launch_kernel(h, weight, sums, bias=bias, norm=norm, activation=activation)
    return sums


def plain_normed_product(
    h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> Tensor:
    sums = F.linear(plain_add_norm_(h, None, norm, weight.dtype), weight, bias)
    if activation == "swiglu":
        gate, inner = sums.chunk(2, dim=-1)
        return F.silu(gate) * inner
    return F.gelu(sums, approximate="tanh") if activation == "gelu" else sums


def add_product_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> None:
    """h (..., O) <- h + gate * (W x + b), in place, for x (..., d) and gate (1, O)."""
    if is_single_row(h):
        _launch_kernel(x, weight, h, bias=bias, gate=gate)
    else:
        plain_add_product_(h, x, weight, bias, gate)


def plain_add_product_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> None:
    h.addcmul_(gate, F.linear(x, weight, bias).to(h.dtype))


def precise_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x + b accumulated and returned in the dtype of b (O,); rows of W after the first O are ignored."""
    if is_single_row(x):
        sums = bias.new_empty(*x.shape[:-1], len(bias))
        _launch_kernel(x, weight, sums, bias=bias)
        return sums
    if x.is_cuda and x.dtype != bias.dtype:
        product = torch.mm(x, weight.T, out_dtype=bias.dtype)
    else:
        product = (x @ weight.T).to(bias.dtype)
    return product[..., : len(bias)] + bias


def log_beliefs(x: Tensor, weight: Tensor, bias: Tensor, mask_id: int) -> Tensor:
    """`clean_log_beliefs` of the `precise_product` of rows x (N, d)."""
    if not can_use_triton(x):
        return clean_log_beliefs(precise_product(x, weight, bias), mask_id)
    from adlm.inference.fused_kernels import log_beliefs_kernel, partial_softmax_kernel

    (num_rows, _), num_symbols = x.shape, len(bias)
    biased = not is_single_row(x)
    if biased and x.dtype != bias.dtype:
        logits = torch.mm(x, weight.T, out_dtype=bias.dtype)
    else:
        logits = x @ weight.T if biased else precise_product(x, weight, bias)
    num_parts = -(-num_symbols // SOFTMAX_BLOCK)
    sums = torch.empty(num_rows, num_parts, 2, device=x.device)
    beliefs = torch.empty(num_rows, num_symbols, device=x.device)
    sizes = (logits.stride(0), num_symbols, mask_id, biased, SOFTMAX_BLOCK)
    if num_rows:
        with torch.cuda.device(x.device):
            partial_softmax_kernel[(num_rows, num_parts)](logits, bias, sums, *sizes)
            log_beliefs_kernel[(num_rows, num_parts)](logits, bias, sums, beliefs, *sizes, next_power_of_two(num_parts))
    return beliefs


def _launch_kernel(
    x: Tensor,
    weight: Tensor,
    sums: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    activation: Activation = "none",
) -> None:
    """Run the kernel: overwrites `sums`, or with a gate adds to them."""
    from adlm.inference.fused_kernels import single_row_kernel

    width, num_sums = x.shape[-1], sums.shape[-1]
    per_program, dependent_launch = _sums_per_program(width, num_sums), supports_dependent_launch(x.device)
    with torch.cuda.device(x.device):
        single_row_kernel[(-(-num_sums // per_program),)](
            x.contiguous(),
            None if norm is None else norm.weight,
            None if norm is None else norm.shift,
            weight,
            bias,
            gate,
            sums,
            num_sums,
            LAYER_NORM_EPSILON if norm is None or norm.rms_epsilon is None else norm.rms_epsilon,
            width,
            per_program,
            next_power_of_two(width),
            norm is not None,
            norm is not None and norm.rms_epsilon is None,
            bias is not None,
            activation == "gelu",
            activation == "swiglu",
            gate is not None,
            dependent_launch,
            launch_pdl=dependent_launch,
        )


def _sums_per_program(width: int, num_sums: int) -> int:
    """Outputs per program. Fastest on an H200: 8 for qkv and the head, 4 for `out`, 2 for `narrow`."""
    per_program = max(2, WEIGHTS_PER_PROGRAM // next_power_of_two(width))
    while per_program > 2 and num_sums < NUM_MULTIPROCESSORS * per_program:
        per_program //= 2
    return per_program
