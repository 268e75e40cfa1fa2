"""The model card of an exported model, README.md: what is known of the model, from its config and its run."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from adlm import __version__
from adlm.checkpoints.exported import public_name
from adlm.config.load import differences, to_mapping
from adlm.config.schema import SOURCES, Config
from adlm.data.rows.anchor_rules import describe_rule
from adlm.language_model import LanguageModel
from adlm.methods.inputs import vocabulary_of
from adlm.models.transformer import num_parameters
from adlm.training.metrics import perplexity, read_metrics
from adlm.training.run_folder import read_commits
from adlm.version import code_commit

PATHS = ("tokenizer", "data.path", "data.prepared")  # options that may name a path of the machine of the run

CARD = Template("""\
---
library_name: transformers
pipeline_tag: $task
tags: [adlm, $tag]
# license: choose one before you publish the model; the code is Apache-2.0
---

# $title

$summary Exported by [adlm](https://arxiv.org/abs/2505.18456) $version, commit `$commit`.

| | |
|---|---|
$table

## Use

Only `transformers` and `torch` are needed, not adlm. The code that `trust_remote_code` runs is `modeling_adlm.py`.

```python
$usage```

Training rows begin with bos and end with eos, as far as the tokenizer has them. With adlm installed,
`adlm.load("$name")` gives all samplers, perplexity with standard errors, and faster sampling.

## Training

```bash
$command
```

$trained_with

## Limitations

- A language model without instruction tuning: its text may be false, offensive or biased as its training text is.
- It reads and writes at most $length tokens at once.
- $note
""")

LOADING = """\
import torch
from transformers import $auto_class, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained("$name")
model = $auto_class.from_pretrained("$name", trust_remote_code=True)
"""
MASKED = Template(
    LOADING
    + """
seed = torch.Generator().manual_seed(0)
ids = model.sample(num=2, length=$num_shown, generator=seed)  # (2, $num_shown), from masks alone
print(tokenizer.batch_decode(ids, skip_special_tokens=True))

text = $bos"the" + tokenizer.mask_token * 4 + " of"  # masks are filled in, the rest is given
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
print(tokenizer.decode(model.sample(input_ids=ids, generator=seed)[0]))

log_probs = model(ids).logits  # (1, L, V): of the clean token at each position; a visible token is copied

ids = tokenizer("clean text", add_special_tokens=False, return_tensors="pt").input_ids
loss = model(ids, labels=ids).loss  # for fine-tuning: the $bound per token, with random masks
"""
)
CAUSAL = Template(
    LOADING
    + """
ids = tokenizer($bos"the", add_special_tokens=False, return_tensors="pt").input_ids
torch.manual_seed(0)
print(tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=True)[0]))

log_probs = model(ids).logits  # (1, L, V): of the token after each position
loss = model(ids, labels=ids).loss  # for fine-tuning: nats per token after the first
"""
)
MASKED_NOTE = (
    "Its likelihood is not exact: nats and perplexity are upper bounds, estimated by sampling. `sample` is ancestral "
    "sampling without temperature, top-k or nucleus."
)
CAUSAL_NOTE = "`generate` has no KV cache here, so it is slow for long texts."


@dataclass(frozen=True)
class RunRecord:
    """What the run of a model knows about its training."""

    validation: Mapping[str, Any] | None
    """The line of metrics.jsonl with the result on held-out rows for these weights."""
    steps: int | None
    tokens: int | None
    """Tokens trained on."""
    commits: tuple[str, ...]
    """Commits of adlm that trained the model, in order."""


def run_record(model: Path) -> RunRecord:
    """The record of the run that a model folder belongs to; empty for a model folder without a run."""
    run = model.parent if model.name in ("model", "best") else model
    lines = read_metrics(run / "metrics.jsonl")
    validated = [line for line in lines if line.get("valid_nats") is not None]
    if model.name == "best" and validated:
        validated = [min(validated, key=lambda line: line["valid_nats"])]
        lines = [line for line in lines if line["step"] <= validated[0]["step"]]
    return RunRecord(
        validation=validated[-1] if validated else None,
        steps=lines[-1]["step"] if lines else None,
        tokens=lines[-1].get("tokens") if lines else None,
        commits=tuple(read_commits(run)),
    )


def model_card(lm: LanguageModel, record: RunRecord, name: str) -> str:
    """README.md for a model that users load by `name`, a hub repository or a folder."""
    config, method = lm.config, lm.method
    usage = (CAUSAL if method.causal else MASKED).substitute(
        auto_class=method.auto_class,
        name=name,
        num_shown=min(32, config.length),
        bos="" if vocabulary_of(config).bos_id is None else "tokenizer.bos_token + ",
        bound="ANELBO" if method.anchored else "NELBO",
    )
    kind = "autoregressive" if method.causal else "masked diffusion"
    trained_with = f"Trained with adlm at commit {', '.join(f'`{commit}`' for commit in record.commits)}."
    return CARD.substitute(
        title=name.rpartition("/")[2],
        task="text-generation" if method.causal else "fill-mask",
        tag=kind.replace(" ", "-"),
        summary=f"Method `{config.method}`, {'an' if method.causal else 'a'} {kind} language model.",
        version=__version__,
        commit=code_commit(),
        table="\n".join(f"| {key} | {value} |" for key, value in _facts(lm, record)),
        name=name,
        usage=usage,
        length=f"{config.length:,}",
        command=f"{train_command(config)} --out runs/{shlex.quote(name.rpartition('/')[2])}",
        trained_with=trained_with if record.commits else "The run did not record the commit that it was trained with.",
        note=CAUSAL_NOTE if method.causal else MASKED_NOTE,
    )


def _facts(lm: LanguageModel, record: RunRecord) -> Iterator[tuple[str, str]]:
    """The rows of the table: what is not known is left out, except for the bound."""
    config, validation = lm.config, record.validation
    sizes = config.model
    yield "method", config.method
    yield "parameters", f"{num_parameters(lm.network):,}"
    blocks = f"{sizes.blocks} + {sizes.num_denoiser_blocks}" if lm.method.anchored else f"{sizes.blocks}"
    yield "network", f"{blocks} blocks, {sizes.hidden} wide, {sizes.heads} heads"
    if lm.method.anchored:
        yield "bridge", sizes.bridge
        yield "anchors", f"{describe_rule(config.anchor)}; weight gamma {config.anchor.gamma:g}"
    yield "length", f"{config.length:,} tokens"
    yield "tokenizer", f"{public_name(config.tokenizer) or 'unnamed'}, {vocabulary_of(config).size:,} symbols"
    own = Path(config.data.path or config.data.prepared).name
    yield "data", config.data.name or config.data.hub or (f"own text ({own})" if own else "not recorded")
    if record.steps is not None:
        tokens = "" if record.tokens is None else f", {record.tokens:,} tokens"
        yield "training", f"{record.steps:,} steps of {config.train.batch_size} rows{tokens}"
    if validation is None:
        yield "nats on held-out text", "not known: the model was exported without the metrics.jsonl of its run"
        return
    nats, stderr, num = validation["valid_nats"], validation.get("valid_stderr"), validation.get("valid_tokens")
    yield (
        "nats on held-out text",
        f"{'' if lm.method.exact else 'at most '}{nats:.4f}{'' if stderr is None else f' ± {stderr:.2g}'} per token "
        f"(perplexity {perplexity(nats):.4g}), {int(num or 0):,} tokens, after {validation['step']:,} steps; "
        "± is the standard error over rows",
    )


def train_command(config: Config) -> str:
    """`adlm train` with the options that differ from their defaults; paths without the folders of this machine.

    Where the text is not recorded, `data.path=FILE` takes its place: without a text the command would be refused.
    """
    changed = differences(to_mapping(Config()), to_mapping(config))
    words = ["adlm", "train"]
    for option, (_, value) in changed.items():
        if option in PATHS:
            value = public_name(str(value))
        if option != "data.root" and option.partition(".")[0] != "vocabulary":  # a path, and that of the tokenizer
            words.append(shlex.quote(f"{option}={value if isinstance(value, str) else json.dumps(value)}"))
    if not any(getattr(config.data, option) for option in (*SOURCES, "prepared")):
        words.append("data.path=FILE")
    return " ".join(words)
