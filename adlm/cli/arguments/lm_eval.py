"""The arguments of `adlm lm-eval`."""

import argparse

EXAMPLE = """adlm lm-eval --model_args path=runs/own --tasks arc_easy,lambada_openai --output_path results
  adlm lm-eval --model_args path=box --tasks sentence_ends --include_path examples/lm_eval
  adlm lm-eval --model_args path=runs/own,samples=128,seed=1 --tasks hellaswag --limit 100
  adlm lm-eval --model_args path=runs/own,sampler=confidence,steps=64 --tasks gsm8k --num_fewshot 2
  adlm lm-eval ls tasks

All arguments are those of `lm-eval` (see `lm-eval run --help`), and --model is adlm unless given. Arguments of the
model, in --model_args:
  path=FOLDER   a run folder or model folder
  samples=K     masks per continuation, an even number (default: 64; ar and a2r need none)
  target_stderr=E  more masks where the standard error is above E nats (default: none), up to max_samples (1024)
  seed=S        seed of masks and generation (default: 0)
  sampler=NAME  of generated text, and steps=T (default: the model's config)
  length=L      tokens of context and continuation together (default: the model's length)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "adlm lm-eval ARGUMENTS..."
    parser.set_defaults(forwarded=[])
