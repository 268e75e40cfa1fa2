"""The reasoning methods, and problems as token ids: `question [BOA] slot*k [EOA] reasoning answer`. No networks.

The methods differ in the slots (continuous: the previous hidden state; or a learnt pause token), in whether slots have
labels, and in how many steps each stage leaves out.

| method | slots | labels | steps left out |
|---|---|---|---|
| no-cot | none | | all |
| cot | none | | none |
| pause | pause tokens | | all |
| icot | none | | some more tokens of the reasoning in each stage, all in the last |
| coconut | continuous | no | one more in each stage, all in the last |
| coconut-pause | pause tokens | no | one more in each stage, all in the last |
| acot | continuous | yes | none, or one more in each stage (ProsQA) |

A slot of a row holds the id it is trained towards: its anchor label, or [ANT] where there is none. So next-token
targets are the targets of the method: [BOA] predicts the first label, slot i label i + 1, the last slot [EOA].

Shapes: B rows, L ids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.apps.reasoning.problems import Problem, ProblemSet, problem_set
from adlm.config.schema import Config, Reason
from adlm.errors import UserError
from adlm.tokens import Tokenizer, add_special_tokens

ALL_STEPS = -1

SlotKind = Literal["none", "continuous", "pause"]


@dataclass(frozen=True)
class ReasoningMethod:
    """What a method puts between question and answer."""

    slots: SlotKind
    labelled: bool = False
    """Whether the slots are trained towards the anchor labels."""
    leaves_out_steps: bool = True
    """Whether stages remove reasoning steps; for acot a choice of the data: `Reason.remove_steps`."""
    staged: bool = True
    """Whether there is a curriculum: the first stage is CoT, each later one has one more slot or one step fewer."""

    @property
    def markers(self) -> bool:
        """Whether slots stand between [BOA] and [EOA]."""
        return self.slots != "none" and self.staged


REASONING_METHODS: dict[str, ReasoningMethod] = {
    "no-cot": ReasoningMethod("none", staged=False),
    "cot": ReasoningMethod("none", leaves_out_steps=False, staged=False),
    "pause": ReasoningMethod("pause", staged=False),
    "icot": ReasoningMethod("none"),
    "coconut": ReasoningMethod("continuous"),
    "coconut-pause": ReasoningMethod("pause"),
    "acot": ReasoningMethod("continuous", labelled=True),
}


def reason_of(config: Config) -> Reason:
    if config.reason is None:
        raise UserError("no reasoning method is given; add a preset such as prosqa/small, or reason.method=acot")
    return config.reason


def reasoning_method(config: Config) -> ReasoningMethod:
    return REASONING_METHODS[reason_of(config).method]


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum."""

    epochs: int
    slots: int = 0
    """Slots between question and reasoning."""
    left_out: int = 0
    """Reasoning steps left out, from the first on; ALL_STEPS leaves out all."""
    left_out_tokens: int = 0
    """Tokens of the remaining reasoning left out, from the first on."""
    reset_optimizer: bool = False
    """Whether the optimizer starts anew."""

    def __str__(self) -> str:
        steps = "all steps" if self.left_out == ALL_STEPS else _counted(self.left_out, "step")
        if self.left_out_tokens:
            steps = _counted(self.left_out_tokens, "token")
        return f"{_counted(self.epochs, 'epoch')} with {_counted(self.slots, 'slot')}, {steps} left out"


def _counted(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


def stages_of(config: Config) -> list[Stage]:
    """The stages of a run."""
    return curriculum(reason_of(config), problem_set(config.data.name).removes_steps)


def curriculum(reason: Reason, removes_steps: bool = False) -> list[Stage]:
    """The stages of a run; `removes_steps` is that of the `ProblemSet`.

    Methods without stages train for first_epochs + epochs. The others begin with `first_epochs` of plain CoT; then come
    stages of `stage_epochs`, of which the last takes the epochs that remain. Stage s = 1, 2, ... has s * slots_a_stage
    slots, at most `slots`. Coconut and its pause variant leave out the first s steps, iCoT the first s * tokens_a_stage
    tokens of the reasoning, and in one more stage all of it. ACoT leaves out a step for every slot if `removes_steps`,
    and none otherwise, unless `reason.remove_steps` says which.
    """
    method = REASONING_METHODS[reason.method]
    if not method.staged:
        slots = reason.slots if method.slots != "none" else 0
        return [Stage(reason.first_epochs + reason.epochs, slots, ALL_STEPS if method.leaves_out_steps else 0)]
    stages = [Stage(reason.first_epochs)] if reason.first_epochs else []
    forms = _forms(reason, method, removes_steps)
    remaining = reason.epochs
    for number, (slots, steps, tokens) in enumerate(forms, 1):
        epochs = remaining if number == len(forms) else min(reason.stage_epochs, remaining)
        if epochs:
            stages.append(Stage(epochs, slots, steps, tokens, reason.reset_optimizer))
        remaining -= epochs
    return stages


def _forms(reason: Reason, method: ReasoningMethod, removes_steps: bool) -> list[tuple[int, int, int]]:
    """Slots, steps left out and tokens left out of the stages after the first."""
    numbers = range(1, 1 + max(1, math.ceil(reason.slots / reason.slots_a_stage)))
    slots = [min(number * reason.slots_a_stage, reason.slots) for number in numbers]
    if method.labelled:
        removes = removes_steps if reason.remove_steps is None else reason.remove_steps
        return [(num, num if removes else 0, 0) for num in slots]
    if method.slots == "none":
        return [*((0, 0, number * reason.tokens_a_stage) for number in numbers), (0, ALL_STEPS, 0)]
    return [*zip(slots, numbers, [0] * len(slots), strict=True), (reason.slots, ALL_STEPS, 0)]


Ids = NDArray[np.int64]

ANSWER_MARK = "### "
BOA, SLOT, EOA, PAUSE, PAD = "[BOA]", "[ANT]", "[EOA]", "[PAUSE]", "[PAD]"
WIDTH = 16  # questions and answers are padded to multiples of this, so that batches have few different shapes


@dataclass(frozen=True)
class SpecialIds:
    """Ids that no text contains."""

    pad: int
    boa: int
    """[BOA], before the slots; Coconut's start of thought."""
    slot: int
    """[ANT]: a slot without a label; a continuous slot is never read as a token."""
    eoa: int
    """[EOA], after the slots; Coconut's end of thought."""
    pause: int
    eos: int


def with_reasoning_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with [BOA], [ANT], [EOA], [PAUSE] and [PAD]; one that has them already keeps its ids."""
    if tokenizer.vocabulary.eos_id is None:
        raise UserError(f"tokenizer {tokenizer.name} has no end-of-text token, with which an answer ends; use another")
    return add_special_tokens(tokenizer, (BOA, SLOT, EOA, PAUSE, PAD))


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The ids of a tokenizer made by `with_reasoning_tokens`."""
    pad, boa, slot, eoa, pause = map(tokenizer.engine.token_to_id, (PAD, BOA, SLOT, EOA, PAUSE))
    return SpecialIds(pad, boa, slot, eoa, pause, tokenizer.vocabulary.eos_id)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EncodedProblem:
    """The ids of the parts of a problem."""

    question: Ids
    steps: tuple[Ids, ...]
    answer: Ids
    """With its mark and the end-of-text token."""
    labels: tuple[int, ...]
    """The anchor labels: the first token of each."""


@dataclass(frozen=True)
class Encoder:
    """How problems become ids."""

    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    problem_set: ProblemSet
    ids: SpecialIds
    misfits: Literal["refuse", "keep"] = "keep"

    def encode(self, problems: Sequence[Problem], where: str = "problem") -> list[EncodedProblem]:
        """The problems; errors name a problem `where` 1, 2, ...

        A slot predicts one token. Of a label that the tokenizer splits, the first token is the target: it is what the
        model has to write first when the label is due.
        """
        all_labels = [self._labels(problem, f"{where} {number}") for number, problem in enumerate(problems, 1)]
        result, ids = [], self._encoded_texts(problems, all_labels)
        for number, (problem, labels) in enumerate(zip(problems, all_labels, strict=True), 1):
            if self.misfits == "refuse" and not problem.steps:
                raise UserError(
                    f"{where} {number} has no steps ({problem.question:.40}...); remove it, or set reason.misfits=keep"
                )
            label_ids = [ids[self.problem_set.label_prefix + label] for label in labels]
            split = next((label for label, found in zip(labels, label_ids, strict=True) if len(found) > 1), None)
            if self.misfits == "refuse" and split is not None:
                raise UserError(
                    f"the tokenizer splits the anchor label {split!r} of {where} {number}; use a larger tokenizer or "
                    "more problems to train it on, or set reason.misfits=keep"
                )
            result.append(
                EncodedProblem(
                    ids[f"{problem.question}\n"],
                    tuple(ids[f"{step}\n"] for step in problem.steps),
                    np.append(ids[ANSWER_MARK + problem.answer], self.ids.eos),
                    tuple(int(found[0]) for found in label_ids),
                )
            )
        return result

    def _labels(self, problem: Problem, where: str) -> tuple[str, ...]:
        try:
            return self.problem_set.labels(problem)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def _encoded_texts(self, problems: Sequence[Problem], labels: Sequence[Sequence[str]]) -> dict[str, Ids]:
        """The ids of all parts of the problems; steps and labels repeat, and each text is encoded once."""
        texts: dict[str, None] = {}
        for problem in problems:
            texts |= dict.fromkeys((f"{problem.question}\n", ANSWER_MARK + problem.answer))
            texts |= dict.fromkeys(f"{step}\n" for step in problem.steps)
        texts |= dict.fromkeys(self.problem_set.label_prefix + label for given in labels for label in given)
        encoded = self.encode_batch(list(texts))
        return {text: np.array(ids, dtype=np.int64) for text, ids in zip(texts, encoded, strict=True)}

    def prompt(self, problem: EncodedProblem, method: ReasoningMethod, num_slots: int) -> list[int]:
        """The question and the slots: what is given at inference."""
        return [*problem.question.tolist(), *self._slots((), method, num_slots)]

    def row(self, problem: EncodedProblem, method: ReasoningMethod, stage: Stage) -> "ReasoningRow":
        """The ids of a problem in a stage."""
        slots = self._slots(problem.labels if method.labelled else (), method, stage.slots)
        steps = () if stage.left_out == ALL_STEPS else problem.steps[stage.left_out :]
        reasoning = np.concatenate([np.zeros(0, dtype=np.int64), *steps])[stage.left_out_tokens :]
        ids = np.concatenate([problem.question, np.array(slots, dtype=np.int64), reasoning, problem.answer])
        return ReasoningRow(ids, len(problem.question), len(problem.question) + len(slots))

    def _slots(self, labels: Sequence[int], method: ReasoningMethod, num: int) -> list[int]:
        if num == 0 or method.slots == "none":
            return []
        if method.slots == "pause":
            slots = [self.ids.pause] * num
        else:
            slots = [*labels[:num], *[self.ids.slot] * (num - len(labels))]
        return [self.ids.boa, *slots, self.ids.eoa] if method.markers else slots


@dataclass(frozen=True)
class ReasoningRow:
    ids: Ids
    num_question: int
    num_prompt: int
    """Question and slots, with their markers."""


@dataclass(frozen=True)
class ReasoningBatch:
    """Rows padded on the left so that their slots share columns, and on the right to one length."""

    ids: Tensor
    """(B, L)"""
    is_text: Tensor
    """(B, L), False at padding."""
    predicted: Tensor
    """(B, L), True at reasoning and answer: the tokens of the language modelling loss."""
    anchors: Tensor
    """(B, L), True at labelled slots and, if the last slot has a label, at [EOA]: the targets of the anchor loss."""
    slots: range
    """The columns of continuous slots, whose input is the hidden state before them."""


def collate(
    rows: Sequence[ReasoningRow], ids: SpecialIds, method: ReasoningMethod, num_slots: int, width: int = 1
) -> tuple[Tensor, Tensor]:
    """Rows of one stage as x (B, L) and pad (B, L), True where nothing is predicted: all that a batch is made of.

    Padding on the left lets slots share columns. Questions and what follows them are padded to multiples of `width`.
    """
    if not rows:
        raise UserError("a batch needs at least one problem")
    before = _round_up(max(row.num_question for row in rows), width)
    length = before + _round_up(max(len(row.ids) - row.num_question for row in rows), width)
    x, pad = np.full((len(rows), length), ids.pad), np.ones((len(rows), length), dtype=bool)
    for index, row in enumerate(rows):
        start = before - row.num_question
        x[index, start : start + len(row.ids)] = row.ids
        pad[index, start + row.num_prompt : start + len(row.ids)] = False
    if method.labelled and num_slots:
        columns = slice(before + 1, before + 1 + num_slots)
        pad[:, columns] = x[:, columns] == ids.slot
        pad[:, columns.stop] = pad[:, columns.stop - 1]  # the last slot predicts [EOA] if it has a label itself
    return torch.from_numpy(x), torch.from_numpy(pad)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def as_batch(x: Tensor, pad: Tensor, ids: SpecialIds, method: ReasoningMethod) -> ReasoningBatch:
    """The batch that `collate` made x and pad of. Synchronizes with the device if the method has continuous slots."""
    between = between_markers(x, ids)
    columns = range(0)
    if method.slots == "continuous":
        found = between[0].nonzero()[:, 0].tolist()
        columns = range(found[0] + 1, found[-1]) if found else columns
    return ReasoningBatch(x, x != ids.pad, ~pad & ~between, ~pad & between, columns)


def between_markers(x: Tensor, ids: SpecialIds) -> Tensor:
    """(B, L), True from [BOA] to [EOA], both included."""
    opened, closed = (x == ids.boa).cumsum(dim=1), (x == ids.eoa).cumsum(dim=1)
    return (opened > closed) | (x == ids.eoa)
