"""Probabilities of the choices of a hole: classification and extraction by template.

The score of a choice c between the text before and after the hole is, in nats,

    s_c = log p(c, after | before),    and    P(c) = exp(s_c) / sum_c' exp(s_c')

is by Bayes' rule the posterior of the choice given both sides, if all choices are equally likely beforehand. Where
eos is read (below), that holds for choices of equally many tokens: each row is given where its own text ends.

Every filled text is tokenised as a whole, so spaces and merges are those of the text as it is written: in `was [MASK].`
the choice `great` is the token ` great`. What is given are the tokens that all filled texts and the text before the
hole begin with. Where a choice merges with the text before it, the tokens of the merge are scored for all choices. p is
that of these tokens; other spellings of the same text are not added up. Networks that read both sides read eos after
the text, where every row that they were trained on has it; for others p is that of a text that begins so.

Models that read both sides also have the score `infill`, s_c = log p(c | before, after): only the choice is masked, so
one token has no Monte Carlo error. It is of a hole of as many tokens as c has.

Shapes: C choices, S strata of Monte Carlo noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any, Literal, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from adlm.canvas import HOLE, check_holes
from adlm.config.options import suggestion, unknown_choice_error
from adlm.errors import UserError, whole_number
from adlm.likelihood.conditional import ConditionalNats, ConditionalRow, ConditionalSettings, Score, conditional_nats
from adlm.likelihood.settings import CHOICE_SCORES, MAX_REPLICATES, NORMALISATIONS, ChoiceSettings
from adlm.methods.block_causal import BlockCausal
from adlm.methods.inputs import end_of_row, vocabulary_of
from adlm.methods.method import Method
from adlm.tokens import Tokenizer

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChoiceScores:
    """The choices of a hole with their probabilities, and the Monte Carlo standard errors of both."""

    text: str
    choices: tuple[str, ...]
    probabilities: tuple[float, ...]
    """exp of the log scores, divided by their sum."""
    stderr: tuple[float, ...]
    """Monte Carlo standard errors of the probabilities, to first order; 0 where the scores are exact."""
    log_scores: tuple[float, ...]
    """In nats: log p(choice and text after it | text before), or of another `score`, normalised as was asked for."""
    log_score_stderr: tuple[float, ...]
    num_tokens: tuple[int, ...]
    """Of what is scored: each choice and the text after it."""
    gap: float
    """The difference between the two highest log scores."""
    gap_stderr: float
    """Its Monte Carlo standard error: smaller than those of both scores, which share their random masks."""
    is_bound: bool
    """Whether the log scores are estimates of lower bounds (masked diffusion), not exact."""

    @property
    def best(self) -> str:
        """The most probable choice, the first of equal ones."""
        return self.choices[self.probabilities.index(max(self.probabilities))]


@dataclass(frozen=True)
class FilledTexts:
    """A text with each choice in its hole, as rows to score."""

    rows: tuple[ConditionalRow, ...]
    num_characters: tuple[int, ...]
    """Of what is scored."""
    prior: str
    """The text with a hole that the prior is measured on, unless the settings name one."""


def score_choices(
    method: Method,
    network: Any,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    choices: Sequence[str],
    settings: ChoiceSettings,
    report_progress: Callable[[int], None] = lambda done: None,
) -> list[ChoiceScores]:
    """The scores of the choices in the hole of every text.

    `report_progress(num)` is called as filled texts are finished, of C for each text and for each text of a prior.
    """
    _check_choices(choices)
    score = score_of(method, settings.score)
    is_exact = method.exact or score not in ("bound", "infill")
    of_rows: Score = "bound" if score == "infill" else cast(Score, score)
    filled = {text: _fill(method, tokenizer, text, choices, score, "text") for text in texts}
    priors: dict[str, str] = {}
    if settings.normalise == "prior":
        own = settings.prior
        priors = {text: each.prior if own is None else own for text, each in filled.items()}
        for prior in priors.values():
            if prior not in filled:
                filled[prior] = _fill(method, tokenizer, prior, choices, score, "prior")
    rows = [row for each in filled.values() for row in each.rows]
    conditional = ConditionalSettings(settings.samples, settings.seed, settings.batch, of_rows, greedy=False)
    results = iter(conditional_nats(method, network, rows, conditional, report_progress))
    scored = {text: [next(results) for _ in choices] for text in filled}
    found = []
    for text in texts:
        sizes = {"tokens": [each.num_tokens for each in scored[text]], "characters": filled[text].num_characters}
        weights = -1 / np.array(sizes.get(settings.normalise, [1] * len(choices)), dtype=np.float64)
        terms = [(scored[text], weights)]
        if priors:
            terms.append((scored[priors[text]], np.ones(len(choices))))
        log_scores = np.sum([weight * [each.nats for each in nats] for nats, weight in terms], axis=0)
        covariance = _covariance(terms, isinstance(method, BlockCausal))
        found.append(_choice_scores(text, choices, log_scores, covariance, scored[text], not is_exact))
    return found


class ChoiceOptions(TypedDict, total=False):
    """The fields of `ChoiceSettings`, as keyword arguments."""

    normalise: Literal["none", "tokens", "characters", "prior"]
    prior: str | None
    score: Literal["causal", "left-to-right", "bound", "infill"] | None
    samples: int
    seed: int
    batch: int | None


def choice_settings(options: ChoiceOptions) -> ChoiceSettings:
    """The settings of a call in Python: messages name arguments, not the options of a command."""
    known, checked = [field.name for field in fields(ChoiceSettings)], dict(options)
    for name, value in options.items():
        if name not in known:
            raise UserError(f"there is no option {name!r}{suggestion(name, known)}", name)
        if name == "samples":
            checked[name] = whole_number(name, value, 2, MAX_REPLICATES)
        elif name == "seed" or (name == "batch" and value is not None):
            checked[name] = whole_number(name, value, 0 if name == "seed" else 1)
        elif name == "normalise" or (name == "score" and value is not None):
            allowed = tuple(NORMALISATIONS if name == "normalise" else CHOICE_SCORES)
            if value not in allowed:
                raise UserError(unknown_choice_error(name, value, allowed), name)
        elif not isinstance(value, str | None):
            raise UserError(f"{name} must be a text with a hole, not a {type(value).__name__}", name)
    return ChoiceSettings(**checked)  # type: ignore[arg-type]


def score_of(method: Method, score: str | None) -> str:
    """The score that is used, checked against the method."""
    is_block_causal = isinstance(method, BlockCausal)
    if score in ("causal", "left-to-right") and not is_block_causal:
        raise UserError(f"score {score} is for block-causal models; leave it out", "score")
    if score == "infill" and (is_block_causal or method.exact):
        raise UserError("score infill is for models that read both sides, such as box; leave it out", "score")
    has_causal_copy = is_block_causal and method.config.train.causal_weight > 0
    if score == "causal" and not has_causal_copy:
        raise UserError(
            "score causal needs a trained causal copy, and train.causal_weight is 0; use left-to-right", "score"
        )
    by_default = "causal" if has_causal_copy else "left-to-right" if is_block_causal else "bound"
    return by_default if score is None else score


def _check_choices(choices: object) -> None:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise UserError(f"choices must be a list of texts, not a {type(choices).__name__}", "choices")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise UserError(f"choices must be text, not a {type(choice).__name__}", "choices")
        if not choice:
            raise UserError(f"choice {number + 1} is empty; leave it out, or write what stands there", "choices")
        if HOLE.search(choice):
            raise UserError(f"choice {choice!r:.60} has a hole; write the text that fills it", "choices")
        if choice in choices[:number]:
            raise UserError(f"choice {choice!r:.60} is given twice; leave one out", "choices")
    if len(choices) < 2:
        raise UserError(f"choices has {len(choices)} of them; give at least two", "choices")


def _fill(
    method: Method, tokenizer: Tokenizer, text: str, choices: Sequence[str], score: str, option: str
) -> FilledTexts:
    """The text with each choice; user errors for what cannot be scored."""
    check_holes(text, option)
    holes = list(HOLE.finditer(text))
    if len(holes) != 1:
        problem = f"{len(holes)} holes; leave one" if holes else "no hole; write [MASK] where the choices belong"
        raise UserError(f"{option} {text!r:.60} has {problem}", option)
    before, after = text[: holes[0].start()], text[holes[0].end() :]
    filled = [before + choice + after for choice in choices]
    for unknown in map(tokenizer.unknown_words, filled):
        if unknown:
            raise UserError(f"tokenizer {tokenizer.name} has no id for {unknown[0]!r}; write something else", option)
    given, given_after, *ids = tokenizer.encode_batch([before, after, *filled])
    num_given = _num_common([given, *ids])
    num_after = _num_common([row[::-1] for row in (given_after, *ids)]) if score == "infill" else 0
    bos, end = vocabulary_of(method.config).row_boundaries[0], end_of_row(method)
    is_causal = method.exact or score not in ("bound", "infill")
    if is_causal and not bos and num_given == 0:
        raise UserError(
            f"{option} {text!r:.60} begins with the hole, and this causal model has no bos to predict its first token "
            "from; put text before the hole",
            option,
        )
    first_of: dict[tuple[int, ...], str] = {}
    for choice, row in zip(choices, ids, strict=True):
        num_read = len(bos) + len(row) + len(end)
        if num_read > method.config.length:
            raise UserError(
                f"with choice {choice!r:.60} the text has {num_read} tokens, and the model reads "
                f"{method.config.length}; shorten {option} {text!r:.60}",
                option,
            )
        if len(row) <= num_given + num_after:
            raise UserError(f"choice {choice!r:.60} has no tokens in {option} {text!r:.60}; leave it out", "choices")
        other = first_of.setdefault(tuple(row), choice)
        if other != choice:
            raise UserError(
                f"choices {other!r:.60} and {choice!r:.60} are the same tokens in {option} {text!r:.60}; leave one out",
                "choices",
            )
    return FilledTexts(
        tuple(
            ConditionalRow((*bos, *row[:num_given]), tuple(row[num_given:stop]), (*row[stop:], *end))
            for row in ids
            for stop in [len(row) - num_after]
        ),
        tuple(len(choice) + (0 if score == "infill" else len(after)) for choice in choices),
        f"{' ' if before.endswith(' ') else ''}[MASK]",
    )


def _num_common(rows: Sequence[Sequence[int]]) -> int:
    """How many ids all rows begin with."""
    return sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(*rows, strict=False)))


def _covariance(terms: Sequence[tuple[list[ConditionalNats], Floats]], is_block_causal: bool) -> Floats:
    """(C, C), the Monte Carlo covariance of log scores that are sums of weighted nats.

    cov(s_i, s_j) = sum over strata of e_i e_j, for errors e of scores that share their masks: those of continuations of
    one length, and of block-causal models all. The errors of others are independent.
    """
    num = len(terms[0][0])
    errors: dict[tuple[int, int], Floats] = {}
    for scored, weights in terms:
        for choice, nats in enumerate(scored):
            key = (0 if is_block_causal else nats.num_tokens, len(nats.errors))
            of_strata = errors.setdefault(key, np.zeros((num, len(nats.errors))))
            of_strata[choice] += weights[choice] * np.array(nats.errors)
    return np.asarray(np.sum([each @ each.T for each in errors.values()], axis=0))


def _choice_scores(
    text: str,
    choices: Sequence[str],
    log_scores: Floats,
    covariance: Floats,
    scored: Sequence[ConditionalNats],
    is_bound: bool,
) -> ChoiceScores:
    """P = softmax(s), to first order with the covariance J cov(s) J', J = dP/ds = diag(P) - P P'."""
    weights = np.exp(log_scores - log_scores.max())
    probabilities = weights / weights.sum()
    jacobian = np.diag(probabilities) - np.outer(probabilities, probabilities)
    variances = np.diag(jacobian @ covariance @ jacobian).clip(min=0)  # rounding
    first, second = np.argsort(-log_scores, kind="stable")[:2]
    gap_variance = covariance[first, first] + covariance[second, second] - 2 * covariance[first, second]
    return ChoiceScores(
        text=text,
        choices=tuple(choices),
        probabilities=tuple(probabilities.tolist()),
        stderr=tuple(np.sqrt(variances).tolist()),
        log_scores=tuple(log_scores.tolist()),
        log_score_stderr=tuple(np.sqrt(np.diag(covariance)).tolist()),
        num_tokens=tuple(each.num_tokens for each in scored),
        gap=float(log_scores[first] - log_scores[second]),
        gap_stderr=float(np.sqrt(max(gap_variance, 0.0))),
        is_bound=is_bound,
    )
