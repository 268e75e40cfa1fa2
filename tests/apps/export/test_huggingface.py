"""Models exported for transformers: the same numbers without adlm, training, sampling, and the way back."""

import ast
import importlib
import json
import os
import py_compile
import re
import shlex
import subprocess
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from small_models import small_model
from worlds import batch_rng, randomized, seeded

import adlm
import adlm.errors
from adlm import code_commit
from adlm.apps.export import bundle
from adlm.apps.export.folder import modeling_code
from adlm.checkpoints.exported import to_json
from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, save_model_folder
from adlm.cli.main import main
from adlm.cli.train import resolve_run
from adlm.config.schema import Anchor, Config, Data, Model, Sampling, Schedule, Time, Vocabulary
from adlm.diffusion.masking import reveal_chance, transition
from adlm.diffusion.times import grid
from adlm.methods import method_of

pytest.importorskip("transformers", reason="transformers is not installed")

MASK = 257
MODELS = {
    "logits": {},
    "hidden": {"model.bridge": "hidden"},
    "mixture": {"model.bridge": "mixture"},
    "plus-input": {"model.bridge": "hidden-plus-input"},
    "no-bridge": {"model.bridge": "none"},
    "tied": {"model.tie_heads": True},
    "one-network": {"model.denoiser_blocks": 0},
    "time": {"model.time_conditioning": True},
    "llama": {"model.family": "llama", "model.kv_heads": 1, "model.bridge": "none", "model.tie_embedding": True},
    "gpt2": {"model.family": "gpt2", "model.positions": 24},
    "mdlm": {"method": "mdlm"},
    "ar": {"method": "ar"},
    "a2r": {"method": "a2r"},
}
CAUSAL = ("ar", "a2r")

# Loads every exported folder with adlm made impossible to import, and writes what it computes.
SCRIPT = """
import importlib.abc, json, sys, torch
from pathlib import Path

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "adlm":
            raise ImportError("adlm is blocked")

sys.meta_path.insert(0, Block())
import transformers
folder, inputs, results = Path(sys.argv[1]), torch.load(sys.argv[2]), {}
for path in sorted(folder.iterdir()):
    auto_class = "AutoModelForCausalLM" if path.name in ("ar", "a2r") else "AutoModelForMaskedLM"
    model = getattr(transformers, auto_class).from_pretrained(path, trust_remote_code=True)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    text = tokenizer("a" + tokenizer.mask_token, add_special_tokens=False)
    with torch.no_grad():
        results[path.name] = {
            "log_probs": model(inputs["z"]).logits,
            "padded": model(inputs["z"], attention_mask=inputs["attention_mask"]).logits,
            "ids": text["input_ids"],
            "special": [getattr(tokenizer, f"{role}_token_id") for role in ("mask", "bos", "eos", "pad")],
            "inputs": sorted(text),
        }
torch.save(results, sys.argv[3])
for example in sys.argv[4:]:
    exec(Path(example).read_text())
assert not [name for name in sys.modules if name.partition(".")[0] == "adlm"]
"""


def make_model(folder: Path, options: dict) -> Path:
    """A small model folder with random weights; `options` are dotted names of the config."""
    plain = load_model_folder(small_model(folder.with_name(f"{folder.name}-plain"), length=24))
    config = replace(plain.config, **{name: value for name, value in options.items() if "." not in name})
    sizes = {name.removeprefix("model."): value for name, value in options.items() if name.startswith("model.")}
    config = replace(config, model=replace(config.model, **sizes))
    save_model_folder(ModelFolder(config, randomized(method_of(config).build()).state_dict(), plain.tokenizer), folder)
    return folder


def some_ids(num: int = 3, length: int = 10) -> torch.Tensor:
    ids = torch.randint(0, 256, (num, length), generator=seeded())
    return torch.where(torch.rand(num, length, generator=seeded(1)) < 0.5, MASK, ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders, and the same models exported."""
    folder = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        make_model(folder / name, options)
        assert main(["export", str(folder / name), "--to", "hf", "--out", str(folder / "exported" / name)]) == 0
    return folder


@pytest.fixture(scope="module")
def without_adlm(folders, tmp_path_factory):
    """What a process that cannot import adlm computes, by model; it also runs the example of a model card."""
    work = tmp_path_factory.mktemp("process")
    examples = [work / "logits.py", work / "ar.py"]
    for path in examples:
        card = (folders / "exported" / path.stem / "README.md").read_text()
        [example] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        path.write_text(example)
        assert example.count("trust_remote_code") == 1, "the model's code; the tokenizer has none"
    attention_mask = torch.ones(3, 10, dtype=torch.int64)
    attention_mask[1, 6:] = 0
    torch.save({"z": some_ids(), "attention_mask": attention_mask}, work / "inputs")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [folders / "exported", work / "inputs", work / "results", *examples]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        cwd=folders / "exported", env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return {"example": process.stdout, "attention_mask": attention_mask, **torch.load(work / "results")}


@pytest.fixture(scope="module")
def code(folders):
    """The generated modules, imported as a package."""
    package = types.ModuleType("exported_adlm")
    package.__path__ = [str(folders / "exported" / "logits")]
    sys.modules["exported_adlm"] = package
    yield importlib.import_module("exported_adlm.modeling_adlm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "exported_adlm"]:
        del sys.modules[name]


def exported_network(code, config: Config, seed: int = 0):
    """An exported model with random weights, and the method and network of adlm with the same ones."""
    method = method_of(config)
    network = randomized(method.build(), seed)
    model = (code.AdlmForCausalLM if method.causal else code.AdlmForMaskedLM)(code.AdlmConfig(**to_json(method.config)))
    model.network.load_state_dict(network.state_dict())
    return model, method, network


def test_without_adlm_the_log_probabilities_are_the_same(folders, without_adlm):
    """One test for all models: with a test each, several workers would start the process of `without_adlm`."""
    z, pad = some_ids(), without_adlm["attention_mask"] == 0
    for name in MODELS:
        lm, found = adlm.load(folders / name), without_adlm[name]
        torch.testing.assert_close(found["log_probs"], lm.log_probs(z), atol=1e-5, rtol=0, msg=f"{name}: {{}}".format)
        logits = lm.network(z, lm.method.conditioning_sigma(z, None, pad), pad)
        masked = ~pad if name in CAUSAL else (z == MASK) & ~pad
        logits[..., MASK] = -torch.inf
        expected = logits[masked].log_softmax(dim=-1)
        torch.testing.assert_close(found["padded"][masked], expected, atol=1e-5, rtol=0, msg=f"{name}: {{}}".format)
        reads_padding = not torch.allclose(found["padded"][1][masked[1]], found["log_probs"][1][masked[1]])
        assert reads_padding == (name not in CAUSAL), name  # the text of a causal network comes before its padding


def test_the_tokenizer_needs_no_code(without_adlm):
    for name in MODELS:
        assert without_adlm[name]["ids"] == [97, MASK]
        assert without_adlm[name]["special"] == [MASK, 256, 256, 256]
        assert without_adlm[name]["inputs"] == ["attention_mask", "input_ids"]


def test_the_example_of_the_card_runs(without_adlm):
    first, *others = without_adlm["example"].splitlines()
    assert len(ast.literal_eval(first)) == 2
    assert sum(line.startswith("<|endoftext|>the") for line in others) == 2


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_loads_in_adlm_to_the_same_model(folders, name):
    before, after = adlm.load(folders / name), adlm.load(folders / "exported" / name)
    assert torch.equal(before.log_probs(some_ids()), after.log_probs(some_ids()))
    assert after.config == before.config
    assert after.sample(1, length=8, seed=1) == before.sample(1, length=8, seed=1)


# The generated code


def test_the_generated_code_compiles_and_imports_nothing_of_adlm(folders):
    for name in ("modeling_adlm.py", "configuration_adlm.py"):
        path = folders / "exported" / "logits" / name
        py_compile.compile(str(path), doraise=True)
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not [module for module in modules if module.partition(".")[0] == "adlm"]


def test_the_generated_code_is_formatted_and_has_no_lint(folders):
    pytest.importorskip("ruff", reason="ruff is not installed")
    path = folders / "exported" / "logits" / "modeling_adlm.py"
    for words in (["check", "--select", "E,F,W,I,B,UP"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--line-length", "120", str(path)]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_generated_code_is_the_same_every_time(folders):
    bundle._module.cache_clear()
    texts = {(folders / "exported" / name / "modeling_adlm.py").read_text() for name in MODELS}
    assert texts == {modeling_code()}


def test_methods_that_the_exported_code_does_not_call_are_left_out():
    generated = modeling_code()
    for name in ("def frozen", "def unfolded", "def plain_score", "triton", "type: ignore", "Annotated"):
        assert name not in generated
    assert "def forward" in generated


# Training


LOSSES = {
    "anelbo": Config(anchor=Anchor(gamma=0.5, tau=1)),
    "anelbo-masked": Config(anchor=Anchor(gamma=0.5, tau=1, positions="masked")),
    "anelbo-random": Config(anchor=Anchor(gamma=0.5, rule="random", share=0.4)),
    "no-anchors": Config(anchor=Anchor(gamma=0.0)),
    "nelbo": Config(method="mdlm"),
    "discrete": Config(method="mdlm", time=Time(steps=10)),
    "counted": Config(method="adlm", time=Time(masks="counted", power=2.0)),
    "clipped": Config(method="mdlm", time=Time(t_min=0.3, t_max=0.8)),
    "one": Config(anchor=Anchor(gamma=0.5, tau=1), time=Time(weight="one", power=2.0)),
    "cosine": Config(method="mdlm", schedule=Schedule(name="cosine")),
    "time": Config(schedule=Schedule(eps=1e-3)),
    "attended": Config(data=Data(pad="attended")),
    "ar": Config(method="ar"),
    "a2r": Config(method="a2r", anchor=Anchor(gamma=0.5, tau=1)),
}


def tiny(config: Config, **model) -> Config:
    sizes = Model(hidden=16, heads=2, blocks=2, condition=8, dropout=0.0, bridge="hidden", **model)
    vocabulary = Vocabulary(size=12, mask_id=7, pad_id=0)
    return replace(config, model=sizes, vocabulary=vocabulary, length=8, sampling=Sampling(steps=3))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_the_method(code, name, padded):
    model, method, network = exported_network(code, tiny(LOSSES[name], time_conditioning=name == "time"))
    x = torch.randint(0, 7, (4, 8), generator=seeded())
    pad = torch.zeros(4, 8, dtype=torch.bool)
    pad[2, 5:] = padded
    expected = method.loss(network, x, pad if padded else None, 1.0, batch_rng(3)).mean
    attention_mask = (~pad).long()
    labels = x.masked_fill(pad, -100)
    options = {} if method.causal else {"generator": seeded(3)}
    loss = model(x, attention_mask=attention_mask, labels=labels, **options).loss
    torch.testing.assert_close(loss, expected)


def test_tokens_with_label_minus_100_are_given_and_not_counted(code):
    model, _, _ = exported_network(code, tiny(Config(method="mdlm")))
    x = torch.randint(0, 7, (6, 8), generator=seeded())
    read = []
    model.network.embedding.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    labels = x.clone()
    labels[:, :5] = -100
    assert model(x, labels=labels, generator=seeded()).loss > 0
    assert torch.equal(read[0][:, :5], x[:, :5])
    assert (read[0][:, 5:] == 7).any()
    assert model(x, labels=torch.full_like(x, -100)).loss == 0
    with pytest.raises(ValueError, match="labels must be the input_ids"):
        model(x, labels=x.roll(1, dims=1))
    with pytest.raises(ValueError, match=r"labels have shape \(\d+, 3\), not that of the ids"):
        model(x, labels=x[:, :3])


def test_masks_of_the_caller_are_scored_by_the_plain_cross_entropy(code):
    model, method, network = exported_network(code, tiny(Config()))
    x = torch.randint(0, 7, (3, 8), generator=seeded())
    z = torch.where(torch.rand(3, 8, generator=seeded(2)) < 0.5, 7, x)
    output = model(z, labels=x)
    nats = -method.log_beliefs(network, z).gather(-1, x[..., None])[..., 0][z == 7]
    torch.testing.assert_close(output.loss, nats.mean())
    assert output.logits.shape == (3, 8, 12)


def test_a_rule_that_needs_the_training_text_says_so(code):
    model, _, _ = exported_network(code, tiny(Config(anchor=Anchor(rule="rare"))))
    x = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"config.anchor\['gamma'\] = 0"):
        model(x, labels=x)
    model.config.anchor["gamma"] = 0
    assert model(x, labels=x).loss.isfinite()


TEXT = torch.arange(8).remainder(5).repeat(4, 1)


def mean_loss(model, num: int = 50) -> float:
    with torch.no_grad():
        return sum(float(model(TEXT, labels=TEXT, generator=seeded(seed)).loss) for seed in range(num)) / num


@pytest.mark.parametrize("method", ["adlm", "mdlm"])
def test_training_steps_lower_the_loss(code, method):
    model, _, _ = exported_network(code, tiny(Config(method=method)))
    before = mean_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(20):
        model(TEXT, labels=TEXT, generator=seeded(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mean_loss(model) < 0.7 * before


def test_the_trainer_of_transformers_lowers_the_loss_and_adlm_loads_the_result(code, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    from transformers import Trainer, TrainingArguments

    model, _, _ = exported_network(code, tiny(Config()))
    before = mean_loss(model)
    rows = [{"input_ids": row, "labels": row} for row in TEXT]
    options = TrainingArguments(
        str(tmp_path), max_steps=20, learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no"
    )
    Trainer(model, options, train_dataset=rows).train()
    assert mean_loss(model) < 0.7 * before


def test_a_fine_tuned_model_loads_in_adlm(code, tmp_path):
    model, _, _ = exported_network(code, tiny(Config()))
    model.save_pretrained(tmp_path / "tuned")
    lm = adlm.load(tmp_path / "tuned")
    z = torch.tensor([[1, 7, 7, 3]])
    torch.testing.assert_close(lm.log_probs(z), model(z).logits.detach())
    assert lm.tokenizer is None


# Sampling


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(name="linear", sigma_min=0.3, sigma_max=3.0)])
def test_samples_have_the_distribution_of_ancestral_sampling(code, schedule):
    """Exact, by enumerating every state and step; with the second schedule some tokens are left for the argmax."""
    config = replace(tiny(Config(schedule=schedule)), vocabulary=Vocabulary(size=4, mask_id=2), length=3)
    model, method, network = exported_network(code, config, seed=2)
    states = torch.cartesian_prod(*[torch.arange(4)] * 3)
    beliefs = method.log_beliefs(network, states).exp().double()
    alpha = method.schedule.alpha(grid(3))
    masked = states == 2
    now = masked.all(dim=1).double()
    tables = [transition(states, beliefs, reveal_chance(s, t).clamp(0, 1), torch.tensor(0.0), 2)
              for t, s in pairwise(alpha)]  # fmt: skip
    argmax = torch.nn.functional.one_hot(torch.where(masked, beliefs.argmax(dim=-1), states), 4).double()
    for table in (*tables, argmax):
        chances = torch.stack([table[:, place][:, states[:, place]] for place in range(3)]).prod(dim=0)  # (from, to)
        now = now @ chances
    ids = model.sample(num=20_000, generator=seeded())
    counts = torch.bincount((ids * torch.tensor([16, 4, 1])).sum(dim=1), minlength=64)
    expected = 20_000 * now
    possible = expected > 0
    assert counts[~possible].sum() == 0
    common = expected >= 5
    assert chisquare(counts[common], expected[common] * counts[common].sum() / expected[common].sum()).pvalue > 1e-3


def test_generate_of_transformers_draws_from_the_log_probabilities(code):
    model, method, network = exported_network(code, tiny(Config(method="ar")))
    prompts = torch.tensor([[0, 3, 4], [2, 5, 1]])
    attention_mask = torch.tensor([[0, 1, 1], [1, 1, 1]])  # padded on the left
    ids = model.generate(prompts, attention_mask=attention_mask, max_new_tokens=3, do_sample=False, use_cache=False)
    for row, start in ((0, 1), (1, 0)):
        expected = prompts[row : row + 1, start:]
        for _ in range(3):
            best = method.log_beliefs(network, expected)[:, -1].argmax(dim=-1, keepdim=True)
            expected = torch.cat([expected, best], dim=1)
        assert torch.equal(ids[row : row + 1, start:], expected)


def test_given_tokens_stay_and_a_seed_gives_the_same_sample(code):
    model, _, _ = exported_network(code, tiny(Config()))
    model.train()
    canvas = torch.tensor([[1, 7, 7, 3], [7, 2, 7, 7]])
    ids = model.sample(num=2, input_ids=canvas, generator=seeded(5))
    given = (canvas != 7).repeat_interleave(2, dim=0)
    assert torch.equal(ids[given], canvas.repeat_interleave(2, dim=0)[given])
    assert (ids != 7).all()
    assert torch.equal(ids, model.sample(num=2, input_ids=canvas, generator=seeded(5)))
    assert model.sample(length=5, steps=1).shape == (1, 5)
    assert model.training
    with pytest.raises(ValueError, match="at most 8"):
        model.sample(length=9)
    for name in ("num", "length", "steps"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            model.sample(**{name: 0})


# The command


@pytest.fixture
def run(tmp_path):
    """A run folder with a model and what a run logs."""
    small_model(tmp_path / "run" / "model", "mdlm")
    lines = [{"step": 10, "tokens": 5, "valid_nats": 2.0, "valid_stderr": 0.02, "valid_tokens": 999},
             {"step": 20, "tokens": 9, "valid_nats": 1.2345, "valid_stderr": 0.0167, "valid_tokens": 999}]  # fmt: skip
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "run" / "commits.txt").write_text("1234abc\n")
    return tmp_path / "run"


def test_the_card_names_method_size_bound_command_and_commits(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "mdlm"
    assert {"README.md", "config.json", "model.safetensors", "modeling_adlm.py", "tokenizer.json"} <= set(
        report["files"]
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| nats on held-out text | at most 1.2345 ± 0.017 per token" in card
    assert "after 20 steps" in card
    assert f"commit `{code_commit()}`" in card
    assert "Trained with adlm at commit `1234abc`." in card
    assert "adlm train method=mdlm tokenizer=bytes length=16" in card
    assert f"| parameters | {report['parameters']:,} |" in card
    assert "# license: choose one" in card
    assert "$" not in card


def test_the_training_command_of_a_card_is_one_that_train_takes(run, tmp_path):
    """The text of this model is not recorded: a placeholder says where it goes."""
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    [line] = re.findall(r"^adlm train .*", (tmp_path / "out" / "README.md").read_text(), re.MULTILINE)
    *overrides, option, out = shlex.split(line)[2:]
    assert (option, out) == ("--out", "runs/out")
    _, config = resolve_run(overrides, tmp_path / "new")
    assert (config.method, config.data.path) == ("mdlm", "FILE")


def test_without_a_model_the_one_in_the_box_is_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--out", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(
        weight.numel() for weight in adlm.load().network.parameters()
    )


def test_the_new_text_of_a_block_causal_model_ends_at_its_first_eos(code):
    z = torch.tensor([9, 5, 9, 4, 9, MASK])
    assert not code._end_text(z, 1, 2, 9)
    assert not code._end_text(z, 1, 5, None)
    assert code._end_text(z, 1, 5, 9)
    assert z.tolist() == [9, 5, 9, 9, 9, 9]


def test_an_exported_folder_names_no_path_of_this_machine(tmp_path):
    plain = load_model_folder(small_model(tmp_path / "plain"))
    data = Data(path=str(tmp_path / "secret" / "texts.txt"), root=str(tmp_path / "secret"))
    config = replace(plain.config, data=data, tokenizer=str(tmp_path / "secret" / "bytes"))
    save_model_folder(replace(plain, config=config), tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 0
    for path in filter(Path.is_file, (tmp_path / "out").rglob("*")):
        assert b"secret" not in path.read_bytes()
    assert "own text (texts.txt)" in (tmp_path / "out" / "README.md").read_text()


def test_the_model_with_the_lowest_bound_has_its_own_line(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join((*lines, lines[0].replace("10", "30"), "")))
    (run / "model").rename(run / "best")
    assert main(["export", str(run / "best"), "--out", str(tmp_path / "out")]) == 0
    assert "after 20 steps" in (tmp_path / "out" / "README.md").read_text()


class FakeHub:
    """Records what is uploaded."""

    calls: list = []  # noqa: RUF012

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append((repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir()), commit_message))
        return f"https://huggingface.co/{repo_id}/commit/1"


def test_push_creates_the_repository_and_uploads_the_folder(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    FakeHub.calls.clear()
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--push", "me/tiny", "--private"]) == 0
    (created, uploaded) = FakeHub.calls
    assert created == ("me/tiny", True, True)
    assert uploaded[1] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "uploaded to https://huggingface.co/me/tiny/commit/1" in capsys.readouterr().out
    assert 'from_pretrained("me/tiny"' in (tmp_path / "out" / "README.md").read_text()


def one_line_error(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_failed_push_keeps_the_folder(run, tmp_path, monkeypatch, capsys):
    def refuse(self, *arguments, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(FakeHub, "create_repo", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    error = one_line_error(capsys, "export", run, "--out", tmp_path / "out", "--push", "me/tiny")
    assert "--push me/tiny failed (ConnectionError: no route to host)" in error
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_only_an_earlier_export_is_replaced(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert "--force to replace it" in one_line_error(capsys, "export", run, "--out", out)
    (out / "README.md").write_text("stale")
    assert main(["export", str(run), "--out", str(out), "--force"]) == 0
    assert "stale" not in (out / "README.md").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    error = one_line_error(capsys, "export", run, "--out", other, "--force")
    assert "holds thesis.txt, which adlm export did not write" in error
    assert (other / "thesis.txt").read_text() == "mine"
    for path in (run, run / "model", tmp_path):
        assert "is what this command reads" in one_line_error(capsys, "export", run / "model", "--out", path, "--force")


def test_what_cannot_be_exported_is_a_user_error(tmp_path, capsys):
    out = ["--out", tmp_path / "out"]
    small_model(tmp_path / "sedd", "sedd")
    small_model(tmp_path / "ids", tokenizer=None)
    small_model(tmp_path / "memory", "mdlm", memory=True)
    assert "method mdlm with model.memory true cannot be exported to hf" in one_line_error(
        capsys, "export", tmp_path / "memory", *out
    )
    assert "method sedd cannot be exported to hf; adlm, mdlm, ar, a2r can" in one_line_error(
        capsys, "export", tmp_path / "sedd", *out
    )
    assert "exported with its tokenizer" in one_line_error(capsys, "export", tmp_path / "ids", *out)
    assert "--to 'gguf' is not one of hf" in one_line_error(capsys, "export", tmp_path / "ids", "--to", "gguf", *out)
    assert "--push tiny is not a repository" in one_line_error(
        capsys, "export", tmp_path / "ids", "--push", "tiny", *out
    )
    assert not (tmp_path / "out").exists()


# Models on the hub


def test_a_model_on_the_hub_loads_by_its_name(folders, monkeypatch, capsys, tmp_path):
    local, asked = folders / "exported" / "mdlm", []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adlm.hub.skip_unreachable_hub", lambda: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(local / file))

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(local)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert torch.equal(adlm.load("me/tiny").log_probs(some_ids()), adlm.load(local).log_probs(some_ids()))
    assert main(["sample", "me/tiny", "--length", "4", "--steps", "2"]) == 0
    assert main(["bench", "sample", "me/tiny", "sampling.steps=2", "--repeats", "1"]) == 0
    capsys.readouterr()
    (name, patterns), *_ = asked
    assert name == "me/tiny"
    assert not [pattern for pattern in patterns if pattern.endswith(".py")]


def test_without_a_network_a_name_is_a_user_error(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adlm.hub.skip_unreachable_hub", lambda: None)

    def offline(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    (tmp_path / "x.txt").write_text("text")  # the text is looked for before the model
    for words in (["sample"], ["perplexity", "--data", "x.txt"], ["export", "--out", "out"]):
        error = one_line_error(capsys, words[0], "me/tiny", *words[1:])
        assert "me/tiny is neither a model folder nor a .ckpt file: there is nothing of that name" in error
        assert "could not be downloaded from the Hugging Face hub (ConnectionError)" in error


def test_a_path_below_a_folder_that_exists_is_not_looked_up_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("adlm.language_model.download_model", None)
    with pytest.raises(adlm.errors.UserError, match="there is nothing of that name"):
        adlm.load("runs/typo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "is not a model of adlm: its config.json has model_type 'gpt2'"),
        ({"length": "long"}, "config.json: length"),
        ({"model": {"hidden": 16, "depth": 3}}, "config.json: .*model.depth"),
        ({"vocab_size": 259}, "weight .* has shape|the tokenizer has 258 symbols"),
        ({"method": "mdlm"}, "is unexpected|is missing"),
    ],
)
def test_a_damaged_config_is_a_user_error(folders, tmp_path, change, message):
    for path in (folders / "exported" / "logits").glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(adlm.errors.UserError, match=message):
        adlm.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "special_tokens_map.json"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_file_that_is_a_pipe_or_a_device_is_a_user_error(folders, tmp_path, name, put):
    for path in (folders / "exported" / "logits").glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()
    put(tmp_path / name)
    with pytest.raises(adlm.errors.UserError, match=rf"{name} is not a regular file"):
        adlm.load(tmp_path)
