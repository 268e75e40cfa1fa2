"""Solving problems with a fine-tuned model: answers, whether they are right, and what the slots predict.

Independent of training. Answers are compared as in Coconut's code: what follows the last #, without commas.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adlm.apps.reasoning.base_model import CausalModel, reasoning_network, require_tokenizer
from adlm.apps.reasoning.generate import generate
from adlm.apps.reasoning.loss import reasoning_loss
from adlm.apps.reasoning.methods import REASONING_METHODS, ReasoningMethod, Stage, curriculum
from adlm.apps.reasoning.rows import ANCHOR_LABELS, Encoder, as_batch, collate, special_ids
from adlm.checkpoints.model_folder import load_model_folder
from adlm.config.schema import Config, Reason
from adlm.data.reasoning.problem import Problem
from adlm.errors import UserError
from adlm.tokens import Tokenizer

Z95 = 1.959963984540054  # of the normal distribution
BATCH = 256  # problems solved at once


def parse_answer(text: str) -> str:
    """What follows the last #, without commas: as the code of Coconut compares answers."""
    return text.split("#")[-1].replace(",", "").strip()


@dataclass(frozen=True)
class Solution:
    """A problem and what a model wrote for it."""

    problem: Problem
    written: str
    answer: str
    """Parsed from `written`."""
    num_tokens: int
    ended: bool
    """Whether it ended before the largest number of tokens."""
    labels: tuple[str, ...]
    """The anchor labels of the problem."""
    slots: tuple[tuple[tuple[str, float], ...], ...]
    """The most likely tokens after [BOA] and each slot, with their probabilities; none without continuous slots."""
    slots_right: tuple[bool, ...]
    """Of [BOA] and the slots that have a label to predict, whether they do; k slots predict the first k labels."""

    @property
    def is_right(self) -> bool:
        return self.answer == parse_answer(self.problem.answer)

    def __str__(self) -> str:
        slots = f"slots: {' '.join(tokens[0][0].strip() for tokens in self.slots)}\n" if self.slots else ""
        mark = "right" if self.is_right else f"wrong, expected {self.problem.answer}"
        return f"{self.problem.question}\n{slots}{self.written}\n({mark})"


@dataclass(frozen=True)
class Score:
    """Exact-match accuracy."""

    num: int
    right: int
    interval: tuple[float, float]
    """95% Wilson interval of the share."""
    tokens: float
    """Mean number of generated tokens."""
    by_hops: Mapping[int, tuple[int, int]]
    """Right answers and problems by the number of steps."""
    slots_right: tuple[tuple[int, int], ...]
    """Right predictions and labels of each slot, from [BOA] on."""

    @property
    def share(self) -> float:
        return self.right / self.num


def wilson_interval(right: int, num: int) -> tuple[float, float]:
    """95% interval of a share [Wilson, 1927]."""
    share, square = right / num, Z95 * Z95
    spread = Z95 * math.sqrt(share * (1 - share) / num + square / (4 * num * num))
    middle, scale = share + square / (2 * num), 1 + square / num
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def score(solutions: Sequence[Solution]) -> Score:
    if not solutions:
        raise UserError("there is no problem to score")
    num, right = len(solutions), sum(solution.is_right for solution in solutions)
    hops = sorted({len(solution.problem.steps) for solution in solutions})
    by_hops = {count: [s.is_right for s in solutions if len(s.problem.steps) == count] for count in hops}
    most = max(len(solution.slots_right) for solution in solutions)
    slots = [[s.slots_right[place] for s in solutions if place < len(s.slots_right)] for place in range(most)]
    return Score(
        num,
        right,
        wilson_interval(right, num),
        sum(solution.num_tokens for solution in solutions) / num,
        {count: (sum(found), len(found)) for count, found in by_hops.items()},
        tuple((sum(found), len(found)) for found in slots),
    )


@dataclass(frozen=True)
class Solver:
    """A fine-tuned model that solves problems. The network is in eval mode and on its device."""

    config: Config
    network: CausalModel
    tokenizer: Tokenizer

    @property
    def reason(self) -> Reason:
        assert self.config.reason is not None
        return self.config.reason

    @property
    def method(self) -> ReasoningMethod:
        return REASONING_METHODS[self.reason.method]

    @property
    def last_stage(self) -> Stage:
        return curriculum(self.reason, self.config.data.name)[-1]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def encoder(self, data: str = "") -> Encoder:
        """Problems of a corpus, by default the one the model was trained on. Misfits are solved like all others."""
        labels = ANCHOR_LABELS[data or self.config.data.name]
        return Encoder(self.tokenizer.encode_batch, labels, special_ids(self.tokenizer))

    def solve(self, problems: Sequence[Problem], num_slots: int | None = None, data: str = "") -> Iterator[Solution]:
        """The solutions in order, in batches; `num_slots` None gives the slots of the last stage."""
        encoder, method = self.encoder(data), self.method
        slots = self.last_stage.slots if num_slots is None else num_slots
        encoded = encoder.encode(problems)
        prompts = [encoder.prompt(problem, method, slots) for problem in encoded]
        self._check_room(prompts)
        for first in range(0, len(problems), BATCH):
            part = slice(first, first + BATCH)
            arguments = (encoder.ids, method, slots, self.reason.max_tokens, self.device)
            found = generate(self.network, prompts[part], *arguments)
            for problem, ids, written in zip(problems[part], encoded[part], found, strict=True):
                text = self.tokenizer.decode(written.ids)
                yield Solution(
                    problem,
                    text,
                    parse_answer(text),
                    len(written.ids),
                    written.ended,
                    encoder.labels.of(problem),
                    tuple(self._tokens(*slot) for slot in zip(written.slot_ids, written.slot_shares, strict=True)),
                    tuple(label == slot[0] for label, slot in zip(ids.labels[:slots], written.slot_ids, strict=False)),
                )

    def _check_room(self, prompts: Sequence[Sequence[int]]) -> None:
        """A user error for prompts longer than the rows of training, or than the model can read."""
        longest = min(self.config.length, self.network.max_length or self.config.length)
        for number, prompt in enumerate(prompts, 1):
            if len(prompt) > longest:
                raise UserError(
                    f"problem {number} takes {len(prompt)} tokens with its slots, and the model reads at most "
                    f"{longest}; give fewer slots, or shorter problems"
                )

    def _tokens(self, ids: Sequence[int], shares: Sequence[float]) -> tuple[tuple[str, float], ...]:
        return tuple((self.tokenizer.decode([index]), share) for index, share in zip(ids, shares, strict=True))

    @torch.no_grad()
    def answer_nats(self, problems: Sequence[Problem]) -> tuple[float, float, int]:
        """Mean nats per token of reasoning and answer in the form of the last stage, its standard error, and tokens."""
        encoder, method, stage = self.encoder(), self.method, self.last_stage
        nats, tokens = [], []
        for first in range(0, len(problems), BATCH):
            rows = [encoder.row(problem, method, stage) for problem in encoder.encode(problems[first : first + BATCH])]
            x, pad = (part.to(self.device) for part in collate(rows, encoder.ids, method, stage.slots))
            batch = as_batch(x, pad, encoder.ids, method)
            nats += reasoning_loss(self.network, batch, 0.0).nats.double().sum(dim=1).tolist()
            tokens += batch.predicted.sum(dim=1).tolist()
        mean = sum(nats) / sum(tokens)
        spread = sum((n - mean * t) ** 2 for n, t in zip(nats, tokens, strict=True))
        correction = len(nats) / (len(nats) - 1) if len(nats) > 1 else math.inf
        return mean, math.sqrt(spread * correction) / sum(tokens), sum(tokens)


def load_solver(path: Path, device: torch.device) -> Solver:
    """The model of a run folder or model folder that `adlm reason train` wrote."""
    folder = path / "model" if (path / "model").is_dir() else path
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run or model folder of `adlm reason train`")
    found = load_model_folder(folder)
    if found.config.reason is None:
        raise UserError(f"{path} is not a reasoning model; train one with `adlm reason train`")
    network = reasoning_network(found, folder).requires_grad_(False)
    return Solver(found.config, network.to(device).eval(), require_tokenizer(found, folder))
