"""Laws of frozen networks: the network's own answers, by fewer operations."""

from dataclasses import replace

import pytest
import torch
from worlds import seeded, wake

from adlm.config.schema import Model
from adlm.inference import trunk as frozen_trunk
from adlm.inference.frozen import FrozenNetwork
from adlm.inference.fused_ops import (
    Norm,
    add_norm_,
    apply_rotary_,
    attend_one_token,
    plain_add_norm_,
    plain_apply_rotary_,
    plain_attend_one_token,
)
from adlm.models.anchored import AnchoredTransformer
from adlm.models.logit_gradients import why_no_triton
from adlm.models.transformer import Transformer

MODEL = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.5)
SYMBOLS = 12

NETWORKS = {
    "mdlm": lambda: Transformer(MODEL, SYMBOLS),
    "adlm logits": lambda: AnchoredTransformer(MODEL, SYMBOLS),
    "adlm hidden": lambda: AnchoredTransformer(replace(MODEL, bridge="hidden"), SYMBOLS),
    "adlm mixture": lambda: AnchoredTransformer(replace(MODEL, bridge="mixture"), SYMBOLS),
    "adlm without a second network": lambda: AnchoredTransformer(replace(MODEL, denoiser_blocks=0), SYMBOLS),
    "ar": lambda: Transformer(MODEL, SYMBOLS, causal=True, modulated=False),
    "a2r": lambda: AnchoredTransformer(MODEL, SYMBOLS, causal=True, modulated=False),
}
CAUSAL = ("ar", "a2r")


def awake(name: str, dtype=torch.float64, device="cpu"):
    return wake(NETWORKS[name]().to(device, dtype)).eval()


def ids(batch: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(SYMBOLS, (batch, length), generator=seeded(seed))


def padding(batch: int = 3, length: int = 7) -> torch.Tensor:
    """The first row whole, the second all padding, the others padded at the end."""
    lengths = torch.tensor([length, 0, *range(length - 2, length - batch, -1)])
    return torch.arange(length) >= lengths[:, None]


def said(frozen: FrozenNetwork, z, **told):
    """The logits of everything (B, L, V), and of the anchors where there are any."""
    hidden = frozen.hidden(z, **told)
    logits = frozen.logits(hidden.last.flatten(0, 1)).unflatten(0, z.shape)
    if hidden.anchor is None:
        return [logits]
    return [logits, frozen.anchor_logits(hidden.anchor.flatten(0, 1)).unflatten(0, z.shape)]


@torch.no_grad()
def expected(network, z, **told):
    anchored = isinstance(network, AnchoredTransformer)
    return [network(z, **told)] + ([network.anchor_logits(z, **told)] if anchored else [])


def assert_same(ours, oracle, tolerance=1e-10):
    assert len(ours) == len(oracle)
    for fast, slow in zip(ours, oracle, strict=True):
        assert fast.dtype == slow.dtype
        torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance * max(1, float(slow.abs().max())))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_frozen_network_says_what_the_network_says(name, length):
    network, z = awake(name), ids(length=length)
    assert_same(said(FrozenNetwork(network), z), expected(network, z))


@pytest.mark.parametrize("name", NETWORKS)
def test_in_single_precision_too(name):
    network, z = awake(name, torch.float32), ids()
    assert_same(said(FrozenNetwork(network), z), expected(network, z), 1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_attends_to_no_padding(name):
    network, z, pad = awake(name), ids(), padding()
    assert_same(said(FrozenNetwork(network), z, pad=pad), expected(network, z, pad=pad))
    assert not torch.equal(expected(network, z, pad=pad)[0], expected(network, z)[0])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("pad", [None, padding()])
def test_told_the_noise_of_every_row_it_says_what_the_network_says(name, pad):
    network, z, sigma = awake(name), ids(), torch.tensor([0.0, 1.7, 0.3]).double()
    assert_same(said(FrozenNetwork(network), z, sigma=sigma, pad=pad), expected(network, z, sigma=sigma, pad=pad))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so and goes on
@pytest.mark.parametrize("name", NETWORKS)
def test_in_half_precision_it_stays_as_near_as_the_network_under_autocast(name):
    network, z = awake(name, torch.float32), ids()
    exact = expected(network, z)[0].softmax(dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = expected(network, z)[0].float().softmax(dim=-1)
    frozen = FrozenNetwork(network, torch.bfloat16)
    (ours, *_) = said(frozen, z)
    assert ours.dtype == torch.float32
    assert frozen.hidden(z).last.dtype == torch.bfloat16
    assert (ours.softmax(dim=-1) - exact).abs().max() < 2 * (autocast - exact).abs().max() + 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_one_row_has_its_own_way_to_the_same_answer(name, monkeypatch):
    network, z = awake(name), ids()
    monkeypatch.setattr(frozen_trunk, "is_single_row", lambda h: True)
    assert_same(said(FrozenNetwork(network), z), expected(network, z))


def test_what_is_frozen_does_not_move_with_the_network():
    for name in NETWORKS:
        network, z = awake(name), ids()
        frozen = FrozenNetwork(network)
        before = [part.clone() for part in said(frozen, z)]
        wake(network, seed=5)
        assert_same(said(frozen, z), before, 0.0)
        assert not torch.equal(expected(network, z)[0], before[0])


def test_nothing_of_it_can_be_differentiated():
    frozen = FrozenNetwork(awake("adlm logits"))
    hidden = frozen.hidden(ids())
    assert not hidden.last.requires_grad
    assert not frozen.logits(hidden.last[0]).requires_grad


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("pieces", [(7,), (1,) * 7, (4, 1, 1, 1), (2, 3, 2)])
def test_read_by_pieces_a_text_is_the_same_text(name, pieces):
    frozen, z = FrozenNetwork(awake(name)), ids()
    whole, cache = frozen.hidden(z), frozen.cache(3, 9)
    for piece, last in zip(z.split(pieces, dim=1), whole.last.split(pieces, dim=1), strict=True):
        assert_same([frozen.read(piece, cache).last], [last])
    assert cache.filled == 7


def test_the_anchor_network_reads_by_pieces_too():
    frozen, z = FrozenNetwork(awake("a2r")), ids()
    whole, cache = frozen.hidden(z), frozen.cache(3, 7)
    read = [frozen.read(piece, cache).anchor for piece in z.split(1, dim=1)]
    assert_same([torch.cat(read, dim=1)], [whole.anchor])


def test_two_texts_read_in_turns_do_not_meet():
    frozen, z = FrozenNetwork(awake("ar")), ids(2, 5)
    caches = [frozen.cache(1, 5), frozen.cache(1, 5)]
    for place in range(5):
        for row, cache in enumerate(caches):
            read = frozen.read(z[row : row + 1, place : place + 1], cache)
            alone = frozen.hidden(z[row : row + 1, : place + 1])
            assert_same([read.last[:, 0]], [alone.last[:, -1]])


def test_a_full_cache_says_so():
    frozen = FrozenNetwork(awake("ar"))
    cache = frozen.cache(3, 7)
    frozen.read(ids(), cache)
    with pytest.raises(ValueError, match="7 places, 7 are filled"):
        frozen.read(ids()[:, :1], cache)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", NETWORKS)
def test_recorded_or_not_it_says_what_the_network_says(name, dtype, tolerance, graphs):
    """Every shape twice, with other ids: what is replayed is the work, not the answer."""
    network = awake(name, dtype, "cuda")
    frozen = FrozenNetwork(network, dtype, graphs)
    sigma = torch.tensor([0.0, 1.7, 0.3], device="cuda", dtype=dtype)
    for told in ({}, {"pad": padding().cuda()}, {"sigma": sigma}, {"sigma": sigma, "pad": padding().cuda()}):
        for turn in range(2):
            z = ids(seed=turn).cuda()
            assert_same(said(frozen, z, **told), expected(network, z, **told), tolerance)
    for length in (*range(1, 12), 1):  # more than are remembered
        z = ids(length=length).cuda()
        assert_same(said(frozen, z), expected(network, z), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu_it_is_in_half_precision_and_as_near_as_the_network_under_autocast(name):
    network, z = awake(name, torch.float32, "cuda"), ids(8, 200).cuda()
    exact = expected(network, z)[0].softmax(dim=-1)
    with torch.autocast("cuda", torch.bfloat16):
        autocast = expected(network, z)[0].float().softmax(dim=-1)
    ours = said(FrozenNetwork(network), z)[0]
    assert ours.dtype == torch.float32
    assert (ours.softmax(dim=-1) - exact).abs().mean() < 1.2 * (autocast - exact).abs().mean() + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("rows", [1, 2])
def test_on_a_gpu_too_texts_read_by_pieces_and_in_turns_are_the_same_texts(name, dtype, tolerance, graphs, rows):
    frozen, texts = FrozenNetwork(awake(name, dtype, "cuda"), dtype, graphs), ids(2 * rows, 300).cuda().split(rows)
    wholes = [frozen.hidden(text).last.clone() for text in texts]
    caches = [frozen.cache(rows, 300) for _ in texts]
    for piece in torch.arange(300).split([4, *(1 for _ in range(200)), 50, *(1 for _ in range(46))]):
        for text, whole, cache in zip(texts, wholes, caches, strict=True):
            assert_same([frozen.read(text[:, piece], cache).last], [whole[:, piece]], tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_width"), [(2, 8), (3, 12), (12, 64)])
def test_the_kernels_are_their_plain_forms(dtype, heads, head_width):
    assert why_no_triton() == ""
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    width = heads * head_width
    h, added = noise(2, 5, width), noise(2, 5, width).to(dtype)
    for norm in (Norm(*noise(3, 1, width)), Norm(*noise(3, 2, width))):
        for given in (None, added):
            ours, plain = h.clone(), h.clone()
            fast, slow = add_norm_(ours, given, norm, dtype), plain_add_norm_(plain, given, norm, dtype)
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(fast, slow, **rounding)
    turns = torch.polar(torch.ones(300, head_width // 2, device="cuda"), noise(300, head_width // 2))
    ours = noise(2, 5, 3, heads, head_width).to(dtype)
    plain = ours.clone()
    apply_rotary_(ours, turns[:5])
    plain_apply_rotary_(plain, turns[:5])
    torch.testing.assert_close(ours, plain, **rounding)
    qkv, kept = noise(2, 1, 3, heads, head_width).to(dtype), noise(2, 2, heads, 300, head_width).to(dtype)
    arrivals = torch.zeros(2, heads, dtype=torch.int32, device="cuda")
    for place in (0, 1, 127, 128, 299):
        ours, plain, position = kept.clone(), kept.clone(), torch.tensor([place], device="cuda")
        fast = attend_one_token(qkv.clone(), turns, *ours, position, arrivals)
        slow = plain_attend_one_token(qkv.clone(), turns, *plain, position)
        torch.testing.assert_close(fast, slow, **rounding)
        torch.testing.assert_close(ours, plain, **rounding)
        assert not arrivals.any()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded()).cuda()
