"""Writes a model as a folder that the auto classes of `transformers` load without adlm, and uploads it.

Does not import transformers: code, weights and JSON are written directly.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import huggingface_hub

from adlm.apps.export.bundle import bundle
from adlm.apps.export.model_card import model_card, run_record
from adlm.checkpoints.exported import PREFIX, TOKENIZER_FILES, is_exported, to_json
from adlm.checkpoints.model_folder import ARCHITECTURE, WEIGHTS, write_tensors
from adlm.errors import UserError
from adlm.files import refuse_taken, replacing_folder, reporting_os_errors, write_file
from adlm.language_model import NO_TOKENIZER, LanguageModel
from adlm.registry import BRIDGES, METHODS, SCHEDULES, Registry

CONFIGURATION, MODELING = "configuration_adlm", "modeling_adlm"
WRITTEN = {
    *(ARCHITECTURE, WEIGHTS, f"{CONFIGURATION}.py", f"{MODELING}.py", "generation_config.json", "README.md"),
    *(*TOKENIZER_FILES, "__pycache__"),
}
# The Triton kernel stays here; its plain form gives the same numbers.
REPLACED = {("adlm.models.logit_gradients", "logit_gradients_"): "plain_logit_gradients_"}


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
        raise UserError(f"method {config.method} cannot be exported to hf; {', '.join(supported)} can")
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
        **{f"{role}_token": lm.tokenizer.engine.id_to_token(index) for role, index in special_ids.items()},
    }
    with replacing_folder(folder) as part:
        write_tensors(weights, part / WEIGHTS)
        write_file(part / ARCHITECTURE, _json({**to_json(lm.config), **classes, "dtype": dtype}))
        if lm.method.causal:  # the defaults of `generate`; the exported network has no KV cache
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
