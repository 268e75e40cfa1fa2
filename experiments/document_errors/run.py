"""How much too small the error over documents is where neighbouring documents are taken for independent: unigram nats
of the validation splits of Penn Treebank and WikiText-2, by document and by the clusters that `adlm perplexity` uses.

python experiments/document_errors/run.py DATA [TOKENIZER ...]        (DATA holds ptb/ and wikitext-2/)
"""

import argparse
import math

import numpy as np

from adlm.likelihood.text_sets import text_sets
from adlm.tokens import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("tokenizers", nargs="*", default=["bytes"])
    arguments = parser.parse_args()
    for name in arguments.tokenizers:
        tokenizer = load_tokenizer(name)
        with text_sets(["ptb", "wikitext2"], tokenizer, 1024, "packed", "valid", arguments.data) as texts:
            for text in texts:
                tokens = text.rows.tokens
                ids = np.empty(len(tokens), np.int64)
                tokens.copy_to(ids, 0, len(ids))
                counts = np.bincount(ids, minlength=tokenizer.vocabulary.size)
                nats = -np.log(counts[ids] / len(ids))
                document = np.searchsorted(tokens.ends, np.arange(len(ids)), side="right")
                alone, together = error(nats, document), error(nats, text.rows.clusters[document])
                ratio = together / alone
                print(
                    f"{tokenizer.name}, {text.name}: {tokens.extent.documents:,} documents +- {alone:.5f}, "
                    f"{text.rows.clusters.max() + 1} {text.unit}s +- {together:.5f}: {ratio:.1f} times, "
                    f"design effect {ratio**2:.1f}"
                )


def error(nats: np.ndarray, unit: np.ndarray) -> float:
    """Of the mean nats per token, over units."""
    sums, tokens = np.bincount(unit, nats), np.bincount(unit)
    used = tokens > 0
    off = (sums - nats.mean() * tokens)[used] / len(nats)
    return math.sqrt((off**2).sum() * used.sum() / (used.sum() - 1))


if __name__ == "__main__":
    main()
