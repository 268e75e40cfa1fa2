"""From a problem to token ids: `question [BOA] slot*k [EOA] reasoning answer`, as one row or as the prompt of one.

A slot of a row holds the id it is trained towards: its anchor label, or [ANT] where there is none. So next-token
targets are the targets of the method: [BOA] predicts the first label, slot i label i + 1, the last slot [EOA].

Shapes: B rows, L ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.data.reasoning.problem import Problem
from adlm.errors import UserError
from adlm.reasoning.methods import ALL_STEPS, ReasoningMethod, Stage

ANSWER_MARK = "### "


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


@dataclass(frozen=True)
class Encoder:
    """How problems become ids."""

    encode: Callable[[str], list[int]]
    labels: Callable[[Problem], tuple[str, ...]]
    """The anchor labels of a problem, in order."""
    ids: SpecialIds

    def label_id(self, label: str) -> int:
        """The first token of a label as it stands in a text, after a space.

        A slot predicts one token. Of a label that the tokenizer splits, the first token is the target: it is what the
        model has to write first when the label is due.
        """
        return self.encode(f" {label}")[0]

    def prompt(self, problem: Problem, method: ReasoningMethod, num_slots: int) -> list[int]:
        """The question and the slots: what is given at inference."""
        return self.encode(f"{problem.question}\n") + self._slots([], method, num_slots)

    def row(self, problem: Problem, method: ReasoningMethod, stage: Stage) -> "ReasoningRow":
        """The ids of a problem in a stage."""
        question = self.encode(f"{problem.question}\n")
        labels = [self.label_id(label) for label in self.labels(problem)] if method.labelled else []
        slots = self._slots(labels, method, stage.slots)
        steps = () if stage.left_out == ALL_STEPS else problem.steps[stage.left_out :]
        rest = [index for step in steps for index in self.encode(f"{step}\n")]
        rest += [*self.encode(f"{ANSWER_MARK}{problem.answer}"), self.ids.eos]
        return ReasoningRow(question + slots + rest, len(question), len(question) + len(slots))

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
    ids: list[int]
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


def collate(rows: Sequence[ReasoningRow], ids: SpecialIds, method: ReasoningMethod, num_slots: int) -> ReasoningBatch:
    """A batch of rows of one stage."""
    if not rows:
        raise UserError("a batch needs at least one problem")
    before = max(row.num_question for row in rows)
    length = before + max(len(row.ids) - row.num_question for row in rows)
    x = torch.full((len(rows), length), ids.pad)
    is_text, predicted, anchors = (torch.zeros(len(rows), length, dtype=torch.bool) for _ in range(3))
    for index, row in enumerate(rows):
        start = before - row.num_question
        x[index, start : start + len(row.ids)] = torch.tensor(row.ids)
        is_text[index, start : start + len(row.ids)] = True
        predicted[index, start + row.num_prompt : start + len(row.ids)] = True
    continuous = method.slots == "continuous" and num_slots > 0
    slots = range(before + 1, before + 1 + num_slots) if continuous else range(0)
    if method.labelled and continuous:
        columns = slice(slots.start, slots.stop)
        anchors[:, columns] = x[:, columns] != ids.slot
        anchors[:, slots.stop] = anchors[:, slots.stop - 1]  # the last slot predicts [EOA] if it has a label itself
    return ReasoningBatch(x, is_text, predicted, anchors, slots)
