"""Models of `transformers`: by a name on the Hugging Face hub, from a folder, or from a GGUF file. Loads, never trains.

Only safetensors and GGUF are read, and no code of a hub repository is executed. A model with missing weights is
rejected, because transformers would initialise them at random.
"""

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from adlm.errors import UserError
from adlm.hub import skip_unreachable_hub

MAX_CONTEXT = 1_000_000  # tokenizers state larger numbers where they know of no limit


def transformers() -> Any:
    """The package, with its warnings and progress bars off."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "models of the hub need the package transformers, which is not installed; try pip install 'adlm[eval]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load_pretrained(name: str, auto_class: str, what: str, instead: str = "") -> tuple[Any, Any]:
    """Tokenizer and model, in eval mode and float32. `instead` is what an error suggests where there is no network."""
    with _source(name) as (source, options), _load_errors(name, what, instead):
        tokenizer = transformers().AutoTokenizer.from_pretrained(source, **options)
        return tokenizer, _load_model(name, source, options, auto_class, what)


def load_pretrained_model(name: str, auto_class: str, what: str, instead: str = "") -> Any:
    """The model, in eval mode and float32."""
    with _source(name) as (source, options), _load_errors(name, what, instead):
        return _load_model(name, source, options, auto_class, what)


def _load_model(name: str, source: str, options: dict[str, str], auto_class: str, what: str) -> Any:
    model, info = getattr(transformers(), auto_class).from_pretrained(
        source, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options
    )
    missing = sorted(weight for weight in info["missing_keys"] if not weight.startswith("pooler."))
    if missing:
        raise UserError(f"{name} is not {what}: it has no weight {missing[0]}; give another model")
    return model.eval()


@contextmanager
def _reading_gguf_once() -> Iterator[None]:
    """transformers reads a GGUF file three times, and lists the names of its weights for every module of the model."""
    gguf: Any = importlib.import_module("gguf")
    plain = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in plain.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(gguf, name, function)


@contextmanager
def _load_errors(name: str, what: str, instead: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever the hub, the network or a damaged file does, the remedy is the same)
        reason = " ".join(str(error).split()).partition(". ")[0][:160]
        raise UserError(
            f"{name} was not loaded as {what} ({type(error).__name__}: {reason}); give a folder, a .gguf file, or a "
            f"name that the hub or its cache on this machine has{instead and f', or without a network {instead}'}"
        ) from None


@contextmanager
def _source(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """What from_pretrained takes: a name or folder, and the GGUF file in it.

    A GGUF file gets a folder of its own: transformers would prefer a tokenizer.json beside it to the file's tokenizer.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{name} is not a file; give the path of a .gguf file, a folder with a model, or a name")
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"{name} needs the package {package}, which is not installed; try pip install {package}"
                )
        with TemporaryDirectory() as folder, _reading_gguf_once():
            (Path(folder) / path.name).symlink_to(path.resolve())
            yield folder, {"gguf_file": path.name}
        return
    if not path.is_dir():
        if path.exists() or name.startswith((".", "/", "~")):
            raise UserError(f"{name} is not a folder with a model; give one, or a name on the Hugging Face hub")
        skip_unreachable_hub()
    yield name, {}


def num_positions(model: Any) -> int | None:
    """Maximum number of tokens by the config, which may not say; GPT-2 calls it n_positions."""
    config = model.config.to_dict()
    found: int | None = config.get("max_position_embeddings") or config.get("n_positions")
    return found


def context_length(model: Any, tokenizer: Any, name: str) -> int:
    """Maximum number of tokens, by the config or the tokenizer."""
    positions = num_positions(model) or tokenizer.model_max_length
    context = min(positions, tokenizer.model_max_length)  # RoBERTa reserves two of its positions
    if context > MAX_CONTEXT:
        raise UserError(f"{name} does not say how long a text it reads: its config has no max_position_embeddings")
    return int(context)
