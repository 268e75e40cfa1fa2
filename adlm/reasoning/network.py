"""A causal language model with continuous slots: the input of a slot is the hidden state at the position before it.

Any causal model of `transformers`, or our own AR network, behind one interface. Slots are read one after the other; a
KV cache keeps what was read before them, in training too.

Shapes: B rows, L tokens, n new tokens, d wide, V symbols.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adlm.models.transformer import Transformer
from adlm.reasoning.rows import ReasoningBatch


class Reader(Protocol):
    """Reads a batch of rows from left to right, in parts."""

    def read(self, inputs: Tensor, is_text: Tensor) -> Tensor:
        """Hidden states (B, n, d) of the next n input embeddings (B, n, d); is_text (B, n) is False at padding."""
        ...


class CausalLanguageModel(Protocol):
    """What is needed of a causal model."""

    def reader(self) -> Reader:
        """A reader that has read nothing yet."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """(B, n, d)"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) of hidden states (..., d)."""
        ...


class HuggingFaceModel(nn.Module):
    """A causal model of `transformers`; any with `inputs_embeds`, a KV cache and a linear output layer."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        model.set_attn_implementation("sdpa")  # takes a mask of booleans

    def reader(self) -> "HuggingFaceReader":
        return HuggingFaceReader(self.model)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]


@dataclass
class HuggingFaceReader:
    model: Any
    cache: Any = None
    is_text: Tensor | None = None
    """(B, L), of everything read so far."""

    def read(self, inputs: Tensor, is_text: Tensor) -> Tensor:
        self.is_text = is_text if self.is_text is None else torch.cat([self.is_text, is_text], dim=1)
        positions = (self.is_text.long().cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        output = self.model.base_model(
            inputs_embeds=inputs,
            attention_mask=_visible(self.is_text, inputs.shape[1]),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = output.past_key_values
        return output.last_hidden_state  # type: ignore[no-any-return]


def _visible(is_text: Tensor, num_new: int) -> Tensor:
    """(B, 1, n, L), True where one of the n new positions attends: to text before it, and always to itself.

    A position of padding on the left would otherwise attend to nothing, for which attention kernels may return NaN.
    """
    length = is_text.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=is_text.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=is_text.device)
    return (is_text[:, None, None, :] & before | itself)[:, :, -num_new:]


class OwnModel(nn.Module):
    """Our AR network. Its training form has no KV cache, so a reader reads the row anew for each part."""

    def __init__(self, network: Transformer):
        super().__init__()
        self.network = network

    def reader(self) -> "OwnReader":
        return OwnReader(self.network)

    def embed(self, ids: Tensor) -> Tensor:
        return self.network.embedding(ids)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)  # type: ignore[no-any-return]


@dataclass
class OwnReader:
    network: Transformer
    inputs: list[Tensor] = field(default_factory=list)
    is_text: list[Tensor] = field(default_factory=list)

    def read(self, inputs: Tensor, is_text: Tensor) -> Tensor:
        self.inputs.append(inputs)
        self.is_text.append(is_text)
        pad = ~torch.cat(self.is_text, dim=1)
        hidden = self.network.trunk(torch.cat(self.inputs, dim=1), None, pad if pad.any() else None)
        return hidden[:, -inputs.shape[1] :]  # type: ignore[no-any-return]


def hidden_states(model: CausalLanguageModel, batch: ReasoningBatch) -> Tensor:
    """(B, L, d): the hidden state at every position of a batch, slots fed back one after the other."""
    hidden, _ = read_rows(model, batch.ids, batch.is_text, batch.slots)
    return hidden


def read_rows(model: CausalLanguageModel, ids: Tensor, is_text: Tensor, slots: range) -> tuple[Tensor, Reader]:
    """The hidden states (B, L, d) of rows with continuous slots in the columns `slots`, and the reader after them."""
    reader = model.reader()
    if not slots:
        return reader.read(model.embed(ids), is_text), reader
    parts = [reader.read(model.embed(ids[:, : slots.start]), is_text[:, : slots.start])]
    for column in slots:
        parts.append(reader.read(parts[-1][:, -1:], is_text[:, column : column + 1]))
    if slots.stop < ids.shape[1]:
        parts.append(reader.read(model.embed(ids[:, slots.stop :]), is_text[:, slots.stop :]))
    return torch.cat(parts, dim=1), reader


def plain_hidden_states(model: CausalLanguageModel, batch: ReasoningBatch) -> Tensor:
    """`hidden_states` without a cache, the whole row read once for each slot: the test oracle."""
    inputs = model.embed(batch.ids)
    for column in batch.slots:
        hidden = model.reader().read(inputs, batch.is_text)
        inputs = torch.cat([inputs[:, :column], hidden[:, column - 1 : column], inputs[:, column + 1 :]], dim=1)
    return model.reader().read(inputs, batch.is_text)


@torch.no_grad()
def add_special_tokens(model: HuggingFaceModel, num: int) -> range:
    """Adds `num` symbols to embedding and output layer and returns their ids.

    Their rows are the mean of the existing rows: a new symbol starts as likely as an average one, and its embedding has
    an ordinary size. A small seeded noise tells them apart.
    """
    old = model.model.get_input_embeddings().weight.shape[0]
    means = [layer.weight.mean(dim=0) for layer in _embedding_layers(model.model)]
    model.model.resize_token_embeddings(old + num, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    for layer, mean in zip(_embedding_layers(model.model), means, strict=True):
        spread = layer.weight[:old].std(dim=0)
        noise = torch.randn(num, len(mean), generator=generator).to(mean)
        layer.weight[old:] = mean + 0.1 * spread * noise
    return range(old, old + num)


def _embedding_layers(model: Any) -> list[Any]:
    """The input embedding and, unless it shares its weights, the output layer."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    return [embedding] if output.weight is embedding.weight else [embedding, output]
