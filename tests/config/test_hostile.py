"""Configs that are too large, nested too deeply or malformed fail fast with a one-line error."""

import time
from pathlib import Path

import pytest

from adlm.config.load import load_config, resolve
from adlm.errors import UserError


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (
            "train.steps=100000000000000000",
            "train.steps 100000000000000000 must be at most 2,147,483,647: Number of",
        ),
        ("anchor.tau=1" + "0" * 30, "anchor.tau is a number of 100 bits; give one of at most 63"),
        ("model.condition=1000000000000", "model.condition 1000000000000 must be at most 1,048,576: Width of the"),
        ("model.blocks=1000000", "model.blocks 1000000 must be at most 1,024"),
        ("length=1000000000", "length 1000000000 must be at most 16,777,216"),
        ("length=1" + "0" * 21, "length is a number of 70 bits"),
        ("length=" + "9" * 5000, "cannot be read as YAML"),
        ("train.samples=1000000", "train.samples 1000000 must be at most 1,024"),
        ("train.seed=1" + "0" * 30, "train.seed is a number of"),
        ("sampling={sampler: remdm-conf, steps: 1000000}", "sampling.steps 1000000 must be at most 20,000 with"),
        ("model.dropout=!!bool x", "tags (!!bool) are not allowed"),
        ("length=!!int ''", "tags (!!int) are not allowed"),
        ("length=!!map [ab]", "tags (!!map) are not allowed"),
        ("length=! 5", "tags (!) are not allowed"),
        ("length=0001-01-01 00:00:00 +12:00", "length '0001-01-01 00:00:00 +12:00' must be a whole number"),
        ("length=" + "[" * 5000, "it is nested too deeply"),
        ("method=" + "a" * 5000, "is not one of adlm"),
        ("a" * 5000 + "=1", "unknown option"),
        ("model.hidden=\x1b[31m", "\\x1b[31m"),
    ],
)
def test_an_invalid_value_is_a_short_one_line_error(word, sentence):
    with pytest.raises(UserError) as caught:
        resolve([word])
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("length: 8\n" + "# x\n" * 2_500_000, "has 10,000,010 bytes, more than the limit of 262,144"),
        ("length: " + "[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_file_that_is_too_large_or_too_deeply_nested_is_refused_within_seconds(text, sentence, tmp_path):
    path, start = tmp_path / "config.yaml", time.monotonic()
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_config(path)
    assert time.monotonic() - start < 60


def test_a_device_in_place_of_a_file_is_not_read():
    with pytest.raises(UserError, match="config file /dev/zero is not a regular file"):
        load_config(Path("/dev/zero"))
