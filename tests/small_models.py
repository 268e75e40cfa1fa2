"""Models of nothing for the tests of sampling: random weights everywhere, the alphabet of bytes."""

from pathlib import Path

import pytest
from worlds import randomized

from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
from adlm.config.schema import Config, Model, Sampling, Schedule, Time, Train
from adlm.methods import method_of
from adlm.tokens import load_tokenizer


def mostly_slow(values, *fast):
    """Cases of a parametrized test: `fast` ones always, the others in the slow suite. A tuple has several arguments."""
    slow = pytest.mark.slow
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in fast else pytest.param(*arguments, marks=slow) for value, arguments in cases]


def small_model(
    folder: Path, method: str = "adlm", tokenizer: str | None = "bytes", length: int = 16, block_length: int = 0
) -> Path:
    """A model folder, woken: every token it writes is drawn from beliefs of its own."""
    loaded = load_tokenizer(tokenizer or "bytes")
    config = Config(
        method=method,
        tokenizer=tokenizer or "bytes",
        vocabulary=loaded.vocabulary,
        length=length,
        model=Model(hidden=16, heads=2, blocks=2, condition=8, block_length=block_length),
        train=Train(causal_weight=0.5 if block_length else 0.0),
        schedule=Schedule(eps=1e-3),
        time=Time(steps=10 if method == "d3pm" else 0),
        sampling=Sampling(steps=4),
    )
    weights = randomized(method_of(config).build()).state_dict()
    save_model_folder(ModelFolder(config, weights, loaded if tokenizer else None), folder)
    return folder
