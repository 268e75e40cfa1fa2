"""Writes a model as a folder that the auto classes of `transformers` load without adlm, with its card, and uploads it.

Does not import transformers: code, weights and JSON are written directly.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import huggingface_hub

from adlm import __version__, code_commit
from adlm.apps.export.bundle import bundle
from adlm.checkpoints.exported import PREFIX, is_exported, public_name, to_json
from adlm.checkpoints.model_folder import ARCHITECTURE, WEIGHTS
from adlm.checkpoints.tensor_files import write_tensors
from adlm.config.load import differences, to_mapping
from adlm.config.schema import SOURCES, Config
from adlm.data.rows.anchor_rules import describe_rule
from adlm.errors import UserError
from adlm.files import refuse_taken, replacing_folder, reporting_os_errors, write_file
from adlm.hub import TOKENIZER_FILES
from adlm.language_model import NO_TOKENIZER, LanguageModel
from adlm.likelihood.standard_errors import perplexity_of
from adlm.methods.inputs import vocabulary_of
from adlm.models.transformer import num_parameters
from adlm.registry import BRIDGES, METHODS, SCHEDULES, Registry
from adlm.training.metrics import read_metrics
from adlm.training.run_folder import read_commits

CONFIGURATION, MODELING = "configuration_adlm", "modeling_adlm"
WRITTEN = {
    *(ARCHITECTURE, WEIGHTS, f"{CONFIGURATION}.py", f"{MODELING}.py", "generation_config.json", "README.md"),
    *(*TOKENIZER_FILES, "custom_generate", "__pycache__"),
}
# The Triton kernel stays here; its plain form gives the same numbers.
REPLACED = {
    ("adlm.models.heads", "logit_gradients_"): "plain_logit_gradients_",
    ("adlm.sampling.rng", "categorical"): "plain_categorical",
    ("adlm.sampling.shaping", "nucleus"): "plain_nucleus",
}


@cache
def modeling_code() -> str:
    """modeling_adlm.py of every exported folder: generated from adlm's own networks."""
    return bundle(f"adlm.apps.export.{MODELING}", [f"adlm.apps.export.{CONFIGURATION}"], REPLACED)


def check_exportable(lm: LanguageModel) -> None:
    """A user error unless the exported code can be this model."""
    config = lm.config
    if config.reason is not None:
        raise UserError(
            "a model of `adlm reason train` is not exported, since its slots need adlm; if it was fine-tuned from a "
            "model of transformers, AutoModelForCausalLM loads its model folder as it is"
        )
    if config.method not in METHODS.built_in or lm.method.auto_class is None:
        supported = [name for name in METHODS.built_in if METHODS[name].auto_class is not None]
        kind = config.method if config.rates.rule == "none" else f"{config.method} with rates.rule {config.rates.rule}"
        kind = f"{kind} with model.memory true" if config.model.memory else kind
        raise UserError(f"method {kind} cannot be exported to hf; {', '.join(supported)} can")
    _check_built_in("schedule.name", config.schedule.name, SCHEDULES)
    if lm.method.anchored:
        _check_built_in("model.bridge", config.model.bridge, BRIDGES)
    if lm.tokenizer is None:
        raise UserError(f"a model is exported with its tokenizer, and {NO_TOKENIZER}")


def _check_built_in(option: str, name: str, registry: Registry) -> None:
    if name not in registry.built_in:
        raise UserError(f"{option} {name} is of another package, and only built-in ones are exported")


def check_folder(folder: Path, force: bool, model: Path) -> None:
    """A user error if writing the folder would destroy something other than an earlier export."""
    with reporting_os_errors(folder):
        target = folder.resolve()
        if model.exists() and (target == model.resolve() or target in model.resolve().parents):
            raise UserError(f"--out {folder} is what this command reads; give another path")
        if not force and folder.is_dir() and is_exported(folder):
            raise UserError(f"--out {folder} is an earlier export; give another path, or --force to replace it")
        if not force or not folder.is_dir() or not any(folder.iterdir()):
            refuse_taken(folder)
            return
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in WRITTEN)
        if foreign or not is_exported(folder):
            found = f"holds {foreign[0]}, which" if foreign else "exists and"
            raise UserError(f"--out {folder} {found} adlm export did not write; give another path, or move it away")


def export_model(lm: LanguageModel, model: Path, folder: Path, name: str) -> None:
    """Write the folder atomically. `model` is where `lm` was loaded from, `name` what the card's example loads."""
    assert lm.tokenizer is not None
    weights = {f"{PREFIX}{key}": value for key, value in lm.network.state_dict().items()}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    card = model_card(lm, run_record(model), name)
    auto_class = str(lm.method.auto_class)
    model_class = f"Adlm{auto_class.removeprefix('AutoModel')}"
    if lm.config.model.block_length:
        model_class = "AdlmForBlockCausalLM"
    classes = {  # which classes of which files `transformers` uses
        "architectures": [model_class],
        "auto_map": {"AutoConfig": f"{CONFIGURATION}.AdlmConfig", auto_class: f"{MODELING}.{model_class}"},
    }
    roles = {role: getattr(lm.tokenizer.vocabulary, f"{role}_id") for role in ("mask", "bos", "eos", "pad")}
    special_ids = {role: index for role, index in roles.items() if index is not None}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": lm.config.length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **({} if lm.chat_template is None else {"chat_template": lm.chat_template}),
        **{f"{role}_token": lm.tokenizer.engine.id_to_token(index) for role, index in special_ids.items()},
    }
    with replacing_folder(folder) as part:
        write_tensors(weights, part / WEIGHTS)
        write_file(part / ARCHITECTURE, _json({**to_json(lm.config), **classes, "dtype": dtype}))
        if not lm.method.causal:
            (part / "custom_generate").mkdir()
            generate = (files("adlm.apps.export") / "generate.py").read_text("utf-8")
            write_file(part / "custom_generate" / "generate.py", generate)
        else:  # the defaults of `generate`; the exported network has no KV cache
            ids = {f"{role}_token_id": index for role, index in special_ids.items() if role != "mask"}
            write_file(part / "generation_config.json", _json({"use_cache": False, **ids}))
        write_file(part / f"{CONFIGURATION}.py", (files("adlm.apps.export") / f"{CONFIGURATION}.py").read_text("utf-8"))
        write_file(part / f"{MODELING}.py", modeling_code())
        lm.tokenizer.save(part)
        write_file(part / "tokenizer_config.json", _json(tokenizer_config))
        write_file(part / "README.md", card)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def push(folder: Path, name: str, private: bool) -> str:
    """Upload an exported folder to the repository `name` on the hub, created if necessary; the commit's address."""
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="adlm export"))
    except Exception as error:  # noqa: BLE001  (the remedy is the same for every error of the network or the hub)
        reason = " ".join(str(error).split()).partition(". ")[0][:160]
        raise UserError(
            f"--push {name} failed ({type(error).__name__}: {reason}); the folder {folder} is complete: log in with "
            f"`hf auth login`, then `hf upload {name} {folder}`"
        ) from None


# The model card, README.md: what is known of the model, from its config and its run.

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
BLOCKS = Template(
    LOADING
    + """
ids = tokenizer($bos"the", add_special_tokens=False, return_tensors="pt").input_ids
seed = torch.Generator().manual_seed(0)
ids = model.generate(ids, max_new_tokens=8, generator=seed)  # or sampler="ancestral", "speculative"; temperature, ...
print(tokenizer.decode(ids[0]))

log_probs = model(ids).logits  # (1, L, V): of the token after each position, by the causal model in the network
"""
)
MASKED_NOTE = (
    "Its likelihood is not exact: nats and perplexity are upper bounds, estimated by sampling. `sample` is ancestral "
    "sampling without temperature, top-k or nucleus."
)
BLOCKS_NOTE = (
    "`generate` denoises blocks of {blocks} tokens with a KV cache, one row at a time. Fine-tune it with adlm: the "
    "loss here is the causal model's alone."
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
    blocks = config.model.block_length
    usage = (CAUSAL if method.causal else BLOCKS if blocks else MASKED).substitute(
        auto_class=method.auto_class,
        name=name,
        num_shown=min(32, config.length),
        bos="" if vocabulary_of(config).bos_id is None else "tokenizer.bos_token + ",
        bound="ANELBO" if method.anchored else "NELBO",
    )
    kind = "autoregressive" if method.causal else f"{'block-causal ' if blocks else ''}masked diffusion"
    trained_with = f"Trained with adlm at commit {', '.join(f'`{commit}`' for commit in record.commits)}."
    return CARD.substitute(
        title=name.rpartition("/")[2],
        task="text-generation" if method.cached else "fill-mask",
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
        note=CAUSAL_NOTE if method.causal else BLOCKS_NOTE.format(blocks=blocks) if blocks else MASKED_NOTE,
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
        f"(perplexity {perplexity_of(nats):.4g}), {int(num or 0):,} tokens, after {validation['step']:,} steps; "
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
