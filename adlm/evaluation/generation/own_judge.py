"""An AR or A2R model of ours as a judge: one that is there without a network. Knows no files and no conventions.

Shapes: B windows of L ids; `pad` is True past the end of one.
"""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from adlm.config.schema import Config
from adlm.data.rows.packing import row_frame
from adlm.errors import UserError
from adlm.evaluation.generation.generative_perplexity import JudgeInfo
from adlm.methods import method_of
from adlm.models.fingerprint import weights_sha256
from adlm.tokens import Tokenizer

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
