"""Tiny pretrained models, written as folders of transformers and as GGUF files, with a byte-level tokenizer."""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Engine

from adlm.tokens import train_bpe

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0}
GPT2_SIZES = {"n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 128}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEXT = "the old man and the sea and 1234 numbers, he said; it's the man's. " * 20


def tokenizer_engine() -> Engine:
    """Byte-level BPE with <|endoftext|> and the tokens around messages, and no mask."""
    engine = json.loads(train_bpe([TEXT], 300).engine.to_str())
    engine["added_tokens"] = [token for token in engine["added_tokens"] if token["content"] != "[MASK]"]
    engine = Engine.from_str(json.dumps(engine))
    engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return engine


def causal_model(architecture: str, tied: bool, extra_rows: int = 0, seed: int = 0):
    """A model of transformers with random weights, in eval mode."""
    import transformers

    torch.manual_seed(seed)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "gpt2": "GPT2"}[architecture]
    symbols = tokenizer_engine().get_vocab_size() + extra_rows
    sizes = GPT2_SIZES if architecture == "gpt2" else SIZES
    config = getattr(transformers, f"{kind}Config")(vocab_size=symbols, tie_word_embeddings=tied, **sizes)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.2 + (1 if weight.ndim == 1 and kind == "Llama" else 0))
    return model


def write_folder(model, folder: Path, **options) -> Path:
    """As on the hub; the tokenizer's config is that of a chat model."""
    model.save_pretrained(folder, **options)
    tokenizer_engine().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_gguf(model, path: Path, quantization: str = "F32", without: tuple[str, ...] = (), **replaced) -> Path:
    """As llama.cpp converts a model; matrices are quantized. `replaced` are values of the metadata."""
    import gguf

    config = model.config
    kind, architecture = gguf.GGMLQuantizationType[quantization], config.model_type
    writer = gguf.GGUFWriter(path, replaced.get("architecture", architecture))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(SIZES["rope_theta"])
    engine = json.loads(tokenizer_engine().to_str())
    added = {token["content"]: token["id"] for token in engine["added_tokens"]}
    symbols = {**engine["model"]["vocab"], **added}
    tokens = sorted(symbols, key=symbols.__getitem__)
    tokens += [f"[PAD{number}]" for number in range(config.vocab_size - len(tokens))]
    if "tokenizer" not in without:
        writer.add_tokenizer_model(replaced.get("tokenizer_model", "gpt2"))
        writer.add_tokenizer_pre(replaced.get("pre", "default"))
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in added else 5 if token.startswith("[PAD") else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in engine["model"]["merges"]])
        writer.add_bos_token_id(added["<|im_start|>"])
        writer.add_eos_token_id(added["<|im_end|>"])
        writer.add_chat_template(TEMPLATE)
    for name, weight in gguf_tensors(model).items():
        if name in without:
            continue
        if weight.ndim == 1 or quantization == "F32" or name == "position_embd.weight":
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model) -> dict[str, np.ndarray]:
    """The weights by llama.cpp's names; queries and keys of Llama with the two halves of a head interleaved."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layers = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    layers |= {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"}
    layers |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"}
    layers |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}
    layers |= {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    layers |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    found = {}
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        weight = parameter.detach().numpy()
        if layer in names:
            found[f"{names[layer]}.{kind}"] = weight
            continue
        _, _, number, inner = layer.split(".", 3)
        if ".c_" in layer and weight.ndim == 2:
            weight = weight.T
        if model.config.model_type == "llama" and layers[inner] in ("attn_q", "attn_k"):
            heads = model.config.num_attention_heads if inner.endswith("q_proj") else model.config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        found[f"blk.{number}.{layers[inner]}.{kind}"] = np.ascontiguousarray(weight)
    return found
