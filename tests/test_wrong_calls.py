"""Wrong calls of the Python API: each is a UserError that names the argument, before any work; never another error."""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("models") / "adlm")


@pytest.fixture(scope="module")
def lm(folder):
    return adlm.load(folder)


META = torch.zeros(1, 4, dtype=torch.int64, device="meta")
IDS = torch.zeros(1, 4, dtype=torch.int64)
CANVAS = torch.full((1, 4), 257)

NO_WHOLE_NUMBERS = ["3", 1.5, 2.0, None, True, [1], (1,), {}, b"1", 1j, float("nan"), float("inf"), torch.tensor(True)]
NO_WHOLE_NUMBERS += [torch.tensor(1.0), torch.tensor([1, 2]), META[0, 0], np.float64(1), np.array([1, 2]), object()]
NO_WHOLE_NUMBERS += [decimal.Decimal(1), fractions.Fraction(1, 2)]
NO_SEEDS = [*NO_WHOLE_NUMBERS, -1, 2**63, 2**64, 10**5000, -(10**5000), np.int64(-1), torch.tensor(-1)]
NO_COUNTS = [*NO_WHOLE_NUMBERS, 0, -1, 10**12, 10**30, 10**5000, -(10**5000), np.int64(0)]
NO_IDS = ["abc", [1, 2], np.zeros((1, 4), dtype=np.int64), None, 5, object(), META, IDS.int(), IDS.float(), IDS.bool()]
NO_IDS += [IDS[None], IDS[:, :0], IDS - 1, IDS + 10_000, IDS.to_sparse(), torch.zeros(1, 17, dtype=torch.int64)]
NO_IDS += [torch.tensor(5), torch.zeros(0, 4, dtype=torch.int64), IDS.to(torch.complex64)]
NO_TEXTS = [
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
NO_SHARES = [
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
NO_SHARES += [10**400, b"1", {}]
NO_PADS = [
    "x",
    [[True]],
    IDS,
    IDS.bool()[0],
    torch.ones(1, 4, dtype=torch.bool),
    META.bool(),
    1,
    IDS.bool().to_sparse(),
]
NO_KNOBS = {
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
NO_PATHS = [
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
NO_DEVICES = [
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
NO_DEVICES += ["vulkan", "cuda:" + "9" * 50, "\x1b[31m", b"cpu", ["cpu"]]

CALLS = {
    "log_probs z": (lambda lm, wrong: lm.log_probs(wrong), NO_IDS, "text z"),
    "log_probs alpha": (lambda lm, wrong: lm.log_probs(IDS, wrong), NO_SHARES, "alpha"),
    "anchor_logits z": (lambda lm, wrong: lm.anchor_logits(wrong), NO_IDS, "text z"),
    "anchor_logits alpha": (lambda lm, wrong: lm.anchor_logits(IDS, wrong), NO_SHARES, "alpha"),
    "bound x": (lambda lm, wrong: lm.bound(wrong), [*NO_IDS, CANVAS], "text x"),
    "bound pad": (lambda lm, wrong: lm.bound(IDS, wrong), NO_PADS, "pad"),
    "bound seed": (lambda lm, wrong: lm.bound(IDS, seed=wrong), NO_SEEDS, "seed"),
    "perplexity texts": (lambda lm, wrong: lm.perplexity(wrong), [*NO_TEXTS, "", []], "text"),
    "perplexity samples": (lambda lm, wrong: lm.perplexity("ab", samples=wrong), NO_COUNTS, "samples"),
    "perplexity seed": (lambda lm, wrong: lm.perplexity("ab", seed=wrong), NO_SEEDS, "seed"),
    "perplexity estimator": (
        lambda lm, wrong: lm.perplexity("ab", estimator=wrong), ["exact?", 5, None, [], "\x1b["], "estimator"
    ),
    "complete canvas": (
        lambda lm, wrong: lm.complete(wrong), [wrong for wrong in NO_IDS if wrong is not IDS] + [IDS], "canvas"
    ),
    "complete num_samples": (lambda lm, wrong: lm.complete(CANVAS, wrong), NO_COUNTS, "num_samples"),
    "complete seed": (lambda lm, wrong: lm.complete(CANVAS, seed=wrong), NO_SEEDS, "seed"),
    "sample num": (lambda lm, wrong: lm.sample(wrong), NO_COUNTS, "num"),
    "sample length": (
        lambda lm, wrong: lm.sample(length=wrong), [wrong for wrong in NO_COUNTS if wrong is not None], "length"
    ),
    "sample seed": (lambda lm, wrong: lm.sample(seed=wrong), NO_SEEDS, "seed"),
    "sample prompt": (lambda lm, wrong: lm.sample(prompt=wrong), [None, 5, b"a", ["a"], object(), IDS], "prompt"),
    "sample suffix": (lambda lm, wrong: lm.sample(suffix=wrong), [None, 5, b"a", ["a"], object(), IDS], "suffix"),
    "sample special_tokens": (lambda lm, wrong: lm.sample(special_tokens=wrong), ["yes", 1, None], "special_tokens"),
    "fill text": (lambda lm, wrong: lm.fill(wrong), [*NO_TEXTS, "", "no hole", ["a[MASK]", "b"], "[MASK*0]"], ""),
    "fill seed": (lambda lm, wrong: lm.fill("a[MASK]", wrong), NO_SEEDS, "seed"),
    "watch canvas": (lambda lm, wrong: lm.watch(wrong), [*NO_IDS[1:], "", "no hole"], "canvas"),
    "watch seed": (lambda lm, wrong: lm.watch("a[MASK]", wrong), NO_SEEDS, "seed"),
    "canvas texts": (lambda lm, wrong: lm.canvas(wrong), [*NO_TEXTS, []], "text"),
    "opening ids": (lambda lm, wrong: lm.opening(wrong), ["abc", 5, None, ["a"], [1.5], object()], "ids"),
    "room ids": (lambda lm, wrong: lm.room(wrong), ["abc", 5, None, ["a"], [1.5], object()], "ids"),
    "walk canvas": (lambda lm, wrong: lm.walk(wrong, lm.sampling()), ["a[MASK]", None, CANVAS, Canvas("a")], "canvas"),
    "walk sampling": (lambda lm, wrong: lm.walk(Canvas(CANVAS), wrong), [None, {}, "ancestral"], "sampling"),
    "walk seed": (lambda lm, wrong: lm.walk(Canvas(CANVAS), lm.sampling(), wrong), NO_SEEDS, "seed"),
    "walk first_row": (lambda lm, wrong: lm.walk(Canvas(CANVAS), lm.sampling(), 0, wrong), NO_SEEDS, "first_row"),
    "load path": (lambda lm, wrong: adlm.load(wrong), NO_PATHS, ""),
    **{
        f"sampling {knob}": (lambda lm, wrong, knob=knob: lm.sampling(**{knob: wrong}), wrongs, f"sampling.{knob}")
        for knob, wrongs in NO_KNOBS.items()
    },
}  # fmt: skip


def shown(wrong) -> str:
    short = wrong % 10**9 if isinstance(wrong, int) else wrong  # an int of thousands of digits has no text
    return f"{type(wrong).__name__} {short!s:.20}"


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_a_user_error_that_names_the_argument(call, lm):
    function, wrongs, named = CALLS[call]
    for wrong in wrongs:
        with pytest.raises(UserError) as caught:
            function(lm, wrong)
        message = str(caught.value)
        assert named in message, (shown(wrong), message)
        assert message.isprintable(), shown(wrong)
        assert len(message) < 700, shown(wrong)


@pytest.mark.parametrize("device", NO_DEVICES, ids=shown)
def test_a_device_that_is_none_is_one_sentence(device, folder):
    with pytest.raises(UserError, match=r"^device .* is not one that torch sees here; try cpu$"):
        adlm.load(folder, device)


def test_there_are_hundreds_of_wrong_calls():
    assert sum(len(wrongs) for _, wrongs, _ in CALLS.values()) > 400


@pytest.mark.parametrize("whole", [np.int64, np.int32, np.uint8, torch.tensor])
def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(whole, lm):
    assert lm.sample(whole(2), length=whole(5), seed=whole(3), steps=whole(4)) == lm.sample(2, 5, 3, steps=4)
    assert torch.equal(lm.complete(CANVAS, whole(2), whole(1)), lm.complete(CANVAS, 2, 1))
    assert torch.equal(lm.bound(IDS, seed=whole(2)), lm.bound(IDS, seed=2))
    assert lm.perplexity("abc", samples=whole(2), seed=whole(1)) == lm.perplexity("abc", samples=2, seed=1)


def test_numbers_of_numpy_and_torch_are_knobs(lm):
    for real in (np.float32, np.float64, torch.tensor):
        assert lm.sampling(temperature=real(0.5), top_p=real(0.75)) == lm.sampling(temperature=0.5, top_p=0.75)
