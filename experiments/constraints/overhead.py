"""What constraints cost: seconds of sampling with and without, in turn, at a vocabulary of 49,152 tokens.

    python experiments/constraints/overhead.py --device cpu
    python experiments/constraints/overhead.py --device cuda --rows 1 8 64
    python experiments/constraints/overhead.py --device cuda --tokenizer tokenizer.json   # without smollm2 itself

Two models: an untrained MDLM of the size of SmolLM2 (30 blocks of 576, whole rows of 64 tokens, 64 steps), and smollm2
itself (block-causal, token by token), if its weights are here. Each text is a hole of given length and, of whole rows,
other masks. Times do not depend on what the weights say, as lengths are given. On a CPU it is the CPU time of one
thread, which other processes disturb less than wall time.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

import adlm
from adlm.bases.named import find_named_base
from adlm.config.schema import Config, Model, Sampling
from adlm.language_model import LanguageModel
from adlm.methods import method_of
from adlm.sampling.settings import SampleSettings
from adlm.tokens import load_tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "married": {"type": "boolean"},
        "job": {"enum": ["farmer", "teacher", "doctor", "sailor"]},
    },
    "required": ["name", "age", "city", "married", "job"],
}
CHOICES = ["yes", "no", "never", "always", "sometimes", "perhaps", "of course", "I do not know", "it depends", "later"]
TASKS = {
    "ten choices": (adlm.Choices(CHOICES), 4),
    "date": (adlm.Regex(r"[12]\d{3}-(0[1-9]|1[0-2])-[0-3]\d"), 11),
    "record of five fields": (adlm.JsonSchema(RECORD), 40),
}
LENGTH = 64


def whole_row_model(name: str, device: str) -> LanguageModel:
    tokenizer = load_tokenizer(name)
    config = Config(
        method="mdlm",
        vocabulary=tokenizer.vocabulary,
        length=128,
        model=Model(hidden=576, blocks=30, heads=9, condition=64, dropout=0.0),
    )
    method = method_of(config)
    torch.manual_seed(0)
    network = method.build().eval().to(device)
    with torch.no_grad():
        network.head.weight.normal_(std=0.1)
    return LanguageModel(config, method, network, tokenizer)


def seconds_of(lm: LanguageModel, text: str, constraints: dict[str, object], sampling: Sampling, rows: int) -> float:
    settings = SampleSettings(sampling, [text], num=rows, constraints=constraints)  # type: ignore[arg-type]
    run = lm.plan(settings)
    if lm.device.type == "cpu":
        start = time.process_time()
        for _ in run.frames():
            pass
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in run.frames():
        pass
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokenizer", default="base:smollm2", help="of the untrained model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samplers", nargs="+", default=["ancestral", "confidence", "speculative"])
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    has_smollm2 = find_named_base("smollm2") is not None
    if options.tokenizer == "base:smollm2" and not has_smollm2:
        raise SystemExit("the tokenizer of smollm2 is not here: adlm fetch smollm2, or give --tokenizer")
    models = {"whole rows": whole_row_model(options.tokenizer, options.device)}
    if has_smollm2:
        models["smollm2"] = adlm.load("smollm2", options.device)
    for rows in options.rows:
        for name, lm in models.items():
            for sampler in options.samplers:
                if (sampler == "speculative") != (name == "smollm2"):
                    continue
                sampling = replace(lm.config.sampling, sampler=sampler, steps=64, candidates=1, stop_at_eos=False)
                for task, (constraint, num) in TASKS.items():
                    others = LENGTH - num
                    text = f"The answer: [MASK*{num}:x]" + (f" and [MASK*{others}]" if name == "whole rows" else "")
                    compiling = time.perf_counter()
                    lm.plan(SampleSettings(sampling, [text], constraints={"x": constraint}))
                    compiling = time.perf_counter() - compiling
                    seconds: dict[bool, list[float]] = {True: [], False: []}
                    for number in range(options.repeats + 1):
                        for constrained in (True, False) if number % 2 else (False, True):
                            given = {"x": constraint} if constrained else {}
                            seconds[constrained].append(seconds_of(lm, text, given, sampling, rows))
                    ratios = [a / b for a, b in zip(seconds[True][1:], seconds[False][1:], strict=True)]
                    row = {
                        "model": name,
                        "sampler": sampler,
                        "task": task,
                        "rows": rows,
                        "device": options.device,
                        "compile": round(compiling, 3),
                        "seconds": round(statistics.median(seconds[False][1:]), 4),
                        "constrained": round(statistics.median(seconds[True][1:]), 4),
                        "overhead": round(statistics.median(ratios) - 1, 3),
                        "commit": adlm.code_commit(),
                    }
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
