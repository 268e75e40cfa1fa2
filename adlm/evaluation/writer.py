"""Which tokenizer wrote a file of samples, and whether another is the same. Knows no models and no metric.

That a tokenizer turns the ids into the text is not enough: of two that were learnt from one text the larger knows every
symbol of the smaller, reads its ids as the same text, and would never write them so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adlm.errors import UserError
from adlm.samples_file import MadeBy, Sample
from adlm.tokens import BUILT_IN, USUAL_NAMES, Tokenizer, load_tokenizer

Symbols = Mapping[str, int]


def writer_of(made_by: MadeBy, samples: Sequence[Sample], given: str | None = None) -> Tokenizer | None:
    """The tokenizer by that name, or the model's own where its folder is still there; None where nobody knows."""
    if given is not None:
        tokenizer = load_tokenizer(given)
        for sample in samples:
            if not spells(tokenizer, sample):
                raise UserError(
                    f"--tokenizer {given} did not write these samples: row {sample.row} is another text to it"
                )
        return tokenizer
    name = _name(made_by)
    found = None if name is None else load_tokenizer(name)
    return found if found is not None and all(spells(found, sample) for sample in samples) else None


def _name(made_by: MadeBy) -> str | None:
    for folder in (Path(made_by.model) / "model", Path(made_by.model)):
        if (folder / "tokenizer.json").is_file():
            return str(folder / "tokenizer.json")
    return made_by.tokenizer if made_by.tokenizer in BUILT_IN else None


def spells(tokenizer: Tokenizer, sample: Sample) -> bool:
    """Whether the ids are the text to this tokenizer."""
    known = all(0 <= index < tokenizer.vocabulary.size for index in sample.ids)
    return known and tokenizer.decode(sample.ids) == sample.text


def symbols_of(vocabulary: Mapping[str, int]) -> Symbols:
    """Every symbol and its id but the mask, which one who reads whole texts need not have."""
    return {symbol: index for symbol, index in vocabulary.items() if symbol not in USUAL_NAMES["mask"]}


def same(one: Tokenizer | None, other: Tokenizer | None) -> bool:
    if one is None or other is None:
        return False
    return symbols_of(one.engine.get_vocab()) == symbols_of(other.engine.get_vocab())
