"""The results of the quickstart, and the conclusion that they support. `report_page` formats them."""

from dataclasses import dataclass

REPORT, PAGE = "report.json", "report.html"
TRACE = "trace.html"
"""Page with the trace of the first ADLM sample."""


@dataclass(frozen=True)
class TrainedModel:
    """The results of one model."""

    nats: float
    stderr: float
    parameters: int
    steps: int
    tokens: int
    seconds: float
    """Training time, without preparation and evaluation."""


@dataclass(frozen=True)
class BoxTexts:
    """What the model in the box writes; not trained by the quickstart."""

    sample: str
    canvas: str
    """A sentence with holes, such as [MASK*3]."""
    infilled: str
    seconds: float
    """Including loading."""


SEED_CAVEAT = (
    "Each model was trained with one seed, and another seed changes such a bound by about 0.01 (docs/results.md), so "
    "one run of each does not show which method is better."
)


@dataclass(frozen=True)
class QuickstartReport:
    adlm: TrainedModel
    mdlm: TrainedModel
    difference: float
    """Bound of adlm minus bound of mdlm, on the same rows and random numbers."""
    difference_stderr: float
    unigram_nats: float
    bigram_nats: float
    held_out_tokens: int
    samples: tuple[str, ...]
    """Samples of ADLM."""
    mdlm_samples: tuple[str, ...]
    canvas: str
    """The sentence with holes, such as [MASK*3]."""
    infilled: str
    """The sentence as infilled by ADLM."""
    box: BoxTexts
    seconds: float
    """Total time."""
    commit: str
    text: str
    """The name of the text."""
    commands: dict[str, str]
    """By purpose: the command that made the report, and commands that repeat its parts."""

    @property
    def conclusion(self) -> str:
        """The result in one sentence."""
        if abs(self.difference) < 2 * self.difference_stderr:
            return "The difference between the two bounds is not significant."
        better, worse = ("ADLM", "MDLM") if self.difference < 0 else ("MDLM", "ADLM")
        return (
            f"For these two models, {better}'s bound is lower than {worse}'s by {abs(self.difference):.4f} ± "
            f"{self.difference_stderr:.4f} nats per token on the same text and random numbers."
        )

    @property
    def verdict(self) -> str:
        """The conclusion and what it does not show."""
        return f"{self.conclusion} {SEED_CAVEAT}"
