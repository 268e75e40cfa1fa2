"""The settings of a metric card, with their help texts. Imports no torch, for `adlm judge --help`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from adlm.errors import UserError
from adlm.request import Request, option

Metric = Literal["perplexity", "mauve", "entropy", "diversity"]
METRICS: tuple[Metric, ...] = get_args(Metric)
IdsOf = Literal["auto", "retokenised", "as-sampled"]
Pooling = Literal["last", "mean"]
Eos = Literal["published", "first", "all", "closing"]
Start = Literal["given", "bos"]

# Which tokens are counted, by name; a first token that is given never is.
EOS: dict[Eos, str] = {
    "published": "every token that is not eos, and the first eos (of a text that begins with one, no other)",
    "first": "up to and including the first eos after the first token",
    "all": "every token, each eos too",
    "closing": "every token but an eos that ends the text, whose nats are added and which is not counted",
}
START: dict[Start, str] = {
    "given": "the text's first token is given and not counted, as published",
    "bos": "every window begins with the judge's bos, as in its training, and every token of the text counts",
}
REFERENCE, PERPLEXITY, MAUVE = "reference texts", "generative perplexity", "MAUVE"


@dataclass(frozen=True)
class JudgeSettings(Request):
    """Every setting that the metrics of a card depend on."""

    metrics: tuple[Metric, ...] = option(
        f"comma-separated subset of {','.join(METRICS)} (default: all)", METRICS, commas=True, metavar="LIST"
    )
    device: str = option("auto, cuda or cpu (default: auto, a GPU if available)", "auto")
    batch: int | None = option(
        "texts per batch (default: 4, on a GPU 16); does not change the results", None, minimum=1
    )
    reference: Path | None = option(
        "a prepared folder, a file with one text per line (.txt, .jsonl), or a samples file",
        None,
        group=REFERENCE,
        metavar="DATA",
    )
    split: str | None = option("split of a prepared folder (default: valid)", None, group=REFERENCE)
    field: str = option("field of a .jsonl file", "text", group=REFERENCE)
    num_reference: int | None = option(
        "number of reference texts (default: as many as samples)", None, group=REFERENCE, minimum=1
    )
    reference_seed: int = option("seed that selects the reference texts", 0, group=REFERENCE)
    judge_reference: bool = option(
        "also report perplexity, entropy and diversity of the reference", False, group=REFERENCE
    )
    model: str = option(
        "Hugging Face name or folder, a .gguf file, or an AR or A2R model folder",
        "gpt2-large",
        group=PERPLEXITY,
        metavar="JUDGE",
    )
    eos: Eos | None = option(
        "(default: closing for an adlm model, published for a Hugging Face model)", None, group=PERPLEXITY, choices=EOS
    )
    start: Start | None = option(
        "(default: bos for an adlm model, given for a Hugging Face model)", None, group=PERPLEXITY, choices=START
    )
    ids: IdsOf = option(
        "ids the judge reads: the text retokenised, as published, or the ids as\n"
        "sampled (default: auto, as-sampled for an adlm model with the same tokenizer)",
        "auto",
        group=PERPLEXITY,
    )
    max_tokens: int | None = option(
        "truncate texts to N tokens (default: no truncation; published: the model's length)",
        None,
        group=PERPLEXITY,
        minimum=1,
    )
    context: int | None = option("maximum context window (default: the judge's)", None, group=PERPLEXITY, minimum=1)
    features: str = option("Hugging Face name or folder, or minilm", "gpt2-large", group=MAUVE)
    pooling: Pooling | None = option(
        "pooling of the last layer: last token or mean (default: last; minilm: mean)", None, group=MAUVE
    )
    given_features: tuple[Path, Path] | None = option(
        "precomputed features", None, group=MAUVE, metavar=("SAMPLES.npy", "REFERENCE.npy")
    )
    seeds: int = option(
        "number of clusterings, with seeds 25, 26, ...",
        5,
        group=MAUVE,
        minimum=1,
        maximum=1_000,
        remedy="5 are usual, and each takes seconds or more",
    )
    clusters: int | None = option("clusters per clustering (default: a tenth of the samples)", None, group=MAUVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metrics:
            raise UserError(f"--metrics is empty; give a subset of {','.join(METRICS)}")
