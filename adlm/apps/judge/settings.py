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
        METRICS, commas=True, metavar="LIST", help=f"comma-separated subset of {','.join(METRICS)} (default: all)"
    )
    device: str = option("auto", metavar="D", help="auto, cuda or cpu (default: auto, a GPU if available)")
    batch: int | None = option(
        None, minimum=1, metavar="B", help="texts per batch (default: 4, on a GPU 16); does not change the results"
    )
    reference: Path | None = option(
        None,
        group=REFERENCE,
        metavar="DATA",
        help="a prepared folder, a file with one text per line (.txt, .jsonl), or a samples file",
    )
    split: str | None = option(
        None, group=REFERENCE, metavar="NAME", help="split of a prepared folder (default: valid)"
    )
    field: str = option("text", group=REFERENCE, metavar="NAME", help="field of a .jsonl file")
    num_reference: int | None = option(
        None,
        group=REFERENCE,
        minimum=1,
        metavar="N",
        help="number of reference texts (default: as many as samples)",
    )
    reference_seed: int = option(0, group=REFERENCE, metavar="S", help="seed that selects the reference texts")
    judge_reference: bool = option(
        False, group=REFERENCE, help="also report perplexity, entropy and diversity of the reference"
    )
    model: str = option(
        "gpt2-large",
        group=PERPLEXITY,
        metavar="JUDGE",
        help="Hugging Face name or folder, a .gguf file, or an AR or A2R model folder",
    )
    eos: Eos | None = option(
        None,
        group=PERPLEXITY,
        choices=EOS,
        help="(default: closing for an adlm model, published for a Hugging Face model)",
    )
    start: Start | None = option(
        None,
        group=PERPLEXITY,
        choices=START,
        help="(default: bos for an adlm model, given for a Hugging Face model)",
    )
    ids: IdsOf = option(
        "auto",
        group=PERPLEXITY,
        help="ids the judge reads: the text retokenised, as published, or the ids as\n"
        "sampled (default: auto, as-sampled for an adlm model with the same tokenizer)",
    )
    max_tokens: int | None = option(
        None,
        group=PERPLEXITY,
        minimum=1,
        metavar="N",
        help="truncate texts to N tokens (default: no truncation; published: the model's length)",
    )
    context: int | None = option(
        None, group=PERPLEXITY, minimum=1, metavar="N", help="maximum context window (default: the judge's)"
    )
    features: str = option("gpt2-large", group=MAUVE, metavar="NAME", help="Hugging Face name or folder, or minilm")
    pooling: Pooling | None = option(
        None, group=MAUVE, help="pooling of the last layer: last token or mean (default: last; minilm: mean)"
    )
    given_features: tuple[Path, Path] | None = option(
        None, group=MAUVE, metavar=("SAMPLES.npy", "REFERENCE.npy"), help="precomputed features"
    )
    seeds: int = option(
        5,
        group=MAUVE,
        minimum=1,
        maximum=1_000,
        remedy="a clustering takes seconds or more",
        metavar="N",
        help="number of clusterings, with seeds 25, 26, ...",
    )
    clusters: int | None = option(
        None, group=MAUVE, metavar="K", help="clusters per clustering (default: a tenth of the samples)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metrics:
            raise UserError(f"--metrics is empty; give a subset of {','.join(METRICS)}")
