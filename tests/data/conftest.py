"""Fixtures of the data tests: a small tokenizer like GPT-2's, and configs."""

import pytest
from texts import prose
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from adlm.config.load import resolve


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> str:
    """A tokenizer.json of 400 symbols, byte-level as GPT-2's."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator([prose(2000)], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    engine.save(str(path))
    return str(path)


@pytest.fixture
def resolve_config():
    """Resolves the overrides of a command to a Config."""
    return lambda *words: resolve([str(word) for word in words])
