"""A causal language model with continuous slots, and its loss. A slot's input is the hidden state before it.

Any causal model of `transformers`, or our own AR network, behind one interface. Slots are read one after the other; a
KV cache keeps what was read before them, in training too. The model that is fine-tuned is of the hub, a folder or a
GGUF file, our own AR model, or new.

Shapes: B rows, L tokens, n new tokens, d wide, V symbols, N targets.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from adlm.apps.reasoning.rows import (
    ReasoningBatch,
    SpecialIds,
    as_batch,
    between_markers,
    reason_of,
    reasoning_method,
    with_reasoning_tokens,
)
from adlm.checkpoints.model_folder import (
    ARCHITECTURE,
    ModelFolder,
    load_model_folder,
    network_of,
    replace_model_folder,
)
from adlm.checkpoints.pretrained import load_pretrained, load_pretrained_model, num_positions
from adlm.checkpoints.tensor_files import FullTensor
from adlm.config.load import model_folder_at
from adlm.config.schema import Config
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.methods.method import Loss
from adlm.models.layers import rotary_angles
from adlm.models.transformer import Block, Transformer
from adlm.tokens import Tokenizer, bpe_size, load_tokenizer, tokenizer_of_transformers, train_bpe
from adlm.training.step import seed_of

# cuDNN attention, which training on text prefers, is slow at the first step of a shape, and these batches have many:
# 8.4 s, then 1.6 s a step, against 1.5 and 1.4 s with this kernel (H200, shared with another process; 30 layers, 128
# rows of 416 tokens, 6 slots). Without slots, once warm, a step takes 0.33 s with cuDNN and 0.35 s with this kernel.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class HuggingFaceModel(nn.Module):
    """A causal model of `transformers`; any with `inputs_embeds`, a KV cache and a linear output layer."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.max_length = num_positions(model)  # the most tokens it can read; None if there is no limit
        model.set_attn_implementation("sdpa")  # takes a mask of booleans
        _fuse_norms(model)

    def reader(self) -> "HuggingFaceReader":
        """Reads a batch of rows from left to right, in parts; it has read nothing yet."""
        return HuggingFaceReader(self.model)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, n, d), in bfloat16 under autocast: what all layers add to, in half the memory of float32."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        kind = ids.device.type
        return embedded.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) of hidden states (..., d)."""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]


def _fuse_norms(model: nn.Module) -> None:
    """Make RMS norms one operation; as `transformers` writes them they are six, each a pass over the hidden states."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "variance_epsilon") and isinstance(weight, nn.Parameter):
            example = torch.linspace(-1, 2, len(weight)).to(weight)[None]
            if torch.allclose(module(example), _rms_norm(module, example), rtol=1e-5, atol=1e-5):
                module.forward = partial(_rms_norm, module)


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):  # needs input and weight of one type
        return F.rms_norm(hidden, module.weight.shape, module.weight.to(hidden.dtype), module.variance_epsilon)


@dataclass
class HuggingFaceReader:
    model: Any
    cache: Any = None
    is_text: Tensor | None = None
    """(B, L), of everything read so far."""

    def read(self, inputs: Tensor, is_text: Tensor) -> Tensor:
        """Hidden states (B, n, d) of the next n input embeddings (B, n, d); is_text (B, n) is False at padding."""
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
    columns = torch.arange(is_text.shape[1], device=is_text.device)
    rows = columns[-num_new:, None]
    return is_text[:, None, None, :] & (columns <= rows) | (columns == rows)


class OwnModel(nn.Module):
    """Our AR network, without time conditioning, with the interface of `HuggingFaceModel`.

    Rotary embeddings have no largest position.
    """

    max_length = None

    def __init__(self, network: Transformer):
        super().__init__()
        if not all(isinstance(block, Block) for block in network.trunk.blocks):
            raise UserError(
                "`adlm reason` reads networks of model.family published; give a pretrained model itself by reason.base"
            )
        self.network = network

    def reader(self) -> "OwnReader":
        return OwnReader(self.network)

    def embed(self, ids: Tensor) -> Tensor:
        return self.network.embedding(ids)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)  # type: ignore[no-any-return]


@dataclass
class OwnReader:
    """Keeps keys and values of every block. Rotary embeddings are relative, so padding on the left changes nothing."""

    network: Transformer
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values (B, H, L, d / H) of everything read so far, block by block."""
    is_text: Tensor | None = None

    def read(self, inputs: Tensor, is_text: Tensor) -> Tensor:
        trunk: Any = self.network.trunk
        num_new = inputs.shape[1]
        self.is_text = is_text if self.is_text is None else torch.cat([self.is_text, is_text], dim=1)
        visible = _visible(self.is_text, num_new)
        cos, sin = rotary_angles(self.is_text.shape[1], trunk.head_width, like=inputs)
        h, cache = inputs, []
        for number, block in enumerate(trunk.blocks):
            q, k, v = block.queries_keys_values(block.norm1(h), (cos[-num_new:], sin[-num_new:]))
            if self.cache:
                k, v = (torch.cat(pair, dim=2) for pair in zip(self.cache[number], (k, v), strict=True))
            cache.append((k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            h = h + block.gated(mixed.transpose(1, 2).flatten(-2), block.out, 1.0)
            h = h + block.mlp(block.norm2(h), 1.0)
        self.cache = cache
        return trunk.finish(h, None)  # type: ignore[no-any-return]


CausalModel = HuggingFaceModel | OwnModel


def read_rows(
    model: CausalModel, ids: Tensor, is_text: Tensor, slots: range
) -> tuple[Tensor, HuggingFaceReader | OwnReader]:
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


def plain_hidden_states(model: CausalModel, batch: ReasoningBatch) -> Tensor:
    """The hidden states of `read_rows` without a cache, the whole row read once for each slot: the test oracle."""
    inputs = model.embed(batch.ids)
    for column in batch.slots:
        hidden = model.reader().read(inputs, batch.is_text)
        inputs = torch.cat([inputs[:, :column], hidden[:, column - 1 : column], inputs[:, column + 1 :]], dim=1)
    return model.reader().read(inputs, batch.is_text)


@dataclass(frozen=True)
class ReasoningObjective:
    """What a training step minimises: see `training.step.Objective`. `pad` is True where nothing is predicted."""

    config: Config
    ids: SpecialIds
    exact: ClassVar[bool] = True

    def predicted(self, x: Tensor, pad: Tensor | None, given: Tensor | None = None) -> Tensor:
        """(B, L), True at reasoning and answer: the loss is divided by these, so anchors do not rescale the rest."""
        assert pad is not None
        return ~pad & ~between_markers(x, self.ids)

    def loss(
        self,
        network: Any,
        x: Tensor,
        pad: Tensor | None,
        progress: float,
        rng: BatchRng,
        given: Tensor | None = None,
    ) -> Loss:
        assert pad is not None
        method = reasoning_method(self.config)
        anchor_weight = reason_of(self.config).anchor_weight if method.labelled else 0.0
        with sdpa_kernel(ATTENTION):
            return reasoning_loss(network, as_batch(x, pad, self.ids, method), anchor_weight)


def reasoning_loss(model: CausalModel, batch: ReasoningBatch, anchor_weight: float) -> Loss:
    """Cross-entropy of reasoning and answer + anchor_weight * cross-entropy of the anchor labels.

    Slots without a label have no loss, and with `anchor_weight` 0 no slot has. `parts["anchors"]` is the cross-entropy
    of the labels without its weight.
    """
    hidden, _ = read_rows(model, batch.ids, batch.is_text, batch.slots)
    nats = _cross_entropy(model, hidden, batch.ids, batch.predicted)
    total, parts = nats.sum(), {"answer": nats.sum().detach()}
    if anchor_weight:
        anchor_nats = _cross_entropy(model, hidden, batch.ids, batch.anchors).sum()
        total, parts["anchors"] = total + anchor_weight * anchor_nats, anchor_nats.detach()
    by_position = torch.zeros(batch.ids.shape, dtype=nats.dtype, device=nats.device)
    by_position[batch.predicted] = nats.detach()
    return Loss(total, by_position, batch.predicted.sum(), parts)


def _cross_entropy(model: CausalModel, hidden: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """-log p (N,) of the ids at `where` (B, L) given what stands before them."""
    logits = model.logits(hidden[:, :-1][where[:, 1:]]).float()
    return F.cross_entropy(logits, ids[where], reduction="none")


@torch.no_grad()
def resize_vocabulary(model: CausalModel, num_known: int, size: int) -> None:
    """Give embedding and output layer at least `size` symbols; those from `num_known` on are new.

    The rows of new symbols are the mean of the others: a new symbol starts as likely as an average one, and its
    embedding has an ordinary size. A small seeded noise tells them apart.
    """
    if isinstance(model, HuggingFaceModel):
        network = model.model
        if network.get_input_embeddings().weight.shape[0] < size:
            network.resize_token_embeddings(size, mean_resizing=False)
        embedding, output = network.get_input_embeddings(), network.get_output_embeddings()
    else:
        embedding, output = _with_rows(model.network.embedding, size), _with_rows(model.network.head, size)
        model.network.embedding, model.network.head = embedding, output
    generator = torch.Generator().manual_seed(0)
    for layer in [embedding] if output.weight is embedding.weight else [embedding, output]:
        mean, spread = layer.weight[:num_known].mean(dim=0), layer.weight[:num_known].std(dim=0)
        num_new = len(layer.weight) - num_known
        noise = torch.randn(num_new, len(mean), generator=generator).to(mean)
        layer.weight[num_known:] = mean + 0.1 * spread * noise


def _with_rows(layer: Any, num: int) -> Any:
    """An embedding or linear layer with `num` rows, the first of them those of `layer`; a new bias is the mean."""
    if isinstance(layer, nn.Embedding):
        new: Any = nn.Embedding(num, layer.embedding_dim)
    else:
        new = nn.Linear(layer.in_features, num)
        new.bias[: len(layer.bias)] = layer.bias
        new.bias[len(layer.bias) :] = layer.bias.mean()
    new.weight[: len(layer.weight)] = layer.weight
    return new.to(layer.weight)


@dataclass(frozen=True)
class BaseModel:
    """A model to fine-tune, with the special tokens of reasoning."""

    config: Config
    """The run's config with `vocabulary`, `tokenizer` and, for our own models, `model` filled in."""
    tokenizer: Tokenizer
    network: CausalModel


def open_base(config: Config, texts: Callable[[], Iterable[str]]) -> BaseModel:
    """The model that `reason.base` names, or `model` from random weights; a bpe tokenizer is trained on `texts`."""
    base = reason_of(config).base
    if not base:
        size = bpe_size(config.tokenizer)
        tokenizer = with_reasoning_tokens(
            load_tokenizer(config.tokenizer) if size is None else train_bpe(texts(), size)
        )
        resolved = replace(config, vocabulary=tokenizer.vocabulary)
        torch.manual_seed(seed_of(config.train.seed, "weights"))
        return BaseModel(resolved, tokenizer, OwnModel(method_of(resolved).build()))  # type: ignore[arg-type]
    folder = model_folder_at(Path(base))
    network: CausalModel
    if folder is None:
        theirs, model = load_pretrained(base, "AutoModelForCausalLM", "a causal language model")
        plain, network = tokenizer_of_transformers(base, theirs), HuggingFaceModel(model)
        resolved = replace(config, tokenizer=base)
    else:  # as trained by `adlm train`, or fine-tuned before
        found, plain, network = load_reasoning_model(folder)
        check_plain_causal(found, f"reason.base {folder} is a model of method {found.method}, which")
        network.requires_grad_(True)
        resolved = replace(config, tokenizer=found.tokenizer, model=found.model)
    tokenizer = with_reasoning_tokens(plain)
    size, has_mask_last = plain.vocabulary.size, plain.vocabulary.mask_id == plain.vocabulary.size - 1
    if folder is None or tokenizer.vocabulary.size > size:
        resize_vocabulary(network, size - has_mask_last, tokenizer.vocabulary.size)  # a mask that we added is not known
    return BaseModel(replace(resolved, vocabulary=tokenizer.vocabulary), tokenizer, network)


def check_plain_causal(config: Config, what: str) -> None:
    """A user error unless the network is one causal transformer: slots are read from left to right."""
    method = method_of(config)
    if not method.causal or method.anchored:
        raise UserError(f"{what} is not a single causal network; reasoning needs method=ar")


def load_reasoning_model(folder: Path) -> tuple[Config, Tokenizer, CausalModel]:
    """Config, tokenizer and network (in eval mode, without gradients) of a model folder."""
    found = load_model_folder(folder)
    if found.tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json, so it cannot read problems; give a model with one")
    if (folder / ARCHITECTURE).is_file():
        model = load_pretrained_model(str(folder), "AutoModelForCausalLM", "a causal language model")
        return found.config, found.tokenizer, HuggingFaceModel(model).requires_grad_(False)
    return found.config, found.tokenizer, OwnModel(network_of(found.config, found.weights))


def save_reasoning_model(base: BaseModel, weights: Mapping[str, Tensor], path: Path, full_tensor: FullTensor) -> None:
    """Write the model folder, replacing an existing one. `transformers` can load that of one of its models."""
    plain = {name.partition(".")[2]: value for name, value in weights.items()}  # without the name of the wrapper
    architecture = None
    if isinstance(base.network, HuggingFaceModel):
        model = base.network.model
        values = {**model.config.to_dict(), "dtype": "float32", "architectures": [type(model).__name__]}
        for local in ("quantization_config", "_name_or_path"):
            values.pop(local, None)
        architecture = json.dumps(values, indent=1, default=str)
    replace_model_folder(ModelFolder(base.config, plain, base.tokenizer, architecture), path, full_tensor)
