"""Invalid arguments to the Python API: each raises a UserError that names the argument, before any work is done."""

import decimal
import fractions
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import small_model

import adlm
from adlm.canvas import Canvas
from adlm.errors import UserError
from adlm.sampling.rng import RowRng
from adlm.sampling.settings import SampleSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("models") / "adlm")


@pytest.fixture(scope="module")
def lm(folder):
    return adlm.load(folder)


META = torch.zeros(1, 4, dtype=torch.int64, device="meta")
IDS = torch.zeros(1, 4, dtype=torch.int64)
CANVAS = torch.full((1, 4), 257)

NOT_INTEGERS = ["3", 1.5, 2.0, None, True, [1], (1,), {}, b"1", 1j, float("nan"), float("inf"), torch.tensor(True)]
NOT_INTEGERS += [torch.tensor(1.0), torch.tensor([1, 2]), META[0, 0], np.float64(1), np.array([1, 2]), object()]
NOT_INTEGERS += [decimal.Decimal(1), fractions.Fraction(1, 2)]
NOT_SEEDS = [*NOT_INTEGERS, -1, 2**63, 2**64, 10**5000, -(10**5000), np.int64(-1), torch.tensor(-1)]
NOT_COUNTS = [*NOT_INTEGERS, 0, -1, 10**12, 10**30, 10**5000, -(10**5000), np.int64(0)]
NOT_IDS = ["abc", [1, 2], np.zeros((1, 4), dtype=np.int64), None, 5, object(), META, IDS.int(), IDS.float(), IDS.bool()]
NOT_IDS += [IDS[None], IDS[:, :0], IDS - 1, IDS + 10_000, IDS.to_sparse(), torch.zeros(1, 17, dtype=torch.int64)]
NOT_IDS += [torch.tensor(5), torch.zeros(0, 4, dtype=torch.int64), IDS.to(torch.complex64)]
NOT_TEXTS = [
    None,
    5,
    1.5,
    b"abc",
    ["a", 5],
    [b"a"],
    [["a"]],
    {"a": 1},
    object(),
    IDS,
    np.array(["a"]),
    iter(["a"]),
    "\ud800",
]
NOT_ALPHAS = [
    "half",
    [0.5, "x"],
    object(),
    float("nan"),
    float("inf"),
    -0.1,
    1.1,
    [0.5, 0.5],
    torch.ones(2),
    META,
    [[0.5]],
]
NOT_ALPHAS += [10**400, b"1", {}]
NOT_PADS = [
    "x",
    [[True]],
    IDS,
    IDS.bool()[0],
    torch.ones(1, 4, dtype=torch.bool),
    META.bool(),
    1,
    IDS.bool().to_sparse(),
]
NOT_OPTIONS = {
    "sampler": ["remdm", 5, ["ancestral"], True, None, b"ancestral", object(), {}],
    "steps": [0, -1, 1.5, "8", True, None, 10**7, 10**30, 10**5000, [8], META[0, 0], np.array([1, 2]), float("nan")],
    "eta": [2.0, -1.0, "x", float("nan"), True, object(), torch.ones(2)],
    "temperature": [float("nan"), float("inf"), -1.0, 1e-9, "hot", True, None, [1.0], 10**400, 1j],
    "top_k": [-1, 1.5, "x", True, 2**40, None, float("inf")],
    "top_p": [0.0, 1.5, -1, float("nan"), "x", None, True],
    "t_end": [1.0, -0.1, "x", float("nan")],
    "repetition_penalty": [0.5, "x", float("inf"), None],
    "final": ["best", 5, None, ["argmax"]],
    "stride": [-1, 1.5, "x", 10**30],
    "threshold": [0.0, 2.0, "x"],
    "nucleus": ["x", 1],
}
NOT_PATHS = [
    None,
    5,
    b"model",
    ["model"],
    object(),
    1.5,
    "",
    "nothing/here",
    "a\0b",
    "x" * 300,
    "\udcff",
    Path("/dev/null"),
]
NOT_DEVICES = [
    "meta",
    "gpu",
    "cuda:999",
    "cpu:1",
    "xla",
    "",
    "cuda:-1",
    None,
    5,
    object(),
    torch.device("meta"),
    "cuda:x",
]
NOT_DEVICES += ["vulkan", "cuda:" + "9" * 50, "\x1b[31m", b"cpu", ["cpu"]]

CALLS = {
    "log_probs z": (lambda lm, wrong: lm.log_probs(wrong), NOT_IDS, "text z"),
    "log_probs alpha": (lambda lm, wrong: lm.log_probs(IDS, wrong), NOT_ALPHAS, "alpha"),
    "anchor_logits z": (lambda lm, wrong: lm.anchor_logits(wrong), NOT_IDS, "text z"),
    "anchor_logits alpha": (lambda lm, wrong: lm.anchor_logits(IDS, wrong), NOT_ALPHAS, "alpha"),
    "bound x": (lambda lm, wrong: lm.bound(wrong), [*NOT_IDS, CANVAS], "text x"),
    "bound pad": (lambda lm, wrong: lm.bound(IDS, wrong), NOT_PADS, "pad"),
    "bound seed": (lambda lm, wrong: lm.bound(IDS, seed=wrong), NOT_SEEDS, "seed"),
    "perplexity texts": (lambda lm, wrong: lm.perplexity(wrong), [*NOT_TEXTS, "", []], "text"),
    "choose text": (lambda lm, wrong: lm.choose(wrong, ["a", "b"]), [*NOT_TEXTS, ""], "text"),
    "choose choices": (
        lambda lm, wrong: lm.choose("[MASK]", wrong), [*NOT_TEXTS, "", [], ["a"], ["a", "a"], ["", "a"]], "choice"
    ),
    "choose samples": (lambda lm, wrong: lm.choose("[MASK]", ["a", "b"], samples=wrong), NOT_COUNTS, "samples"),
    "choose seed": (lambda lm, wrong: lm.choose("[MASK]", ["a", "b"], seed=wrong), NOT_SEEDS, "seed"),
    "choose normalise": (
        lambda lm, wrong: lm.choose("[MASK]", ["a", "b"], normalise=wrong), ["x", 5, None, [], "\x1b["], "normalise"
    ),
    "choose prior": (
        lambda lm, wrong: lm.choose("[MASK]", ["a", "b"], normalise="prior", prior=wrong),
        [each for each in [*NOT_TEXTS, "", "x"] if each is not None],
        "prior",
    ),
    "choose score": (
        lambda lm, wrong: lm.choose("[MASK]", ["a", "b"], score=wrong), ["x", 5, [], "causal"], "score"
    ),
    "perplexity samples": (lambda lm, wrong: lm.perplexity("ab", samples=wrong), NOT_COUNTS, "samples"),
    "perplexity seed": (lambda lm, wrong: lm.perplexity("ab", seed=wrong), NOT_SEEDS, "seed"),
    "perplexity estimator": (
        lambda lm, wrong: lm.perplexity("ab", estimator=wrong), ["exact?", 5, None, [], "\x1b["], "estimator"
    ),
    "perplexity order": (
        lambda lm, wrong: lm.perplexity("ab", estimator="order", order=wrong), [5, [], "\x1b[", "confidence"], "order"
    ),
    "perplexity order of another estimator": (
        lambda lm, wrong: lm.perplexity("ab", order=wrong), ["entropy", "\x1b["], "order"
    ),
    "perplexity order_steps": (
        lambda lm, wrong: lm.perplexity("ab", estimator="order", order_steps=wrong),
        [wrong for wrong in NOT_COUNTS if wrong is not None],
        "order_steps",
    ),
    "complete canvas": (
        lambda lm, wrong: lm.complete(wrong), [wrong for wrong in NOT_IDS if wrong is not IDS] + [IDS], "canvas"
    ),
    "complete num_samples": (lambda lm, wrong: lm.complete(CANVAS, wrong), NOT_COUNTS, "num_samples"),
    "complete seed": (lambda lm, wrong: lm.complete(CANVAS, seed=wrong), NOT_SEEDS, "seed"),
    "sample num": (lambda lm, wrong: lm.sample(wrong), NOT_COUNTS, "num"),
    "sample length": (
        lambda lm, wrong: lm.sample(length=wrong), [wrong for wrong in NOT_COUNTS if wrong is not None], "length"
    ),
    "sample seed": (lambda lm, wrong: lm.sample(seed=wrong), NOT_SEEDS, "seed"),
    "sample prompt": (lambda lm, wrong: lm.sample(prompt=wrong), [None, 5, b"a", ["a"], object(), IDS], "prompt"),
    "sample suffix": (lambda lm, wrong: lm.sample(suffix=wrong), [None, 5, b"a", ["a"], object(), IDS], "suffix"),
    "sample special_tokens": (lambda lm, wrong: lm.sample(special_tokens=wrong), ["yes", 1, None], "special_tokens"),
    "fill text": (lambda lm, wrong: lm.fill(wrong), [*NOT_TEXTS, "", "no hole", ["a[MASK]", "b"], "[MASK*0]"], ""),
    "fill num": (
        lambda lm, wrong: lm.fill("a[MASK]", num=wrong), [wrong for wrong in NOT_COUNTS if wrong is not None], "num"
    ),
    "fill seed": (lambda lm, wrong: lm.fill("a[MASK]", wrong), NOT_SEEDS, "seed"),
    "watch canvas": (lambda lm, wrong: lm.watch(wrong), [*NOT_IDS[1:], "", "no hole"], "canvas"),
    "watch seed": (lambda lm, wrong: lm.watch("a[MASK]", wrong), NOT_SEEDS, "seed"),
    "canvas texts": (lambda lm, wrong: lm.canvas(wrong), [*NOT_TEXTS, []], "text"),
    "bos_prefix ids": (lambda lm, wrong: lm.bos_prefix(wrong), ["abc", 5, None, ["a"], [1.5], object()], "ids"),
    "max_text_length ids": (
        lambda lm, wrong: lm.max_text_length(wrong), ["abc", 5, None, ["a"], [1.5], object()], "ids"
    ),
    "plan canvas": (
        lambda lm, wrong: lm.plan(SampleSettings(lm.sampling(), canvas=wrong)),
        ["a[MASK]", CANVAS, Canvas("a")],
        "canvas",
    ),
    "plan sampling": (
        lambda lm, wrong: lm.plan(SampleSettings(wrong, canvas=Canvas(CANVAS))), [None, {}, "ancestral"], "sampling"
    ),
    "plan seed": (lambda lm, wrong: SampleSettings(lm.sampling(), seed=wrong), NOT_SEEDS, "seed"),
    "plan batch": (
        lambda lm, wrong: SampleSettings(lm.sampling(), batch=wrong),
        [wrong for wrong in [*NOT_INTEGERS, 0, -1] if wrong is not None],
        "batch",
    ),
    "plan rng": (
        lambda lm, wrong: lm.plan(SampleSettings(lm.sampling(), canvas=Canvas(CANVAS)), RowRng(*wrong)),
        [(0, []), (-1, [0]), ([0, -1], [0, 1]), (0, [0, 1])],
        "",
    ),
    "canvas of more rows than a fixed batch": (
        lambda lm, z: lm.with_fixed_batch(2).plan(SampleSettings(lm.sampling(), canvas=Canvas(z))),
        [CANVAS.expand(3, 4)],
        "rows",
    ),
    "with_fixed_batch": (lambda lm, wrong: lm.with_fixed_batch(wrong), [0, -1, "x", None], "num_rows"),
    "load path": (lambda lm, wrong: adlm.load(wrong), NOT_PATHS, ""),
    **{
        f"sampling {name}": (lambda lm, wrong, name=name: lm.sampling(**{name: wrong}), wrongs, f"sampling.{name}")
        for name, wrongs in NOT_OPTIONS.items()
    },
}  # fmt: skip


def describe(wrong) -> str:
    short = wrong % 10**9 if isinstance(wrong, int) else wrong  # Python refuses to print ints of thousands of digits
    return f"{type(wrong).__name__} {short!s:.20}"


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_a_user_error_that_names_the_argument(call, lm):
    function, wrongs, named = CALLS[call]
    for wrong in wrongs:
        with pytest.raises(UserError) as caught:
            function(lm, wrong)
        message = str(caught.value)
        assert named in message, (describe(wrong), message)
        assert message.isprintable(), describe(wrong)
        assert len(message) < 700, describe(wrong)


@pytest.mark.parametrize("device", NOT_DEVICES, ids=describe)
def test_an_invalid_device_is_a_one_line_error(device, folder):
    with pytest.raises(UserError, match=r"^device .* is not one that torch sees here; try cpu$"):
        adlm.load(folder, device)


def test_there_are_hundreds_of_wrong_calls():
    assert sum(len(wrongs) for _, wrongs, _ in CALLS.values()) > 400


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, torch.tensor])
def test_integers_of_numpy_and_torch_are_accepted(integer, lm):
    assert lm.sample(integer(2), length=integer(5), seed=integer(3), steps=integer(4)) == lm.sample(2, 5, 3, steps=4)
    assert torch.equal(lm.complete(CANVAS, integer(2), integer(1)), lm.complete(CANVAS, 2, 1))
    assert torch.equal(lm.bound(IDS, seed=integer(2)), lm.bound(IDS, seed=2))
    assert lm.perplexity("abc", samples=integer(2), seed=integer(1)) == lm.perplexity("abc", samples=2, seed=1)


def test_numpy_and_torch_scalars_are_accepted_as_sampling_options(lm):
    for real in (np.float32, np.float64, torch.tensor):
        assert lm.sampling(temperature=real(0.5), top_p=real(0.75)) == lm.sampling(temperature=0.5, top_p=0.75)
