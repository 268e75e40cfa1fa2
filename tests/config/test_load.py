"""Presets, overrides and the error messages for invalid ones."""

from dataclasses import replace

import pytest
import yaml
from small_models import mostly_slow

from adlm.bases.named import find_named_base
from adlm.config.load import (
    BOX_FOLDER,
    from_mapping,
    is_run_preset,
    load_config,
    preset_titles,
    resolve,
    save_config,
    to_mapping,
    to_yaml,
    validate,
)
from adlm.config.options import descriptions, sections
from adlm.config.schema import Config, Data, Model, Reason, Vocabulary
from adlm.errors import UserError
from adlm.methods import method_of

RUNS = [f"{corpus}/{method}" for corpus in ("owt", "lm1b") for method in ("adlm", "mdlm", "sedd", "d3pm", "ar", "a2r")]


def test_every_run_of_the_paper_has_a_preset_and_every_preset_a_title():
    titles = preset_titles()
    assert set(RUNS) <= set(titles)
    assert {f"model/{size}" for size in ("tiny", "small", "medium", "1b", "3b", "7b")} <= set(titles)
    assert all(len(title) > 10 for title in titles.values())
    assert all(resolve([name]) for name in titles if find_named_base("smollm2") or not name.startswith("adapt/"))


@pytest.mark.parametrize("name", mostly_slow(preset_titles(), "own", "owt/adlm", "lm1b/d3pm", "recipe/modern"))
def test_every_preset_resolves_and_survives_a_round_trip(name, tmp_path):
    if name.startswith("adapt/") and find_named_base("smollm2") is None:
        pytest.skip("the base weights of smollm2 are not on this machine; adlm fetch smollm2")
    config = resolve([name])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert from_mapping(yaml.safe_load(to_yaml(config, explain=True))) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.skipif(find_named_base("smollm2") is None, reason="smollm2 has no base weights here; adlm fetch smollm2")
def test_the_preset_of_smollm2_is_the_recipe_of_the_model_in_the_box():
    preset, box = resolve(["adapt/smollm2"]), load_config(BOX_FOLDER / "smollm2" / "config.yaml")
    written = {"base_sha256": box.train.base_sha256, "samples": 2, "checkpoint_every": 100_000}  # no part of a recipe
    written["steps"] = box.train.steps  # of its second run; the first had no causal target and no such infilling
    own = resolve(["own", "init=smollm2"])
    assert (own.train.infill, own.model.hole_id) == (0, 4), "pairs and streams are not rearranged"
    assert replace(preset.train, **written) == box.train
    for section in ("method", "model", "time", "schedule", "sampling"):
        assert getattr(preset, section) == getattr(box, section)


def test_a_recipe_is_merged_over_a_run_and_is_no_run_itself():
    config = resolve(["owt/mdlm", "recipe/modern"])
    assert (config.method, config.length, config.train.optimizer) == ("mdlm", 1024, "muon")
    with pytest.raises(UserError, match=r"time.weight one is for adlm and mdlm, not for ar; use time.weight=bound"):
        method_of(resolve(["owt/ar", "recipe/modern"]))
    assert is_run_preset("owt/mdlm")
    assert not is_run_preset("recipe/modern")
    assert not is_run_preset("model/small")


@pytest.mark.parametrize("name", RUNS)
def test_presets_of_the_paper_set_the_published_values(name):
    corpus, method = name.split("/")
    config = resolve([name])
    assert config.method == method
    assert (config.tokenizer, config.length) == (("gpt2", 1024) if corpus == "owt" else ("bert-base-uncased", 128))
    assert (config.model.hidden, config.model.blocks, config.model.heads) == (768, 12, 12)
    assert config.train.steps == (500_000 if method in ("ar", "a2r") else 1_000_000)
    if method in ("adlm", "a2r"):
        assert config.model.num_denoiser_blocks == 6
        assert (config.anchor.gamma, config.anchor.tau, config.anchor.positions) == (3e-3, 5, "all")
    if method not in ("ar", "a2r"):
        assert config.schedule.eps == 1e-3
    assert config.time.steps == (1000 if method == "d3pm" else 0)
    assert config.model.time_conditioning == (method in ("sedd", "d3pm"))


def test_overrides_are_applied_from_left_to_right(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("length: 64\nanchor: {tau: 2}\n")
    config = resolve(["owt/adlm", "model=medium", str(own), "anchor.gamma=0.1", "length=32"])
    assert (config.model.hidden, config.model.num_denoiser_blocks) == (1024, 12)
    assert (config.anchor.tau, config.anchor.gamma, config.length) == (2, 0.1, 32)
    assert config.tokenizer == "gpt2"
    assert resolve(["length=32", str(own)]).length == 64


def test_numbers_may_use_exponents_and_underscores():
    config = resolve(["train.learning_rate=3e-4", "train.steps=500_000", "schedule.eps=0", "anchor.gamma=1"])
    assert (config.train.learning_rate, config.train.steps) == (3e-4, 500_000)
    assert isinstance(config.schedule.eps, float)


@pytest.mark.parametrize("text", ["*.txt", "3", "a: b", "[x]", "'quoted'", "true", "~/a#b"])
def test_values_of_string_options_are_not_parsed(text):
    assert resolve([f"data.path={text}"]).data.path == text


def test_off_is_a_string_and_true_is_a_boolean(tmp_path):
    assert resolve(["train.compile=off", "train.wandb=off", "train.recompute=true"]).train.compile == "off"
    (tmp_path / "own.yaml").write_text("train: { compile: off, recompute: True }\n")
    config = resolve([str(tmp_path / "own.yaml")])
    assert (config.train.compile, config.train.recompute) == ("off", True)
    assert resolve_yaml(to_yaml(config), tmp_path) == config
    with pytest.raises(UserError, match=r"train.recompute 'no' must be true or false"):
        resolve(["train.recompute=no"])


def resolve_yaml(text, folder):
    (folder / "again.yaml").write_text(text)
    return resolve([str(folder / "again.yaml")])


def test_the_last_override_selects_the_text_to_read(tmp_path):
    assert resolve(["owt/adlm", "data.path=mine.txt"]).data.name == ""
    assert resolve(["data.path=mine.txt", "data=ptb"]).data == Data(name="ptb")
    config = resolve(["owt/adlm", "data.hub=a/b", "data.held_out=0.5"])
    assert (config.data.hub, config.data.name, config.data.packing) == ("a/b", "", "packed-published")
    with pytest.raises(UserError, match=r"data.name ptb and data.path x both select the text to read; keep one"):
        Data(name="ptb", path="x")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["anchor.gama=1"], "unknown option 'anchor.gama'; did you mean anchor.gamma?"),
        (["train.lr=1e-3"], "unknown option 'train.lr'; did you mean train.learning_rate?"),
        (["batch=3"], "unknown option 'batch'; did you mean train.batch_size?"),
        (["gamma=1"], "unknown option 'gamma'; did you mean anchor.gamma?"),
        (["model.size=small"], "unknown option 'model.size'; did you mean vocabulary.size?"),
        (
            ["anchor.zzz=1"],
            "unknown option 'anchor.zzz'; anchor has gamma, rule, tau, share, pattern, positions, warm_up",
        ),
        (["nothing=1"], "unknown option 'nothing'; there are method, tokenizer, init, length"),
        (["anchor.gamma.x=3"], "unknown option 'anchor.gamma.x'; did you mean anchor.gamma?"),
        (["anchor.tau=-1"], "anchor.tau -1 must be at least 0: rule count: a token is an anchor if"),
        (["anchor.tau=2.5"], "anchor.tau 2.5 must be a whole number"),
        (["anchor.tau=true"], "anchor.tau true must be a whole number"),
        (["anchor.tau="], "option anchor.tau has no value; write anchor.tau=..."),
        (["anchor.tau=five"], "anchor.tau 'five' must be a whole number"),
        (["anchor.gamma=big"], "anchor.gamma 'big' must be a number"),
        (["anchor.gamma=.inf"], "anchor.gamma inf must be a finite number"),
        (["anchor.warm_up=1"], "anchor.warm_up 1 must be true or false"),
        (["anchor=3"], "anchor 3 must be a section of options, not a single value"),
        (["length=1"], "length 1 must be at least 2"),
        (["method=adml"], "method 'adml' is not one of adlm, mdlm, sedd, d3pm, ar, a2r; did you mean 'adlm'?"),
        (
            ["model=smal"],
            "there is no preset 'model/smal' (`adlm presets` lists them all); did you mean 'model/small'?",
        ),
        (["model=9b"], "there is no preset 'model/9b' (`adlm presets` lists them all); did you mean 'model/7b'?"),
        (["owt/adml"], "there is no preset 'owt/adml' (`adlm presets` lists them all); did you mean 'owt/adlm'?"),
        (["missing.yaml"], "config file missing.yaml cannot be read: No such file or directory"),
        (["length=[1"], "length=[1 cannot be read as YAML"),
        (
            ["vocabulary.size=54", "vocabulary.mask_id=54"],
            "vocabulary.mask_id 54 is outside the vocabulary of 54 symbols",
        ),
        (["vocabulary.size=54", "vocabulary.mask_id=-1"], "vocabulary.mask_id -1 must be at least 0"),
        (["vocabulary.size=54"], "vocabulary.mask_id is not given and has no default"),
        (["vocabulary={size: 5, mask_id: 4, eos_id: 4}"], "vocabulary.eos_id 4 is the mask id too"),
        (["model.hidden=770"], "model.hidden 770 is not a multiple of twice model.heads 12; try model.hidden=768"),
        (["model.hidden=36"], "model.hidden 36 is not a multiple of twice model.heads 12; try model.hidden=48"),
        (["time.sigma=0.1"], "time.sigma 0.1 needs discrete time, and time.steps is 0"),
        (["schedule=geometric", "schedule.sigma_min=0"], "schedule.sigma_min 0.0 is not positive"),
        (["schedule=linear", "schedule.sigma_max=0.0"], "schedule.sigma_max 0.0 must be more than 0"),
        (["schedule=geometric", "schedule.sigma_min=2"], "schedule.sigma_max 1.0 must exceed schedule.sigma_min 2.0"),
        (["model.time_conditioning=true"], "needs a finite noise level at t = 1, and schedule.eps 0.0"),
    ],
)
def test_an_error_is_one_line_with_the_option_the_value_and_the_remedy(words, sentence):
    with pytest.raises(UserError) as caught:
        resolve(words)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_in_place_of_a_preset_is_answered_with_the_option_that_takes_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("length: 8\n")
    (tmp_path / "text.txt").write_text("A text.")
    for name, remedy in (("run", "resumed by `adlm train --out .*run`"), ("text.txt", "write data.path=.*text.txt")):
        with pytest.raises(UserError, match=f"there is no preset .* {remedy}$"):
            resolve(["own", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("length: 8\nlength: 9\n", "length is set twice, again on line 2"),
        ("anchor: &a {tau: 2}\nmodel: *a\n", "aliases (*name) are not allowed"),
        ("- 1\n- 2\n", "is not a mapping of options to values"),
        ("just words\n", "is not a mapping of options to values"),
        ("length: !!python/object/apply:os.system ['true']\n", "cannot be read as YAML"),
        ("\x00", "cannot be read as YAML"),
        ("length: {1: 2}\n", "unknown option 'length.1'"),
        ("? [a, b]\n: 3\n", "unknown option"),
        ("data: {name: 2024-01-01}\nlength: 2024-01-01\n", "length '2024-01-01' must be a whole number"),
    ],
)
def test_a_malformed_file_is_an_error_and_executes_nothing(tmp_path, text, sentence):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        resolve([str(path)])
    assert sentence in str(caught.value)


def test_a_file_that_is_not_utf8_is_an_error(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not UTF-8 text"):
        resolve([str(path)])


def test_an_empty_file_changes_nothing(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("# nothing yet\n")
    assert resolve([str(path)]) == Config()


def test_a_config_constructed_in_python_is_validated_too():
    config = Config(model=Model(hidden=32, heads=2), vocabulary=Vocabulary(5, 4))
    assert validate(config) == config
    with pytest.raises(UserError, match=r"length 'long' must be a whole number"):
        validate(replace(config, length="long"))


def test_every_option_has_a_description():
    known = descriptions()
    for name, value in to_mapping(replace(Config(), vocabulary=Vocabulary(9, 8, 1, 2, 3), reason=Reason())).items():
        leaves = [f"{name}.{leaf}" for leaf in value] if name in sections() else [name]
        assert all(known[leaf].endswith(".") for leaf in leaves)


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    save_config(Config(length=8), path)
    monkeypatch.setattr("adlm.config.load.to_yaml", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_config(Config(length=9), path)
    assert load_config(path).length == 8
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", ["lenght: 8", "length: -1", "data: {seed: null}"])
def test_a_damaged_file_is_named(tmp_path, line):
    path = tmp_path / "config.yaml"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=f"^{path}: .*{line.split()[0].strip(':{')[:4]}"):
        load_config(path)
