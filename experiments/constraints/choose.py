"""Zero-shot topics of news by template: accuracy of `lm.choose` on AG News by normalisation.

    python experiments/constraints/choose.py --data FOLDER/ag_news/test.csv --models box smollm2
    python experiments/constraints/choose.py --data FOLDER/ag_news/test.csv --models smollm2 --hole before

The file has class, title and description in each row, without a header. As many texts of each class are taken, at
random by the seed, and cut to their first words, so that they fit the rows of the model in the box.
"""

import argparse
import csv
import json
import math
import random
import time
from pathlib import Path

import adlm

TOPICS = ["politics", "sports", "business", "technology"]  # World, Sports, Business, Sci/Tech
TEMPLATES = {  # with the text, and without it: the prior
    "after": ("{text} The topic of this article is [MASK].", "The topic of this article is [MASK]."),
    "before": ("The topic of this article is [MASK]. {text}", "The topic of this article is [MASK]."),
}
"""Where the hole is: before the text, the score is mainly log p(text | topic)."""


def read_texts(path: Path, num: int, num_words: int, seed: int) -> list[tuple[int, str]]:
    """(class, text), `num` in all, as many of each class."""
    by_class: dict[int, list[str]] = {label: [] for label in range(len(TOPICS))}
    with path.open(encoding="utf-8", newline="") as file:
        for label, title, description in csv.reader(file):
            words = f"{title}. {description}".replace("\\", " ").split()
            by_class[int(label) - 1].append(" ".join(words[:num_words]))
    rng = random.Random(seed)
    return [(label, text) for label, texts in by_class.items() for text in rng.sample(texts, num // len(TOPICS))]


def measure(name: str, texts: list[tuple[int, str]], place: str, score: str | None, samples: int) -> dict[str, object]:
    """The accuracy by normalisation, from one measurement of the scores."""
    lm, start, (template, prior) = adlm.load(name), time.perf_counter(), TEMPLATES[place]
    found = lm.choose([template.replace("{text}", text) for _, text in texts], TOPICS, samples=samples, score=score)
    priors = {
        "prior": lm.choose(prior, TOPICS, samples=samples, score=score).log_scores,
        "prior, hole alone": lm.choose(" [MASK]", TOPICS, samples=samples, score=score).log_scores,
    }
    right: dict[str, list[bool]] = {}
    chosen: dict[str, list[int]] = {}
    for (label, text), scores in zip(texts, found, strict=True):
        num_after = len(template.replace("{text}", text).partition("[MASK]")[2])
        sizes = {
            "none": [1] * len(TOPICS),
            "tokens": scores.num_tokens,
            "characters": [len(topic) + (0 if score == "infill" else num_after) for topic in TOPICS],
        }
        normalised = {
            each: [score / size for score, size in zip(scores.log_scores, sizes[each], strict=True)] for each in sizes
        }
        for each, of_prior in priors.items():
            normalised[each] = [score - log_prior for score, log_prior in zip(scores.log_scores, of_prior, strict=True)]
        for each, values in normalised.items():
            best = max(range(len(TOPICS)), key=values.__getitem__)
            right.setdefault(each, []).append(best == label)
            chosen.setdefault(each, []).append(best)
    return {
        "model": name,
        "hole": place,
        "score": score or "default",
        "texts": len(texts),
        "seconds": round(time.perf_counter() - start),
        "undecided": sum(scores.gap < 2 * scores.gap_stderr for scores in found),
        "accuracy": {each: round(sum(hits) / len(hits), 4) for each, hits in right.items()},
        "stderr": {
            each: round(math.sqrt(sum(hits) * (len(hits) - sum(hits)) / len(hits) ** 3), 4)
            for each, hits in right.items()
        },
        "chosen": {each: [picked.count(index) for index in range(len(TOPICS))] for each, picked in chosen.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="test.csv of AG News")
    parser.add_argument("--models", nargs="+", default=["box", "smollm2"])
    parser.add_argument("--num", type=int, default=200, help="texts")
    parser.add_argument("--words", type=int, default=30, help="of each text")
    parser.add_argument("--hole", choices=list(TEMPLATES), default="after", help="where the hole is")
    parser.add_argument("--score", help="of adlm choose")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen_texts = read_texts(arguments.data, arguments.num, arguments.words, arguments.seed)
    for model in arguments.models:
        result = measure(model, chosen_texts, arguments.hole, arguments.score, arguments.samples)
        print(json.dumps(result), flush=True)
