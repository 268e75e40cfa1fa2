"""What `adlm.load` returns: a model to ask, in ids. Knows how to put its parts together, nothing of how they work.

Shapes: B sequences, L tokens, V symbols.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm.config.schema import Config, Sampling
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.methods.inputs import check_ids, vocabulary_of
from adlm.methods.method import Method
from adlm.model_folder import ModelFolder, load_model_folder, network_of
from adlm.published import as_model_folder, read_published
from adlm.tokens import Tokenizer


@dataclass(frozen=True)
class LanguageModel:
    """A network with its method. Calls take and give ids; `tokenizer` is there where the folder has one."""

    config: Config
    method: Method
    network: Any
    tokenizer: Tokenizer | None = None

    @property
    def mask_id(self) -> int:
        return vocabulary_of(self.config).mask_id

    def log_probs(self, z: Tensor, t: float | None = None) -> Tensor:
        """log beliefs (B, L, V): of the clean token at each place, or, left to right, of the token after it.

        `t` matters only to a network that is told the time; without it the share of masks in a row stands for it.
        """
        check_ids(z, self.config, "text")
        if t is not None and not 0 <= t <= 1:
            raise UserError(f"t {t} must be a time from 0 to 1")
        return self.method.log_beliefs(self.network, z, t)

    def anchor_logits(self, z: Tensor) -> Tensor:
        """The anchor network's logits (B, L, V)."""
        if not hasattr(self.network, "anchor_logits"):
            raise UserError(f"method {self.config.method} has no anchor network; adlm and a2r have one")
        check_ids(z, self.config, "text")
        with torch.no_grad():
            return self.network.anchor_logits(z)  # type: ignore[no-any-return]

    def bound(self, x: Tensor, pad: Tensor | None = None, seed: int = 0) -> Tensor:
        """nats (B, L): one unbiased draw of the bound on -log p(x); exact left to right."""
        return self.method.bound(self.network, x, pad, torch.Generator().manual_seed(seed))

    def complete(
        self,
        canvas: Tensor,
        num_samples: int = 1,
        steps: int = Sampling.steps,
        sampler: str = Sampling.sampler,
        eta: float = Sampling.eta,
        seed: int = 0,
    ) -> Tensor:
        """ids (B * num_samples, L): each row of a canvas (B, L) or (L,) filled in, where it has the mask id."""
        if num_samples < 1:
            raise UserError(f"num_samples {num_samples} must be at least 1")
        rows = canvas[None] if isinstance(canvas, Tensor) and canvas.ndim == 1 else canvas
        check_ids(rows, self.config, "canvas")
        sampling = replace(self.config.sampling, steps=steps, sampler=sampler, eta=eta)  # type: ignore[arg-type]
        method = method_of(replace(self.config, sampling=sampling))
        generator = torch.Generator().manual_seed(seed)
        *_, last = method.generate(self.network, rows.repeat_interleave(num_samples, dim=0), sampling, generator)
        return last.ids


def load(path: str | Path) -> LanguageModel:
    """A model folder, the folder of a run, or a checkpoint of the released code (averaged weights, if any)."""
    place = Path(path)
    if place.is_dir():
        trained = place / "model"  # the folder of a run has its model there
        return language_model(load_model_folder(trained if trained.is_dir() else place))
    if place.suffix == ".ckpt":
        return language_model(as_model_folder(read_published(place)))
    raise UserError(f"{path} is neither a model folder nor a .ckpt file")


def language_model(model: ModelFolder) -> LanguageModel:
    """A folder's parts, put together."""
    network = network_of(model.config, model.weights)
    return LanguageModel(model.config, method_of(model.config), network, model.tokenizer)
