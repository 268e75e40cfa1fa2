"""Judges for tests: one with known probabilities, and a folder with an untrained GPT-2."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adlm.apps.judge.generative_perplexity import JudgeInfo
from adlm.tokens import load_tokenizer

EOS_ID = 3


class KnownJudge:
    """A bigram model over the letters a, b, c and eos (`.`), given by a table of probabilities."""

    table = torch.tensor(
        [[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1]]
    )

    def __init__(self, context: int = 8, bos_id: int | None = EOS_ID):
        self.about = JudgeInfo("known", "test", "", "letters", "", context, bos_id, EOS_ID, "cpu", "float32")
        self.shapes: list[tuple[int, ...]] = []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [["abc.".index(letter) for letter in text] for text in texts]

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        assert x.shape[1] <= self.about.context
        self.shapes.append(tuple(x.shape))
        nats = -self.table[x[:, :-1], x[:, 1:]].log()
        return torch.nn.functional.pad(nats, (1, 0)).masked_fill(pad, 0.0)


def tiny_gpt2(folder: Path, positions: int = 24) -> Path:
    """A small GPT-2 over bytes with random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.disable_progress_bar()
    tokenizer = load_tokenizer("bytes")
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.engine, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_positions": positions, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
    config = transformers.GPT2Config(vocab_size=tokenizer.vocabulary.size, bos_token_id=256, eos_token_id=256, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
