"""Frozen networks compute the same logits as the networks they were made from."""

import gc
import threading
import time
from dataclasses import replace

import pytest
import torch
from worlds import randomized, seeded

from adlm.config.schema import Model
from adlm.diffusion.beliefs import clean_log_beliefs
from adlm.inference import trunk as frozen_trunk
from adlm.inference.frozen import FrozenNetwork, GraphCache, no_collection
from adlm.inference.fused_ops import (
    Norm,
    add_norm_,
    apply_rotary_,
    attend_cached,
    attend_open,
    cached_attention_bias,
    linear_swiglu,
    log_beliefs,
    plain_add_norm_,
    plain_apply_rotary_,
    plain_attend_cached,
    precise_product,
)
from adlm.models.anchored import AnchoredTransformer
from adlm.models.heads import why_no_triton
from adlm.models.transformer import Transformer

MODEL = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.5)
LLAMA = Model(family="llama", hidden=16, heads=4, kv_heads=2, mlp=24, blocks=2, denoiser_blocks=1, rotary_base=300.0)
QWEN = replace(LLAMA, kv_heads=1, qkv_bias=True, tie_embedding=True, norm_epsilon=1e-2, bridge="none")
GPT2 = Model(family="gpt2", hidden=16, heads=4, mlp=24, blocks=2, denoiser_blocks=1, positions=320)
SYMBOLS = 12

NETWORKS = {
    "mdlm": lambda: Transformer(MODEL, SYMBOLS),
    "adlm logits": lambda: AnchoredTransformer(MODEL, SYMBOLS),
    "adlm hidden": lambda: AnchoredTransformer(replace(MODEL, bridge="hidden"), SYMBOLS),
    "adlm mixture": lambda: AnchoredTransformer(replace(MODEL, bridge="mixture"), SYMBOLS),
    "adlm hidden-plus-input": lambda: AnchoredTransformer(replace(MODEL, bridge="hidden-plus-input"), SYMBOLS),
    "adlm without a bridge": lambda: AnchoredTransformer(replace(MODEL, bridge="none"), SYMBOLS),
    "adlm tied": lambda: AnchoredTransformer(replace(MODEL, tie_heads=True), SYMBOLS),
    "adlm with normalised queries": lambda: AnchoredTransformer(replace(MODEL, qk_norm=True), SYMBOLS),
    "adlm with a second anchor head": lambda: AnchoredTransformer(replace(MODEL, second_anchor_head=1), SYMBOLS),
    "adlm without a second network": lambda: AnchoredTransformer(replace(MODEL, denoiser_blocks=0), SYMBOLS),
    "ar": lambda: Transformer(MODEL, SYMBOLS, causal=True, modulated=False),
    "ar with normalised queries": lambda: Transformer(replace(MODEL, qk_norm=True), SYMBOLS, True, False),
    "a2r": lambda: AnchoredTransformer(MODEL, SYMBOLS, causal=True, modulated=False),
    "a2r hidden-plus-input": lambda: AnchoredTransformer(
        replace(MODEL, bridge="hidden-plus-input"), SYMBOLS, causal=True, modulated=False
    ),
    "a2r without a bridge": lambda: AnchoredTransformer(
        replace(MODEL, bridge="none"), SYMBOLS, causal=True, modulated=False
    ),
    "llama mdlm": lambda: Transformer(LLAMA, SYMBOLS),
    "llama adlm": lambda: AnchoredTransformer(LLAMA, SYMBOLS),
    "llama ar": lambda: Transformer(LLAMA, SYMBOLS, causal=True, modulated=False),
    "gpt2 mdlm": lambda: Transformer(GPT2, SYMBOLS),
    "gpt2 adlm": lambda: AnchoredTransformer(GPT2, SYMBOLS),
    "gpt2 ar": lambda: Transformer(GPT2, SYMBOLS, causal=True, modulated=False),
    "gpt2 a2r": lambda: AnchoredTransformer(replace(GPT2, bridge="none"), SYMBOLS, causal=True, modulated=False),
    "qwen adlm": lambda: AnchoredTransformer(QWEN, SYMBOLS),
    "qwen ar": lambda: Transformer(QWEN, SYMBOLS, causal=True, modulated=False),
    "qwen a2r": lambda: AnchoredTransformer(QWEN, SYMBOLS, causal=True, modulated=False),
}
CAUSAL = ("ar", "ar with normalised queries", "a2r", "a2r hidden-plus-input", "a2r without a bridge")
CAUSAL += ("llama ar", "qwen ar", "qwen a2r", "gpt2 ar", "gpt2 a2r")


def random_network(name: str, dtype=torch.float64, device="cpu"):
    return randomized(NETWORKS[name]().to(device, dtype)).eval()


def ids(batch: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(SYMBOLS, (batch, length), generator=seeded(seed))


def padding(batch: int = 3, length: int = 7) -> torch.Tensor:
    """The first row without padding, the second all padding, the others padded at the end."""
    lengths = torch.tensor([length, 0, *range(length - 2, length - batch, -1)])
    return torch.arange(length) >= lengths[:, None]


def frozen_logits(frozen: FrozenNetwork, z, **inputs):
    """All logits (B, L, V), and those of the anchor network if there is one."""
    hidden = frozen.hidden(z, **inputs)
    logits = frozen.logits(hidden.last.flatten(0, 1)).unflatten(0, z.shape)
    if hidden.anchor is None:
        return [logits]
    return [logits, frozen.anchor_logits(hidden.anchor.flatten(0, 1)).unflatten(0, z.shape)]


@torch.no_grad()
def network_logits(network, z, **inputs):
    anchored = isinstance(network, AnchoredTransformer)
    return [network(z, **inputs)] + ([network.anchor_logits(z, **inputs)] if anchored else [])


def assert_same(ours, oracle, tolerance=1e-10):
    assert len(ours) == len(oracle)
    for fast, slow in zip(ours, oracle, strict=True):
        assert fast.dtype == slow.dtype
        torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance * max(1, float(slow.abs().max())))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_frozen_network_has_the_logits_of_the_network(name, length):
    network, z = random_network(name), ids(length=length)
    assert_same(frozen_logits(FrozenNetwork(network), z), network_logits(network, z))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_frozen_network_in_float32_has_the_logits_of_the_network(name):
    network, z = random_network(name, torch.float32), ids()
    assert_same(frozen_logits(FrozenNetwork(network), z), network_logits(network, z), 1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_padding_is_not_attended_to(name):
    network, z, pad = random_network(name), ids(), padding()
    assert_same(frozen_logits(FrozenNetwork(network), z, pad=pad), network_logits(network, z, pad=pad))
    assert not torch.equal(network_logits(network, z, pad=pad)[0], network_logits(network, z)[0])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("pad", [None, padding()])
def test_a_frozen_network_is_conditioned_on_the_noise_level_of_every_row(name, pad):
    network, z, sigma = random_network(name), ids(), torch.tensor([0.0, 1.7, 0.3]).double()
    assert_same(
        frozen_logits(FrozenNetwork(network), z, sigma=sigma, pad=pad), network_logits(network, z, sigma=sigma, pad=pad)
    )


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units warns and falls back
@pytest.mark.parametrize("name", NETWORKS)
def test_in_bfloat16_it_is_as_accurate_as_the_network_under_autocast(name):
    network, z = random_network(name, torch.float32), ids()
    exact = network_logits(network, z)[0].softmax(dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = network_logits(network, z)[0].float().softmax(dim=-1)
    frozen = FrozenNetwork(network, torch.bfloat16)
    (ours, *_) = frozen_logits(frozen, z)
    assert ours.dtype == torch.float32
    assert frozen.hidden(z).last.dtype == torch.bfloat16
    assert (ours.softmax(dim=-1) - exact).abs().max() < 2 * (autocast - exact).abs().max() + 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_the_single_row_path_computes_the_same_logits(name, monkeypatch):
    network, z = random_network(name), ids()
    monkeypatch.setattr(frozen_trunk, "is_single_row", lambda h: True)
    assert_same(frozen_logits(FrozenNetwork(network), z), network_logits(network, z))


def test_later_changes_of_the_network_do_not_affect_the_frozen_copy():
    for name in NETWORKS:
        network, z = random_network(name), ids()
        frozen = FrozenNetwork(network)
        before = [part.clone() for part in frozen_logits(frozen, z)]
        randomized(network, seed=5)
        assert_same(frozen_logits(frozen, z), before, 0.0)
        assert not torch.equal(network_logits(network, z)[0], before[0])


def test_a_frozen_network_computes_no_gradients():
    frozen = FrozenNetwork(random_network("adlm logits"))
    hidden = frozen.hidden(ids())
    assert not hidden.last.requires_grad
    assert not frozen.logits(hidden.last[0]).requires_grad


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (4, 1, 1, 1), (2, 3, 2)])
def test_reading_a_text_in_chunks_gives_the_same_hidden_states(name, sizes):
    frozen, z = FrozenNetwork(random_network(name)), ids()
    whole, cache = frozen.hidden(z), frozen.cache(3, 9)
    for chunk, last in zip(z.split(sizes, dim=1), whole.last.split(sizes, dim=1), strict=True):
        assert_same([frozen.read(chunk, cache).last], [last])
    assert cache.filled == 7


def test_reading_in_chunks_gives_the_same_anchor_hidden_states():
    frozen, z = FrozenNetwork(random_network("a2r")), ids()
    whole, cache = frozen.hidden(z), frozen.cache(3, 7)
    read = [frozen.read(chunk, cache).anchor for chunk in z.split(1, dim=1)]
    assert_same([torch.cat(read, dim=1)], [whole.anchor])


def test_caches_read_alternately_are_independent():
    frozen, z = FrozenNetwork(random_network("ar")), ids(2, 5)
    caches = [frozen.cache(1, 5), frozen.cache(1, 5)]
    for position in range(5):
        for row, cache in enumerate(caches):
            read = frozen.read(z[row : row + 1, position : position + 1], cache)
            alone = frozen.hidden(z[row : row + 1, : position + 1])
            assert_same([read.last[:, 0]], [alone.last[:, -1]])


def test_reading_past_the_end_of_a_cache_is_an_error():
    frozen = FrozenNetwork(random_network("ar"))
    cache = frozen.cache(3, 7)
    frozen.read(ids(), cache)
    with pytest.raises(ValueError, match="7 positions, 7 are filled"):
        frozen.read(ids()[:, :1], cache)


def test_threads_that_need_no_collection_wait_for_each_other():
    states = []

    def capture():
        with no_collection():
            states.append(gc.isenabled())
            time.sleep(0.01)
            states.append(gc.isenabled())

    threads = [threading.Thread(target=capture) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [False] * 8
    assert gc.isenabled()
    with pytest.raises(RuntimeError), no_collection():
        raise RuntimeError
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_garbage_is_collected_during_a_capture():
    """Two calls to warm up, then the capture."""
    states = []

    def negative(x):
        states.append(gc.isenabled())
        return -x

    GraphCache(torch.device("cuda")).replay(negative, torch.ones(1, device="cuda"))
    assert states == [True, True, False]
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", NETWORKS)
def test_with_and_without_cuda_graphs_it_has_the_logits_of_the_network(name, dtype, tolerance, graphs):
    """Every shape is run twice with different ids, so that a stale result would be noticed."""
    network = random_network(name, dtype, "cuda")
    frozen = FrozenNetwork(network, dtype, graphs)
    sigma = torch.tensor([0.0, 1.7, 0.3], device="cuda", dtype=dtype)
    for inputs in ({}, {"pad": padding().cuda()}, {"sigma": sigma}, {"sigma": sigma, "pad": padding().cuda()}):
        for seed in range(2):
            z = ids(seed=seed).cuda()
            assert_same(frozen_logits(frozen, z, **inputs), network_logits(network, z, **inputs), tolerance)
    for length in (*range(1, 12), 1):  # more shapes than graphs are cached
        z = ids(length=length).cuda()
        assert_same(frozen_logits(frozen, z), network_logits(network, z), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu_it_runs_in_bfloat16_as_accurately_as_the_network_under_autocast(name):
    network, z = random_network(name, torch.float32, "cuda"), ids(8, 200).cuda()
    exact = network_logits(network, z)[0].softmax(dim=-1)
    with torch.autocast("cuda", torch.bfloat16):
        autocast = network_logits(network, z)[0].float().softmax(dim=-1)
    ours = frozen_logits(FrozenNetwork(network), z)[0]
    assert ours.dtype == torch.float32
    assert (ours.softmax(dim=-1) - exact).abs().mean() < 1.2 * (autocast - exact).abs().mean() + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("rows", [1, 2])
def test_on_a_gpu_alternate_reading_in_chunks_gives_the_same_hidden_states(name, dtype, tolerance, graphs, rows):
    frozen, texts = (
        FrozenNetwork(random_network(name, dtype, "cuda"), dtype, graphs),
        ids(2 * rows, 300).cuda().split(rows),
    )
    wholes = [frozen.hidden(text).last.clone() for text in texts]
    caches = [frozen.cache(rows, 300) for _ in texts]
    for chunk in torch.arange(300).split([4, *(1 for _ in range(200)), 50, *(1 for _ in range(46))]):
        for text, whole, cache in zip(texts, wholes, caches, strict=True):
            assert_same([frozen.read(text[:, chunk], cache).last], [whole[:, chunk]], tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_width"), [(2, 2, 8), (3, 3, 12), (12, 12, 64), (9, 3, 64), (6, 1, 12)]
)
def test_the_kernels_equal_their_plain_forms(dtype, heads, kv_heads, head_width):
    assert why_no_triton() == ""
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    width = heads * head_width
    h, added = noise(2, 5, width), noise(2, 5, width).to(dtype)
    for norm in (Norm(*noise(3, 1, width)), Norm(*noise(3, 2, width)), Norm(*noise(3, 1, width), 1e-2)):
        for given in (None, added):
            ours, plain = h.clone(), h.clone()
            fast, slow = add_norm_(ours, given, norm, dtype), plain_add_norm_(plain, given, norm, dtype)
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(fast, slow, **rounding)
    rotary = torch.polar(torch.ones(300, head_width // 2, device="cuda"), noise(300, head_width // 2))
    ours = noise(2, 5, heads + 2 * kv_heads, head_width).to(dtype)
    plain = ours.clone()
    apply_rotary_(ours, rotary[:5], kv_heads)
    plain_apply_rotary_(plain, rotary[:5], kv_heads)
    torch.testing.assert_close(ours, plain, **rounding)
    qkv = noise(2, 1, heads + 2 * kv_heads, head_width).to(dtype)
    cached = noise(2, 2, kv_heads, 300, head_width).to(dtype)
    arrivals = torch.zeros(2, heads, dtype=torch.int32, device="cuda")
    for starts in ((0, 0), (1, 127), (127, 128), (128, 5), (299, 0)):
        ours, plain, position = cached.clone(), cached.clone(), torch.tensor(starts, device="cuda")
        fast = attend_cached(qkv.clone(), rotary, *ours, position, arrivals)
        slow = plain_attend_cached(qkv.clone(), rotary, *plain, position, None)
        torch.testing.assert_close(fast, slow, **rounding)
        torch.testing.assert_close(ours, plain, **rounding)
        assert not arrivals.any()
    for num, num_rules in ((1, 1), (5, 1), (24, 2), (32, 1)):
        qkv = noise(2, num, heads + 2 * kv_heads, head_width).to(dtype)
        angles = rotary[torch.arange(2 * num, device="cuda").view(2, num)]
        visible = (noise(num_rules, num, num) > 0) | torch.eye(num, dtype=torch.bool, device="cuda")
        for starts in ((0, 0), (1, 63), (64, 65), (268, 5)):
            plain, position = cached.clone(), torch.tensor(starts, device="cuda")
            bias = cached_attention_bias(position, 300, visible, heads // kv_heads, dtype)
            slow = plain_attend_cached(qkv.clone(), angles, *plain, position, bias)
            for split in (True, False):
                ours = cached.clone()
                fast = attend_open(qkv.clone(), angles, *ours, position, arrivals, visible, split)
                torch.testing.assert_close(fast, slow, **rounding)
                torch.testing.assert_close(ours, plain, **rounding)
                assert not arrivals.any()
    matrix, rows = noise(2 * 1500, width).to(dtype) / 8, noise(2, 5, width).to(dtype)
    gate, inner = (rows.double() @ matrix.double().T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * inner
    torch.testing.assert_close(linear_swiglu(rows, matrix).double(), exact, rtol=2e-2, atol=rounding["atol"] * 10)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded()).cuda()


@pytest.mark.parametrize("name", ["mdlm", "adlm logits", "adlm hidden"])
def test_with_a_fixed_batch_a_row_has_the_same_bits_alone_and_among_others(name):
    frozen = FrozenNetwork(random_network(name, torch.float32), batch=4)
    z, pad = ids(4, 32), torch.arange(32).expand(4, 32) >= 29
    together = frozen.hidden(z, None, pad).last
    logits = frozen.logits(together[:, :9].flatten(0, 1))
    for row in range(4):
        alone = frozen.hidden(z[row : row + 1], None, pad[row : row + 1]).last
        assert torch.equal(alone[0], together[row])
        assert torch.equal(frozen.logits(alone[0, 2:3])[0], logits[9 * row + 2])


def test_a_fixed_batch_does_not_change_the_logits_beyond_rounding():
    network = random_network("adlm logits")
    plain, fixed = FrozenNetwork(network), FrozenNetwork(network, batch=4)
    sigma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    for frozen_input in ((ids(), sigma, None), (ids(), sigma, padding())):
        expected, got = (each.hidden(*frozen_input) for each in (plain, fixed))
        assert torch.allclose(fixed.logits(got.last.flatten(0, 1)), plain.logits(expected.last.flatten(0, 1)))
        assert torch.allclose(
            fixed.anchor_logits(got.anchor.flatten(0, 1)), plain.anchor_logits(expected.anchor.flatten(0, 1))
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("symbols", [12, 4096, 49_153])
def test_on_a_gpu_fused_log_beliefs_are_those_of_the_plain_form(symbols, rows):
    x, weight, bias = (
        torch.randn(shape, generator=seeded(number)).cuda()
        for number, shape in enumerate(((rows, 64), (symbols + 3, 64), (symbols,)))
    )
    x, weight = x.bfloat16(), weight.bfloat16()
    ours, plain = log_beliefs(x, weight, bias, 5), clean_log_beliefs(precise_product(x, weight, bias), 5)
    assert ours[:, 5].tolist() == [-torch.inf] * rows
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours.exp().sum(dim=-1), torch.ones(rows, device="cuda"))
