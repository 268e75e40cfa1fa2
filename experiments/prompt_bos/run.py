"""Should a diffusion model read a prompt after bos? The bound on held-out continuations, with and without the frame.

python experiments/prompt_bos/run.py runs/quickstart        (a folder of `adlm quickstart`; about ten minutes a model)

A training row is [bos] text [eos]. Held-out text is cut into a prompt, which is given, a hole, and perhaps a suffix,
which is given too. The hole's any-order bound, -log p(hole | prompt, suffix), is measured with four frames around the
same tokens and with the same masks: none, bos before the text, eos after it, both. bos and eos are given and not
predicted. Errors are over documents (speeches).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import adlm
from adlm.data.prepare.prepared import open_prepared
from adlm.language_model import LanguageModel

FRAMES = {"none": (0, 0), "bos": (1, 0), "eos": (0, 1), "both": (1, 1)}
PROMPTS = (1, 2, 4, 16)
HOLE = 16  # tokens, where the text goes on or ends after it; else the hole reaches to the end of the row
EVERY, BATCH = 4, 64  # every fourth held-out row


def main() -> None:
    folder = Path(sys.argv[1])
    rows = open_prepared(folder / "data").rows("valid")
    numbers = np.arange(0, len(rows) - 1, EVERY)  # without the last row, which is short
    x, _ = rows.read(numbers)
    text, documents = torch.from_numpy(x[:, 1:-1]), rows.documents(numbers)[:, 1]
    print(f"{len(text)} stretches of {text.shape[1]} tokens, {len(set(documents))} documents; nats a token, paired")
    for name in ("adlm", "mdlm"):
        lm = adlm.load(folder / name)
        for prompt in PROMPTS:
            for end in (prompt + HOLE, text.shape[1]):
                report(lm, f"{name} prompt {prompt:2}, hole {end - prompt:2}", text[:, :end], (prompt, end), documents)
            suffix = text.shape[1] - prompt - HOLE
            name_it = f"{name} prompt {prompt:2}, hole {HOLE}, suffix {suffix}"
            report(lm, name_it, text, (prompt, prompt + HOLE), documents)


def report(lm: LanguageModel, name: str, text: Tensor, hole: tuple[int, int], documents: np.ndarray) -> None:
    """The bound without a frame and what each frame changes: for the whole hole, and without its last token."""
    generator = torch.Generator().manual_seed(0)
    length = hole[1] - hole[0]
    share = (torch.randperm(len(text), generator=generator) + torch.rand(len(text), generator=generator)) / len(text)
    num_masks = torch.ceil(share * length).clamp(min=1).long()
    order = torch.rand(len(text), length, generator=generator).argsort(dim=1).argsort(dim=1)
    masked = order < num_masks[:, None]
    nats = {frame: hole_nats(lm, text, hole, masked, *around) for frame, around in FRAMES.items()}
    for part, columns in (("", slice(None)), ("but its last token", slice(None, -1))):
        each = {frame: found[:, columns].mean(dim=1) for frame, found in nats.items()}
        columns = [f"none {mean_and_error(each['none'], documents)}"]
        columns += [
            f"{frame} {mean_and_error(each[frame] - each['none'], documents, '+')}" for frame in list(FRAMES)[1:]
        ]
        print(f"{name:39} {part:18}  " + "   ".join(columns), flush=True)


def hole_nats(
    lm: LanguageModel, text: Tensor, hole: tuple[int, int], masked: Tensor, num_bos: int, num_eos: int
) -> Tensor:
    """(n, hole): -log p at the masks times length / masks, whose sum is an estimate of the bound."""
    vocabulary, (num, length) = lm.config.vocabulary, masked.shape
    assert vocabulary is not None
    z = text.clone()
    z[:, slice(*hole)][masked] = lm.mask_id
    bos, eos = torch.full((num, num_bos), vocabulary.bos_id), torch.full((num, num_eos), vocabulary.eos_id)
    z = torch.cat([bos, z, eos], dim=1)
    found = torch.zeros(num, length, dtype=torch.float64)
    for start in range(0, num, BATCH):
        part = slice(start, start + BATCH)
        log_probs = lm.log_probs(z[part])[:, num_bos + hole[0] : num_bos + hole[1]]
        found[part] = -log_probs.gather(-1, text[part, slice(*hole), None])[..., 0].double()
    return found * masked * (length / masked.sum(dim=1, keepdim=True))


def mean_and_error(each: Tensor, documents: np.ndarray, sign: str = "") -> str:
    """The mean over stretches and its standard error over documents, which have unequal numbers of stretches."""
    values, mean = each.numpy(), float(each.mean())
    left = np.array([(values[documents == document] - mean).sum() for document in np.unique(documents)])
    error = np.sqrt(len(left) / (len(left) - 1) * (left**2).sum()) / len(values)
    return f"{mean:{sign}.4f} ± {error:.4f}"


if __name__ == "__main__":
    with torch.no_grad():
        main()
