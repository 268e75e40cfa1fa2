"""Tokenizers: encoding, decoding, special ids, training and loading."""

import json
import string
import time

import pytest
from texts import prose
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from adlm.canvas import encode_canvas
from adlm.errors import UserError
from adlm.tokens import bpe_size, load_tokenizer, symbols_sha256, train_bpe

TEXT = "Of the people, by the people, for the people: naïve ☃ [MASK] <|endoftext|>\n\tend."


@pytest.fixture
def word_piece(tmp_path):
    """A BERT vocab.txt of two dozen lines."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "people", "##s", *".,[]", "mask"]))
    return path


@pytest.fixture
def byte_level(tmp_path):
    """A tokenizer.json as GPT-2's: <|endoftext|> and no mask; truncation and padding are set."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    engine.train_from_iterator([TEXT] * 5, trainer)
    engine.enable_truncation(4)
    engine.enable_padding(length=50)
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    return path


def test_byte_ids_are_the_bytes_and_decoding_restores_every_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocabulary.eos_id, tokenizer.vocabulary.mask_id, tokenizer.vocabulary.size) == (256, 257, 258)


def test_text8_has_a_space_26_letters_and_a_mask():
    tokenizer = load_tokenizer("text8")
    alphabet = " " + string.ascii_lowercase
    assert tokenizer.encode(alphabet) == list(range(27))
    assert tokenizer.decode(tokenizer.encode("of the people")) == "of the people"
    assert (tokenizer.vocabulary.size, tokenizer.vocabulary.mask_id) == (28, 27)
    with pytest.raises(UserError, match="tokenizer text8 has no id for 'Ü'"):
        tokenizer.encode("Über")


def test_a_tokenizer_without_a_mask_gets_one_more_id_and_a_pad_that_is_its_eos(byte_level):
    before = Engine.from_file(str(byte_level)).get_vocab_size()
    vocabulary = load_tokenizer(str(byte_level)).vocabulary
    assert (vocabulary.size, vocabulary.mask_id) == (before + 1, before)
    assert vocabulary.bos_id == vocabulary.eos_id == vocabulary.pad_id == 0


def test_a_tokenizer_with_a_mask_keeps_it(word_piece):
    vocabulary = load_tokenizer(str(word_piece)).vocabulary
    assert (vocabulary.size, vocabulary.mask_id) == (13, 4)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id) == (2, 3, 0)


def test_no_text_is_encoded_as_the_mask_or_another_special_token(word_piece, byte_level):
    for name in ("bytes", str(word_piece), str(byte_level)):
        tokenizer = load_tokenizer(name)
        special = {tokenizer.vocabulary.mask_id, tokenizer.vocabulary.eos_id, tokenizer.vocabulary.bos_id}
        assert not special & set(tokenizer.encode(TEXT))


def test_truncation_and_padding_saved_in_a_file_are_switched_off(byte_level):
    tokenizer = load_tokenizer(str(byte_level))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("the")) <= 3


def test_masks_are_visible_in_decoded_text(byte_level):
    tokenizer = load_tokenizer(str(byte_level))
    assert tokenizer.decode([*tokenizer.encode("by "), tokenizer.vocabulary.mask_id]) == "by [MASK]"


def test_a_batch_of_texts_is_encoded_like_single_texts(byte_level):
    tokenizer = load_tokenizer(str(byte_level))
    texts = [TEXT, "", "the people"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_a_saved_tokenizer_loads_to_the_same_ids(byte_level, tmp_path):
    tokenizer, folder = load_tokenizer(str(byte_level)), tmp_path / "model"
    folder.mkdir()
    tokenizer.save(folder)
    again = load_tokenizer(str(folder))
    assert again.vocabulary == tokenizer.vocabulary
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_no_mask_can_be_added_to_a_vocabulary_with_gaps(tmp_path):
    Engine(models.WordLevel({"a": 0, "b": 2}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizer's ids have gaps"):
        load_tokenizer(str(tmp_path))


def test_special_tokens_in_files_next_to_the_tokenizer_override_the_defaults(word_piece):
    names = {"mask_token": {"content": "##s"}, "pad_token": "the", "cls_token": "[UNK]", "bos_token": None}
    (word_piece.parent / "special_tokens_map.json").write_text(json.dumps(names))
    vocabulary = load_tokenizer(str(word_piece.parent)).vocabulary
    assert (vocabulary.mask_id, vocabulary.pad_id, vocabulary.bos_id, vocabulary.eos_id) == (7, 5, 1, 3)
    saved = word_piece.parent / "saved"
    saved.mkdir()
    load_tokenizer(str(word_piece.parent)).save(saved)
    assert load_tokenizer(str(saved)).vocabulary == vocabulary


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json, no vocab.txt, and no vocab.json with merges.txt"),
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer.json"),
        ({"vocab.json": "[]", "merges.txt": "?"}, "cannot be read as vocab.json and merges.txt"),
        ({"vocab.txt": "[UNK]", "tokenizer_config.json": "{"}, "cannot be read"),
    ],
)
def test_a_damaged_folder_is_a_user_error(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_missing_file_is_not_requested_from_the_hub():
    with pytest.raises(UserError, match=r"tokenizer no/such/tokenizer.json does not exist"):
        load_tokenizer("no/such/tokenizer.json")


@pytest.mark.parametrize("name", ["bpe4096", "bpe_4096", "BPE-4096"])
def test_a_misspelled_bpe_name_gets_a_suggestion(name):
    with pytest.raises(UserError, match=f"tokenizer '{name}' does not exist; did you mean 'bpe-4096'"):
        load_tokenizer(name)


def test_decoding_an_id_outside_the_vocabulary_is_a_user_error():
    with pytest.raises(UserError, match="id 258 is outside tokenizer bytes, which has ids 0 to 257"):
        load_tokenizer("bytes").decode([65, 258])


def test_the_real_tokenizers_have_their_known_ids(data_folder):
    gpt2, bert = load_tokenizer("gpt2"), load_tokenizer("bert-base-uncased")
    assert (gpt2.vocabulary.size, gpt2.vocabulary.mask_id, gpt2.vocabulary.eos_id) == (50_258, 50_257, 50_256)
    assert (bert.vocabulary.size, bert.vocabulary.mask_id) == (30_522, 103)
    assert (bert.vocabulary.bos_id, bert.vocabulary.eos_id, bert.vocabulary.pad_id) == (101, 102, 0)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode(gpt2.encode(TEXT)) == TEXT
    assert bert.encode("Hello world") == [7592, 2088]
    only_vocab = load_tokenizer(str(data_folder / "tokenizers/bert-base-uncased/vocab.txt"))
    assert only_vocab.encode(TEXT) == bert.encode(TEXT)


def test_training_a_bpe_is_deterministic_and_decoding_restores_the_text(tmp_path):
    texts = ["the people of the people", "by the people, for the people"] * 20
    tokenizer = train_bpe(texts, 300)
    assert tokenizer.vocabulary.size <= 300
    assert tokenizer.vocabulary.mask_id == tokenizer.vocabulary.size - 1
    assert tokenizer.vocabulary.eos_id is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2
    assert train_bpe(iter(texts), 300).engine.to_str() == tokenizer.engine.to_str()


def test_the_name_of_a_bpe_to_be_trained_cannot_be_loaded():
    assert bpe_size("bpe-2048") == 2048
    assert bpe_size("gpt2") is bpe_size("bpe-0x10") is bpe_size("bpe-") is None
    with pytest.raises(UserError, match=r"bpe-2048 is trained by `adlm prepare`.*adlm prepare tokenizer=bpe-2048"):
        load_tokenizer("bpe-2048")
    with pytest.raises(UserError, match=r"bpe-100 cannot be trained: use a size from 300"):
        train_bpe(["text"], 100)


def test_unknown_words_are_found_and_are_a_user_error_on_a_canvas(word_piece):
    tokenizer = load_tokenizer(str(word_piece))
    assert tokenizer.unknown_words("the peoples, the snow ☃.") == ["snow", "☃"]
    assert tokenizer.unknown_words("the peoples") == []
    with pytest.raises(UserError, match="has no id for 'snow', '☃'; write something else there"):
        encode_canvas("the [MASK] snow ☃ snow", tokenizer)
    assert load_tokenizer("bytes").unknown_words("☃") == []


def test_unknown_words_of_a_unigram_model_are_found(tmp_path):
    Engine(models.Unigram([("a", -1.0), ("<unk>", 0.0)], 1, False)).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).unknown_words("ab") == ["b"]


@pytest.mark.parametrize("name", ["bytes", "text8"])
def test_a_lone_surrogate_is_a_user_error(name):
    with pytest.raises(UserError, match="a lone surrogate, which is not valid Unicode text"):
        load_tokenizer(name).encode("ab\udcff")


def test_omitted_special_tokens_become_a_blank_line_between_texts_and_nothing_at_the_ends(tmp_path):
    tokenizer = load_tokenizer("bytes")
    end = tokenizer.vocabulary.eos_id
    ids = [end, *b"one", end, end, *b"two", end]
    assert tokenizer.decode(ids, special_tokens=False) == "one\n\ntwo"
    assert tokenizer.decode(ids).count("<|endoftext|>") == 4
    assert tokenizer.decode([end, end], special_tokens=False) == ""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "day", "##s"]))
    bert = load_tokenizer(str(tmp_path / "vocab.txt"))
    assert bert.decode([2, 5, 6, 7, 4, 3, 0, 0], special_tokens=False) == "good days [MASK]", "masks are not hidden"
    assert load_tokenizer("text8").decode([1, 2], special_tokens=False) == "ab"


def with_pattern(folder, pattern):
    """The byte tokenizer with a regular expression as its pre-tokenizer."""
    content = json.loads(load_tokenizer("bytes").engine.to_str())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = split
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "(" * 10_000 + ")" * 10_000])
def test_an_invalid_pattern_is_a_user_error(pattern, tmp_path):
    with pytest.raises(UserError, match=r"cannot be read as a tokenizer.json: Oniguruma error"):
        load_tokenizer(str(with_pattern(tmp_path, pattern)))


def test_a_pattern_with_catastrophic_backtracking_is_a_user_error(tmp_path):
    """The engine panics with an error that is not a subclass of Exception."""
    tokenizer = load_tokenizer(str(with_pattern(tmp_path, "(a|aa)+$")))
    start = time.monotonic()
    for call in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match=r"fails \(.*retry-limit.*\): its pattern is damaged or hostile"):
            call("a" * 60 + "!")
    assert time.monotonic() - start < 100
    assert tokenizer.encode("b") == [98]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"mask_token": 5}', "mask_token is 5, which is not a valid string"),
        ('{"eos_token": {"content": ["x"]}}', r"eos_token is \['x'\], which is not a valid string"),
        ('{"bos_token": "\\ud800"}', "bos_token is .*, which is not a valid string"),
        ('{"pad_token": ' * 100_000, "is not JSON: it is nested too deeply"),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ("\xff", "is not JSON"),
        ("[]", "must be a mapping of special tokens"),
    ],
)
@pytest.mark.parametrize("file", ["special_tokens_map.json", "tokenizer_config.json"])
def test_special_tokens_of_wrong_types_are_a_user_error(content, message, file, tmp_path):
    load_tokenizer("bytes").save(tmp_path)
    (tmp_path / file).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_larger_tokenizer_decodes_the_ids_of_a_smaller_one_but_has_another_sha256():
    texts = [prose(400, seed) for seed in range(4)]
    small, large = train_bpe(texts, 300), train_bpe(texts, 360)
    text = prose(20, 9)
    assert large.decode(small.encode(text)) == text
    assert large.encode(text) != small.encode(text)
    assert small.sha256 != large.sha256
    assert small.sha256 == train_bpe(texts, 300).sha256


def test_the_mask_does_not_change_the_sha256():
    vocabulary = load_tokenizer("bytes").engine.get_vocab()
    assert "[MASK]" in vocabulary
    without = {key: value for key, value in vocabulary.items() if key != "[MASK]"}
    assert symbols_sha256(vocabulary) == symbols_sha256(without)
    assert symbols_sha256(vocabulary) != symbols_sha256(without | {"a": without["b"], "b": without["a"]})
