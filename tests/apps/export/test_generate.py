"""`generate` of exported models, in a process that cannot import adlm: the text that adlm writes."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from small_models import small_model
from worlds import randomized

import adlm
from adlm import Choices
from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, save_model_folder
from adlm.cli.main import main
from adlm.constraints.binding import prefix_allowed_tokens
from adlm.methods import method_of

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.slow  # a process that imports transformers; test_huggingface.py has one in the fast suite

MODELS = {
    "llama": ("mdlm", {"family": "llama", "kv_heads": 1, "masked_keys": "hidden", "tie_embedding": True}),
    "anchored": ("adlm", {}),
    "gpt2": ("mdlm", {"family": "gpt2", "positions": 40}),
}
RUNS = [("speculative", {}), ("ancestral", {"steps": 1})]
"""Greedy decoding with these has one result."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

SCRIPT = """
import importlib.abc, sys, torch
from pathlib import Path

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "adlm":
            raise ImportError("adlm is blocked")

sys.meta_path.insert(0, Block())
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
ids, results = torch.load(sys.argv[2]), {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    blocks = path.name != "rows"
    model = (AutoModelForCausalLM if blocks else AutoModelForMaskedLM).from_pretrained(path, trust_remote_code=True)
    own = results[path.name] = {}
    if blocks:
        for sampler, options in (("speculative", {}), ("ancestral", {"steps": 1})):
            own[sampler] = model.generate(ids, max_new_tokens=20, sampler=sampler, temperature=0.0, **options)
        own["log_probs"] = model(own["speculative"]).logits.detach()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
        own["chat"] = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    if blocks:
        own["greedy"] = model.generate(ids, max_new_tokens=20, temperature=0.0, logits_processor=[lambda ids, p: p])
        table = torch.load(sys.argv[2] + ".allowed")
        fn = lambda row, ids: table[tuple(ids[6:].tolist())]
        own["constrained"] = model.generate(ids, max_new_tokens=4, prefix_allowed_tokens_fn=fn)
        try:
            model.generate(ids, max_new_tokens=4, prefix_allowed_tokens_fn=fn, sampler="ancestral")
        except ValueError as error:
            own["refused"] = str(error)
    seeded = torch.Generator().manual_seed(1)
    own["drawn"] = model.generate(input_ids=ids, max_new_tokens=9, generator=seeded)
    own["again"] = model.generate(input_ids=ids, max_new_tokens=9, generator=seeded.manual_seed(1))
torch.save(results, sys.argv[3])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model folders and exported ones. Outputs have no constant part: greedy text would be one token."""
    root = tmp_path_factory.mktemp("generate")
    small_model(root / "rows", length=40)
    for name, (method, options) in MODELS.items():
        plain = load_model_folder(small_model(root / f"{name}-plain", method, length=40, block_length=4))
        config = replace(plain.config, model=replace(plain.config.model, **options))
        weights = randomized(method_of(config).build(), seed=2, scale=1.5).state_dict()
        constant = ("head.bias", "trunk.modulation.weight", "trunk.modulation.bias", "trunk.norm.bias")
        weights = {key: value * (not key.endswith(constant)) for key, value in weights.items()}
        save_model_folder(ModelFolder(config, weights, plain.tokenizer, chat_template=TEMPLATE), root / name)
    for name in ("rows", *MODELS):
        assert main(["export", str(root / name), "--to", "hf", "--out", str(root / "exported" / name)]) == 0
    return root


@pytest.fixture(scope="module")
def prompts():
    return torch.tensor([[256, *b"hello"], [256, *b"world"]])


CONSTRAINT = Choices(["no", "not", "now", "yes"])


def allowed_after(folder):
    """What may follow every beginning of a text that satisfies the constraint, as adlm's automaton says."""
    tokenizer = adlm.load(folder / "llama").tokenizer
    allowed, found, waiting = prefix_allowed_tokens(CONSTRAINT, tokenizer, 0, 4), {}, [()]
    while waiting:
        ids = waiting.pop()
        found[ids] = allowed(0, torch.tensor(ids, dtype=torch.int64))
        waiting += [(*ids, index) for index in found[ids]] if len(ids) < 3 else []
    return found


@pytest.fixture(scope="module")
def written(folder, prompts):
    torch.save(prompts, folder / "prompts")
    torch.save(allowed_after(folder), folder / "prompts.allowed")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [str(folder / name) for name in ("exported", "prompts", "results")]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return torch.load(folder / "results")


@pytest.mark.parametrize(("sampler", "options"), RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_adlm(folder, written, prompts, name, sampler, options):
    lm = adlm.load(folder / name)
    canvas = torch.cat([prompts, torch.full((2, 20), lm.mask_id)], dim=1)
    expected = lm.complete(canvas, sampler=sampler, temperature=0.0, **options)
    assert torch.equal(written[name][sampler], expected)
    assert len(set(expected[0, 6:].tolist())) > 3


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_causal_model(folder, written, name):
    lm, x = adlm.load(folder / name), written[name]["speculative"]
    nats = -written[name]["log_probs"][:, :-1].gather(2, x[:, 1:, None])[..., 0]
    assert torch.allclose(nats, lm.method.causal_nats(lm.network, x, None)[:, 1:], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_text_of_a_given_form_is_drawn_from_the_causal_model(folder, written, name):
    """As `generate` of transformers does: a processor that changes nothing leaves the greedy text of the model."""
    assert torch.equal(written[name]["greedy"], written[name]["speculative"])
    tokenizer = adlm.load(folder / name).tokenizer
    texts = [tokenizer.decode(row, special_tokens=False) for row in written[name]["constrained"][:, 6:].tolist()]
    assert {*texts} <= {"no", "not", "now", "yes"}
    assert written[name]["refused"] == "logits_processor and prefix_allowed_tokens_fn are for sampler speculative"


@pytest.mark.parametrize("name", ["rows", *MODELS])
def test_a_prompt_stays_and_the_generator_decides(written, prompts, name):
    drawn = written[name]["drawn"]
    assert drawn.shape == (2, 15)
    assert torch.equal(drawn[:, :6], prompts)
    assert torch.equal(drawn, written[name]["again"])
    assert not (drawn == 257).any()


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_block_causal_model_comes_back(folder, written, name):
    lm, back = adlm.load(folder / name), adlm.load(folder / "exported" / name)
    assert (back.chat_template, written[name]["chat"]) == (TEMPLATE, "hi")
    options = {"prompt": "the", "length": 20, "sampler": "speculative"}
    assert back.sample(**options) == lm.sample(**options)
