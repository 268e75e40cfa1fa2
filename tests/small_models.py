"""Models of nothing for the tests of sampling: random weights everywhere, the alphabet of bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import randomized

from adlm.checkpoints.model_folder import ModelFolder, load_model_folder, save_model_folder
from adlm.config.schema import Config, Model, Sampling, Schedule, Time, Train
from adlm.methods import method_of
from adlm.tokens import load_tokenizer


def mostly_slow(values, *fast):
    """Cases of a parametrized test: `fast` ones always, the others in the slow suite. A tuple has several arguments."""
    slow = pytest.mark.slow
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in fast else pytest.param(*arguments, marks=slow) for value, arguments in cases]


def small_model(
    folder: Path,
    method: str = "adlm",
    tokenizer: str | None = "bytes",
    length: int = 16,
    block_length: int = 0,
    memory: bool = False,
) -> Path:
    """A model folder, woken: every token it writes is drawn from beliefs of its own."""
    loaded = load_tokenizer(tokenizer or "bytes")
    config = Config(
        method=method,
        tokenizer=tokenizer or "bytes",
        vocabulary=loaded.vocabulary,
        length=length,
        model=Model(hidden=16, heads=2, blocks=2, condition=8, block_length=block_length, memory=memory),
        train=Train(causal_weight=0.5 if block_length else 0.0),
        schedule=Schedule(eps=1e-3),
        time=Time(steps=10 if method == "d3pm" else 0),
        sampling=Sampling(steps=4),
    )
    weights = randomized(method_of(config).build()).state_dict()
    save_model_folder(ModelFolder(config, weights, loaded if tokenizer else None), folder)
    return folder


def infilling_model(folder: Path, length: int = 64) -> Path:
    """A block-causal model that fills holes of unknown length: with a few letters, and often with eos."""
    plain = load_model_folder(small_model(folder / "plain", "mdlm", length=length, block_length=4))
    network = method_of(plain.config).build()
    network.load_state_dict(plain.weights)
    eos_id = load_tokenizer("bytes").vocabulary.eos_id
    with torch.no_grad():
        network.trunk.modulation.bias[0] = 10.0  # a hidden unit that is always large, and that the head
        network.head.weight *= 0.2
        network.head.weight[:, 0] = -3.0  # counts against all tokens
        network.head.weight[[*b"abcdef ", eos_id], 0] = 0.0  # but these
    config = replace(plain.config, model=replace(plain.config.model, hole_id=255))  # no byte of UTF-8
    save_model_folder(ModelFolder(config, network.state_dict(), plain.tokenizer), folder / "infilling")
    return folder / "infilling"
