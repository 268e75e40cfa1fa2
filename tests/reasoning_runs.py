"""Small reasoning runs for the tests: files of short problems, tiny base models, and the command that trains."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm.apps.reasoning.datasets import prontoqa, prosqa
from adlm.apps.reasoning.datasets.prontoqa import Skeleton
from adlm.apps.reasoning.datasets.prosqa import Shape
from adlm.apps.reasoning.problems import Forbidden, Problem, series
from adlm.cli.main import main
from adlm.tokens import Tokenizer, train_bpe

SHAPE = Shape(num_nodes=8, min_hops=1, max_hops=3)
NUM_TRAIN, NUM_VALID, NUM_TEST = 24, 6, 7

# Plain chain of thought, then three stages, of one epoch of three batches each.
TINY = (
    "method=ar",
    "tokenizer=bpe-500",
    "length=256",
    "data.name=prosqa",
    "model.hidden=16",
    "model.heads=2",
    "model.blocks=1",
    "model.dropout=0.1",
    "train.batch_size=8",
    "train.learning_rate=3e-3",
    "train.warm_up_steps=0",
    "train.log_every=2",
    "train.valid_every=0",
    "train.sample_every=1000",
    "train.checkpoint_every=1000",
    "train.threads=1",
    "train.device=cpu",
    "train.ema=0",
    "reason.method=acot",
    "reason.first_epochs=1",
    "reason.epochs=3",
    "reason.stage_epochs=1",
    "reason.slots=3",
    "reason.max_tokens=12",
)
STEPS_PER_STAGE, NUM_STEPS = 3, 12


def generate_prosqa(
    num: int, seed: int, start: int = 0, forbidden: Forbidden | None = None, shape: Shape = prosqa.REAL
) -> Iterator[Problem]:
    return series("prosqa", partial(prosqa.draw, shape=shape), num, seed, start, forbidden)


def generate_prontoqa(
    num: int, seed: int, start: int = 0, forbidden: Forbidden | None = None, skeleton: Skeleton = prontoqa.REAL
) -> Iterator[Problem]:
    return series("prontoqa", partial(prontoqa.draw, skeleton=skeleton), num, seed, start, forbidden)


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """A file in the format of the real ones, without the fields that describe a graph."""
    path.write_text(json.dumps([asdict(problem) for problem in problems]))


def prosqa_problems(num: int, start: int = 0) -> list[Problem]:
    return list(generate_prosqa(num, 0, start=start, shape=SHAPE))


def prosqa_root(folder: Path) -> Path:
    """A folder for data.root with training, validation and test problems of ProsQA."""
    (folder / "prosqa").mkdir(parents=True)
    start = 0
    for split, num in (("train", NUM_TRAIN), ("valid", NUM_VALID), ("test", NUM_TEST)):
        write_problems(folder / "prosqa" / f"prosqa_{split}.json", prosqa_problems(num, start))
        start += num
    return folder


def gsm8k_root(folder: Path) -> Path:
    """The same for GSM8K, in its three formats. Most problems are one sum: a model that writes it solves some."""
    (folder / "gsm8k").mkdir(parents=True)
    train, valid, test = ([_sum(number) for number in part] for part in (range(24), range(24, 32), range(32, 40)))
    for split, problems in (("train", train), ("test", test)):
        lines = [{"question": p.question, "answer": f"So {p.steps[0]}.\n#### {p.answer}"} for p in problems]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_problems(folder / "gsm8k" / "gsm_valid.json", valid)
    return folder


def _sum(number: int) -> Problem:
    second = 3 if number % 4 else 4
    question = f"Tom has 2 and Ann {second} apples on day {number}."
    return Problem(question, (f"<<2+{second}={2 + second}>>",), f"{2 + second}")


def reason_train(root: Path, out: Path, *words: str) -> int:
    """`adlm reason train` with the options of TINY, then `words`."""
    return main(["reason", "train", *TINY, f"data.root={root}", *words, "--out", str(out)])


def evaluated(model: Path, root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON of `adlm reason eval`."""
    capsys.readouterr()
    assert main(["reason", "eval", str(model), "--root", str(root), "--device", "cpu", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def tokenizer_of(problems: Sequence[Problem], size: int = 500) -> Tokenizer:
    return train_bpe((problem.as_text() for problem in problems), size)


def hugging_face_folder(folder: Path, kind: str, tokenizer: Tokenizer | None = None, positions: int = 256) -> Path:
    """A tiny GPT-2 or Llama with random weights and a tokenizer, as `transformers` saves them."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    tokenizer = tokenizer or tokenizer_of(prosqa_problems(NUM_TRAIN))
    torch.manual_seed(0)
    symbols = tokenizer.vocabulary.size - 1  # without the mask, as of a model that is not ours
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=symbols, n_positions=positions, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=symbols,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=positions,
            tie_word_embeddings=kind == "tied-llama",
        )
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    engine = json.loads(tokenizer.engine.to_str())
    engine["added_tokens"] = [token for token in engine["added_tokens"] if token["content"] != "[MASK]"]
    (folder / "tokenizer.json").write_text(json.dumps(engine))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    return folder
