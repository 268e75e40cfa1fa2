"""A GGUF file, written here, is read as the model that it holds."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from adlm.checkpoints.pretrained import load_pretrained
from adlm.errors import UserError

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

WIDTH, HEADS, INNER, BLOCKS = 16, 2, 32, 2


def bytes_as_characters() -> list[str]:
    """The 256 characters by which a byte-level BPE writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(others))]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The path of a small Llama, and its weights by their names in the file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = [*bytes_as_characters(), "th", "<|end|>"]
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32) * 0.2

    weights = {"token_embd.weight": matrix(len(tokens), WIDTH), "output_norm.weight": 1 + matrix(WIDTH)}
    weights["output.weight"] = matrix(len(tokens), WIDTH)
    for number in range(BLOCKS):
        block = {f"attn_{name}": matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        block |= {"ffn_gate": matrix(INNER, WIDTH), "ffn_up": matrix(INNER, WIDTH), "ffn_down": matrix(WIDTH, INNER)}
        block |= {"attn_norm": 1 + matrix(WIDTH), "ffn_norm": 1 + matrix(WIDTH)}
        weights |= {f"blk.{number}.{name}.weight": value for name, value in block.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def test_weights_and_tokenizer_are_those_of_the_file(written):
    path, weights = written
    tokenizer, model = load_pretrained(str(path), "AutoModelForCausalLM", "a causal language model")
    ours = dict(model.named_parameters())
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    }
    for name, other in pairs.items():
        torch.testing.assert_close(ours[other].detach(), torch.from_numpy(weights[name]))
    ids = tokenizer("the path", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "the path"
    assert len(ids) == len("the path") - 2, "th is one token"
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()


def test_a_tokenizer_beside_the_file_is_not_read(written, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(written[0].read_bytes())
    Tokenizer(WordLevel({"the": 0, "path": 1, "?": 2}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer, _ = load_pretrained(str(path), "AutoModelForCausalLM", "a causal language model")
    assert tokenizer.vocab_size == 258


def test_a_damaged_file_is_a_user_error(written, tmp_path):
    path, _ = written
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match="was not loaded"):
        load_pretrained(str(broken), "AutoModelForCausalLM", "a causal language model")
