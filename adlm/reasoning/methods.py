"""The reasoning methods as data: what stands between the question and the answer, stage by stage. No networks.

A row is `question [BOA] slot*k [EOA] reasoning answer`. The methods differ in the slots (continuous: the previous
hidden state; or a learnt pause token), in whether slots have labels, and in how many steps each stage leaves out.

| method | slots | labels | steps left out |
|---|---|---|---|
| no-cot | none | | all |
| cot | none | | none |
| pause | pause tokens | | all |
| icot | none | | one more in each stage, all in the last |
| coconut | continuous | no | one more in each stage, all in the last |
| coconut-pause | pause tokens | no | one more in each stage, all in the last |
| acot | continuous | yes | none, or one more in each stage (ProsQA) |
"""

from dataclasses import dataclass
from typing import Literal

from adlm.config.schema import Reason
from adlm.errors import UserError

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


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum."""

    epochs: int
    slots: int = 0
    """Slots between question and reasoning."""
    left_out: int = 0
    """Reasoning steps left out, from the first on; ALL_STEPS leaves out all."""
    reset_optimizer: bool = False
    """Whether the optimizer starts anew."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.slots < 0 or self.left_out < ALL_STEPS:
            raise UserError(f"{self} is not a stage: epochs must be at least 1, slots and steps left out at least 0")

    def __str__(self) -> str:
        steps = "all steps" if self.left_out == ALL_STEPS else _counted(self.left_out, "step")
        return f"{_counted(self.epochs, 'epoch')} with {_counted(self.slots, 'slot')}, {steps} left out"


def _counted(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


def curriculum(reason: Reason, data: str = "") -> list[Stage]:
    """The stages of a run on the problems of a corpus.

    Methods without stages train for first_epochs + epochs. The others begin with `first_epochs` of plain CoT; stage
    s = 1, 2, ... of `stage_epochs` has s * slots_a_stage slots, at most `slots`, and leaves out the first s steps; the
    last stage takes the epochs that remain. ACoT leaves out steps on ProsQA only, unless `remove_steps` says otherwise.
    """
    method = REASONING_METHODS[reason.method]
    if not method.staged:
        slots = reason.slots if method.slots != "none" else 0
        return [Stage(reason.first_epochs + reason.epochs, slots, ALL_STEPS if method.leaves_out_steps else 0)]
    removes = data == "prosqa" if reason.remove_steps is None else reason.remove_steps
    stages = [Stage(reason.first_epochs)] if reason.first_epochs else []
    remaining, number = reason.epochs, 0
    while remaining > 0:
        number += 1
        is_last = number * reason.slots_a_stage >= reason.slots or remaining <= reason.stage_epochs
        slots = 0 if method.slots == "none" else min(number * reason.slots_a_stage, reason.slots)
        left_out = ALL_STEPS if is_last else number
        if method.labelled:
            left_out = number if removes and slots else 0
        epochs = remaining if is_last else reason.stage_epochs
        stages.append(Stage(epochs, slots, left_out, reason.reset_optimizer))
        remaining -= epochs
    return stages
