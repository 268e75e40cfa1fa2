"""Text <-> ids, and the one place where the mask, bos, eos and pad ids are settled. Knows no tensors.

Every tokenizer is a Hugging Face `tokenizers` object underneath (the characters of text8 and plain bytes too), so that
one class encodes, decodes and is saved as a tokenizer.json. A tokenizer without a mask (GPT-2) gets one more id for it.
"""

import hashlib
import json
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from adlm.config.schema import Vocabulary
from adlm.errors import UserError
from adlm.files import read_bytes, read_json, write_file
from adlm.hub import skip_unreachable_hub

MASK = "[MASK]"
BUILT_IN = ("text8", "bytes")

# What a special token is called where no file beside the tokenizer says so; the first that exists is taken.
USUAL_NAMES = {
    "mask": (MASK, "<mask>", "<|mask|>", "<MASK>"),
    "bos": ("[BOS]", "<s>", "<|startoftext|>", "<|begin_of_text|>", "[CLS]", "<|endoftext|>"),
    "eos": ("[EOS]", "</s>", "<|endoftext|>", "<|end_of_text|>", "[SEP]"),
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<PAD>"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Ids for text and text for ids; `vocabulary` says how many symbols there are and which are special."""

    name: str
    engine: Engine
    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone: nothing is added, and `[MASK]` in a document is ordinary characters."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, in parallel."""
        self.engine.encode_special_tokens = True
        try:
            with _panics_told(self.name):
                encoded = self.engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except UserError:
            raise
        except Exception:  # noqa: BLE001  (the engine raises bare Exception for a symbol it has no id for)
            half = next((c for text in texts for c in text if "\ud800" <= c <= "\udfff"), None)
            if half is not None:
                raise UserError(f"the text holds {half!r}, half a character: it is no UTF-8") from None
            unknown = next((c for text in texts for c in text if self.engine.token_to_id(c) is None), None)
            raise UserError(f"tokenizer {self.name} has no id for {unknown!r}; it is not in its alphabet") from None
        return [row.ids for row in encoded]

    def unknown(self, text: str) -> list[str]:
        """The words of the text that are all the same to this tokenizer: the engine's unknown token stands for them."""
        index = self._unknown_id()
        if index is None:
            return []
        self.engine.encode_special_tokens = True
        with _panics_told(self.name):
            encoded = self.engine.encode(text, add_special_tokens=False)
        return [
            text[slice(*place)] for found, place in zip(encoded.ids, encoded.offsets, strict=True) if found == index
        ]

    def _unknown_id(self) -> int | None:
        model = self.engine.model
        if isinstance(model, models.Unigram):  # which does not tell
            return json.loads(self.engine.to_str())["model"]["unk_id"]  # type: ignore[no-any-return]
        return None if model.unk_token is None else self.engine.token_to_id(model.unk_token)

    def decode(self, ids: Sequence[int], special_tokens: bool = True) -> str:
        """The text of the ids, special tokens written out.

        With `special_tokens=False` bos, eos and pad are left out; between two texts a blank line stands for them, so
        that the end of a document does not run into the next one.
        """
        if not special_tokens:
            runs = groupby(ids, key=self.special_ids.__contains__)
            return "\n\n".join(self.decode(list(run)) for special, run in runs if not special)
        for index in ids:
            if not 0 <= index < self.vocabulary.size:
                raise UserError(
                    f"id {index} is outside tokenizer {self.name}, which has ids 0 to {self.vocabulary.size - 1}"
                )
        with _panics_told(self.name):
            return str(self.engine.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """bos, eos and pad, where the vocabulary has them; the mask is not text and not one of them."""
        vocabulary = self.vocabulary
        return frozenset(i for i in (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id) if i is not None)

    @cached_property
    def sha256(self) -> str:
        """What tells it from any other: see `symbols_sha256`."""
        return symbols_sha256(self.engine.get_vocab())

    @cached_property
    def joins_spaces(self) -> bool:
        """Whether a word and the space before it are one symbol: what GPT-2 writes as Ġ and SentencePiece as ▁."""
        return any(len(symbol) > 1 and symbol[0] in "Ġ▁" for symbol in self.engine.get_vocab())

    def piece(self, index: int) -> bytes:
        """What one id adds to a text that has begun, in UTF-8: of a byte-level tokenizer perhaps part of a character.

        Joined, the pieces of ids are their `decode`, but for the space that decoders of words leave out at the start.
        """
        if isinstance(self.engine.decoder, decoders.ByteLevel):
            symbols = str(self.engine.id_to_token(index) or "")
            if all(symbol in BYTES for symbol in symbols):
                return bytes(BYTES[symbol] for symbol in symbols)
            return symbols.encode()
        alone, twice = self.decode([index]), self.decode([index, index])
        return (twice.removeprefix(alone) if twice.startswith(alone) else alone).encode()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its special tokens by name; `load_tokenizer` reads them back to the same ids."""
        write_file(folder / "tokenizer.json", self.engine.to_str(pretty=True))
        ids = {role: getattr(self.vocabulary, f"{role}_id") for role in USUAL_NAMES}
        named = {f"{role}_token": self.engine.id_to_token(index) for role, index in ids.items() if index is not None}
        write_file(folder / "special_tokens_map.json", json.dumps(named, indent=1))


@contextmanager
def _panics_told(name: str) -> Iterator[None]:
    """The engine panics, which is no Exception, where a tokenizer.json asks for what cannot be done.

    One reason is a regular expression that backtracks without end: the engine gives up after some tenths of a second.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"tokenizer {name} fails ({reason}): its pattern is damaged or hostile; use another") from None


def symbols_sha256(vocabulary: Mapping[str, int]) -> str:
    """Of every symbol with its id but the mask, which one who reads whole texts need not have.

    Two with the same one mean the same by an id, whichever library wrote them down.
    """
    symbols = sorted((symbol, index) for symbol, index in vocabulary.items() if symbol not in USUAL_NAMES["mask"])
    return hashlib.sha256(json.dumps(symbols).encode()).hexdigest()


def _byte_symbols() -> list[str]:
    """How the engine writes each byte: as itself where it is printable, else as the next character from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in printable else next(hidden)) for byte in range(256)]


BYTES = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}


def bpe_size(name: str) -> int | None:
    """Of `bpe-2048`, a tokenizer yet to be trained, 2048; of any other name nothing."""
    return int(name[4:]) if re.fullmatch(r"bpe-[1-9]\d*", name) else None


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE as GPT-2's, of `size` symbols with the mask, learnt from the texts; eos ends a document."""
    if not 300 <= size <= 1_000_000:
        raise UserError(f"tokenizer bpe-{size} cannot be made: give a size from 300 (256 bytes and a few) to 1000000")
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
    return Tokenizer(f"bpe-{size}", engine, _settle(engine, {}))


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name (in $ADLM_DATA/tokenizers, then on the hub), tokenizer.json, vocab.txt or folder."""
    engine, special = _read(name)
    engine.no_truncation()
    engine.no_padding()
    return Tokenizer(name, engine, _settle(engine, special))


def _read(name: str) -> tuple[Engine, Mapping[str, str]]:
    """The engine, and the special tokens that files beside it name."""
    if name == "text8":
        return _characters(" " + string.ascii_lowercase), {}
    if name == "bytes":
        return _bytes(), {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    if bpe_size(name) is not None:
        raise UserError(
            f"tokenizer {name} is learnt from the text when it is prepared, so there is none to load yet; run `adlm "
            f"prepare tokenizer={name} ...` first and give data.prepared"
        )
    path = Path(name)
    local = Path(os.environ.get("ADLM_DATA", "")) / "tokenizers" / name
    if not path.exists() and os.environ.get("ADLM_DATA") and local.is_dir():
        path = local
    if path.is_dir():
        return _from_folder(path), _named_beside(path)
    if path.is_file():
        return (_bert(path) if path.suffix == ".txt" else _from_json(path)), _named_beside(path.parent)
    if meant := re.fullmatch(r"bpe[-_ ]?([1-9]\d*)", name, re.IGNORECASE):
        raise UserError(
            f"tokenizer {name!r} does not exist; did you mean 'bpe-{meant[1]}', learnt from the text itself?"
        )
    if path.suffix in (".json", ".txt"):
        raise UserError(f"tokenizer {name} does not exist; give a tokenizer.json, a vocab.txt or a folder with one")
    return _from_hub(name), {}


def _from_folder(folder: Path) -> Engine:
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json")
    if (folder / "vocab.txt").is_file():
        return _bert(folder / "vocab.txt")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _gpt2(folder / "vocab.json", folder / "merges.txt")
    raise UserError(f"tokenizer folder {folder} has no tokenizer.json, no vocab.txt, and no vocab.json with merges.txt")


def _from_json(path: Path) -> Engine:
    content = read_bytes(path)
    try:
        with _panics_told(str(path)):
            return Engine.from_buffer(content)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (the engine raises bare Exception for a damaged file)
        problem = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise UserError(f"tokenizer {path} cannot be read as a tokenizer.json: {problem}") from None


def _from_hub(name: str) -> Engine:
    skip_unreachable_hub()
    try:
        return Engine.from_pretrained(name)
    except Exception as error:  # noqa: BLE001  (whatever the network or the hub does, the remedy is the same)
        raise UserError(
            f"tokenizer {name!r} is no file, not in $ADLM_DATA/tokenizers, none of {', '.join(BUILT_IN)}, and was not "
            f"fetched from the hub ({type(error).__name__}); give the path of a tokenizer.json"
        ) from None


def _bert(vocab: Path) -> Engine:
    """WordPiece over a vocab.txt, as bert-base-uncased reads text."""
    try:
        engine: Engine = tokenizers.BertWordPieceTokenizer(str(vocab), lowercase=True)._tokenizer
    except Exception as error:  # noqa: BLE001  (as above)
        raise UserError(f"tokenizer {vocab} cannot be read as a BERT vocab.txt: {error}") from None
    return engine


def _gpt2(vocab: Path, merges: Path) -> Engine:
    """Byte-level BPE over vocab.json and merges.txt, as GPT-2 reads text."""
    try:
        engine: Engine = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))._tokenizer
    except Exception as error:  # noqa: BLE001  (as above)
        raise UserError(f"tokenizer {vocab.parent} cannot be read as vocab.json and merges.txt: {error}") from None
    return engine


def _characters(alphabet: str) -> Engine:
    """One id a character, in the order of the alphabet."""
    engine = Engine(models.WordLevel({character: index for index, character in enumerate(alphabet)}))
    engine.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    engine.decoder = decoders.Fuse()
    return engine


def _bytes() -> Engine:
    """The ids 0 to 255 are the bytes themselves; 256 ends a document."""
    engine = Engine(models.BPE(dict(BYTES), []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>"])
    return engine


def _named_beside(folder: Path) -> dict[str, str]:
    """The special tokens that special_tokens_map.json or tokenizer_config.json name."""
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
                    raise UserError(f"{folder / file}: {key}_token is {content!r:.100}, which is no text")
                named[role] = content
    return named


def _settle(engine: Engine, named: Mapping[str, str]) -> Vocabulary:
    """The special ids; a mask is added as one more symbol where there is none, and eos pads where there is no pad."""

    def first(role: str) -> int | None:
        return next(_ids(engine, [named[role]] if role in named else USUAL_NAMES[role]), None)

    mask_id = first("mask")
    size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
    if mask_id is None:
        engine.add_special_tokens([MASK])
        mask_id, size = next(_ids(engine, [MASK])), size + 1
        if mask_id != size - 1:
            raise UserError(
                f"the tokenizer's ids have gaps, so no id is free for a mask: {MASK} would be {mask_id}, a word"
            )
    else:
        engine.add_special_tokens([str(engine.id_to_token(mask_id))])  # so that no text encodes to it
    bos_id, eos_id, pad_id = first("bos"), first("eos"), first("pad")
    return Vocabulary(size, mask_id, bos_id, eos_id, eos_id if pad_id is None else pad_id)


def _ids(engine: Engine, tokens: Sequence[str]) -> Iterator[int]:
    for token in tokens:
        index = engine.token_to_id(token)
        if index is not None:
            yield index
