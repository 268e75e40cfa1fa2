"""The tokenizer of a GGUF file, built by the library `tokenizers` from the file's metadata."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from adlm.errors import UserError

CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPACE = "▁"

# How Llama 3 and Qwen2 split a text before BPE; they differ in the length of numbers.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def gguf_engine(path: Path, metadata: dict[str, Any]) -> tuple[Engine, dict[str, str]]:
    """The engine, and the tokens of the roles bos, eos and pad. A user error if there is none, or none that we know."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or not tokens:
        raise UserError(f"{path} has no tokenizer (tokenizer.ggml.tokens); give a file with one")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{path} has a tokenizer of the kind {kind!r:.60}; gpt2 and llama are supported")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"{path} has a damaged tokenizer: {len(tokens)} symbols, not all with a type and a name")
    build = _byte_level if kind == "gpt2" else _sentencepiece
    engine = build(path, metadata, {token: index for index, token in enumerate(tokens)})
    marked = zip(tokens, types, strict=True)
    added = [(token, number == CONTROL) for token, number in marked if number in (CONTROL, USER_DEFINED)]
    for special in (True, False):
        words = [
            AddedToken(token, special=special, normalized=False) for token, is_special in added if is_special is special
        ]
        engine.add_special_tokens(words) if special else engine.add_tokens(words)
    roles = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            roles[role] = tokens[index]
    return engine, roles


def _byte_level(path: Path, metadata: dict[str, Any], vocabulary: dict[str, int]) -> Engine:
    """Byte-level BPE with the file's merges. How a text is split first has a name, tokenizer.ggml.pre."""
    split, bytes_only = metadata.get("tokenizer.ggml.pre", "default"), pre_tokenizers.ByteLevel(False, use_regex=False)
    splits: dict[str, list[Any]] = {
        "default": [pre_tokenizers.ByteLevel(False)],
        "gpt-2": [pre_tokenizers.ByteLevel(False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
        "llama-bpe": [pre_tokenizers.Split(Regex(WORDS % 3), "isolated"), bytes_only],
        "qwen2": [pre_tokenizers.Split(Regex(WORDS % 1), "isolated"), bytes_only],
    }
    if split not in splits:
        raise UserError(
            f"{path} has a tokenizer that splits text in the way {split!r:.60}; {', '.join(splits)} are supported"
        )
    engine = Engine(models.BPE(vocabulary, _merges(path, metadata, vocabulary), ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = pre_tokenizers.Sequence(splits[split])
    engine.decoder = decoders.ByteLevel()
    return engine


def _sentencepiece(path: Path, metadata: dict[str, Any], vocabulary: dict[str, int]) -> Engine:
    """BPE over characters, bytes where a character has no symbol. Merges are the file's, or follow from the scores."""
    if "tokenizer.ggml.merges" in metadata:
        pairs = _merges(path, metadata, vocabulary)
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(vocabulary):
            raise UserError(f"{path} has a damaged tokenizer: no score (tokenizer.ggml.scores) for every symbol")
        ranked = []
        for symbol, index in vocabulary.items():
            for first, second in ((symbol[:cut], symbol[cut:]) for cut in range(1, len(symbol))):
                if first in vocabulary and second in vocabulary:
                    ranked.append((-scores[index], vocabulary[first], vocabulary[second], first, second))
        pairs = [(first, second) for *_, first, second in sorted(ranked)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    token = next((symbol for symbol, index in vocabulary.items() if index == unknown), None)
    engine = Engine(models.BPE(vocabulary, pairs, unk_token=token, fuse_unk=True, byte_fallback=True))
    words: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        words, spaces = [*words, decoders.Strip(" ", 1, 0)], [normalizers.Prepend(SPACE), *spaces]
    engine.normalizer = normalizers.Sequence(spaces)
    engine.decoder = decoders.Sequence(words)
    return engine


def _merges(path: Path, metadata: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges, pairs = metadata.get("tokenizer.ggml.merges"), []
    for merge in merges if isinstance(merges, list) else []:
        first, _, second = str(merge).partition(" ")
        if {first, second, first + second} <= vocabulary.keys():
            pairs.append((first, second))
    if not isinstance(merges, list) or len(pairs) != len(merges):
        raise UserError(f"{path} has a damaged tokenizer: its merges (tokenizer.ggml.merges) are not of its symbols")
    return pairs
