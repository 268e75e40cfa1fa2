"""Does eos after a continuation matter to a network that reads both sides? The last word of LAMBADA among four.

    python experiments/last_word/run.py lambada_test.jsonl > experiments/last_word/log.txt

The text before it is cut to 49 words. The three others are last words of other passages, and the score is that of
`adlm lm-eval`: the bound, with 32 masked versions or all masks. The model is the one in the box.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import adlm
from adlm.likelihood.conditional import ConditionalRow, ConditionalSettings, conditional_nats
from adlm.methods.inputs import vocabulary_of

NUM = 150


def questions(passages: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The text before the last word, and four words of which the first is right."""
    words = [passage.split() for passage in passages]
    random.Random(0).shuffle(words)
    others = iter(words[NUM:])
    return [(" ".join(own[-50:-1]), [own[-1], *(next(others)[-1] for _ in range(3))]) for own in words[:NUM]]


def main() -> None:
    lm = adlm.load()
    tokenizer, (bos, eos) = lm.require_tokenizer(), vocabulary_of(lm.config).row_boundaries
    asked = questions([json.loads(line)["text"] for line in Path(sys.argv[1]).read_text().splitlines()])
    for title, end in (("without", []), ("with", eos)):
        rows = []
        for before, answers in asked:
            given = tokenizer.encode(before)
            for answer in answers:
                ids = tokenizer.encode(f"{before} {answer}")
                rows.append(ConditionalRow((*bos, *given), tuple(ids[len(given) :]), tuple(end)))
        scores = conditional_nats(lm.method, lm.network, rows, ConditionalSettings(samples=32, greedy=False))
        nats = np.array([score.nats for score in scores]).reshape(NUM, 4)
        right = (nats.argmin(axis=1) == 0).mean()
        error = (right * (1 - right) / NUM) ** 0.5
        print(
            f"{title} eos: {right:.1%} ± {error:.1%} right, the right word costs {nats[:, 0].mean():.2f} nats",
            flush=True,
        )


if __name__ == "__main__":
    main()
