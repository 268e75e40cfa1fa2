"""Synthetic sampling runs over English text, for tests of traces: a fake model of one text, and frames that fill it."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from adlm.errors import UserError
from adlm.sampling.frame import Frame
from adlm.tokens import Tokenizer, train_bpe

TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening, and every evening he counted them aloud, as if "
    "one might have gone missing in the night. There were one hundred and twelve. At the top he lit the lamp, opened "
    "the window to the sea and listened.\n\nShips went by that he would never board, bound for harbours that he knew "
    "only from letters. He did not mind. A light, he liked to say, is the one traveller who arrives by staying where "
    "it is.\n\nOn the last night of October the fog came in so thick that the beam stood in the air like a wall. He "
    "rang the bell by hand until morning — and when it lifted, a small white boat lay at the rocks, quite unharmed."
)
SMALL_WORDS = "the and he it a of in to that by for at as is was were had who when so if on would one did not"


def tokenizer_of(text: str, size: int = 640) -> Tokenizer:
    return train_bpe([text], size)


class FakeModel:
    """A fake model of one text, more certain the more of it is visible; its anchor network prefers long words."""

    def __init__(
        self, ids: list[int], mask_id: int, size: int, tokenizer: Tokenizer | None = None, anchors: bool = True
    ):
        self.x, self.mask_id, self.size, self.tokenizer = torch.tensor(ids), mask_id, size, tokenizer
        model = SimpleNamespace(block_length=0)
        self.config = SimpleNamespace(method="adlm" if anchors else "mdlm", model=model)
        self.method = SimpleNamespace(causal=False)
        pieces = ["" if tokenizer is None else tokenizer.decode([index]) for index in ids]
        self.important = torch.tensor(
            [piece.strip().lower() not in SMALL_WORDS.split() and piece.strip().isalpha() for piece in pieces]
        )
        self.anchors = anchors
        self.rare = torch.zeros(size)
        if tokenizer is not None:  # single bytes are unlikely
            self.rare[[i for i in range(size) if len(tokenizer.piece(i)) < 2 and i not in set(ids)]] = -6.0

    def log_probs(self, z: Tensor, alpha: float | None = None) -> Tensor:
        visible = 1 - (z == self.mask_id).double().mean()
        return self._logits(z, 7.0 + 9.0 * float(visible) + torch.where(self.important, 0.0, 1.5), seed=1).log_softmax(
            -1
        )

    def anchor_logits(self, z: Tensor, alpha: float | None = None) -> Tensor:
        if not self.anchors:
            raise UserError("method mdlm has no anchor network; adlm and a2r have one")
        visible = 1 - (z == self.mask_id).double().mean()
        return self._logits(z, 1.0 + 5.0 * float(visible) + torch.where(self.important, 4.5, 0.0), seed=2)

    def _logits(self, z: Tensor, bonus: Tensor, seed: int) -> Tensor:
        """Noise that changes little from state to state, -inf at the mask, and a bonus for the true token."""
        fixed = torch.randn(len(self.x), self.size, generator=torch.Generator().manual_seed(seed))
        moving = torch.randn(len(self.x), self.size, generator=torch.Generator().manual_seed(int(z.sum()) + seed))
        logits = 1.5 * fixed + 0.5 * moving + self.rare
        logits[torch.arange(len(self.x)), self.x] += bonus
        logits[:, self.mask_id] = -torch.inf
        return logits[None].expand(len(z), -1, -1)


def sampling_frames(
    lm: FakeModel, canvas: Tensor, steps: int, remasking: float = 0.0, seed: int = 0
) -> Iterator[Frame]:
    """From the canvas (B, L) to text: at every step each mask is revealed with probability 1 / (steps left).

    With remasking, a drawn token is remasked with that probability, and may be revealed again in the same step.
    """
    generator = torch.Generator().manual_seed(seed)
    z, chance = canvas, (canvas != lm.mask_id).float()
    nowhere, to_fill = torch.zeros_like(canvas, dtype=torch.bool), canvas == lm.mask_id
    yield Frame(z, torch.ones(len(z), dtype=torch.float64), nowhere, nowhere, chance, z, None)
    for step in range(steps):
        steps_left = steps - step
        drawable = z == lm.mask_id
        remasked = (
            to_fill & ~drawable & (torch.rand(z.shape, generator=generator) < (remasking if steps_left > 1 else 0))
        )
        masks = drawable | remasked
        revealed = masks & (torch.rand(z.shape, generator=generator) < 1 / steps_left)
        read = z.masked_fill(remasked & revealed, lm.mask_id)
        probabilities = lm.log_probs(read).exp()
        drawn = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator).view(z.shape)
        z = torch.where(revealed, drawn, torch.where(masks, lm.mask_id, z))
        drawn_chance = probabilities.gather(-1, drawn[..., None])[..., 0].float()
        chance = torch.where(revealed, drawn_chance, torch.where(masks, 0.0, chance))
        t = torch.full((len(z),), 1 - (step + 1) / steps, dtype=torch.float64)
        yield Frame(z, t, revealed, remasked, chance, read, None)


def fake_model_and_canvas(
    anchors: bool = True, given: tuple[str, ...] = ("The old lighthouse keeper", "staying where it is")
) -> tuple[FakeModel, Tensor]:
    """A fake model of TEXT, and a canvas (1, L) with some phrases of it given."""
    tokenizer = tokenizer_of(TEXT)
    ids = tokenizer.encode(TEXT)
    vocabulary = tokenizer.vocabulary
    canvas = torch.full((1, len(ids)), vocabulary.mask_id)
    for phrase in given:
        start, end = TEXT.index(phrase), TEXT.index(phrase) + len(phrase)
        offset = 0
        for position, index in enumerate(ids):
            if start <= offset and offset + len(tokenizer.decode([index])) <= end:
                canvas[0, position] = index
            offset += len(tokenizer.piece(index).decode(errors="ignore"))
    return FakeModel(ids, vocabulary.mask_id, vocabulary.size, tokenizer, anchors), canvas
