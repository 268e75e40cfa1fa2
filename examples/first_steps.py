"""A language of 576 sentences, packed into blocks as in the paper and learnt in a minute by ADLM and by MDLM.

Every sentence is equally likely, so the entropy of a block is known exactly and no model can pay less; what a bound
says above it is what is still to learn. Run it with `python examples/first_steps.py`.
"""

import itertools
import math
import time
from collections import Counter
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from adlm.config.schema import Anchor, Config, Model, Sampling, Vocabulary
from adlm.diffusion.times import BatchRng
from adlm.methods import method_of
from adlm.methods.method import Method
from adlm.models.transformer import num_parameters
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng

NAMES = ["ada", "ben", "cleo", "dora", "emil", "fay"]
ANIMALS = {"cat": ("sleeps", "purrs", "house"), "duck": ("swims", "quacks", "pond")}
ANIMALS |= {"owl": ("hoots", "waits", "tree"), "goat": ("eats", "climbs", "field")}
HOW = ["quietly", "gladly", "slowly", "often", "alone", "again"]
WHEN = ["today", "tonight"]
LENGTH = 24
STEPS = 1000
BLOCKS = 4096  # ten times so many are measured


def sentences() -> list[tuple[str, ...]]:
    """Who does what tells where: `ada the duck swims slowly in the pond tonight .`"""
    made = []
    for name, (animal, (one, other, place)), how, when in itertools.product(NAMES, ANIMALS.items(), HOW, WHEN):
        made += [(name, "the", animal, does, how, "in", "the", place, when, ".") for does in (one, other)]
    return made


def entropy(pieces: list[tuple[str, ...]]) -> float:
    """Of a piece drawn from the list."""
    return sum(-count / len(pieces) * math.log(count / len(pieces)) for count in Counter(pieces).values())


def block_entropy(language: list[tuple[str, ...]]) -> float:
    """Nats in LENGTH words cut at a random place out of sentence after sentence."""
    width = len(language[0])
    total = math.log(width)  # where in a sentence the block begins
    for start in range(width):
        whole, rest = divmod(LENGTH - (width - start), width)
        head, tail = entropy([words[start:] for words in language]), entropy([words[:rest] for words in language])
        total += (head + whole * math.log(len(language)) + tail) / width
    return total


def draw_blocks(num: int, ids: Tensor, draws: torch.Generator) -> Tensor:
    """Blocks of LENGTH ids, cut out of sentences drawn one after the other."""
    width = ids.shape[1]
    stream = ids[torch.randint(len(ids), (num, LENGTH // width + 2), generator=draws)].flatten(1)
    start = torch.randint(width, (num, 1), generator=draws)
    return stream.gather(1, start + torch.arange(LENGTH))


def train(name: str, method: Method, ids: Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    network, draws = method.build(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    for step in track(range(STEPS), description=f"training {name}", transient=True):
        optimizer.zero_grad()
        method.loss(network, draw_blocks(32, ids, draws), None, step / STEPS, BatchRng(draws)).mean.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network


def show(console: Console, method: Method, network: torch.nn.Module, words: list[str], language: set[str]) -> None:
    """A hole filled in, a block from nothing with second thoughts on the way, and how many sentences are right."""
    mask = words.index("[MASK]")

    def text(ids: Tensor) -> str:
        return " ".join("____" if index == mask else words[index] for index in ids.tolist())

    given = ". fay the ____ ____ slowly in the pond today . ben the cat ____ ____ in the ____ tonight ."
    canvas = torch.tensor([[mask if word == "____" else words.index(word) for word in given.split()]])
    filled = last_frame(method.generate(network, canvas, Sampling(steps=32), RowRng(4, [0]))).ids[0]
    console.print(f"\n  given    {text(canvas[0])}\n  infilled {text(filled)}\n")
    blank = torch.full((1, 14), mask)
    for frame in method.generate(network, blank, Sampling("remdm-rescale", steps=20, eta=0.1), RowRng(4, [1])):
        console.print(f"  t = {frame.t[0]:.2f}  {text(frame.ids[0])}")
    blank = torch.full((200, LENGTH), mask)
    drawn = last_frame(method.generate(network, blank, Sampling(steps=64), RowRng(4, range(2, 202)))).ids
    found = [piece.strip() for row in drawn for piece in text(row).split(".")[1:-1]]
    console.print(f"\n  {sum(piece in language for piece in found)} of {len(found)} drawn sentences are sentences\n")


def main() -> None:
    console = Console(highlight=False, width=110)
    language = sentences()
    words = [*sorted(set(itertools.chain(*language))), "[MASK]"]
    ids = torch.tensor([[words.index(word) for word in sentence] for sentence in language])
    config = Config(
        length=LENGTH,
        vocabulary=Vocabulary(size=len(words), mask_id=len(words) - 1),
        model=Model(hidden=64, heads=4, blocks=2, denoiser_blocks=1, bridge="hidden", condition=16, dropout=0.0),
        anchor=Anchor(gamma=0.1, tau=1),
    )
    floor = block_entropy(language) / LENGTH
    nothing = math.log(len(words) - 1)
    console.print(
        f"{len(language)} sentences: no model pays less than {floor:.4f} nats a word; no idea costs {nothing:.4f}"
    )
    for name, method in (
        ("adlm", method_of(config)),
        ("mdlm", method_of(replace(config, method="mdlm", model=replace(config.model, blocks=3)))),
    ):
        start = time.perf_counter()
        network = train(name, method, ids)
        seconds = time.perf_counter() - start
        draws = torch.Generator().manual_seed(1)
        bounds = [
            method.bound(network, draw_blocks(BLOCKS, ids, draws), None, BatchRng(draws)).mean(dim=1) for _ in range(10)
        ]
        paid = torch.cat(bounds)
        error = paid.std().item() / math.sqrt(len(paid))
        size = f"{num_parameters(network) / 1e3:.0f}k parameters, {seconds:.0f} s of training"
        console.print(f"[bold]{name}[/] pays at most {paid.mean().item():.4f} ± {error:.4f} nats a word ({size})")
        if name == "adlm":
            show(console, method, network, words, {" ".join(sentence[:-1]) for sentence in language})


if __name__ == "__main__":
    main()
