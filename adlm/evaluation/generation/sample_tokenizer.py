"""Which tokenizer a samples file was made with. No models and no metrics.

The file has its sha256. For a file without one, the tokenizer in the model's folder is used, if the folder still
exists. It is not enough that a tokenizer decodes the ids to the text: of two trained on one text, the larger contains
every symbol of the smaller and decodes its ids to the same text, but encodes the text differently.
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
    """A tokenizer by name and sha256; ids of two tokenizers with the same sha256 are interchangeable."""

    name: str
    sha256: str


def find_sample_tokenizer(
    made_by: Provenance, samples: Sequence[Sample], given: str | None = None
) -> SampleTokenizer | None:
    """The tokenizer of the samples, or None if unknown. `given` is a name that must agree with the file."""
    recorded = None
    if made_by.tokenizer_sha256 is not None:
        recorded = SampleTokenizer(made_by.tokenizer, made_by.tokenizer_sha256)
    if given is not None:
        return _check_given(given, recorded, samples)
    if recorded is not None:
        return recorded
    name = _tokenizer_of_model(made_by)
    tokenizer = None if name is None else load_tokenizer(name)
    if tokenizer is None or not all(decodes_to_text(tokenizer, sample) for sample in samples):
        return None
    return SampleTokenizer(tokenizer.name, tokenizer.sha256)


def _check_given(name: str, recorded: SampleTokenizer | None, samples: Sequence[Sample]) -> SampleTokenizer:
    tokenizer = load_tokenizer(name)
    if recorded is not None and recorded.sha256 != tokenizer.sha256:
        raise UserError(
            f"--tokenizer {name} did not write these samples: their file names {recorded.name}, with other symbols "
            f"(sha256 {recorded.sha256[:12]}, not {tokenizer.sha256[:12]}); leave --tokenizer out"
        )
    for sample in samples if recorded is None else ():
        if not decodes_to_text(tokenizer, sample):
            raise UserError(f"--tokenizer {name} did not write these samples: row {sample.row} is another text to it")
    return SampleTokenizer(tokenizer.name, tokenizer.sha256)


def _tokenizer_of_model(made_by: Provenance) -> str | None:
    """The tokenizer.json in the model's folder, or the name of a built-in tokenizer."""
    for folder in (Path(made_by.model) / "model", Path(made_by.model)):
        if os.path.isfile(folder / "tokenizer.json"):  # also False where the name is too long for a path
            return str(folder / "tokenizer.json")
    return made_by.tokenizer if made_by.tokenizer in BUILT_IN else None


def decodes_to_text(tokenizer: Tokenizer, sample: Sample) -> bool:
    """Whether the tokenizer decodes the sample's ids to its text."""
    known = all(0 <= index < tokenizer.vocabulary.size for index in sample.ids)
    return known and tokenizer.decode(sample.ids) == sample.text
