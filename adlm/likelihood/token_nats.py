"""The bound of one short text, token by token. No display.

Shapes: L tokens, K samples.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.likelihood.estimators import ESTIMATORS, default_estimator
from adlm.likelihood.settings import BATCH_TOKENS, BATCH_TOKENS_ON_GPU
from adlm.likelihood.standard_errors import perplexity_of
from adlm.likelihood.text_sets import rows_of_texts
from adlm.methods.inputs import check_clean
from adlm.methods.method import Method
from adlm.tokens import Tokenizer


@dataclass(frozen=True)
class TokenRow:
    """A text as the one row that the model scores: framed by bos and eos, as in `LanguageModel.perplexity`."""

    x: Tensor
    """(1, L)"""
    pad: Tensor | None
    """(1, L), True at padding; None where attention ignores padding, which is then left out."""
    counted: Tensor
    """(1, L), True at the tokens that the nats per token are divided by."""


@dataclass(frozen=True)
class TokenNats:
    """The bound of a text and of its tokens."""

    nats: Tensor
    """(L,), the mean over the samples; 0 where a token is given (the first one of causal methods)."""
    stderr: Tensor
    """(L,), Monte Carlo standard errors; 0 for exact methods."""
    total: float
    total_stderr: float
    tokens: int

    @property
    def per_token(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.per_token)


def token_row(method: Method, text: str, tokenizer: Tokenizer) -> TokenRow:
    """The row of a text; a user error if it has more than one."""
    length = method.config.length
    rows = rows_of_texts([text], tokenizer, length)
    if len(rows) > 1:
        raise UserError(f"the text takes {len(rows)} rows of the model's length {length}; shorten it")
    ids, padding = rows.read(np.arange(1))
    counted = rows.counted(ids, padding)
    if padding is not None and method.config.data.pad != "attended":
        text_positions = ~padding[0]
        ids, counted, padding = ids[:, text_positions], counted[:, text_positions], None
    x, pad = torch.from_numpy(ids), None if padding is None else torch.from_numpy(padding)
    check_clean(method.config, x, pad)
    if not (method.predicted(x, pad) & torch.from_numpy(counted)).any():
        raise UserError("no token is predicted: from left to right the first of a row is given; give a longer text")
    return TokenRow(x, pad, torch.from_numpy(counted))


def draw_token_nats(method: Method, network: Any, row: TokenRow, samples: int, seed: int = 0) -> Iterator[Tensor]:
    """(K, L) in parts of some samples: unbiased estimates of the bound, each at other noise levels; one if exact."""
    estimator = method.bound if method.exact else ESTIMATORS[default_estimator(method)](method)
    device = next(network.parameters()).device
    at_once = max(1, (BATCH_TOKENS_ON_GPU if device.type == "cuda" else BATCH_TOKENS) // row.x.shape[1])
    generator, num_left = torch.Generator().manual_seed(seed), 1 if method.exact else samples
    while num_left > 0:
        num = min(at_once, num_left)
        x, pad = (None if each is None else each.expand(num, -1).to(device) for each in (row.x, row.pad))
        yield estimator(network, x, pad, BatchRng(generator)).double().cpu()  # type: ignore[arg-type]
        num_left -= num


def mean_token_nats(method: Method, row: TokenRow, samples: Tensor) -> TokenNats:
    """The means of samples (K, L) and their standard errors, which stratified noise levels make a little too large."""
    if not samples.isfinite().all():
        raise UserError("the model's nats are not finite: its weights are damaged or its precision is too low")
    predicted = method.predicted(row.x, row.pad)
    sums = (samples * predicted).sum(dim=1)
    root = math.sqrt(len(samples))
    exact = len(samples) == 1
    return TokenNats(
        nats=samples.mean(dim=0) * predicted[0],
        stderr=torch.zeros(samples.shape[1]) if exact else samples.std(dim=0) / root,
        total=float(sums.mean()),
        total_stderr=0.0 if exact else float(sums.std()) / root,
        tokens=int((predicted & row.counted).sum()),
    )
