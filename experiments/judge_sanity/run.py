"""Do judges prefer English to shuffled words? Nats per token of a sentence and of its words in another order.

python experiments/judge_sanity/run.py SmolLM2-135M-Instruct.Q4_1.gguf tinyllama.gguf
"""

import sys
import time

import torch

from adlm.checkpoints.pretrained import load_pretrained

SENTENCE = "The committee met on Tuesday to discuss the new budget and agreed to raise taxes by two percent."
SHUFFLED = "on to committee two The by and discuss percent raise taxes met new Tuesday the agreed to budget."


@torch.no_grad()
def nats_per_token(tokenizer, model, text: str) -> float:
    ids = tokenizer(text, return_tensors="pt").input_ids
    log_probs = model(ids).logits[0, :-1].float().log_softmax(dim=-1)
    return -float(log_probs.gather(1, ids[0, 1:, None]).mean())


def main() -> None:
    for name in sys.argv[1:]:
        began = time.monotonic()
        judge = load_pretrained(name, "AutoModelForCausalLM", "a causal language model")
        seconds = time.monotonic() - began
        sentence, shuffled = (nats_per_token(*judge, text) for text in (SENTENCE, SHUFFLED))
        print(f"{name.rpartition('/')[2]}: loaded in {seconds:.0f} s, sentence {sentence:.2f}, shuffled {shuffled:.2f}")


if __name__ == "__main__":
    main()
