"""Tokenizers: text <-> ids, and the ids of the mask, bos, eos and pad tokens. Independent of tensors.

Every tokenizer wraps a Hugging Face `tokenizers` object, including the characters of text8 and plain bytes, and can be
saved as a tokenizer.json. A tokenizer without a mask token (GPT-2) gets one as an additional id.
"""

import hashlib
import json
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Encoding, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from adlm.bases.description import find_base
from adlm.bases.gguf_file import read_gguf
from adlm.bases.gguf_tokenizer import gguf_engine
from adlm.config.load import BOX, BOX_FOLDER
from adlm.config.schema import Config, Vocabulary
from adlm.errors import UserError
from adlm.files import opened, read_bytes, read_json, write_file
from adlm.hub import skip_unreachable_hub

MASK = "[MASK]"
BUILT_IN = ("text8", "bytes")
BASE = "base:"
"""Prefix of the name of a pretrained model's tokenizer: base:FILE.gguf, base:FOLDER, base:owner/name."""
DOCUMENT_END = "<|endoftext|>"

KNOWN_VOCABULARIES = {"gpt2": Vocabulary(50_258, 50_257, 50_256), "bert-base-uncased": Vocabulary(30_522, 103, 101)}
"""Those of the presets' tokenizers, which then need not be loaded."""

# Default names of special tokens where no file next to the tokenizer names them; the first that exists is used.
DEFAULT_SPECIAL_TOKENS = {
    "mask": (MASK, "<mask>", "<|mask|>", "<MASK>"),
    "bos": ("[BOS]", "<s>", "<|startoftext|>", "<|begin_of_text|>", "[CLS]", "<|endoftext|>"),
    "eos": ("[EOS]", "</s>", "<|endoftext|>", "<|end_of_text|>", "[SEP]"),
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<PAD>"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text and decodes ids; `vocabulary` has the number of symbols and the special ids."""

    name: str
    engine: Engine
    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens; `[MASK]` in a text is encoded as ordinary characters."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for several texts, in parallel."""
        return [row.ids for row in self._encodings(texts, self.engine.encode_batch_fast)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """`encode_batch`, and for each id the range [start, stop) of the characters that it encodes."""
        return [(row.ids, row.offsets) for row in self._encodings(texts, self.engine.encode_batch)]

    def _encodings(self, texts: Sequence[str], encode_batch: Callable[..., list[Encoding]]) -> list[Encoding]:
        self.engine.encode_special_tokens = True
        try:
            with _panics_as_user_errors(self.name):
                return encode_batch(list(texts), add_special_tokens=False)
        except UserError:
            raise
        except Exception:  # noqa: BLE001  (the engine raises a bare Exception for a symbol without an id)
            surrogate = next((c for text in texts for c in text if "\ud800" <= c <= "\udfff"), None)
            if surrogate is not None:
                raise UserError(
                    f"the text contains {surrogate!r}, a lone surrogate, which is not valid Unicode text"
                ) from None
            unknown = next((c for text in texts for c in text if self.engine.token_to_id(c) is None), None)
            raise UserError(
                f"tokenizer {self.name} has no id for {unknown!r}; remove it from the text or use another tokenizer"
            ) from None

    def unknown_words(self, text: str) -> list[str]:
        """The words of the text that are encoded as the unknown token."""
        model = self.engine.model
        if isinstance(model, models.Unigram):  # it does not expose its unknown token
            unknown_id = json.loads(self.engine.to_str())["model"]["unk_id"]
        else:
            unknown_id = None if model.unk_token is None else self.engine.token_to_id(model.unk_token)
        if unknown_id is None:
            return []
        self.engine.encode_special_tokens = True
        with _panics_as_user_errors(self.name):
            encoded = self.engine.encode(text, add_special_tokens=False)
        return [
            text[slice(*span)] for index, span in zip(encoded.ids, encoded.offsets, strict=True) if index == unknown_id
        ]

    def decode(self, ids: Sequence[int], special_tokens: bool = True) -> str:
        """The text of the ids, including special tokens.

        With `special_tokens=False` bos, eos and pad are omitted; between two texts they are replaced by a blank line.
        """
        if not special_tokens:
            runs = groupby(ids, key=self.special_ids.__contains__)
            return "\n\n".join(self.decode(list(run)) for special, run in runs if not special)
        for index in ids:
            if not 0 <= index < self.vocabulary.size:
                raise UserError(
                    f"id {index} is outside tokenizer {self.name}, which has ids 0 to {self.vocabulary.size - 1}"
                )
        with _panics_as_user_errors(self.name):
            return str(self.engine.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of bos, eos and pad, as far as the vocabulary has them; the mask is not included."""
        vocabulary = self.vocabulary
        return frozenset(i for i in (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id) if i is not None)

    @cached_property
    def sha256(self) -> str:
        """Identifies the tokenizer: see `symbols_sha256`."""
        return symbols_sha256(self.engine.get_vocab())

    @cached_property
    def joins_spaces(self) -> bool:
        """Whether a word and the space before it are one symbol, marked Ġ by GPT-2 and ▁ by SentencePiece."""
        return any(len(symbol) > 1 and symbol[0] in "Ġ▁" for symbol in self.engine.get_vocab())

    @cached_property
    def longest_symbol(self) -> int:
        """Characters, or bytes if the tokenizer is byte-level, of the longest symbol."""
        return max(map(len, self.engine.get_vocab()))

    def piece(self, index: int) -> bytes:
        """The UTF-8 bytes that one id adds inside a text; for byte-level tokenizers possibly part of a character.

        The concatenated pieces equal `decode`, except for the leading space that word-level decoders omit.
        """
        if isinstance(self.engine.decoder, decoders.ByteLevel):
            symbols = str(self.engine.id_to_token(index) or "")
            if all(symbol in BYTES for symbol in symbols):
                return bytes(BYTES[symbol] for symbol in symbols)
            return symbols.encode()
        once, twice = self.decode([index]), self.decode([index, index])
        return (twice.removeprefix(once) if twice.startswith(once) else once).encode()

    def is_same(self, other: "Tokenizer | None") -> bool:
        """Whether the two encode every text alike and have the same special ids."""
        return other is not None and (other.vocabulary, other.engine.to_str()) == (
            self.vocabulary,
            self.engine.to_str(),
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and special_tokens_map.json; `load_tokenizer` restores the same ids."""
        write_file(folder / "tokenizer.json", self.engine.to_str(pretty=True))
        ids = {role: getattr(self.vocabulary, f"{role}_id") for role in DEFAULT_SPECIAL_TOKENS}
        tokens = {f"{role}_token": self.engine.id_to_token(index) for role, index in ids.items() if index is not None}
        write_file(folder / "special_tokens_map.json", json.dumps(tokens, indent=1))


@contextmanager
def _panics_as_user_errors(name: str) -> Iterator[None]:
    """Panics of the Rust engine, which are not subclasses of Exception, become user errors.

    One cause is a regular expression with catastrophic backtracking: the engine gives up after some tenths of a second.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"tokenizer {name} fails ({reason}): its pattern is damaged or hostile; use another tokenizer"
        ) from None


def symbols_sha256(vocabulary: Mapping[str, int]) -> str:
    """sha256 of all symbols with their ids, without the mask, which tokenizers of other models may lack.

    Tokenizers with equal hashes assign the same meaning to every id, whichever library saved them.
    """
    symbols = sorted(
        (symbol, index) for symbol, index in vocabulary.items() if symbol not in DEFAULT_SPECIAL_TOKENS["mask"]
    )
    return hashlib.sha256(json.dumps(symbols).encode()).hexdigest()


def _byte_symbols() -> list[str]:
    """The engine's character for each byte: the byte itself if printable, else the next character from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


BYTES = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}


def bpe_size(name: str) -> int | None:
    """2048 for `bpe-2048`, the name of a tokenizer to be trained; None for any other name."""
    return int(name[4:]) if re.fullmatch(r"bpe-[1-9]\d*", name) else None


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's with `size` symbols including the mask; <|endoftext|> is eos."""
    if not 300 <= size <= 1_000_000:
        raise UserError(f"tokenizer bpe-{size} cannot be trained: use a size from 300 to 1000000")
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return Tokenizer(f"bpe-{size}", engine, _build_vocabulary(engine, {}))


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by name ($ADLM_DATA/tokenizers, then the hub), or from a tokenizer.json, vocab.txt or folder."""
    engine, special = _load_engine(name)
    engine.no_truncation()
    engine.no_padding()
    return Tokenizer(name, engine, _build_vocabulary(engine, special))


def with_vocabulary(config: Config) -> Config:
    """The config of a run on random tokens, or of none at all: it needs the vocabulary, not the tokenizer."""
    if config.vocabulary is not None:
        return config
    size = bpe_size(config.tokenizer)
    trained = None if size is None else Vocabulary(size, size - 1, 0, 0, 0)  # the ids that `train_bpe` assigns
    vocabulary = KNOWN_VOCABULARIES.get(config.tokenizer) or trained or load_tokenizer(config.tokenizer).vocabulary
    return replace(config, vocabulary=vocabulary)


def tokenizer_of_transformers(name: str, tokenizer: Any) -> Tokenizer:
    """The tokenizer that `transformers` loaded with a model."""
    engine = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(engine, Engine):
        raise UserError(f"the tokenizer of {name} has no tokenizer.json; give a model that has one")
    engine = Engine.from_str(engine.to_str())
    engine.no_truncation()
    engine.no_padding()
    named = {role: getattr(tokenizer, f"{role}_token") for role in DEFAULT_SPECIAL_TOKENS}
    return Tokenizer(name, engine, _build_vocabulary(engine, {role: token for role, token in named.items() if token}))


def add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer with more special tokens, each a symbol of its own that no text is encoded as."""
    engine = Engine.from_str(tokenizer.engine.to_str())
    engine.add_special_tokens(list(tokens))
    size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
    return replace(tokenizer, engine=engine, vocabulary=replace(tokenizer.vocabulary, size=size))


def _load_engine(name: str) -> tuple[Engine, Mapping[str, str]]:
    """The engine, and the special tokens named by the files next to it."""
    if name == "text8":
        return _character_engine(" " + string.ascii_lowercase), {}
    if name == "bytes":
        return _byte_engine(), {"bos": DOCUMENT_END, "eos": DOCUMENT_END}
    if name.startswith(BASE):
        return _base_engine(name.removeprefix(BASE))
    if bpe_size(name) is not None:
        raise UserError(
            f"tokenizer {name} is trained by `adlm prepare`, so there is none to load yet; run `adlm prepare "
            f"tokenizer={name} ...` first and set data.prepared"
        )
    path = BOX_FOLDER if name == BOX else Path(name)
    local = Path(os.environ.get("ADLM_DATA", "")) / "tokenizers" / name
    if not path.exists() and os.environ.get("ADLM_DATA") and local.is_dir():
        path = local
    if path.is_dir():
        return _engine_from_folder(path), _read_special_tokens(path)
    if path.exists():
        with opened(path):  # refuses pipes and devices
            engine = _engine_from_vocab_txt(path) if path.suffix == ".txt" else _engine_from_json(path)
        return engine, _read_special_tokens(path.parent)
    if match := re.fullmatch(r"bpe[-_ ]?([1-9]\d*)", name, re.IGNORECASE):
        raise UserError(
            f"tokenizer {name!r} does not exist; did you mean 'bpe-{match[1]}', trained on the text itself?"
        )
    if path.suffix in (".json", ".txt"):
        raise UserError(f"tokenizer {name} does not exist; give a tokenizer.json, a vocab.txt or a folder with one")
    return _engine_from_hub(name), {}


def _base_engine(source: str) -> tuple[Engine, Mapping[str, str]]:
    """Of a pretrained model. If it has <|endoftext|>, that stands between documents, as in pretraining.

    The files of chat models name the tokens around a message instead, <|im_start|> and <|im_end|>.
    """
    path = find_base(source)
    if path is None:
        raise UserError(
            f"tokenizer {BASE}{source} is neither a .gguf file, nor a folder with config.json, nor owner/name"
        )
    if path.suffix == ".gguf":
        engine, named = gguf_engine(path, read_gguf(path).metadata)
    else:
        engine, named = _engine_from_folder(path), _read_special_tokens(path)
    if engine.token_to_id(DOCUMENT_END) is not None:
        named |= dict.fromkeys(("bos", "eos", "pad"), DOCUMENT_END)
    return engine, named


def _engine_from_folder(folder: Path) -> Engine:
    if (folder / "tokenizer.json").is_file():
        return _engine_from_json(folder / "tokenizer.json")
    if (folder / "vocab.txt").is_file():
        return _engine_from_vocab_txt(folder / "vocab.txt")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _engine_from_merges(folder / "vocab.json", folder / "merges.txt")
    raise UserError(f"tokenizer folder {folder} has no tokenizer.json, no vocab.txt, and no vocab.json with merges.txt")


def _engine_from_json(path: Path) -> Engine:
    content = read_bytes(path)
    try:
        with _panics_as_user_errors(str(path)):
            return Engine.from_buffer(content)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (the engine raises a bare Exception for a damaged file)
        problem = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise UserError(f"tokenizer {path} cannot be read as a tokenizer.json: {problem}") from None


def _engine_from_hub(name: str) -> Engine:
    skip_unreachable_hub()
    try:
        return Engine.from_pretrained(name)
    except Exception as error:  # noqa: BLE001  (the remedy is the same for every error of the network or the hub)
        raise UserError(
            f"tokenizer {name!r} is not a file, not in $ADLM_DATA/tokenizers, not one of {', '.join(BUILT_IN)} and "
            f"bpe-SIZE, and could not be downloaded from the hub ({type(error).__name__}); pass the path of a "
            "tokenizer.json"
        ) from None


def _engine_from_vocab_txt(vocab: Path) -> Engine:
    """WordPiece from a vocab.txt, with the settings of bert-base-uncased."""
    try:
        engine: Engine = tokenizers.BertWordPieceTokenizer(str(vocab), lowercase=True)._tokenizer
    except Exception as error:  # noqa: BLE001  (as above)
        raise UserError(f"tokenizer {vocab} cannot be read as a BERT vocab.txt: {error}") from None
    return engine


def _engine_from_merges(vocab: Path, merges: Path) -> Engine:
    """Byte-level BPE from vocab.json and merges.txt, with the settings of GPT-2."""
    try:
        engine: Engine = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))._tokenizer
    except Exception as error:  # noqa: BLE001  (as above)
        raise UserError(f"tokenizer {vocab.parent} cannot be read as vocab.json and merges.txt: {error}") from None
    return engine


def _character_engine(alphabet: str) -> Engine:
    """One id per character, in the order of the alphabet."""
    engine = Engine(models.WordLevel({character: index for index, character in enumerate(alphabet)}))
    engine.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    engine.decoder = decoders.Fuse()
    return engine


def _byte_engine() -> Engine:
    """Ids 0 to 255 are the bytes; 256 is the end of a document."""
    engine = Engine(models.BPE(dict(BYTES), []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>"])
    return engine


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens named by special_tokens_map.json or tokenizer_config.json."""
    named: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (folder / file).exists():
            continue
        entries = read_json(folder / file)
        if not isinstance(entries, dict):
            raise UserError(f"{folder / file} must be a mapping of special tokens")
        roles = (("mask", ("mask",)), ("bos", ("cls", "bos")), ("eos", ("sep", "eos")), ("pad", ("pad",)))
        for role, keys in roles:
            for key in keys:
                token = entries.get(f"{key}_token")
                content = token.get("content", token) if isinstance(token, dict) else token
                if content is None:
                    continue
                if not isinstance(content, str) or any("\ud800" <= character <= "\udfff" for character in content):
                    raise UserError(f"{folder / file}: {key}_token is {content!r:.100}, which is not a valid string")
                named[role] = content
    return named


def _build_vocabulary(engine: Engine, named: Mapping[str, str]) -> Vocabulary:
    """Size and special ids. Adds a mask token if there is none; without a pad token, eos is used for padding."""

    def first(role: str) -> int | None:
        tokens = [named[role]] if role in named else DEFAULT_SPECIAL_TOKENS[role]
        return next((index for token in tokens if (index := engine.token_to_id(token)) is not None), None)

    mask_id = first("mask")
    size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
    if mask_id is None:
        engine.add_special_tokens([MASK])
        mask_id, size = engine.token_to_id(MASK), size + 1
        if mask_id != size - 1:
            raise UserError(
                f"the tokenizer's ids have gaps, so no mask can be added: {MASK} would get id {mask_id}, which is used"
            )
    else:
        engine.add_special_tokens([str(engine.id_to_token(mask_id))])  # so that no text is encoded as the mask
    bos_id, eos_id, pad_id = first("bos"), first("eos"), first("pad")
    return Vocabulary(size, mask_id, bos_id, eos_id, eos_id if pad_id is None else pad_id)


def token_bytes(tokenizer: Tokenizer | None, index: int) -> bytes:
    """The UTF-8 bytes that an id adds to a text; without a tokenizer, its number."""
    return f" {index}".encode() if tokenizer is None else tokenizer.piece(index)


def tokens_bytes(tokenizer: Tokenizer | None, ids: Sequence[int], special_tokens: bool = False) -> list[bytes]:
    """The bytes that each id adds to the text of `Tokenizer.decode(ids, special_tokens)`.

    Hidden special tokens add nothing, except that the first one between two documents adds a blank line.
    """
    hidden = [not special_tokens and tokenizer is not None and index in tokenizer.special_ids for index in ids]
    last = max((position for position, is_hidden in enumerate(hidden) if not is_hidden), default=-1)
    pieces = []
    for position, index in enumerate(ids):
        separates = 0 < position < last and not hidden[position - 1]
        pieces.append((b"\n\n" if separates else b"") if hidden[position] else token_bytes(tokenizer, index))
    return pieces


def text_of(tokenizer: Tokenizer | None, ids: Iterable[int], special_tokens: bool = False) -> str:
    """The text of the ids, with masks spelled out; without a tokenizer, the ids as numbers."""
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(list(ids), special_tokens)


def decode_complete(data: bytes) -> str | None:
    """The text of bytes that are complete UTF-8 characters, else None."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def decode_escaped(data: bytes) -> str:
    """The text of the bytes of one token; incomplete characters are escaped."""
    return data.decode(errors="backslashreplace")


def decode_side_by_side(pieces: Sequence[bytes | None]) -> list[str]:
    """The text of each token in its sequence; None is a mask.

    A character that spans several tokens belongs to the first of them, and the others are empty. Incomplete characters
    are escaped.
    """
    texts = ["" if data is None else decode_escaped(data) for data in pieces]
    start = 0
    while start < len(pieces):
        end, data = start + 1, pieces[start] or b""
        while decode_complete(data) is None and end < min(len(pieces), start + 4) and pieces[end] is not None:
            data += pieces[end] or b""
            end += 1
        text = decode_complete(data)
        if text is None:
            end = start + 1
        else:
            texts[start:end] = [text] + [""] * (end - start - 1)
        start = end
    return texts
