"""Answers by greedy decoding, in batches: the question, the slots, then tokens until the end. Independent of training.

Shapes: B problems, L tokens of the padded prompts, T new tokens, d wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.reasoning.methods import ReasoningMethod
from adlm.reasoning.network import CausalLanguageModel, read_rows
from adlm.reasoning.rows import SpecialIds


@dataclass(frozen=True)
class Generated:
    """What a model wrote for one problem."""

    ids: list[int]
    """The new tokens, without the end-of-text token."""
    ended: bool
    """Whether it ended before the largest number of tokens."""
    slot_ids: list[int]
    """The most likely token after [BOA] and after each slot: the labels that an anchored model predicts."""


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
    """Greedy decoding of a batch of prompts, padded on the left. Each row is decoded as it would be alone."""
    length = max(map(len, prompts))
    x = torch.full((len(prompts), length), ids.pad, device=device)
    is_text = torch.zeros(len(prompts), length, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        x[row, length - len(prompt) :] = torch.tensor(prompt, device=device)
        is_text[row, length - len(prompt) :] = True
    continuous = method.slots == "continuous" and num_slots > 0
    slots = range(length - 1 - num_slots, length - 1) if continuous else range(0)
    hidden, reader = read_rows(model, x, is_text, slots)
    slot_ids = model.logits(hidden[:, slots.start - 1 : slots.stop]).argmax(dim=-1) if slots else x[:, :0]
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    new: list[Tensor] = []
    last = hidden[:, -1]
    while len(new) < max_tokens:
        token = torch.where(running, model.logits(last).argmax(dim=-1), ids.eos)
        new.append(token)
        running = running & (token != ids.eos)
        if not running.any():
            break
        last = reader.read(model.embed(token[:, None]), torch.ones_like(token[:, None], dtype=torch.bool))[:, -1]
    written = torch.stack(new, dim=1).tolist() if new else [[] for _ in prompts]
    return [
        Generated(tokens[: tokens.index(ids.eos)] if ids.eos in tokens else tokens, ids.eos in tokens, predicted)
        for tokens, predicted in zip(written, slot_ids.tolist(), strict=True)
    ]
