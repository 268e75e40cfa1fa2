"""Which tokenizer wrote a file of samples. Knows no models and no metric.

The file tells, by sha256. Of a file from before they did, the model's own tokenizer is taken where its folder is still
there. That a tokenizer turns the ids into the text is not enough: of two learnt from one text the larger knows every
symbol of the smaller, reads its ids as the same text, and would never write them so.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adlm.errors import UserError
from adlm.samples_file import Provenance, Sample
from adlm.tokens import BUILT_IN, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class SampleTokenizer:
    """A tokenizer; two of one sha256 mean the same by an id."""

    name: str
    sha256: str


def find_sample_tokenizer(
    made_by: Provenance, samples: Sequence[Sample], given: str | None = None
) -> SampleTokenizer | None:
    """Who wrote the samples; `given` is a name that must agree. None where nobody knows."""
    told = None if made_by.tokenizer_sha256 is None else SampleTokenizer(made_by.tokenizer, made_by.tokenizer_sha256)
    if given is not None:
        return _given(given, told, samples)
    if told is not None:
        return told
    name = _in_the_models_folder(made_by)
    found = None if name is None else load_tokenizer(name)
    if found is None or not all(spells(found, sample) for sample in samples):
        return None
    return SampleTokenizer(found.name, found.sha256)


def _given(name: str, told: SampleTokenizer | None, samples: Sequence[Sample]) -> SampleTokenizer:
    tokenizer = load_tokenizer(name)
    if told is not None and told.sha256 != tokenizer.sha256:
        raise UserError(
            f"--tokenizer {name} did not write these samples: their file names {told.name}, and its symbols are others "
            f"(sha256 {told.sha256[:12]}, not {tokenizer.sha256[:12]}); leave --tokenizer out"
        )
    for sample in samples if told is None else ():
        if not spells(tokenizer, sample):
            raise UserError(f"--tokenizer {name} did not write these samples: row {sample.row} is another text to it")
    return SampleTokenizer(tokenizer.name, tokenizer.sha256)


def _in_the_models_folder(made_by: Provenance) -> str | None:
    for folder in (Path(made_by.model) / "model", Path(made_by.model)):
        if os.path.isfile(folder / "tokenizer.json"):  # False too where the name is too long for a path
            return str(folder / "tokenizer.json")
    return made_by.tokenizer if made_by.tokenizer in BUILT_IN else None


def spells(tokenizer: Tokenizer, sample: Sample) -> bool:
    """Whether the ids are the text to this tokenizer."""
    known = all(0 <= index < tokenizer.vocabulary.size for index in sample.ids)
    return known and tokenizer.decode(sample.ids) == sample.text
