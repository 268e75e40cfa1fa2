"""Adapter folders: small, merged with their base when loaded, refused in one line where they do not fit it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model
from small_runs import RecordingReporter, corpus

import adlm
from adlm.checkpoints.adapter import Adapter, read_adapter, replace_adapter
from adlm.cli.main import main
from adlm.config.load import load_config, resolve, save_config
from adlm.errors import UserError
from adlm.tokens import load_tokenizer
from adlm.training.train import train

OPTIONS = ("train.lora_rank=2", "train.batch_size=8", "train.learning_rate=1e-2", "train.steps=4", "train.ema=0")
QUIET = ("train.warm_up_steps=0", "train.valid_every=0", "train.valid_rows=2", "train.sample_every=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The model folder that a run started from, and the run."""
    folder = tmp_path_factory.mktemp("adapter")
    base, run = small_model(folder / "base"), folder / "run"
    words = [f"init={base}", f"data.prepared={corpus(folder, lines=60)}", *OPTIONS, *QUIET]
    train(resolve(words), run, RecordingReporter())
    return base, run


@pytest.fixture
def copy(trained, tmp_path):
    """An adapter folder to damage, and its base."""
    base, run = trained
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(run / "model", tmp_path / "adapter")
    config = load_config(tmp_path / "adapter" / "config.yaml")
    save_config(replace(config, init=str(tmp_path / "base")), tmp_path / "adapter" / "config.yaml")
    return tmp_path / "adapter", tmp_path / "base"


def test_it_holds_only_what_was_trained_and_names_its_base(trained):
    base, run = trained
    assert {path.name for path in (run / "model").iterdir()} == {"adapter.safetensors", "config.yaml"}
    parts = {name.rpartition(".")[2] for name in load_file(run / "model" / "adapter.safetensors")}
    assert parts == {"lora_a", "lora_b", "trained_row", "weight", "bias"}
    assert load_config(run / "model" / "config.yaml").init == str(base.resolve())
    assert adlm.load(run).tokenizer.is_same(adlm.load(base).tokenizer)


def test_a_run_and_its_commands_use_the_merged_model(trained, capsys):
    base, run = trained
    lm = adlm.load(run)
    assert main(["sample", str(run), "--length", "8", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == lm.sample(1, length=8, seed=1)[0]
    ids = torch.full((1, 8), 257)  # masks
    assert not torch.equal(lm.log_probs(ids), adlm.load(base).log_probs(ids))


def test_bfloat16_halves_the_file_and_a_tokenizer_of_its_own_is_kept(trained, tmp_path):
    adapter = read_adapter(trained[1] / "model")
    config = replace(adapter.config, train=replace(adapter.config.train, lora_dtype="bfloat16"))
    replace_adapter(Adapter(config, adapter.weights, load_tokenizer("bytes")), tmp_path / "small")
    sizes = [(path / "adapter.safetensors").stat().st_size for path in (tmp_path / "small", trained[1] / "model")]
    assert sizes[0] < 0.6 * sizes[1]
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    ids = torch.full((1, 8), 257)  # masks
    close, exact = adlm.load(tmp_path / "small").log_probs(ids), adlm.load(trained[1]).log_probs(ids)
    torch.testing.assert_close(close, exact, rtol=0, atol=0.05)


def without(tensors, name):
    return {other: value for other, value in tensors.items() if other != name}


A, B = "anchor.trunk.blocks.0.qkv.lora_a", "anchor.trunk.blocks.0.qkv.lora_b"
DAMAGES = {
    "a name too many": (lambda own: {**own, "anchor.head.weight": torch.ones(2)}, "anchor.head.weight is unexpected"),
    "a factor is missing": (lambda own: without(own, B), f"weight {B} is missing"),
    "another rank": (lambda own: {**own, A: torch.ones(3, 16)}, f"weight {A} has shape (3, 16) instead of (2, 16)"),
    "another width": (lambda own: {**own, B: torch.ones(7, 2)}, f"weight {B} has shape (7, 2) instead of (48, 2)"),
    "NaN": (lambda own: {**own, A: own[A] * torch.nan}, f"weight {A} holds a NaN or an infinity"),
    "integers": (lambda own: {**own, A: own[A].long()}, f"weight {A} has dtype int64"),
    "overflow": (lambda own: {**own, A: own[A] * 0 + 3e38, B: own[B] * 0 + 3e38}, "overflows when it is merged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused_in_one_line(damage, copy, capsys):
    folder, _ = copy
    change, sentence = DAMAGES[damage]
    save_file(change(load_file(folder / "adapter.safetensors")), folder / "adapter.safetensors")
    assert main(["sample", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("adlm: ")
    assert error.count("\n") == 1
    assert "adapter.safetensors" in error
    assert sentence in error


def test_a_run_is_not_written_into_an_adapter_folder(copy, tmp_path, capsys):
    assert main(["train", "--out", str(copy[0]), "train.steps=9"]) == 2
    assert "is a model folder, not a run; give another --out" in capsys.readouterr().err


def test_a_file_that_is_not_safetensors_is_refused_in_one_line(copy):
    folder, _ = copy
    (folder / "adapter.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        adlm.load(folder)


def with_options(folder, **options):
    config = load_config(folder / "config.yaml")
    save_config(replace(config, train=replace(config.train, **options)), folder / "config.yaml")


def test_another_base_or_none_is_refused_in_one_line(copy):
    folder, base = copy
    weights = load_file(base / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, base / "model.safetensors")
    with pytest.raises(UserError, match=r"is an adapter for another base: .* has sha256 .*, and it needs .*; restore"):
        adlm.load(folder)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"is an adapter, and its base cannot be used: init .* is neither box"):
        adlm.load(folder)


def test_a_config_of_other_sizes_is_refused_in_one_line(copy):
    folder, _ = copy
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("blocks: 2", "blocks: 3"))
    with pytest.raises(UserError, match=r"adapter\.safetensors: weight .* is missing"):
        adlm.load(folder)


def test_an_adapter_is_no_base_and_needs_a_rank(copy):
    folder, base = copy
    shutil.copy(folder / "adapter.safetensors", base)
    with pytest.raises(UserError, match="is itself an adapter"):
        adlm.load(folder)
    with_options(folder, lora_rank=0)
    with pytest.raises(UserError, match=r"has no init and train\.lora_rank; restore it"):
        adlm.load(folder)


def test_the_merged_model_is_written_as_a_model_folder_without_a_base(trained, tmp_path, capsys):
    run = trained[1]
    assert main(["export", str(run), "--to", "adlm", "--out", str(tmp_path / "merged")]) == 0
    assert "written to" in capsys.readouterr().out
    merged, lm = adlm.load(tmp_path / "merged"), adlm.load(run)
    assert (merged.config.init, merged.config.train.lora_rank) == ("", 0)
    weights = merged.network.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in lm.network.state_dict().items())
    assert merged.tokenizer.is_same(lm.tokenizer)
    for words, sentence in ((["--force"], "--force is for --to hf"), ([], "exists already")):
        assert main(["export", str(run), "--to", "adlm", "--out", str(tmp_path / "merged"), *words]) == 2
        assert sentence in capsys.readouterr().err
