"""LanguageModel: sampling, infilling and scoring in text and ids; results do not depend on the rest of the batch."""

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from small_models import infilling_model, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import randomized

from adlm.config.schema import Config, Model, Sampling, Schedule, Time
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.language_model import LanguageModel, Run, load
from adlm.methods import method_of
from adlm.sampling.frame import first_frame
from adlm.sampling.settings import SampleSettings
from adlm.tokens import load_tokenizer

BYTES = load_tokenizer("bytes")


def model(name="adlm", length=24, tokenizer=BYTES, vocabulary=BYTES.vocabulary, **options) -> LanguageModel:
    sizes = Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0)
    config = Config(method=name, vocabulary=vocabulary, length=length, model=sizes, **options)
    method = method_of(config)
    return LanguageModel(config, method, randomized(method.build().double(), scale=0.2), tokenizer)


LM = model()


def test_completion_gives_each_row_its_samples_one_after_the_other():
    canvas = torch.full((2, 10), LM.mask_id)
    canvas[0, 0], canvas[1, 0] = 65, 66
    ids = LM.complete(canvas, num_samples=3, steps=8)
    assert ids.shape == (6, 10)
    assert ids[:, 0].tolist() == [65, 65, 65, 66, 66, 66]
    assert (ids != LM.mask_id).all()
    assert len({tuple(row) for row in ids.tolist()}) == 6


def test_a_seed_repeats_and_another_does_not():
    canvas = torch.full((10,), LM.mask_id)
    first, again, other = (LM.complete(canvas, steps=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_filled_text_keeps_what_was_given_and_is_as_long():
    text = LM.fill("We [MASK*4] of", steps=6)
    assert len(BYTES.encode(text)) == 10 or "\ufffd" in text  # bytes that are no character
    assert text.startswith("We ")
    assert text.endswith(" of")


def test_several_samples_of_a_text_are_a_list_that_begins_with_the_single_one():
    text = "We [MASK*4] of"
    several = LM.fill(text, num=3, steps=6, seed=2)
    assert several[0] == LM.fill(text, steps=6, seed=2)
    assert len(set(several)) == 3
    assert LM.fill(text, num=1, steps=6, seed=2) == several[:1], "a list whenever num is given"
    both = LM.fill([text, "b[MASK]"], num=3, steps=6, seed=2)
    assert both[:3] == several
    assert [each[0] for each in both[3:]] == ["b"] * 3
    assert LM.fill([], num=2) == LM.fill([]) == []
    with pytest.raises(UserError, match=r"sampling.top_p 9 must be at most 1"):
        LM.fill([], top_p=9)


@pytest.mark.parametrize(
    "call", [LM.fill, LM.watch, lambda text: LM.sample(prompt=text)], ids=["fill", "watch", "sample"]
)
def test_a_hole_that_is_not_closed_is_refused(call):
    with pytest.raises(UserError, match=r"\[MASK\*4 is not a hole; write \[MASK\] for one token"):
        call("The [MASK*4 was")


def test_a_text_is_filled_the_same_in_a_batch_of_unequal_lengths_as_alone():
    texts = ["a[MASK]", "We the [MASK*9] of", "[MASK*3]b"]
    together = LM.fill(texts, steps=6, seed=4)
    assert together[0] == LM.fill(texts[0], steps=6, seed=4)
    assert LM.fill(["x[MASK]", texts[1]], steps=6, seed=4)[1] == together[1]


def test_sampling_many_is_sampling_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr("adlm.language_model.ROWS_AT_ONCE", 2)
    few = LM.sample(5, length=6, steps=4, seed=3)
    monkeypatch.setattr("adlm.language_model.ROWS_AT_ONCE", 64)
    assert few == LM.sample(5, length=6, steps=4, seed=3)
    assert len(few) == 5


def test_the_last_frame_of_watch_is_the_result_of_fill():
    *_, last = LM.watch("We [MASK*4] of", steps=6, seed=2)
    assert BYTES.decode(last.ids[0].tolist(), special_tokens=False) == LM.fill("We [MASK*4] of", steps=6, seed=2)
    first = next(LM.watch(torch.full((5,), LM.mask_id), steps=2))
    assert first.ids.shape == (1, 5)


def test_sampling_options_default_to_the_models_config():
    own = model(sampling=Sampling("remdm-loop", steps=77, eta=0.05, top_p=0.8))
    assert own.sampling() == own.config.sampling
    assert own.sampling(steps=5) == replace(own.config.sampling, steps=5)
    ancestral = own.sampling(sampler="ancestral")
    assert (ancestral.eta, ancestral.top_p, ancestral.steps) == (None, 0.8, 77)


class CountingCalls(TorchDispatchMode):
    """Counts the operators that PyTorch runs."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def multiply(lm: LanguageModel) -> None:
    with torch.no_grad():
        for weight in lm.network.parameters():
            weight.mul_(-1.0)


def optimize(lm: LanguageModel) -> None:
    lm.network.requires_grad_()
    lm.network(torch.full((1, 4), 1)).sum().backward()
    torch.optim.AdamW(lm.network.parameters(), lr=1.0).step()


def load_other_weights(lm: LanguageModel) -> None:
    lm.network.load_state_dict({name: -weight for name, weight in lm.network.state_dict().items()})


def replace_data(lm: LanguageModel) -> None:
    for weight in lm.network.parameters():
        weight.data = -weight.data


def write_to_data(lm: LanguageModel) -> None:
    for weight in lm.network.parameters():
        weight.data.mul_(-1.0)
    lm.refresh()


@pytest.mark.parametrize("change", [multiply, optimize, load_other_weights, replace_data, write_to_data])
def test_samples_come_from_the_current_weights(change):
    lm = model()
    canvas = torch.full((4, 10), lm.mask_id)
    before, frozen = lm.complete(canvas, steps=4), lm.frozen
    assert lm.frozen is frozen, "built once as long as no weight changes"
    change(lm)
    assert not torch.equal(lm.complete(canvas, steps=4), before)


def test_a_small_change_of_one_weight_among_large_ones_is_detected():
    lm = model()
    weight = next(each for each in lm.network.float().parameters() if each.ndim == 2)
    with torch.no_grad():
        weight[0] += 1e4
        frozen = lm.frozen
        weight[1, 1] += 1e-4
    assert lm.frozen is not frozen


def test_looking_for_changed_weights_reads_none_of_them():
    """Comparing version counters costs the same for a network of any width; the sums it replaces read every weight."""
    lm = model()
    frozen = lm.frozen
    with CountingCalls() as calls:
        assert lm.frozen is frozen
    assert calls.num == 0


@pytest.mark.parametrize("name", ["adlm", "mdlm", "ar", "a2r"])
def test_a_prompt_is_read_after_bos_as_in_training(name):
    lm = model(name)
    bos, words, holes = BYTES.vocabulary.bos_id, BYTES.encode("We"), [lm.mask_id] * 6
    end = [] if lm.method.causal else [BYTES.vocabulary.eos_id]  # else a network that reads both sides writes it there
    after = lm.complete(torch.tensor([[bos, *words, *holes, *end]]), seed=3)[0].tolist()
    assert lm.fill("We[MASK*6]", seed=3) == BYTES.decode(after[1:], special_tokens=False)
    *_, last = lm.watch("We[MASK*6]", seed=3)
    assert last.ids[0].tolist() == after
    *_, without = lm.watch(torch.tensor([*words, *holes]), seed=3)
    assert without.ids.shape == (1, 8)
    assert not torch.equal(without.chance[0], last.chance[0, 1:]), "ids are taken as they are"
    both = lm.fill(["[MASK*6]", "We[MASK*6]"], seed=3, special_tokens=True)
    begins = [bos] if end else []
    alone = lm.complete(torch.tensor([[*begins, *holes, *end]]), seed=3)[0].tolist()
    assert both[0] == BYTES.decode(alone[len(begins) :]), "a first mask of a causal model is bos"


def test_a_hole_at_either_end_of_a_text_has_as_many_tokens_of_text_as_it_says():
    for text in ("[MASK*3] sea", "the [MASK*3]", "[MASK*3] the [MASK*3]"):
        [canvas] = LM.canvas([text]).ids.tolist()
        ends = BYTES.vocabulary.eos_id
        assert (canvas[0], canvas[-1] == ends) == (ends, text.endswith("]")), "bos and eos have one id"
        assert canvas.count(LM.mask_id) == 3 * text.count("MASK")
    [tight] = LM.canvas(["We[MASK*21]"]).ids.tolist()
    assert (len(tight), tight[-1]) == (24, LM.mask_id), "there is no room for eos"
    [prompt] = LM.canvas(["We[MASK*6]"], closed=False).ids.tolist()
    assert prompt[-1] == LM.mask_id


def test_no_bos_is_added_to_a_text_as_long_as_a_diffusion_model_or_without_bos_in_the_vocabulary():
    words, holes = BYTES.encode("We"), [LM.mask_id] * 22
    ids = LM.complete(torch.tensor([[*words, *holes]]), steps=4)[0].tolist()
    assert LM.fill("We[MASK*22]", steps=4, special_tokens=True) == BYTES.decode(ids)
    holes = [LM.mask_id] * 6
    nameless = model("ar", vocabulary=replace(BYTES.vocabulary, bos_id=None))
    ids = nameless.complete(torch.tensor([[*words, *holes]]))[0].tolist()
    assert nameless.fill("We[MASK*6]", special_tokens=True) == BYTES.decode(ids)


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("adlm", "no hole", r"the canvas 'no hole' has no masks to fill in"),
        ("adlm", "[MASK*25]", r"row 5 of the canvas is 25 tokens long and .*; shorten it, or use sampling.sampler=s"),
        ("d3pm", "[MASK*25]", r"row 5 of the canvas is 25 tokens long and .* made for length 24; shorten it$"),
        ("ar", "[MASK]b", r"row 5 of the canvas gives a token after a mask"),
    ],
)
def test_an_invalid_text_among_many_is_named_before_anything_is_sampled(name, wrong, sentence, monkeypatch):
    monkeypatch.setattr("adlm.language_model.ROWS_AT_ONCE", 2)
    monkeypatch.setattr("adlm.language_model.last_frame", lambda frames: pytest.fail("something was sampled"))
    lm = model(name, schedule=Schedule(eps=1e-3), time=Time(steps=10 if name == "d3pm" else 0))
    with pytest.raises(UserError, match=sentence):
        lm.fill([*["a[MASK]"] * 5, wrong, "a[MASK]"])


def test_an_invalid_canvas_is_named_by_its_own_row_whatever_num_samples():
    canvas = torch.full((2, 3), LM.mask_id)
    canvas[1, 2] = 66
    with pytest.raises(UserError, match=r"row 1 of the canvas gives a token after a mask"):
        model("ar").complete(canvas, num_samples=3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: LM.fill("no hole at all"), r"'no hole at all' has no masks to fill in; write \[MASK\]"),
        (lambda: LM.fill("[MASK*25]"), r"^the text of the canvas is 25 tokens long and the model was made for "),
        (lambda: LM.complete(torch.full((1, 25), LM.mask_id)), r"length 24; shorten it, or use sampling.sampler=semi"),
        (lambda: LM.complete(torch.full((1, 5), 999)), r"holds id 999, outside the vocabulary"),
        (lambda: LM.complete([1, 2]), r"must be a torch tensor"),
        (lambda: LM.sample(steps=0), r"sampling.steps 0 must be at least 1"),
        (lambda: LM.sample(top_p=0.0), r"sampling.top_p 0.0 must be"),
        (lambda: LM.sample(temperature=-1), r"sampling.temperature -1 must be from 0.001 to 1000"),
        (lambda: LM.sample(temperature=1e-50), r"sampling.temperature 1e-50 must be from 0.001 to 1000"),
        (lambda: LM.sample(length=0), r"length 0 must be at least 1"),
        (lambda: LM.fill("[MASK*" + "9" * 5000 + "]"), r"asks for more than 1,000,000 masks"),
        (lambda: LM.complete([1], sampler="semi-autoregressive"), r"must be a torch tensor"),
        (lambda: LM.perplexity(""), r"the texts hold no tokens"),
        (lambda: LM.sample(sampler="remdm"), r"sampling.sampler 'remdm' is not one of"),
        (lambda: LM.sample(1, lenght=3), r"there is no sampling option 'lenght'; did you mean 'length'"),
        (lambda: LM.fill("[MASK]", constraint={}), r"'constraint'; did you mean 'constraints'"),
        (lambda: LM.sample(top_q=0.5), r"there is no sampling option 'top_q'; did you mean 'top_"),
        (lambda: LM.sample(sampler="remdm-loop", eta=0.5), r"sampling.eta 0.5 is above"),
        (lambda: LM.sample(0), r"num 0 must be at least 1"),
        (lambda: model("ar").sample(suffix="z"), r"gives a token after a mask, and ar writes from left to right"),
        (lambda: LM.sample(prompt="abc", length=3), r"length 3 leaves no room: prompt and suffix have 3 tokens"),
        (lambda: LM.sample(suffix="a[MASK]"), r"suffix 'a\[MASK\]' contains a mask"),
        (lambda: LM.sample(seed=-3), r"seed -3 must be 0 or more"),
        (
            lambda: model("mdlm").sample(sampler="anchor-first"),
            r"anchor-first needs an anchor network, and mdlm has none",
        ),
        (
            lambda: model("ar").sample(sampler="remdm-cap"),
            r"remdm-cap does not work with method ar; use ancestral or left-to-right",
        ),
        (
            lambda: model(tokenizer=None).sample(),
            r"this model has no tokenizer.* `adlm import FILE.ckpt --out FOLDER --tokenizer gpt2`",
        ),
        (
            lambda: LM.sample(sampler="semi-autoregressive", stride=30, length=40),
            r"sampling.stride 30 would skip tokens",
        ),
    ],
)
def test_user_errors_are_one_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


def test_sampling_from_nan_logits_is_an_error():
    lm = model("mdlm")
    with torch.no_grad():
        lm.network.head.bias.fill_(torch.nan)
    with pytest.raises(UserError, match=r"beliefs are not finite"):
        lm.sample(steps=2)


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("adlm", "ancestral"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("ar", "ancestral"), ("adlm", "confidence"), ("d3pm", "ancestral"), ("a2r", "ancestral")]
        ),
    ],
)
def test_padding_is_not_penalized_as_a_repetition(name, sampler, monkeypatch):
    """The repetition penalty ignores the id at padding positions."""
    lm = model(name, schedule=Schedule(eps=1e-3), time=Time(steps=10 if name == "d3pm" else 0))
    options = {"sampler": sampler, "steps": 4, "repetition_penalty": 3.0}
    alone = [lm.fill("a[MASK*4]", seed=seed, **options) for seed in range(5)]
    for fill_id in range(40, 120, 8):
        monkeypatch.setattr(LanguageModel, "fill_id", fill_id)
        assert [lm.fill(["a[MASK*4]", "[MASK*20]"], seed=seed, **options)[0] for seed in range(5)] == alone


def test_texts_longer_than_the_model_are_sampled_in_windows():
    text = LM.complete(torch.full((1, 60), LM.mask_id), sampler="semi-autoregressive", stride=8, steps=4)
    assert text.shape == (1, 60)
    assert (text != LM.mask_id).all()


def test_windows_of_a_long_text_are_read_between_bos_and_eos_as_in_training(monkeypatch):
    read, hidden = [], FrozenNetwork.hidden

    def recorded_hidden(network, z, *others):
        read.append(z.clone())
        return hidden(network, z, *others)

    monkeypatch.setattr(FrozenNetwork, "hidden", recorded_hidden)
    bos, eos = BYTES.vocabulary.bos_id, BYTES.vocabulary.eos_id
    text = LM.complete(torch.full((1, 60), LM.mask_id), sampler="semi-autoregressive", steps=4)
    assert text.shape == (1, 60)
    assert read
    assert all(z.shape[1] == 24 and z[0, 0] == bos and z[0, -1] == eos for z in read)
    read.clear()
    LM.complete(torch.full((1, 24), LM.mask_id), sampler="semi-autoregressive", steps=4)
    assert (read[0] == LM.mask_id).all(), "what fits the model is read as it is"


def model_of_ends(monkeypatch) -> LanguageModel:
    """A model whose samples have bos first, eos last, and one eos in between, at the end of a document."""
    lm = model("mdlm", length=8)
    end = BYTES.vocabulary.eos_id

    def written(run):
        ids = torch.tensor([[end, *b"ab", end, *b"cd", end, end]])[:, : run.canvas.ids.shape[1]]
        yield first_frame(ids.expand(len(run.canvas.ids), -1), lm.mask_id)

    monkeypatch.setattr(Run, "frames", written)
    return lm


def test_special_tokens_are_removed_from_texts_unless_requested(monkeypatch):
    lm = model_of_ends(monkeypatch)
    assert lm.sample(2) == ["ab\n\ncd", "ab\n\ncd"]
    assert lm.fill("[MASK*8]") == "ab\n\ncd"
    with_special = "<|endoftext|>ab<|endoftext|>cd<|endoftext|><|endoftext|>"
    assert lm.sample(special_tokens=True) == [with_special]
    assert lm.fill(["[MASK*8]"], special_tokens=True) == [with_special]


@pytest.mark.parametrize("name", ["adlm", "ar"])
def test_samples_begin_with_the_prompt_and_end_with_the_suffix(name):
    lm = model(name)
    suffix = "" if name == "ar" else "yz"
    texts = lm.sample(3, length=12, seed=2, prompt="abc", suffix=suffix, steps=4)
    assert texts == lm.fill([f"abc[MASK*{9 - len(suffix)}]{suffix}"] * 3, seed=2, steps=4)
    assert all(text.startswith("abc") and text.endswith(suffix) for text in texts)
    filled = lm.sample(prompt="abc", steps=4, special_tokens=True)[0]
    assert filled == lm.fill("abc[MASK*20]", steps=4, special_tokens=True), "as long as fits, with bos: 1 + 3 + 20"


def test_the_repr_of_a_model_is_one_line():
    size = sum(weight.numel() for weight in LM.network.parameters())
    assert repr(LM) == f"LanguageModel(adlm, {size:,} parameters, 258 symbols, length 24, cpu)"
    assert repr(model(tokenizer=None)).endswith("cpu, no tokenizer)")


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "inference_mode": torch.inference_mode,
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
}


def everything(lm):
    """The results of every call, as Python values."""
    canvas = torch.full((2, 4), lm.mask_id, device="cpu")
    x = torch.arange(8, device="cpu").view(2, 4)
    samplers = ["ancestral", "remdm-conf", "confidence", "dfm"] if lm.config.method == "adlm" else ["ancestral"]
    return [
        lm.sample(2, length=5, steps=3),
        lm.fill("a[MASK*3]", steps=3),
        *(lm.complete(canvas, 2, sampler=sampler, steps=3).tolist() for sampler in samplers),
        [frame.ids.tolist() for frame in lm.watch("a[MASK*3]", steps=3)],
        lm.bound(x).tolist(),
        lm.log_probs(canvas, alpha=0.5).tolist(),
        lm.perplexity("some words") if lm.method.exact else None,
    ]


@pytest.mark.parametrize("name", ["adlm", "ar"])
def test_results_do_not_depend_on_torch_modes_and_defaults(name, tmp_path):
    folder = small_model(tmp_path / "model", name)
    wanted = everything(load(folder))
    for mode in MODES.values():
        with mode():
            lm = load(folder)
            assert everything(lm) == wanted
        assert lm.sample(2, length=5, steps=3) == wanted[0]


@pytest.mark.parametrize("name", ["adlm", "ar"])
def test_frames_may_be_consumed_in_another_mode_than_the_first_one(name):
    lm = model(name)
    wanted = [frame.ids.tolist() for frame in lm.watch("a[MASK*4]", steps=4)]
    with torch.inference_mode():
        frames = lm.watch("a[MASK*4]", steps=4)
        first = [next(frames).ids.tolist(), next(frames).ids.tolist()]
    assert first + [frame.ids.tolist() for frame in frames] == wanted


def test_sampling_works_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert len(model().sample(1, length=4, steps=2)) == 1


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("adlm", "ancestral"), ("adlm", "remdm-cap"), ("adlm", "remdm-conf"), ("adlm", "confidence"),
        ("adlm", "semi-autoregressive"), ("d3pm", "ancestral"), ("sedd", "analytic"), ("ar", "ancestral"),
    ],
)  # fmt: skip
def test_modifying_a_frame_does_not_affect_the_run(name, sampler):
    lm = model(name, schedule=Schedule(eps=1e-3), time=Time(steps=10 if name == "d3pm" else 0))
    canvas = torch.full((2, 30 if sampler == "semi-autoregressive" else 8), lm.mask_id)
    before = canvas.clone()
    wanted = [frame.ids.tolist() for frame in lm.watch(canvas, sampler=sampler, steps=6)]
    seen = []
    for frame in lm.watch(canvas, sampler=sampler, steps=6):
        seen.append(frame.ids.tolist())
        for tensor in (frame.ids, frame.t, frame.revealed, frame.remasked, frame.chance, frame.read):
            tensor.zero_()
    assert seen == wanted
    assert torch.equal(canvas, before)


@pytest.mark.parametrize("name", ["adlm", "mdlm", "ar", "d3pm"])
def test_every_call_reports_nan_weights(name):
    lm = model(name, schedule=Schedule(eps=1e-3), time=Time(steps=10 if name == "d3pm" else 0))
    with torch.no_grad():
        for weight in lm.network.parameters():
            weight.view(-1)[0] = torch.nan
    x = torch.zeros(8, 24, dtype=torch.int64)
    calls = [lambda: lm.bound(x), lambda: lm.perplexity("some words")]
    calls += [lambda: lm.log_probs(torch.full((1, 4), lm.mask_id))]
    calls += [lambda: lm.anchor_logits(x)] if name == "adlm" else []
    for call in calls:
        with pytest.raises(UserError, match=r"are not (numbers|finite): its weights"):
            call()


def test_requests_beyond_memory_are_refused_before_sampling():
    canvas = torch.full((1, 4), LM.mask_id)
    with pytest.raises(UserError, match=r"num_samples 1000000000000 of length 4: at least 32 TB of memory, and this"):
        LM.complete(canvas, num_samples=10**12)
    with pytest.raises(UserError, match=r"num 10000000000000 of length 24: at least 1.92 PB of memory"):
        LM.sample(10**13)


def test_a_planned_run_is_the_same_every_time_as_a_whole_and_in_batches():
    request = SampleSettings(LM.sampling(steps=6), ["a[MASK*5]", "We [MASK*9] of"], num=3, seed=4)
    run = LM.plan(request)
    whole = run.filled()
    assert run.filled() == whole
    assert [row for batch in run.batches(3) for row in batch.filled()] == whole
    assert [row for batch in run.batches(3, first=3) for row in batch.filled()] == whole[3:]
    assert LM.fill(["a[MASK*5]", "We [MASK*9] of"], num=3, seed=4, steps=6) == [
        BYTES.decode(ids, special_tokens=False) for ids in whole
    ]


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda: LM.sample(top_p=2.0), "sampling.top_p"),
        (lambda: LM.sample(temperature=1e-9), "sampling.temperature"),
        (lambda: LM.sample(sampler="nope"), "sampling.sampler"),
        (lambda: LM.sample(stepz=5), "sampling.stepz"),
        (lambda: LM.sample(sampler="semi-autoregressive", stride=99), "sampling.stride"),
        (lambda: model("ar").sample(sampler="dfm"), "sampling.sampler"),
        (lambda: LM.sample(0), "num"),
        (lambda: LM.complete(torch.full((1, 5), LM.mask_id), 0), "num_samples"),
        (lambda: LM.sample(seed=-1), "seed"),
        (lambda: LM.sample(prompt="[MASK]"), "prompt"),
        (lambda: LM.sample(length=1, prompt="We the"), "length"),
        (lambda: LM.fill("no hole"), "texts"),
    ],
)
def test_a_user_error_carries_the_name_of_its_option(call, option):
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.option == option


@pytest.fixture(scope="module")
def infilling(tmp_path_factory):
    return load(infilling_model(tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("sampler", ["ancestral", "speculative"])
def test_holes_of_unknown_length_end_where_the_model_ends_them(infilling, sampler):
    texts = ["(A[MASK*..6]B)", "(A[MASK*]B[MASK*2]C[MASK*]D)", "(A[MASK*..6]", "[MASK*..6]B)"]
    patterns = [r"\(A(.{,6})B\)", r"\(A(.{,16})B(.*)C(.{,16})D\)", r"\(A(.{,6})", r"(.{,6})B\)"]
    together = infilling.fill(texts, num=8, sampler=sampler)
    lengths = set()
    for number, text in enumerate(together):
        found = re.fullmatch(patterns[number // 8], text, re.DOTALL)
        assert found, text
        assert set(found[1]) <= set("abcdef "), "no end-of-text token, and no blank line for one"
        lengths.add((number // 8, len(found[1])))
    assert len(lengths) > 12
    shown = infilling.fill(texts, num=8, sampler=sampler, special_tokens=True)
    assert [text for text in shown if "<|endoftext|>" not in text] == [text for text in together if "\n\n" not in text]
    assert infilling.fill(texts[0], num=8, sampler=sampler) == together[:8]
    *_, last = infilling.watch(texts[0], sampler=sampler)
    assert last.open.sum() == 6
    ids = last.ids[0][~(last.open & (last.ids == infilling.tokenizer.vocabulary.eos_id))[0]]
    assert infilling.tokenizer.decode(ids.tolist()[1:]) == together[0]


def test_without_a_length_the_text_between_prompt_and_suffix_is_of_unknown_length(infilling):
    texts = infilling.sample(8, prompt="(A", suffix="B)", seed=2)
    assert texts == infilling.fill("(A[MASK*]B)", num=8, seed=2)
    assert len({len(text) for text in texts}) > 2
    assert {len(text) for text in infilling.sample(4, 12, prompt="(A", suffix="B)", temperature=0.01)} == {12}
    assert infilling.sample(2, 12, prompt="(A") == infilling.fill("(A[MASK*10]", num=2)


def test_models_that_cannot_fill_holes_of_unknown_length_say_so(tmp_path):
    for lm in (LM, load(small_model(tmp_path / "blocks", "mdlm", block_length=4))):
        with pytest.raises(UserError, match=r"hole of unknown length.*give its length, such as \[MASK\*12\]"):
            lm.fill("a[MASK*]")


def test_a_hole_of_unknown_length_that_does_not_fit_is_refused(infilling):
    with pytest.raises(UserError, match="takes 65 tokens, with its holes filled in after it"):
        infilling.fill("ab[MASK*..56]c")
    assert infilling.fill("ab[MASK*..55]c")
    with pytest.raises(UserError, match="takes 65 tokens"):  # the text between two holes counts twice
        infilling.fill("ab[MASK*..2]" + "c" * 24 + "[MASK*..2]d")
    assert infilling.fill("ab[MASK*]" + "c" * 24 + "[MASK*]d")


@pytest.mark.parametrize(("name", "block_length"), [("ar", 0), ("a2r", 0), ("mdlm", 4), ("adlm", 3)])
def test_models_that_write_from_left_to_right_write_texts_longer_than_their_rows(name, block_length, tmp_path):
    lm = load(small_model(tmp_path / name, name, length=16, block_length=block_length))
    canvas = lm.canvas(["ab[MASK*48]"])
    assert canvas.ids.shape[1] == 51  # with bos
    frames = list(lm.watch("ab[MASK*48]"))
    assert (frames[-1].ids != lm.mask_id).all()
    assert lm.fill("ab[MASK*48]", special_tokens=True) == lm.require_tokenizer().decode(frames[-1].ids[0, 1:], True)
