"""Answers by greedy decoding, in batches: the question, the slots, then tokens until the end. Independent of training.

Shapes: B problems, L tokens of the padded prompts, T new tokens, d wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adlm.apps.reasoning.methods import ReasoningMethod
from adlm.apps.reasoning.network import CausalLanguageModel, read_rows
from adlm.apps.reasoning.rows import SpecialIds

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
    model: CausalLanguageModel,
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
