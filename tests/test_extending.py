"""docs/extending.md, proved: the example plug-in adds one of each kind from outside the package, by entry points."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reasoning_runs import prosqa_root, reason_train
from small_models import small_model
from worlds import batch_rng, randomized

from adlm.apps.paper.results import is_causal
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.config.schema import Model, Sampling, Vocabulary
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of
from adlm.methods.mdlm import Mdlm
from adlm.models.anchored import AnchoredTransformer
from adlm.registry import ANCHOR_RULES, BRIDGES, METHODS, SAMPLERS, SCHEDULES
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import Sampler

PLUGIN = Path(__file__).parent.parent / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The plug-in on sys.path with its metadata, as an installation of it would leave them."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "adlm_plugin_example-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adlm-plugin-example\nVersion: 0.1\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{name} = {target}\n" for group, points in groups for name, target in points.items())
    )
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.syspath_prepend(PLUGIN)
    for registry in (METHODS, SAMPLERS, BRIDGES, SCHEDULES, ANCHOR_RULES, CORPORA):
        monkeypatch.setattr(registry, "_registered", {})


def test_a_method_bridge_schedule_sampler_and_corpus_from_another_package_run_end_to_end(
    installed, tmp_path, monkeypatch, capsys
):
    corpus = tmp_path / "data" / "haiku"
    corpus.mkdir(parents=True)
    for number in range(40):
        (corpus / f"{number}.txt").write_text(f"an old silent pond {number}\na frog jumps into the pond\nsplash " * 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADLM_DATA", str(corpus.parent))

    def run(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    assert "Haiku, one text file each" in run("prepare", "--list")
    words = ["method=unweighted", "model.bridge=residual", "schedule.name=quadratic", "data=haiku"]
    quick = [
        "tokenizer=bpe-300",
        "train.steps=4",
        "train.batch_size=4",
        "train.valid_rows=4",
        "train.device=cpu",
        "sampling.steps=4",
    ]
    report = json.loads(run("train", "own", *words, *quick, "sampling.sampler=remask-late", "--out", "run", "--json"))
    assert report["step"] == 4
    assert 0 < report["nats"] < 20
    sample = ["sample", "run", "--num", "2", "sampling.sampler=remask-late", "sampling.eta=0.1", "sampling.steps=8"]
    assert len(run(*sample)) > 20
    run(*sample, "--out", "samples.jsonl")
    about = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["made_by"]["about"]
    assert (about["gamma"], about["tau"]) == (0.1, 5), "an anchored method, by its attribute"
    judge = small_model(tmp_path / "judge", "later-tokens")
    card = json.loads(run("judge", "samples.jsonl", "--model", str(judge), "--metrics", "perplexity", "--json"))
    assert card["perplexity"]["pooled"]["value"] > 1
    run("train", "own", "anchor.rule=long-words", "anchor.gamma=0.1", "data=haiku", *quick, "--out", "long", "--json")
    lines = (tmp_path / "long" / "metrics.jsonl").read_text().splitlines()
    assert 0 < json.loads(lines[-1])["anchor_share"] < 0.5, "most tokens of a BPE of 300 symbols are short"
    assert "haiku" in run("perplexity", "run", "--data", "haiku", "--max-tokens", "200")


@pytest.mark.parametrize(
    ("line", "kind"),
    [("method: mdlm", "method"), ("  sampler: ancestral", "sampler"), ("  bridge: logits", "bridge")],
)
def test_a_model_of_a_package_that_is_not_installed_says_so(tmp_path, capsys, line, kind):
    config = small_model(tmp_path / "model", "mdlm") / "config.yaml"
    changed = config.read_text().replace(line, f"{line.partition(':')[0]}: theirs", 1)
    assert changed != config.read_text()
    config.write_text(changed)
    assert main(["sample", str(tmp_path / "model")]) == 2
    message = f"{kind} 'theirs' is neither built in nor of an installed package; install the package that provides it"
    assert message in capsys.readouterr().err


def test_a_causal_method_from_another_package_is_a_base_for_reasoning_and_left_to_right_in_tables(installed, tmp_path):
    base = small_model(tmp_path / "base", "later-tokens")
    root = prosqa_root(tmp_path / "data")
    assert reason_train(root, tmp_path / "run", f"reason.base={base}", "length=4096", "reason.misfits=keep") == 0
    assert reason_train(root, tmp_path / "new", "method=later-tokens") == 0
    assert is_causal("later-tokens")
    assert not is_causal("unweighted")


def test_unknown_names_list_those_of_other_packages(installed, capsys):
    assert main(["presets", "own", "method=unwieghted"]) == 2
    message = capsys.readouterr().err
    assert (
        "is not one of adlm, mdlm, sedd, d3pm, ar, a2r, unweighted, later-tokens; did you mean 'unweighted'?" in message
    )


def test_an_entry_point_that_cannot_be_loaded_is_a_user_error(installed, tmp_path, capsys):
    points = tmp_path / "site" / "adlm_plugin_example-0.1.dist-info" / "entry_points.txt"
    points.write_text("[adlm.methods]\nbroken = no_such_module:Method\n")
    (tmp_path / "text.txt").write_text("some words and more words\n" * 200)
    words = ["train", "own", "method=broken", f"data.path={tmp_path / 'text.txt'}", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "method 'broken': its entry point no_such_module:Method cannot be loaded" in capsys.readouterr().err


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    return __import__("adlm_plugin_example")


def test_what_is_registered_in_python_works_like_what_is_built_in(example, monkeypatch):
    for registry in (METHODS, SAMPLERS, BRIDGES, SCHEDULES):
        monkeypatch.setattr(registry, "_registered", {})
    METHODS.register("twin", Mdlm)
    SCHEDULES.register("quadratic", example.Quadratic)
    SAMPLERS.register("late", Sampler(example.REMASK_LATE.sample, example.late_steps))
    config = resolve(["method=twin", "schedule.name=quadratic", "sampling.sampler=late", "length=8"])
    model = Model(hidden=16, heads=2, blocks=1, condition=8)
    method = method_of(replace(config, vocabulary=Vocabulary(12, 11), model=model))
    network = randomized(method.build())
    nats = method.bound(network, torch.randint(11, (256, 8)), None, batch_rng())
    assert nats.isfinite().all()
    *_, last = method.generate(network, torch.full((2, 8), 11), Sampling("late", steps=5, eta=0.2), RowRng(0, range(2)))
    assert (last.ids != 11).all()


def test_the_default_frozen_form_of_a_bridge_equals_it(example, monkeypatch):
    monkeypatch.setattr(BRIDGES, "_registered", {"residual": example.ResidualBridge})
    model = Model(hidden=16, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0, bridge="residual")
    network = randomized(AnchoredTransformer(model, 12)).double().eval()
    ids = torch.randint(12, (2, 6))
    frozen = FrozenNetwork(network)
    rows = frozen.hidden(ids).last
    torch.testing.assert_close(frozen.logits(rows.flatten(0, 1)), network(ids).flatten(0, 1))
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
    assert torch.equal(frozen.hidden(ids).last, rows), "a frozen network keeps its weights"


def test_built_in_names_cannot_be_replaced():
    with pytest.raises(UserError, match="method 'adlm' is built in; register yours under another name"):
        METHODS.register("adlm", Mdlm)
