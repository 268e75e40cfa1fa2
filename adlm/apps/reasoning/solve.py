"""Solving problems with a fine-tuned model: greedy decoding, whether answers are right, and what the slots predict.

Independent of training. Answers are compared as in Coconut's code: what follows the last #, without commas.

Shapes: B problems, L tokens of the padded prompts, T new tokens, d wide.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from adlm.apps.reasoning.network import CausalModel, load_reasoning_model, read_rows, reasoning_loss
from adlm.apps.reasoning.problems import Problem, problem_set
from adlm.apps.reasoning.rows import (
    Encoder,
    ReasoningMethod,
    SpecialIds,
    Stage,
    as_batch,
    collate,
    reason_of,
    reasoning_method,
    special_ids,
    stages_of,
)
from adlm.config.load import model_folder_at
from adlm.config.schema import Config, Reason
from adlm.errors import UserError
from adlm.tokens import Tokenizer

Z95 = 1.959963984540054  # of the normal distribution
BATCH = 256  # problems solved at once
NUM_SHOWN = 3  # of the most likely tokens at a slot


@dataclass(frozen=True)
class Generated:
    """What a model wrote for one problem."""

    ids: list[int]
    """The new tokens, without the end-of-text token."""
    ended: bool
    """Whether it ended before the largest number of tokens."""
    slot_ids: list[list[int]]
    """The most likely tokens, likeliest first, after [BOA] and after each slot: what a slot stands for."""
    slot_shares: list[list[float]] = field(compare=False)
    """Their probabilities."""


@torch.no_grad()
def generate(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    ids: SpecialIds,
    method: ReasoningMethod,
    num_slots: int,
    max_tokens: int,
    device: torch.device,
) -> list[Generated]:
    """Greedy decoding of a batch of prompts, padded on the left. Each row is decoded as it would be alone.

    A row ends at the end-of-text token, after `max_tokens`, or where the model can read no further token.
    """
    room = [max_tokens if model.max_length is None else model.max_length + 1 - len(prompt) for prompt in prompts]
    limits = torch.tensor(room, device=device).clamp(max=max_tokens)
    length = max(map(len, prompts))
    x = torch.full((len(prompts), length), ids.pad, device=device)
    is_text = torch.zeros(len(prompts), length, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        x[row, length - len(prompt) :] = torch.tensor(prompt, device=device)
        is_text[row, length - len(prompt) :] = True
    continuous = method.slots == "continuous" and num_slots > 0
    slots = range(length - 1 - num_slots, length - 1) if continuous else range(0)
    hidden, reader = read_rows(model, x, is_text, slots)
    before = hidden[:, slots.start - 1 : slots.stop] if slots else hidden[:, :0]  # of [BOA] and of the slots
    slot_shares, slot_ids = model.logits(before).float().softmax(dim=-1).topk(NUM_SHOWN, dim=-1)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    new: list[Tensor] = []
    last = hidden[:, -1]
    while len(new) < max_tokens:
        token = torch.where(running, model.logits(last).argmax(dim=-1), ids.eos)
        new.append(token)
        running = running & (token != ids.eos) & (limits > len(new))
        if not running.any():
            break
        last = reader.read(model.embed(token[:, None]), running[:, None])[:, -1]
    results = []
    for number, (row, limit) in enumerate(zip(torch.stack(new, dim=1).tolist(), limits.tolist(), strict=True)):
        tokens = row[:limit]
        ended = ids.eos in tokens
        written = tokens[: tokens.index(ids.eos)] if ended else tokens
        results.append(Generated(written, ended, slot_ids[number].tolist(), slot_shares[number].tolist()))
    return results


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
        return reason_of(self.config)

    @property
    def method(self) -> ReasoningMethod:
        return reasoning_method(self.config)

    @property
    def last_stage(self) -> Stage:
        return stages_of(self.config)[-1]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def encoder(self, data: str = "") -> Encoder:
        """Problems of a corpus, by default the one the model was trained on. Misfits are solved like all others."""
        problems = problem_set(data or self.config.data.name)
        return Encoder(self.tokenizer.encode_batch, problems, special_ids(self.tokenizer))

    def solve(self, problems: Sequence[Problem], num_slots: int | None = None, data: str = "") -> Iterator[Solution]:
        """The solutions in order, in batches; `num_slots` None gives the slots of the last stage."""
        encoder, method = self.encoder(data), self.method
        slots = self.last_stage.slots if num_slots is None else num_slots
        encoded = encoder.encode(problems)
        prompts = [encoder.prompt(problem, method, slots) for problem in encoded]
        longest = min(self.config.length, self.network.max_length or self.config.length)
        for number, prompt in enumerate(prompts, 1):
            if len(prompt) > longest:
                raise UserError(
                    f"problem {number} takes {len(prompt)} tokens with its slots, and the model reads at most "
                    f"{longest}; give fewer slots, or shorter problems"
                )
        for first in range(0, len(problems), BATCH):
            part = slice(first, first + BATCH)
            found = generate(
                self.network, prompts[part], encoder.ids, method, slots, self.reason.max_tokens, self.device
            )
            for problem, ids, written in zip(problems[part], encoded[part], found, strict=True):
                text = self.tokenizer.decode(written.ids)
                yield Solution(
                    problem,
                    text,
                    parse_answer(text),
                    len(written.ids),
                    written.ended,
                    encoder.problem_set.labels(problem),
                    tuple(
                        tuple((self.tokenizer.decode([index]), share) for index, share in zip(*slot, strict=True))
                        for slot in zip(written.slot_ids, written.slot_shares, strict=True)
                    ),
                    tuple(label == slot[0] for label, slot in zip(ids.labels[:slots], written.slot_ids, strict=False)),
                )

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
    folder = model_folder_at(path) or path
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run or model folder of `adlm reason train`")
    config, tokenizer, network = load_reasoning_model(folder)
    if config.reason is None:
        raise UserError(f"{path} is not a reasoning model; train one with `adlm reason train`")
    return Solver(config, network.to(device).eval(), tokenizer)
