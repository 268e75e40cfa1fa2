"""The tokenizer built from the metadata of a GGUF file gives the ids of the tokenizer that was written to it."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from adlm.bases.gguf_tokenizer import gguf_engine
from adlm.errors import UserError

TEXT = "It's 12 345 days:\n\n  the old man's boat, THE'LL see\u2003don't… naïve café 日本語 x²⅔  0\tyou're \r\n end  "
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": SPLIT.replace("NUMBER", "{1,3}"),
    "qwen2": SPLIT.replace("NUMBER", ""),
}
"""How the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen2 split a text."""


def byte_level(split) -> Tokenizer:
    engine = Tokenizer(models.BPE())
    if isinstance(split, str):
        words = pre_tokenizers.Split(Regex(split), "isolated")
        split = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    engine.pre_tokenizer = pre_tokenizers.Sequence(split) if isinstance(split, list) else split
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator([TEXT * 3], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return engine


def metadata_of(engine: Tokenizer, **entries) -> dict:
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    named = {"model": "gpt2", "tokens": tokens, "merges": [" ".join(pair) for pair in model["merges"]], **entries}
    return {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_ids_are_those_of_the_published_way_to_split(pre):
    published = byte_level(PUBLISHED[pre])
    ours, _ = gguf_engine(Path("x.gguf"), metadata_of(published, pre=pre))
    text = TEXT + "x = 2024;\n" * 3
    assert ours.encode(text).ids == published.encode(text).ids
    assert ours.decode(ours.encode(text).ids) == text
    others = {name: byte_level(split).pre_tokenizer.pre_tokenize_str(text) for name, split in PUBLISHED.items()}
    assert [name for name, words in others.items() if words == ours.pre_tokenizer.pre_tokenize_str(text)] == [pre]


def sentencepiece() -> Tokenizer:
    """As the tokenizer of Llama 2: <unk>, <s>, </s>, the bytes, then pieces in the order of their merges."""
    engine = Tokenizer(models.BPE())
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["the old man and the sea", "the old boat", "an old man's sea", "seven men"] * 5
    engine.train_from_iterator(words, trainers.BpeTrainer(vocab_size=330, special_tokens=special))
    content = json.loads(engine.to_str())
    content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    content["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("merges_in_file", [True, False])
def test_sentencepiece_ids_follow_from_merges_or_from_scores(merges_in_file):
    published = sentencepiece()
    metadata = metadata_of(published, model="llama", bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    metadata["tokenizer.ggml.scores"] = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    if not merges_in_file:
        del metadata["tokenizer.ggml.merges"]
    ours, roles = gguf_engine(Path("x.gguf"), metadata)
    for text in ("the old man and the sea", "  seven  boats é日 the sea", "an old man's <s> sea"):
        assert ours.encode(text.replace("<s>", ""), add_special_tokens=False).ids == (
            published.encode(text.replace("<s>", ""), add_special_tokens=False).ids
        )
    assert ours.decode(ours.encode("the sea é").ids) == "the sea é"
    assert roles == {"bos": "<s>", "eos": "</s>"}


def test_special_tokens_are_those_of_the_type_control_and_others_stay_ordinary():
    engine = byte_level(PUBLISHED["default"])
    size = engine.get_vocab_size()
    metadata = metadata_of(engine, eos_token_id=size)
    tokens = metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|end|>", "<think>", "[PAD0]"]
    metadata["tokenizer.ggml.token_type"] = [1] * size + [3, 4, 5]
    ours, roles = gguf_engine(Path("x.gguf"), metadata)
    assert [ours.token_to_id(token) for token in tokens[-3:]] == [size, size + 1, size + 2]
    assert ours.encode("<|end|>old<think>").ids[0] == size
    assert ours.encode("<|end|>old<think>").ids[-1] == size + 1
    assert roles == {"eos": "<|end|>"}
    ours.encode_special_tokens = True
    assert ours.encode("<|end|>").ids[0] != size


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"tokens": None}, "has no tokenizer"),
        ({"tokens": [1, 2]}, "has no tokenizer"),
        ({"tokens": ["a", "a"]}, "damaged tokenizer: 2 symbols, not all with a type and a name"),
        ({"token_type": [1]}, "not all with a type and a name"),
        ({"merges": ["no such"]}, "its merges .* are not of its symbols"),
        ({"merges": 5}, "its merges .* are not of its symbols"),
        ({"model": "llama", "merges": None}, "no score"),
        ({"model": "bert"}, "of the kind 'bert'; gpt2 and llama are supported"),
        ({"pre": "tekken"}, "in the way 'tekken'; default, gpt-2, smollm, llama-bpe, qwen2 are supported"),
    ],
)
def test_a_damaged_tokenizer_is_one_line(entries, sentence):
    with pytest.raises(UserError, match=sentence):
        gguf_engine(Path("x.gguf"), metadata_of(byte_level(PUBLISHED["default"]), **entries))
