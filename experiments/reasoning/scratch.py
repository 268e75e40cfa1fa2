"""ACoT and its baselines from random weights: a small GPT-2 on generated ProsQA problems, tested on the real ones.

    python experiments/reasoning/scratch.py --data DATA/prosqa --method acot --seed 0 > acot-0.json

Words are tokens, so every label is one. All methods get the same problems in the same order, the same number of epochs
and the same optimizer; the table of docs/reasoning.md is made from these files.
"""

import argparse
import json
import math
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from adlm.data.reasoning import prosqa
from adlm.data.reasoning.make_prosqa import generate_prosqa
from adlm.data.reasoning.problem import Problem, read_problems
from adlm.data.reasoning.series import forbidden_forms
from adlm.reasoning.generate import generate
from adlm.reasoning.loss import reasoning_loss
from adlm.reasoning.methods import REASONING_METHODS, curriculum
from adlm.reasoning.network import HuggingFaceModel
from adlm.reasoning.rows import ANSWER_MARK, Encoder, SpecialIds, collate

WORD = re.compile(r"\w+|###|[^\w\s]|\n")


class Words:
    """A vocabulary of words."""

    def __init__(self, problems: list[Problem]):
        texts = (" ".join((problem.question, *problem.steps, ANSWER_MARK, problem.answer)) for problem in problems)
        self.words = sorted({word for text in texts for word in WORD.findall(text)} | {"\n"})
        self.index = {word: number for number, word in enumerate(self.words)}
        first = len(self.words)
        self.ids = SpecialIds(*range(first, first + 6))
        self.size = first + 6

    def encode(self, text: str) -> list[int]:
        return [self.index[word] for word in WORD.findall(text)]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[index] if index < len(self.words) else "?" for index in ids)


def wilson(right: int, num: int, z: float = 1.96) -> tuple[float, float]:
    share, spread = right / num, z * math.sqrt(right * (num - right) / num**3 + z * z / (4 * num * num))
    middle, scale = share + z * z / (2 * num), 1 + z * z / num
    return (middle - spread) / scale, (middle + spread) / scale


def answer_of(text: str) -> str:
    return text.split("###")[-1].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with prosqa_valid.json and prosqa_test.json")
    parser.add_argument("--method", choices=REASONING_METHODS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--first-epochs", type=int, default=2)
    parser.add_argument("--stage-epochs", type=int, default=1)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--anchor-weight", type=float, default=1.0)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--test", type=int, default=500)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = [arguments.data / "prosqa_valid.json", arguments.data / "prosqa_test.json"]
    test = list(read_problems(files[1]))[: arguments.test]
    problems = list(generate_prosqa(arguments.problems, 1, forbidden=forbidden_forms(files, prosqa.structure)))
    words = Words([*problems, *test])
    encoder = Encoder(words.encode, prosqa.anchor_labels, words.ids)
    torch.manual_seed(arguments.seed)
    config = GPT2Config(
        vocab_size=words.size,
        n_positions=512,
        n_embd=arguments.width,
        n_layer=arguments.blocks,
        n_head=arguments.width // 64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = HuggingFaceModel(GPT2LMHeadModel(config)).to(device)
    method = REASONING_METHODS[arguments.method]
    if method.staged:
        stages = curriculum(
            arguments.method, arguments.epochs, arguments.first_epochs, arguments.stage_epochs, arguments.slots
        )
    else:
        stages = curriculum(arguments.method, arguments.epochs + arguments.first_epochs, max_slots=arguments.slots)
    order, start, step, log = torch.Generator().manual_seed(arguments.seed), time.perf_counter(), 0, []
    skipped = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.01, fused=device.type == "cuda")
    for number, stage in enumerate(stages):
        if stage.reset_optimizer:
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=arguments.rate, weight_decay=0.01, fused=device.type == "cuda"
            )
        rows = [encoder.row(problem, method, stage) for problem in problems]
        stage_step = 0
        for _ in range(stage.epochs):
            for chosen in torch.randperm(len(rows), generator=order).split(arguments.batch):
                batch = collate([rows[index] for index in chosen.tolist()], words.ids, method, stage.slots)
                for group in optimizer.param_groups:
                    group["lr"] = arguments.rate * min(1.0, (stage_step + 1) / 100)
                moved = type(batch)(
                    *(getattr(batch, name).to(device) for name in ("ids", "is_text", "predicted", "anchors")),
                    batch.slots,
                )
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = reasoning_loss(model, moved, arguments.anchor_weight)
                optimizer.zero_grad(set_to_none=True)
                (loss.total / loss.num_tokens).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if norm.isfinite():
                    optimizer.step()
                else:
                    skipped += 1
                step, stage_step = step + 1, stage_step + 1
                if step % 100 == 0:
                    line = {"step": step, "stage": number, "nats": float(loss.nats / loss.num_tokens)}
                    line["anchors_right"] = float(loss.num_right_anchors / loss.num_anchors.clamp(min=1))
                    line["seconds"] = round(time.perf_counter() - start, 1)
                    log.append(line)
                    print(line, file=sys.stderr, flush=True)
    model.eval()
    slots = stages[-1].slots
    right, tokens, outputs, slot_right, slot_num = 0, 0, [], [0] * (slots + 1), [0] * (slots + 1)
    for first in range(0, len(test), 250):
        part = test[first : first + 250]
        prompts = [encoder.prompt(problem, method, slots) for problem in part]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            written = generate(model, prompts, words.ids, method, slots, 80, device)
        for problem, each in zip(part, written, strict=True):
            said, expected = answer_of(words.decode(each.ids)), words.decode(words.encode(problem.answer))
            right += said == expected
            tokens += len(each.ids)
            labels = [encoder.label_id(label) for label in encoder.labels(problem)][: slots + 1]
            for place, (label, token) in enumerate(zip(labels, each.slot_ids, strict=False)):
                slot_num[place] += 1
                slot_right[place] += label == token
            outputs.append({"hops": len(problem.steps), "right": said == expected, "written": words.decode(each.ids)})
    low, high = wilson(right, len(test))
    hops = sorted({output["hops"] for output in outputs})
    by_hops = {
        h: [sum(o["right"] for o in outputs if o["hops"] == h), sum(o["hops"] == h for o in outputs)] for h in hops
    }
    result = {
        "method": arguments.method,
        "data": "prosqa",
        "seed": arguments.seed,
        "num": len(test),
        "right": right,
        "accuracy": right / len(test),
        "interval": [low, high],
        "tokens": tokens / len(test),
        "slots": slots,
        "by_hops": by_hops,
        "slots_right": [r / max(1, n) for r, n in zip(slot_right, slot_num, strict=True)],
        "seconds": round(time.perf_counter() - start, 1),
        "steps": step,
        "skipped": skipped,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "stages": [asdict(stage) for stage in stages],
        "command": " ".join(sys.argv),
        "log": log,
        "examples": outputs[:3],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
