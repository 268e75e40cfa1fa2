"""experiments/adapt/judge.py: its figures are those of transformers, and it resumes."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tiny_bases import causal_model, tokenizer_engine, write_gguf

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

FILE = Path(__file__).parents[2] / "experiments" / "adapt" / "judge.py"
TEXTS = ["the old man and the sea", "<|im_start|>he said 1234, he said 1234, he said é", ""]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("adapt_judge", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, tmp_path, monkeypatch):
    """Judges the lines with a tiny Llama, and returns what --out then holds."""
    threads, path = torch.get_num_threads(), write_gguf(causal_model("llama", tied=False), tmp_path / "tiny.gguf")

    def judge(*lines):
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [tmp_path / "texts.jsonl", "--judge", path, "--out", tmp_path / "judged.jsonl", "--batch", 1]
        monkeypatch.setattr(sys, "argv", ["judge.py", *map(str, words)])
        script.main()
        return [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]

    yield judge
    torch.set_num_threads(threads)


def test_nats_after_bos_are_those_of_transformers_for_every_token_and_byte(run):
    (result,) = run({"model": "a", "seconds": 3.5, "texts": TEXTS})
    model, engine, texts = causal_model("llama", tied=False), tokenizer_engine(), [TEXTS[0], TEXTS[1][12:]]
    nats, rows = [], [engine.encode(text).ids for text in texts]
    for ids in rows:
        x = torch.tensor([[engine.token_to_id("<|im_start|>"), *ids]])
        with torch.no_grad():
            log_probs = model(x).logits[0, :-1].log_softmax(dim=-1)
        nats.append(-float(log_probs.gather(1, x[0, 1:, None]).sum()))
    tokens, sizes = [len(ids) for ids in rows], [len(text.encode()) for text in texts]
    judged = result["judged"]
    assert (result["model"], result["seconds"], "texts" in result) == ("a", 3.5, False)
    assert (judged["texts"], judged["tokens"], judged["bytes"]) == (2, sum(tokens), sum(sizes))
    assert judged["nats_per_token"][0] == pytest.approx(sum(nats) / sum(tokens), abs=1e-4)
    assert judged["perplexity"][0] == pytest.approx(math.exp(sum(nats) / sum(tokens)), rel=1e-4)
    assert judged["nats_per_token_by_text"] == pytest.approx([a / b for a, b in zip(nats, tokens, strict=True)], 1e-4)
    mean = sum(nats) / sum(sizes)
    deviations = [a - mean * b for a, b in zip(nats, sizes, strict=True)]
    stderr = math.sqrt(sum(x**2 for x in deviations) * 2) / sum(sizes)
    assert judged["nats_per_byte"] == pytest.approx([mean, stderr], abs=1e-4)
    assert judged["repeated_by_text"][0] == 0 < judged["repeated_by_text"][1]


def test_lines_that_are_done_are_skipped_and_equal_texts_of_other_models_are_not(run, script, monkeypatch):
    first, second = ({"model": name, "texts": TEXTS} for name in "ab")
    once = run(first)
    both = run(first, second, {"model": "c"}, {"model": "d", "texts": [""]})
    assert both[:1] == once
    assert [result["model"] for result in both] == ["a", "b"]
    assert both[0]["judged"]["nats_per_token"] == both[1]["judged"]["nats_per_token"]
    monkeypatch.setattr(script, "judge_of", lambda *_: pytest.fail("the judge is loaded though nothing is left"))
    assert run(first, second) == both
