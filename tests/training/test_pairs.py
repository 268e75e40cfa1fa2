"""Training on prompts and answers: what is learnt, measured, resumed and saved, and what is refused."""

import itertools
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from small_models import mostly_slow, small_model
from small_runs import RecordingReporter, corpus
from tiny_bases import TEMPLATE, causal_model, write_folder, write_gguf

from adlm import load
from adlm.chat.template import PLAIN_TEMPLATE
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.config.schema import Sampling
from adlm.errors import UserError
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.training.train import train

PAIRS = [(first + second + "=", second + first) for first, second in itertools.product("abcdef", repeat=2)]
NETWORK = ("model.hidden=32", "model.heads=2", "model.blocks=2", "model.condition=8", "model.dropout=0")
QUICK = ("train.batch_size=4", "train.warm_up_steps=0", "train.threads=1", "train.sample_every=0")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of two letters and their reverse, as pairs and as messages."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [
        {"prompt": prompt, "answer": answer}
        if number % 2
        else {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for number, (prompt, answer) in enumerate(PAIRS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words_of(pairs, *words):
    return [f"data.path={pairs}", "data.format=pairs", "data.held_out=0.25", "tokenizer=bytes", "length=7", *words]


def run(out, *words):
    reporter = RecordingReporter()
    return train(resolve(words), out, reporter), reporter.messages


@pytest.mark.parametrize(("method", "block_length"), mostly_slow([("ar", 0), ("mdlm", 3), ("mdlm", 0)], ("ar", 0)))
def test_a_tiny_model_learns_to_answer(method, block_length, pairs, tmp_path):
    options = [f"method={method}", f"model.block_length={block_length}", "model.start=neighbours", "data.held_out=0"]
    options += ["train.steps=200", "train.batch_size=36", "train.learning_rate=2e-2", "train.optimizer=muon"]
    options += ["train.decay=linear", "train.warm_up_steps=5", "train.ema=0", "train.sample_every=0", "train.threads=1"]
    options += ["time.t_min=0.1"] + ["time.masks=counted"] * (method == "mdlm")
    run(tmp_path / "run", *words_of(pairs, *NETWORK, *options))
    lm = load(tmp_path / "run")
    encode, bos_id = lm.tokenizer.encode, lm.tokenizer.vocabulary.bos_id
    canvas = torch.tensor([[bos_id, *encode(prompt), *[lm.mask_id] * 3] for prompt, _ in PAIRS])
    sampler = "left-to-right" if lm.method.cached else "confidence"
    sampling = Sampling(sampler=sampler, steps=3, temperature=0)
    texts = last_frame(lm.method.generate(lm.network, canvas, sampling, RowRng(0, range(len(PAIRS))))).ids
    answers = [lm.tokenizer.decode(row[4:]) for row in texts.tolist()]
    right = [answer == f"{expected}<|endoftext|>" for answer, (_, expected) in zip(answers, PAIRS, strict=True)]
    assert sum(right) >= 30  # of 36; by chance 1


@pytest.mark.parametrize("method", ["ar", "mdlm"])
def test_a_run_resumes_to_the_same_weights_and_validates_on_answers(method, pairs, tmp_path):
    blocks = ["model.block_length=2", "train.causal_weight=0.5"] if method == "mdlm" else []
    words = words_of(pairs, f"method={method}", *blocks, *NETWORK, *QUICK, "train.checkpoint_every=2")
    outcome, _ = run(tmp_path / "whole", *words, "train.steps=4")
    run(tmp_path / "parts", *words, "train.steps=2")
    resumed, _ = run(tmp_path / "parts", *words, "train.steps=4")
    whole, parts = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    held_out = outcome.measured.rows
    assert outcome.measured == resumed.measured
    assert 3 < held_out < 18
    assert outcome.measured.tokens == 3 * held_out  # two letters and eos of each
    prepared = [f"data.prepared={tmp_path / 'whole/data'}", *words[3:], "train.steps=4"]  # which knows its format
    run(tmp_path / "again", *prepared, "train.micro_batch=2")
    again = load_file(tmp_path / "again/model/model.safetensors")
    for name in whole:
        torch.testing.assert_close(whole[name], again[name], atol=1e-5, rtol=1e-4)
    for name in ("whole", "again"):
        config = load(tmp_path / name).config
        assert (config.data.format, config.data.packing) == ("pairs", "pairs")


def test_samples_of_a_run_answer_held_out_prompts(pairs, tmp_path):
    words = words_of(pairs, "method=ar", *NETWORK, *QUICK[:3], "train.steps=1", "train.samples=3")
    run(tmp_path / "run", *words, "train.sample_every=1")
    [path] = (tmp_path / "run/samples").iterdir()
    samples = path.read_text().split("---\n")[1:]
    assert len(samples) == 3
    assert all(sample[:3] in dict(PAIRS) for sample in samples)


def test_the_perplexity_of_pairs_is_that_of_their_answers(pairs, tmp_path, capsys):
    words = words_of(pairs, "method=ar", *NETWORK, *QUICK, "train.steps=2", "length=12")
    run(tmp_path / "run", *words)
    capsys.readouterr()
    command = ["perplexity", str(tmp_path / "run"), "--json", "--data"]
    assert main([*command, str(pairs), "--format", "pairs"]) == 0
    [found] = json.loads(capsys.readouterr().out)["figures"]
    lm = load(tmp_path / "run")
    eos_id, total = lm.tokenizer.vocabulary.eos_id, 0.0
    for prompt, answer in PAIRS:
        ids = torch.tensor([[eos_id, *lm.tokenizer.encode(prompt + answer), eos_id]])
        beliefs = lm.method.log_beliefs(lm.network, ids)[0]
        total -= sum(float(beliefs[place - 1, ids[0, place]]) for place in range(4, 7))
    assert (found["tokens"], found["documents"], found["packing"], found["length"]) == (108, 36, "pairs", 7)
    assert found["nats"] == pytest.approx(total / 108, abs=1e-5)
    assert main([*command, str(tmp_path / "run/data"), "--split", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"][0]["packing"] == "pairs"
    assert main([*command, str(pairs), "--format", "pairs", "--packing", "packed"]) == 2
    assert "--packing packed is for running text" in capsys.readouterr().err
    assert main([*command, "sotu", "--format", "pairs"]) == 2
    assert "--format pairs is for your own files and the hub" in capsys.readouterr().err


def test_the_line_of_a_bad_record_is_named_and_nothing_is_left(pairs, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(pairs.read_text() + '{"prompt": "ab=", "answer": ""}\n')
    words = [word.replace(str(pairs), str(bad)) for word in words_of(pairs)]
    assert main(["train", "method=ar", *words, *NETWORK, *QUICK, "--out", str(tmp_path / "run")]) == 2
    assert "line 37 of bad.jsonl: message 2, an answer, is empty" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_does_not_go_with_pairs_is_refused(pairs, tmp_path):
    words = [*NETWORK, *QUICK, "train.steps=1", "length=16"]
    with pytest.raises(UserError, match=r"holds running text, and data.format is pairs"):
        run(tmp_path / "a", f"data.prepared={corpus(tmp_path, 50)}", "data.format=pairs", "method=ar", *words)
    infill = ["method=mdlm", "model.block_length=2", "model.hole_id=0", "train.infill=0.5"]
    with pytest.raises(UserError, match=r"train.infill 0.5 rearranges running text; data.format pairs needs 0"):
        run(tmp_path / "b", *words_of(pairs, *words, *infill))
    with pytest.raises(UserError, match=r"data.packing pairs is for data.format pairs"):
        resolve(["data.packing=pairs", "data.path=x"])


# Models to start from, with and without a chat template.


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed")
    return write_folder(causal_model("llama", True), tmp_path_factory.mktemp("base") / "tiny")


def test_full_fine_tunes_keep_the_template_of_the_base_also_when_it_is_gone(base, pairs, tmp_path):
    moved = shutil.copytree(base, tmp_path / "base")
    words = ["method=ar", f"init={moved}", f"data.path={pairs}", *QUICK, "train.checkpoint_every=1", "length=32"]
    for name, data in (("text", "data.field=prompt"), ("pairs", "data.format=pairs")):
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in PAIRS))
        run(tmp_path / name, *words, f"data.path={source}", data, "train.steps=1")
        assert load(tmp_path / name).chat_template == TEMPLATE
    shutil.rmtree(moved)
    assert main(["train", "--out", str(tmp_path / "pairs"), "train.steps=2"]) == 0
    assert load(tmp_path / "pairs").chat_template == TEMPLATE


def test_an_adapter_has_a_template_of_its_own_where_its_base_has_none(base, pairs, tmp_path):
    lora = [*QUICK, "train.lora_rank=2", "train.steps=1", f"data.path={pairs}", "data.format=pairs"]
    plain = small_model(tmp_path / "plain", length=16)
    for model, template, has_own in ((plain, PLAIN_TEMPLATE, True), (base, TEMPLATE, False)):
        out = tmp_path / f"from-{model.name}"
        run(out, f"init={model}", "method=adlm" if model == plain else "method=ar", *lora, "length=16")
        assert (out / "model/chat_template.jinja").exists() == has_own
        assert load(out).chat_template == template
        again = tmp_path / f"again-{model.name}"
        run(again, f"init={out}", *lora, "length=16")
        assert load(again).chat_template == template
    words = [*NETWORK, *QUICK, "train.steps=1", "length=16", f"data.prepared={tmp_path / 'from-tiny/data'}"]
    with pytest.raises(UserError, match="was written by another chat template than the model's"):
        run(tmp_path / "other", "method=ar", *words)


def cut(path):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.9)])


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("kind", ["gguf", "folder", "model"])
def test_weights_that_are_cut_off_are_refused_before_text_is_prepared(kind, lora_rank, pairs, tmp_path, capsys):
    if kind == "gguf":
        pytest.importorskip("gguf", reason="gguf is not installed")
    if kind != "model":
        pytest.importorskip("transformers", reason="transformers is not installed")
    if kind == "gguf":
        model = write_gguf(causal_model("llama", True), tmp_path / "x.gguf")
        cut(model)
    else:
        is_base = kind == "folder"
        folder = tmp_path / "model"
        model = write_folder(causal_model("llama", True), folder) if is_base else small_model(folder, "ar")
        cut(model / "model.safetensors")
    words = ["method=ar", f"init={model}", f"data.path={pairs}", "data.format=pairs", *QUICK, "length=16"]
    assert main(["train", *words, f"train.lora_rank={lora_rank}", "--out", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr()
    assert "cut off" in shown.err or "cannot be read as safetensors" in shown.err
    assert "preparing" not in shown.out + shown.err
    assert not (tmp_path / "run").exists()


def test_inspect_marks_the_answers(pairs, tmp_path, capsys):
    assert main(["prepare", *words_of(pairs), "--out", str(tmp_path / "data"), "--inspect"]) == 0
    printed = capsys.readouterr().out
    assert "{answers} (what is learnt; the rest is given)" in printed
    marked = re.findall(r"([a-f])([a-f])=\{([a-f]{2})", printed)
    assert marked
    assert all(first + second == answer[::-1] for first, second, answer in marked)
