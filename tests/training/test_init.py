"""Tests of `init=MODEL`: a run that starts from the weights and the tokenizer of a model."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, corpus
from tiny_bases import causal_model, write_folder

from adlm import load
from adlm.checkpoints.base_weights import read_base
from adlm.cli.main import main
from adlm.config import load as load_module
from adlm.config.load import BOX_FOLDER, resolve
from adlm.config.schema import Sampling
from adlm.inference.frozen import FrozenNetwork
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

STILL = ("train.steps=1", "train.warm_up_steps=0", "train.learning_rate=1e-12", "train.ema=0")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of 4 steps and its prepared text."""
    folder = tmp_path_factory.mktemp("first")
    prepared, run = corpus(folder, lines=100), folder / "run"
    assert main(["train", *SMALL, "train.steps=4", f"data.prepared={prepared}", "--out", str(run)]) == 0
    return run, prepared


def weights_of(run):
    return load_file(run / "model" / "model.safetensors")


def test_a_run_starts_at_the_weights_of_another(first, tmp_path):
    run, prepared = first
    words = [f"init={run}", *STILL, "train.batch_size=8", f"data.prepared={prepared}"]
    assert main(["train", *words, "--out", str(tmp_path / "second")]) == 0
    second = weights_of(tmp_path / "second")
    for name, weight in weights_of(run).items():
        torch.testing.assert_close(second[name], weight, rtol=0, atol=1e-6)
    assert load(tmp_path / "second").config.model == load(run).config.model


def test_it_sets_the_options_of_the_network_and_other_options_hold_wherever_they_stand():
    box, config = load("box").config, resolve(["own", "train.steps=7", "init=box", "data.path=x"])
    assert (config.model, config.length, config.sampling, config.tokenizer) == (box.model, 128, box.sampling, "box")
    assert (config.train.steps, config.train.learning_rate) == (7, 5e-4)
    assert config == resolve(["own", "init=box", "train.steps=7", "data.path=x"])


def test_a_run_from_the_box_begins_at_its_weights(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("The old man looked at the sea, and said nothing to his son. " * 60)
    words = ["own", "init=box", f"data.path={tmp_path / 'text.txt'}", *STILL, "train.batch_size=1"]
    words += ["train.sample_every=0", "train.valid_rows=1"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    assert "next:\n  adlm sample" in capsys.readouterr().out
    trained, box = weights_of(tmp_path / "run"), load_file(BOX_FOLDER / "model.safetensors")
    for name, weight in box.items():
        torch.testing.assert_close(trained[name], weight.float(), rtol=0, atol=1e-6)


def test_a_run_with_a_checkpoint_no_longer_needs_the_model_it_started_from(first, tmp_path, capsys):
    run, _ = first
    shutil.copytree(run / "model", tmp_path / "start")
    (tmp_path / "text.txt").write_text("the sun and the moon. " * 200)
    words = ["train", f"data.path={tmp_path / 'text.txt'}", "train.batch_size=8", "train.valid_every=0"]
    for out, start in (("whole", run), ("resumed", tmp_path / "start")):
        steps = 6 if out == "whole" else 3
        constant = (f"train.steps={steps}", "train.decay=constant", "train.warm_up_steps=0")
        assert main([*words, f"init={start}", *constant, "--out", str(tmp_path / out)]) == 0
    shutil.rmtree(tmp_path / "start")
    assert main(["train", "--out", str(tmp_path / "resumed"), "train.steps=6"]) == 0
    assert "resuming from step 3" in capsys.readouterr().err
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["init=nowhere"], "init nowhere is neither box, the model in the box, nor a run or model folder of adlm"),
        (["init=box", "data.prepared={prepared}"], "init box has another tokenizer than the prepared text"),
        (["init={run}", "data.prepared={prepared}", "model.hidden=32"], "does not fit: weight"),
    ],
)
def test_a_model_that_does_not_fit_is_a_user_error(words, sentence, first, tmp_path, capsys):
    run, prepared = first
    words = [word.format(run=run, prepared=prepared) for word in words]
    assert main(["train", *words, *STILL, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("adlm: ")
    assert sentence in error
    assert not (tmp_path / "run").exists()


def test_reasoning_runs_have_another_option_for_it(first, tmp_path, capsys):
    words = ["prosqa/small", f"init={first[0]}", "method=ar", "data.problems=16", "train.warm_up_steps=1"]
    assert main(["reason", "train", *words, "--out", str(tmp_path / "run")]) == 2
    assert "a model to fine-tune goes by reason.base" in capsys.readouterr().err


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny pretrained causal model of three blocks, and the words of a run of one step that changes little."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("base")
    write_folder(causal_model("llama", True), folder / "tiny")
    (folder / "text.txt").write_text("The old man looked at the sea, and said nothing to his son. " * 60)
    words = [f"init={folder / 'tiny'}", f"data.path={folder / 'text.txt'}", *STILL, "train.batch_size=2", "length=64"]
    return str(folder / "tiny"), [*words, "train.sample_every=0", "train.valid_rows=2"]


@pytest.mark.parametrize("method", ["ar", "mdlm", "adlm"])
def test_a_run_starts_from_a_pretrained_base_with_its_tokenizer(method, base, tmp_path):
    source, words = base
    assert main(["train", f"method={method}", *words, "--out", str(tmp_path / "run")]) == 0
    trained, pretrained = load(tmp_path / "run"), read_base(source)
    expected = pretrained.weights_for(trained.config, trained.method.anchored)
    weights = weights_of(tmp_path / "run")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert trained.tokenizer.vocabulary == pretrained.tokenizer.vocabulary
    assert trained.tokenizer.sha256 == pretrained.tokenizer.sha256
    assert (trained.config.model.family, trained.config.length) == ("llama", 64)


def test_the_causal_run_has_the_loss_of_the_base_and_continues_texts(base, tmp_path):
    assert main(["train", "method=ar", *base[1], "--out", str(tmp_path / "run")]) == 0
    trained, model = load(tmp_path / "run"), causal_model("llama", True)
    ids = torch.tensor([trained.tokenizer.encode("the old man and the sea, he said")])
    with torch.no_grad():
        log_probs = model(ids).logits[:, :-1].log_softmax(dim=-1)
    ours = trained.method.bound(trained.network, ids, None, None)[0, 1:]
    torch.testing.assert_close(ours, -log_probs[0].gather(-1, ids[0, 1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    canvas = torch.tensor([ids[0].tolist() + [trained.config.vocabulary.mask_id] * 8])
    sampling = Sampling(sampler="left-to-right", temperature=0)
    frames = trained.method.generate(FrozenNetwork(trained.network), canvas, sampling, RowRng(0, range(1)))
    assert last_frame(frames).ids[0].tolist() == greedy


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        (["method=ar"], (3, None)),
        (["method=adlm"], (2, 1)),
        (["method=adlm", "model.blocks=1"], (1, 2)),
        (["method=adlm", "model.denoiser_blocks=0"], (3, 0)),
        (["own", "method=adlm"], (2, 1)),
    ],
)
def test_the_blocks_of_a_base_are_those_of_the_network_or_of_both(words, blocks, base):
    config = resolve([*words, *base[1]])
    assert (config.model.blocks, config.model.denoiser_blocks) == blocks
    assert (config.tokenizer, config.model.qk_norm) == (f"base:{base[0]}", False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["length=256"], "length 256 is more than the 128 tokens that"),
        (["model.hidden=32"], "does not fit: weight"),
        (["tokenizer=bytes"], "has another tokenizer than the prepared text"),
        (["method=adlm", "model.bridge=logits"], "is one network of 3 blocks, so model.blocks 2"),
        (["init=missing.gguf"], "missing.gguf cannot be read"),
        (["method=adlm", "model.blocks=4"], "has 3 blocks; give model.blocks from 1 to 3"),
        (["method=adlm", "model.blocks=x"], "model.blocks"),
        (["method=[1]"], "method"),
        (["model=5"], "model"),
    ],
)
def test_a_base_that_does_not_fit_the_run_is_one_line(words, sentence, base, tmp_path, capsys):
    given = [word for word in base[1] if not word.startswith(words[-1].partition("=")[0])]
    assert main(["train", "method=ar", *given, *words, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("adlm: ")
    assert sentence in error


def test_a_preset_of_ours_may_name_the_base_and_its_own_options_hold(base, tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(
        f"# T\nmethod: adlm\ninit: {base[0]}\nmodel: {{blocks: 1, block_length: 4}}\ntrain: {{steps: 9}}\n"
    )
    found = [*load_module._preset_files(), ("adapt/tiny", tmp_path / "tiny.yaml")]
    monkeypatch.setattr(load_module, "_preset_files", lambda: iter(found))
    config = resolve(["adapt/tiny", "train.batch_size=2"])
    assert (config.init, config.tokenizer, config.model.family) == (base[0], f"base:{base[0]}", "llama")
    assert (config.model.blocks, config.model.denoiser_blocks, config.model.block_length) == (1, 2, 4)
    assert (config.train.steps, config.train.batch_size, config.train.optimizer) == (9, 2, "adamw")


def test_a_preset_of_blocks_of_text_keeps_them_with_a_base(base, tmp_path):
    (tmp_path / "blocks.yaml").write_text("model: {block_length: 4, masked_keys: hidden, qk_norm: true, hidden: 32}\n")
    model = resolve([str(tmp_path / "blocks.yaml"), "method=mdlm", *base[1]]).model
    assert (model.block_length, model.masked_keys, model.qk_norm, model.hidden) == (4, "hidden", False, 64)


@pytest.mark.parametrize("lora", [(), ("train.lora_rank=2",)])
def test_a_model_gets_and_loses_a_chain(lora, base, tmp_path):
    _, (init, *words) = base

    def chain_of(out, *options):
        assert main(["train", *options, *words, "length=16", *lora, "--out", str(tmp_path / out)]) == 0
        return load(tmp_path / out).network.chain

    assert chain_of("with", init, "method=mdlm", "model.block_length=2", "model.chain=3") is not None
    again = f"init={tmp_path / 'with'}"
    assert chain_of("kept", again) is not None
    assert chain_of("without", again, "model.chain=0", "model.block_length=1") is None
