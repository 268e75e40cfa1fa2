"""The reasoning methods as data: what stands between the question and the answer, stage by stage. No networks.

A row is `question [BOA] slot*k [EOA] reasoning answer`. The methods differ in the slots (continuous: the previous
hidden state; or a learnt pause token), in whether slots have labels, and in how many steps each stage leaves out.

| method | slots | labels | steps left out |
|---|---|---|---|
| no-cot | none | | all |
| cot | none | | none |
| pause | pause tokens | | all |
| icot | none | | one more in each stage |
| coconut | continuous | no | one more in each stage |
| coconut-pause | pause tokens | no | one more in each stage |
| acot | continuous | yes | none, or one more in each stage (ProsQA) |
"""

from dataclasses import dataclass
from typing import Literal

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
    """Whether stages remove reasoning steps."""
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
    """Whether the optimizer starts anew, as in Coconut."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.slots < 0 or self.left_out < ALL_STEPS:
            raise UserError(f"{self} is not a stage: epochs must be at least 1, slots and steps left out at least 0")


def curriculum(
    name: str, epochs: int, first_epochs: int = 0, stage_epochs: int = 5, max_slots: int = 6, slots_a_stage: int = 1
) -> list[Stage]:
    """The stages of a method in `epochs` epochs, after `first_epochs` of plain CoT for the methods with a curriculum.

    Stage s = 1, 2, ... of `stage_epochs` epochs has s * slots_a_stage slots (at most `max_slots`) and leaves out the
    first s steps; the last stage takes the epochs that remain. In the last stage of iCoT, Coconut and its pause
    variant no step is left.
    """
    if name not in REASONING_METHODS:
        raise UserError(f"reasoning method {name!r} is not one of {', '.join(REASONING_METHODS)}")
    method = REASONING_METHODS[name]
    if not method.staged:
        slots = max_slots if method.slots != "none" else 0
        return [Stage(epochs, slots, ALL_STEPS if method.leaves_out_steps else 0)]
    stages = [Stage(first_epochs)] if first_epochs else []
    remaining, number = epochs, 0
    while remaining > 0:
        number += 1
        is_last = number * slots_a_stage >= max_slots or remaining <= stage_epochs
        slots = 0 if method.slots == "none" else min(number * slots_a_stage, max_slots)
        left_out = 0 if not method.leaves_out_steps else number
        stages.append(Stage(remaining if is_last else stage_epochs, slots, left_out, reset_optimizer=True))
        remaining -= stages[-1].epochs
    return stages
