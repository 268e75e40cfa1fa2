"""The problems of a corpus as ACoT sees them: labels, the target of every slot, statistics. Prints nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from adlm.apps.reasoning.problems import Problem, ProblemSet, problem_parts, problem_set
from adlm.apps.reasoning.rows import BOA, REASONING_METHODS, Encoder, Stage, collate, special_ids, with_reasoning_tokens
from adlm.config.schema import Config, Reason
from adlm.data.rows.anchor_rules import QUANTILES
from adlm.errors import UserError
from adlm.tokens import Tokenizer

ACOT = REASONING_METHODS["acot"]
MAX_PROBLEMS = 10_000  # read of each split
NUM_EXAMPLES = 3  # of each split, evenly spaced


@dataclass(frozen=True)
class InspectedLabel:
    text: str
    tokens: tuple[str, ...]
    """What the tokenizer makes of the label; the first token is the target."""

    @property
    def is_split(self) -> bool:
        return len(self.tokens) > 1


@dataclass(frozen=True)
class SlotTarget:
    """What [BOA] or a slot is trained to predict."""

    position: str
    """[BOA], or the number of the slot from 1 on."""
    target: str | None
    """A token; None where there is no loss."""
    label: InspectedLabel | None
    """The label that begins with the target; None for [EOA] and where there is no loss."""


@dataclass(frozen=True)
class InspectedProblem:
    number: int
    """Position in its split, from 1 on."""
    question: str
    steps: tuple[str, ...]
    answer: str
    labels: tuple[InspectedLabel, ...]
    slots: tuple[SlotTarget, ...]


@dataclass(frozen=True)
class ProblemStatistics:
    num_problems: int
    """Problems that were read: all, or the first MAX_PROBLEMS."""
    without_steps: int
    steps: Mapping[int, int]
    """Number of problems by their number of steps."""
    labels: Mapping[int, int]
    """Number of problems by their number of labels."""
    label_quantiles: tuple[int, ...]
    """Quantiles of the number of labels per problem: minimum, 10%, median, 90%, maximum."""
    num_labels: int
    distinct_labels: int
    distinct_targets: int
    """Different first tokens; fewer than `distinct_labels` where labels begin with the same token."""
    split_share: float
    """Fraction of labels that the tokenizer splits."""
    problems_with_split: int
    """Problems with at least one such label."""
    problems_beyond_slots: int
    """Problems with more labels than slots."""


@dataclass(frozen=True)
class InspectedProblems:
    """The problems of a split."""

    num_slots: int
    statistics: ProblemStatistics
    examples: tuple[InspectedProblem, ...]


def inspect_problems(config: Config, tokenizer: Tokenizer, splits: Sequence[str]) -> dict[str, InspectedProblems]:
    """The problems of the splits of the corpus that the config names, with `reason.slots` slots."""
    num_slots = (config.reason or Reason()).slots
    tokenizer = with_reasoning_tokens(tokenizer)
    found = {}
    for split, part in problem_parts(config.data).items():
        if split in splits:
            problems = list(islice(part.problems(), MAX_PROBLEMS))
            try:
                found[split] = inspected(problems, problem_set(config.data.name), tokenizer, num_slots)
            except UserError as error:
                raise UserError(f"{part.name}: {error}") from None
    return found


def inspected(
    problems: Sequence[Problem], source: ProblemSet, tokenizer: Tokenizer, num_slots: int
) -> InspectedProblems:
    """Problems of a set; the tokenizer has the reasoning tokens. There must be at least one problem."""
    labels = [source.labels(problem) for problem in problems]
    distinct = sorted({label for given in labels for label in given})
    encoded = tokenizer.encode_batch([f"{source.label_prefix}{label}" for label in distinct])
    known = {
        label: InspectedLabel(label, tuple(tokenizer.decode([index]) for index in ids))
        for label, ids in zip(distinct, encoded, strict=True)
    }
    split = [sum(known[label].is_split for label in given) for given in labels]
    num_labels = sum(map(len, labels))
    statistics = ProblemStatistics(
        num_problems=len(problems),
        without_steps=sum(not problem.steps for problem in problems),
        steps=_counts([len(problem.steps) for problem in problems]),
        labels=_counts([len(given) for given in labels]),
        label_quantiles=tuple(np.quantile(list(map(len, labels)), QUANTILES, method="nearest").tolist()),
        num_labels=num_labels,
        distinct_labels=len(distinct),
        distinct_targets=len({ids[0] for ids in encoded}),
        split_share=sum(split) / max(1, num_labels),
        problems_with_split=sum(num > 0 for num in split),
        problems_beyond_slots=sum(len(given) > num_slots for given in labels),
    )
    encoder = Encoder(tokenizer.encode_batch, source, special_ids(tokenizer))
    chosen = sorted({round(i * (len(problems) - 1) / max(1, NUM_EXAMPLES - 1)) for i in range(NUM_EXAMPLES)})
    examples = []
    for index in chosen:
        problem, given = problems[index], tuple(known[label] for label in labels[index])
        targets = _slot_targets(problem, given, encoder, tokenizer, num_slots)
        examples.append(
            InspectedProblem(index + 1, problem.question, problem.steps, problem.answer, given, tuple(targets))
        )
    return InspectedProblems(num_slots, statistics, tuple(examples))


def _counts(numbers: Sequence[int]) -> dict[int, int]:
    return dict(sorted(Counter(numbers).items()))


def _slot_targets(
    problem: Problem, labels: Sequence[InspectedLabel], encoder: Encoder, tokenizer: Tokenizer, num_slots: int
) -> list[SlotTarget]:
    """The targets of [BOA] and the slots, read from the row that ACoT is trained on: each predicts the next id."""
    if not num_slots:
        return []
    row = encoder.row(encoder.encode([problem])[0], ACOT, Stage(1, num_slots))
    x, pad = (part[0].tolist() for part in collate([row], encoder.ids, ACOT, num_slots))
    targets = []
    for number in range(num_slots + 1):
        column = row.num_question + number + 1
        target = None if pad[column] else tokenizer.decode([x[column]])
        label = labels[number] if number < min(len(labels), num_slots) else None
        targets.append(SlotTarget(str(number) if number else BOA, target, label))
    return targets
