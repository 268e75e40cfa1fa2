"""The reasoning methods as data: what stands between the question and the answer, stage by stage. No networks.

A row is `question [BOA] slot*k [EOA] reasoning answer`. The methods differ in the slots (continuous: the previous
hidden state; or a learnt pause token), in whether slots have labels, and in how many steps each stage leaves out.

| method | slots | labels | steps left out |
|---|---|---|---|
| no-cot | none | | all |
| cot | none | | none |
| pause | pause tokens | | all |
| icot | none | | some more tokens of the reasoning in each stage, all in the last |
| coconut | continuous | no | one more in each stage, all in the last |
| coconut-pause | pause tokens | no | one more in each stage, all in the last |
| acot | continuous | yes | none, or one more in each stage (ProsQA) |
"""

import math
from dataclasses import dataclass
from typing import Literal

from adlm.apps.reasoning.problems import problem_set
from adlm.config.schema import Config, Reason
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

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.slots < 0 or self.left_out < ALL_STEPS or self.left_out_tokens < 0:
            raise UserError(f"{self} is not a stage: epochs must be at least 1, the other numbers at least 0")

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
