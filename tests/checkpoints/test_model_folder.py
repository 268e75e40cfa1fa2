"""Model folders, `adlm import` and `adlm.load`."""

import errno
import json
import stat
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model
from worlds import randomized, seeded

import adlm
from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, save_model_folder
from adlm.checkpoints.published import PublishedCheckpoint, to_model_folder
from adlm.cli.main import main
from adlm.config.schema import Config, Model, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.registry import METHODS
from adlm.tokens import load_tokenizer

MASK = 257


@pytest.fixture
def model(request):
    """A tiny byte-level model of the method that the test names."""
    name = getattr(request, "param", "adlm")
    config = Config(
        method=name,
        tokenizer="bytes",
        vocabulary=load_tokenizer("bytes").vocabulary,
        length=8,
        model=Model(hidden=16, heads=2, blocks=2, condition=8),
        schedule=Schedule(eps=1e-3),
        time=Time(steps=10 if name == "d3pm" else 0),
    )
    return ModelFolder(config, randomized(method_of(config).build()).state_dict(), load_tokenizer("bytes"))


@pytest.mark.parametrize("model", METHODS, indirect=True)
def test_a_saved_model_loads_to_the_same_model(model, tmp_path):
    save_model_folder(model, tmp_path / "deep" / "model")
    lm = adlm.load(tmp_path / "deep" / "model")
    assert lm.config == model.config
    assert lm.mask_id == MASK
    assert lm.tokenizer.encode("abc") == [97, 98, 99]
    assert all(torch.equal(value, model.weights[name]) for name, value in lm.network.state_dict().items())
    assert not lm.network.training
    ids = torch.tensor([[256, 98, 99, 100]])
    assert lm.log_probs(ids).shape == (1, 4, 258)
    assert lm.bound(ids).isfinite().all()
    canvas = torch.tensor([256, 98, MASK, MASK])
    filled = lm.complete(canvas, num_samples=3, steps=4, seed=1)
    assert filled.shape == (3, 4)
    assert (filled != MASK).all()
    assert (filled[:, :2] == canvas[:2]).all()
    assert torch.equal(filled, lm.complete(canvas, num_samples=3, steps=4, seed=1))


def test_a_folder_contains_plain_files_with_group_read_permission(model, tmp_path):
    save_model_folder(model, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model.safetensors", "config.yaml", "tokenizer.json", "special_tokens_map.json"}
    for path in (tmp_path / "model").iterdir():
        assert path.stat().st_mode & stat.S_IRGRP
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_without_a_tokenizer_works_with_ids(model, tmp_path):
    save_model_folder(replace(model, tokenizer=None), tmp_path / "model")
    lm = adlm.load(tmp_path / "model")
    assert lm.tokenizer is None
    assert (lm.complete(torch.full((1, 5), MASK), steps=3) != MASK).all()


def test_an_existing_file_or_folder_is_not_overwritten(model, tmp_path):
    save_model_folder(model, tmp_path / "model")
    with pytest.raises(UserError, match="exists already; give another path"):
        save_model_folder(model, tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        save_model_folder(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_save_that_fails_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.checkpoints.model_folder.save_config", lambda config, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model_folder(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_user_error_and_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("adlm.checkpoints.model_folder.write_tensors", full)
    with pytest.raises(UserError, match=r"cannot be written: .*No space left on device"):
        save_model_folder(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_a_user_error(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"cannot be written: Not a directory|cannot be written: File exists"):
        save_model_folder(model, tmp_path / "file" / "model")


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.yaml").unlink(), "has no config.yaml, so it is not a model folder"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "cannot be read as safetensors"),
        (lambda f: (f / "config.yaml").write_text("length: 1\n"), "length 1 must be at least 2"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read as a tokenizer.json"),
        (lambda f: (f / "tokenizer.json").rename(f / "x") and (f / "tokenizer.json").symlink_to("y"), "does not exist"),
        (lambda f: load_tokenizer("text8").save(f), "the tokenizer has 28 symbols, and vocabulary.size is 258"),
        (
            lambda f: rewrite(f, lambda w: w.pop("anchor.head.bias")),
            "weight anchor.head.bias is missing for method adlm",
        ),
        (lambda f: rewrite(f, lambda w: w.update(x=torch.ones(1))), "weight x is unexpected for method adlm"),
        (
            lambda f: rewrite(f, lambda w: w.update({"anchor.head.bias": torch.ones(3)})),
            "weight anchor.head.bias has shape",
        ),
    ],
)
def test_a_damaged_folder_is_a_user_error(model, tmp_path, damage, message):
    save_model_folder(model, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(UserError, match=message):
        adlm.load(tmp_path / "model")


def test_a_folder_of_model_folders_is_answered_with_one_of_them(model, tmp_path):
    save_model_folder(model, tmp_path / "mdlm")
    save_model_folder(model, tmp_path / "adlm")
    with pytest.raises(UserError, match=f"give a model folder in it, such as {tmp_path / 'adlm'}$"):
        adlm.load(tmp_path)


def test_a_model_of_a_similar_name_is_suggested():
    with pytest.raises(UserError, match="did you mean 'smollm2'"):
        adlm.load("smolm2")


@pytest.mark.parametrize("path", ["nowhere", "config.yaml"])
def test_a_path_that_is_not_a_model_is_a_user_error(path):
    with pytest.raises(UserError, match=r"is neither a model folder nor a .ckpt file"):
        adlm.load(path)


def test_unsupported_calls_are_user_errors(model):
    config = replace(model.config, method="mdlm")
    lm = adlm.language_model.LanguageModel(config, method_of(config), method_of(config).build())
    with pytest.raises(UserError, match="method mdlm has no anchor network"):
        lm.anchor_logits(torch.tensor([[1]]))
    for verb in (lm.log_probs, lm.complete):
        with pytest.raises(UserError, match="holds id 999, outside the vocabulary of 258"):
            verb(torch.tensor([[999]]))
        with pytest.raises(UserError, match="must be a torch tensor of int64 ids"):
            verb([[1, 2]])
    with pytest.raises(UserError, match="alpha 2 must be a share of visible tokens, from 0 to 1"):
        lm.log_probs(torch.tensor([[1]]), alpha=2)
    with pytest.raises(UserError, match=r"alpha of shape \(2,\) must be one share, or one for each of 1 rows"):
        lm.log_probs(torch.tensor([[1]]), alpha=torch.tensor([0.5, 0.5]))
    conditioned = replace(lm, config=replace(config, model=replace(config.model, time_conditioning=True)))
    with pytest.raises(UserError, match="alpha 0 must be a share of visible tokens, above 0 and at most 1"):
        conditioned.log_probs(torch.tensor([[1]]), alpha=0.0)
    with pytest.raises(UserError, match="num_samples 0 must be at least 1"):
        lm.complete(torch.tensor([MASK]), num_samples=0)
    with pytest.raises(UserError, match=r"sampling.sampler 'fast' is not one of"):
        lm.complete(torch.tensor([MASK]), sampler="fast")


def test_import_converts_a_released_checkpoint_to_a_model_folder(test_vectors, tmp_path, capsys):
    checkpoint = test_vectors / "adlm-tiny.ckpt"
    assert main(["import", str(checkpoint), "--out", str(tmp_path / "model"), "--length", "24"]) == 0
    output = capsys.readouterr().out
    assert "adlm after 123 steps: 81 raw tensors, 346,124 parameters, all used" in output
    assert "ignored: state_dict backbone.rotary_emb.inv_freq" in output
    lm, straight = adlm.load(tmp_path / "model"), adlm.load(checkpoint)
    z = torch.randint(54, (2, 24), generator=seeded())
    assert torch.equal(lm.log_probs(z), straight.log_probs(z))
    assert torch.equal(lm.anchor_logits(z), straight.anchor_logits(z))
    assert lm.config.length == 24
    assert load_model_folder(tmp_path / "model").config.schedule.eps == 1e-3


def test_import_prints_json_and_options_override_what_weights_do_not_determine(test_vectors, tmp_path, capsys):
    content = torch.load(test_vectors / "adlm-tiny.ckpt", weights_only=True)
    state = {name: value for name, value in content["state_dict"].items() if name.startswith("backbone.")}
    torch.save({"state_dict": state}, tmp_path / "alone.ckpt")
    arguments = ["import", str(tmp_path / "alone.ckpt"), "--json", "--mask-id", "3", "--out"]
    for method in (None, "sedd", "d3pm"):
        folder = tmp_path / str(method)
        assert main([*arguments, str(folder), *(["--method", method] if method else [])]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["method"] == (method or "mdlm")
        assert report["config"]["vocabulary"]["mask_id"] == 3
        assert any("--method" in note for note in report["notes"]) == (method is None)
        assert adlm.load(folder).config.time.steps == (1000 if method == "d3pm" else 0)


class DictConfig:
    """Stands in for omegaconf's, as a released checkpoint pickles it."""

    __module__ = "omegaconf.dictconfig"


def test_import_inspects_pickled_configs_without_constructing_them(test_vectors, tmp_path, capsys, monkeypatch):
    content = torch.load(test_vectors / "adlm-tiny.ckpt", weights_only=True)
    state = {name: value for name, value in content["state_dict"].items() if name.startswith("backbone.")}
    config = DictConfig()
    config.content = {"parameterization": "sedd", "model": {"length": 77}, "tokenizer": {"name_or_path": "gpt2"}}
    fake = types.ModuleType("omegaconf.dictconfig")
    fake.DictConfig = DictConfig
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    monkeypatch.setitem(sys.modules, "omegaconf.dictconfig", fake)
    torch.save({"state_dict": state, "hyper_parameters": {"config": config}}, tmp_path / "hinted.ckpt")
    monkeypatch.delitem(sys.modules, "omegaconf.dictconfig")
    monkeypatch.delitem(sys.modules, "omegaconf")
    assert main(["import", str(tmp_path / "hinted.ckpt"), "--out", str(tmp_path / "model")]) == 0
    output = capsys.readouterr().out
    assert output.startswith("sedd: ")
    assert "ignored: an object of omegaconf.dictconfig.DictConfig, not constructed" in output
    assert "trained with tokenizer gpt2 (--tokenizer)" in output
    assert adlm.load(tmp_path / "model").config.length == 77
    assert "omegaconf" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "ema"], "--weights ema: the file has no EMA weights"),
        (["--tokenizer", "text8"], "tokenizer text8 has 28 symbols and the weights have 54"),
        (["--mask-id", "54"], "vocabulary.mask_id 54 is outside the vocabulary of 54 symbols"),
        (["--method", "ar"], "for method ar with the sizes in the config"),
        (["--length", "1"], "length 1 must be at least 2"),
        (["--weights", "both"], "--weights 'both' is not one of ema, raw"),
    ],
)
def test_a_failed_import_leaves_nothing(test_vectors, tmp_path, capsys, arguments, message):
    assert main(["import", str(test_vectors / "adlm-tiny.ckpt"), "--out", str(tmp_path / "model"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_import_does_not_overwrite_a_folder(test_vectors, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["import", str(test_vectors / "adlm-tiny.ckpt"), "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_vocabulary_of_the_size_of_bert_has_the_mask_id_of_bert():
    published = PublishedCheckpoint("mdlm", Model(), 30_522, {}, None, None, {}, [])
    assert to_model_folder(published).config.vocabulary == Vocabulary(30_522, 103)


def test_loading_a_model_does_not_import_the_torch_compiler(model, tmp_path):
    for bridge in ("hidden", "logits"):
        config = replace(model.config, model=replace(model.config.model, bridge=bridge, bridge_start="identity"))
        weights = method_of(config).build().state_dict()
        save_model_folder(replace(model, config=config, weights=weights), tmp_path / bridge)
    script = (
        f"import sys, adlm; adlm.load({str(tmp_path / 'hidden')!r}); adlm.load({str(tmp_path / 'logits')!r}); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def changed_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors")


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_of_other_than_floating_point_dtypes_are_a_user_error(dtype, tmp_path):
    folder = small_model(tmp_path / "model")
    changed_weights(folder, lambda weights: {name: value.to(dtype) for name, value in weights.items()})
    with pytest.raises(UserError, match=f"weight .* has dtype {str(dtype)[6:]}, which is not one of float32"):
        adlm.load(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_floating_point_dtypes_can_be_loaded(dtype, tmp_path):
    folder = small_model(tmp_path / "model")
    changed_weights(folder, lambda weights: {name: value.to(dtype) for name, value in weights.items()})
    lm = adlm.load(folder)
    assert lm.bound(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {weight.dtype for weight in lm.network.parameters()} == {expected}, "CPUs are slow in half precision"


def test_weights_of_two_dtypes_are_a_user_error(tmp_path):
    folder = small_model(tmp_path / "model")
    changed_weights(folder, lambda weights: {**weights, "anchor.head.bias": weights["anchor.head.bias"].double()})
    with pytest.raises(UserError, match="mixes weights of float32 and float64"):
        adlm.load(folder)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_a_user_error_with_its_name(number, tmp_path):
    folder = small_model(tmp_path / "model")

    def damage(weights):
        weights["anchor.trunk.blocks.1.qkv.weight"][3, 4] = number
        return weights

    changed_weights(folder, damage)
    with pytest.raises(UserError, match=r"weight anchor.trunk.blocks.1.qkv.weight holds a NaN or an infinity"):
        adlm.load(folder)


def test_a_weight_whose_sum_overflows_is_finite(tmp_path):
    folder = small_model(tmp_path / "model")
    changed_weights(folder, lambda weights: {**weights, "anchor.head.bias": torch.full((258,), 3e38)})
    adlm.load(folder)


def test_weight_names_from_files_cannot_control_a_terminal(tmp_path):
    folder = small_model(tmp_path / "model")
    changed_weights(folder, lambda weights: {**weights, "\x1b[31m\x07red": torch.ones(2)})
    with pytest.raises(UserError) as caught:
        adlm.load(folder)
    assert "\\x1b[31m\\x07red" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("line", ["blocks: 2\n", "denoiser_blocks: null\n"])
def test_a_config_with_more_blocks_than_there_are_weights_is_a_user_error_at_once(line, tmp_path, monkeypatch):
    folder = small_model(tmp_path / "model")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(f"  {line}", f"  {line.split(':')[0]}: 1024\n"))
    monkeypatch.setattr("adlm.checkpoints.model_folder.on_meta", None)  # no block is built
    with pytest.raises(UserError, match=r"do not fit: there are 51 weights, and a block has at least 6"):
        adlm.load(folder)
