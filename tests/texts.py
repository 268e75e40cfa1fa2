"""Texts of made-up words for the tests that need some, and nothing that was ever written by anybody."""

import random

WORDS = "anchor bridge canvas diffusion the of to a and mask token walk time noise rare telling".split()  # noqa: SIM905


def prose(num_words: int, seed: int = 0) -> str:
    """Sentences of made-up order, with punctuation, numbers and a few line breaks."""
    draws = random.Random(seed)
    marks = ["", "", "", "", ",", ".", "; it's", " 42", ".\n"]
    return " ".join(draws.choice(WORDS) + draws.choice(marks) for _ in range(num_words))
