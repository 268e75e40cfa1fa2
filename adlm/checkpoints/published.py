"""Reading the checkpoints of the released ADLM, MDLM, SEDD, D3PM and AR code, and converting them to model folders.

A released .ckpt is a Lightning dictionary: `state_dict` with the networks under `backbone.` (the anchor network, or the
only one) and `denoiser.` (older files: `replica.`), and `ema` with a plain list of EMA weights in the same order. It
also contains pickled config and tokenizer objects, which are inspected but never constructed. Plain data is read at
once, tensors on request: each one's metadata is checked against the size of its storage in the archive first.
"""

import itertools
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm.checkpoints.model_folder import ModelFolder
from adlm.checkpoints.pickle_interpreter import DamagedPickle, ForeignObject, TensorRecord, interpret, printable_name
from adlm.config.load import validate
from adlm.config.schema import Config, Model, Sampling, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.tokens import Tokenizer

MAX_PICKLE_BYTES = 64 * 2**20  # GPT-2's slow tokenizer takes 3 MB
MAX_ENTRIES = 50_000
MAX_EXPANSION = 4  # all tensors together, in multiples of the file size: tensors may share a storage


class Archive:
    """An open file. `content` is its plain data, with TensorRecord for tensors and ForeignObject for other objects."""

    def __init__(self, path: Path, file: zipfile.ZipFile):
        num_bytes = path.stat().st_size
        self._path, self._file = path, file
        self._bytes_left = MAX_EXPANSION * num_bytes
        entries = file.infolist()
        if len(entries) > MAX_ENTRIES or sum(entry.file_size for entry in entries) > num_bytes:
            raise DamagedPickle("its entries claim more bytes than the file has")
        # Of two entries with the same name Python reads the last and torch the first; some readers ignore case.
        names = {entry.filename.lower() for entry in entries}
        if len(names) < len(entries):
            raise DamagedPickle("two of its entries have the same name")
        if any(entry.filename != entry.orig_filename for entry in entries):
            raise DamagedPickle("the name of an entry contains a NUL")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise DamagedPickle("it is compressed, which torch files never are")
        pickles = [
            entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")
        ]
        if len(pickles) != 1:
            raise DamagedPickle("it is a zip archive without exactly one torch data.pkl")
        if pickles[0].file_size > MAX_PICKLE_BYTES:
            raise DamagedPickle(
                f"its data.pkl has {pickles[0].file_size:,} bytes, more than the limit of {MAX_PICKLE_BYTES:,}"
            )
        self._folder = pickles[0].filename.removesuffix("data.pkl")
        if f"{self._folder}byteorder" in file.namelist() and file.read(f"{self._folder}byteorder") != b"little":
            raise DamagedPickle("its data is big-endian; save it again on a little-endian machine")
        self.content, self.foreign = interpret(file.read(pickles[0]))

    def tensor(self, record: TensorRecord) -> Tensor:
        """The tensor, copied out of the archive."""
        with errors_as_user_errors(self._path):
            return self._tensor(record)

    def _tensor(self, record: TensorRecord) -> Tensor:
        storage, num_bytes = record.storage, record.storage.length * record.storage.dtype.itemsize
        last = record.offset + sum((n - 1) * step for n, step in zip(record.size, record.stride, strict=True))
        if math.prod(record.size) and not last < storage.length:
            raise DamagedPickle(f"a tensor of shape {record.size} does not fit its storage of {storage.length} numbers")
        self._bytes_left -= max(record.num_bytes, num_bytes)  # the whole storage is read, even for a small view of it
        if self._bytes_left < 0:
            raise DamagedPickle("its tensors together are several times the size of the file")
        try:
            entry = self._file.getinfo(f"{self._folder}data/{storage.key}")
        except KeyError:
            raise DamagedPickle(f"its storage {storage.key!r} is missing") from None
        if entry.file_size != num_bytes:
            raise DamagedPickle(f"its storage {storage.key!r} has {entry.file_size} bytes, not {num_bytes}")
        if not math.prod(record.size):
            return torch.empty(record.size, dtype=storage.dtype)
        flat = torch.frombuffer(bytearray(self._file.read(entry)), dtype=storage.dtype)
        return flat.as_strided(record.size, record.stride, record.offset).clone()


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a torch file, so that its tensors can be read; a user error if it is damaged or not a torch file."""
    with errors_as_user_errors(path):
        start = check_directory(path)
        file = zipfile.ZipFile(path)
    with file:
        with errors_as_user_errors(path):
            if file.start_dir != start:  # Python and torch would read different directories
                raise DamagedPickle("its central directory is not where its end record says")
            archive = Archive(path, file)
        yield archive


def check_directory(path: Path) -> int:
    """Offset of the zip central directory according to the end record. Rejects non-zip files and long directories."""
    if path.exists() and not path.is_file():
        raise DamagedPickle("it is not a file")
    with path.open("rb") as stream:
        is_zip = stream.read(4) == b"PK\x03\x04"
        stream.seek(max(0, path.stat().st_size - 2**17))
        tail = stream.read()
    end = tail.rfind(b"PK\x05\x06")
    if not is_zip:
        raise DamagedPickle("torch files are zip archives, and this is not one")
    if end < 0:
        raise DamagedPickle("it is truncated: it does not end with a zip central directory")
    offset, layout = end + 12, "<LL"
    if tail[max(0, end - 76) :].startswith(b"PK\x06\x06") and tail[max(0, end - 20) :].startswith(b"PK\x06\x07"):
        offset, layout = end - 36, "<QQ"  # a zip64 record and its locator directly precede the end record
    size, start = struct.unpack_from(layout, tail, offset)
    if size > 100 * MAX_ENTRIES:
        raise DamagedPickle(f"it lists more entries than the limit of {MAX_ENTRIES:,}")
    return int(start)


@contextmanager
def errors_as_user_errors(path: Path) -> Iterator[None]:
    """Errors of a damaged or unreadable file become user errors with its path."""
    try:
        yield
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, struct.error) as error:
        raise UserError(f"{path} is damaged: {error or 'it is truncated'}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (DamagedPickle, RuntimeError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a checkpoint: {error}") from None


# Published weight name -> ours, within one network; applied in this order.
RENAMED = (
    (r"^vocab_embed\.embedding$", "embedding.weight"),
    (r"^vocab_embed\.0\.", "bridge."),
    (r"^sigma_map\.mlp\.0\.", "trunk.condition.inner."),
    (r"^sigma_map\.mlp\.2\.", "trunk.condition.outer."),
    (r"^output_layer\.linear\.", "head."),
    (r"^output_layer\.norm_final\.", "trunk.norm."),
    (r"^output_layer\.adaLN_modulation\.", "trunk.modulation."),
    (r"^blocks\.(\d+)\.", r"trunk.blocks.\1."),
    (r"\.attn_qkv\.", ".qkv."),
    (r"\.attn_out\.", ".out."),
    (r"\.mlp\.0\.", ".widen."),
    (r"\.mlp\.2\.", ".narrow."),
    (r"\.adaLN_modulation\.", ".modulation."),
)
NETWORKS = {"backbone": "anchor", "denoiser": "denoiser", "replica": "denoiser"}
ROTARY = "rotary_emb.inv_freq"  # a constant that is saved there and computed here; it gives the width of a head
PARAMETERIZATIONS = {"subs": "mdlm", "sedd": "sedd", "d3pm": "d3pm", "ar": "ar"}
# Whether a released network is time-conditioned, and T of the methods of discrete time, unless the file's config says.
RELEASED: dict[str, tuple[bool, int | None]] = {"sedd": (True, None), "d3pm": (True, 1000), "mdlm": (False, 0)}
HINTS = ("parameterization", "T", "length", "time_conditioning", "name_or_path")
MAX_CONFIG_NODES = 100_000
MAX_SIZE = 2**24  # of a vocabulary, a width, a length
BERT_SYMBOLS, BERT_MASK = 30_522, 103


@dataclass(frozen=True)
class PublishedCheckpoint:
    """The contents of a released checkpoint, under our names."""

    method: str
    model: Model
    num_symbols: int
    weights: dict[str, Tensor]
    ema_weights: dict[str, Tensor] | None
    """None if the file has none."""
    step: int | None
    """Number of optimizer steps."""
    hints: dict[str, Any]
    """parameterization, T, length and tokenizer, as far as the pickled config contains them."""
    ignored: list[str]
    """Entries of the file that are not used."""


def read_checkpoint(path: Path) -> PublishedCheckpoint:
    """Read a released .ckpt without importing or calling anything it names."""
    with open_archive(path) as archive:
        content = archive.content
        state = content.get("state_dict") if isinstance(content, dict) else None
        if (
            not isinstance(state, dict)
            or not state
            or not all(isinstance(value, TensorRecord) for value in state.values())
        ):
            raise UserError(f"{path} has no `state_dict` of tensors, so it is not a released checkpoint")
        known = {key: value for key, value in state.items() if _is_weight(key, path)}
        pair = any(NETWORKS[key.partition(".")[0]] == "denoiser" for key in known)
        used = {_our_name(key, pair): value for key, value in known.items() if not key.endswith(ROTARY)}
        if len(used) < sum(not key.endswith(ROTARY) for key in known):
            raise UserError(f"{path}: two weights map to the same name")
        model = _model_sizes(known, used, pair, path)
        weights = {name: _read_weight(archive, name, value, path) for name, value in used.items()}
        ema_weights = _read_ema(archive, content.get("ema"), used, path)
        hints = dict(_find_hints(content.get("hyper_parameters")))
        ignored = [f"state_dict {key}" for key in state if key not in known or key.endswith(ROTARY)]
        ignored += [printable_name(str(key)) for key in content if key not in ("state_dict", "ema", "global_step")]
        ignored += [f"an object of {name}, not constructed" for name in sorted(archive.foreign)]
    step = content.get("global_step")
    method = _guess_method(used, pair, hints)
    size = _shape(used, "head.weight", 2, path)[0]
    return PublishedCheckpoint(
        method, model, size, weights, ema_weights, step if isinstance(step, int) else None, hints, ignored
    )


def _is_weight(key: Any, path: Path) -> bool:
    """Whether a tensor belongs to a network. False for metrics; a user error for anything else, which would be lost."""
    if not isinstance(key, str) or key != printable_name(key):
        raise UserError(f"{path}: weight {printable_name(str(key))} has an invalid name")
    prefix = key.partition(".")[0]
    if prefix in NETWORKS or prefix.endswith(("_metrics", "_metric")):
        return prefix in NETWORKS
    raise UserError(f"{path}: weight {key} belongs to no known network: their prefixes are {', '.join(NETWORKS)}")


def _our_name(key: str, pair: bool) -> str:
    prefix, _, name = key.partition(".")
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return f"{NETWORKS[prefix]}.{name}" if pair else name


def _read_weight(archive: Archive, name: str, record: TensorRecord, path: Path) -> Tensor:
    if not record.storage.dtype.is_floating_point:
        raise UserError(f"{path}: weight {name} has dtype {record.storage.dtype}, not a floating-point dtype")
    value = archive.tensor(record)
    if not value.isfinite().all():
        raise UserError(f"{path}: weight {name} holds a NaN or an infinity, so the model is broken")
    return value.float()


def _read_ema(archive: Archive, ema: Any, used: Mapping[str, TensorRecord], path: Path) -> dict[str, Tensor] | None:
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if shadow is None:
        return None
    shapes = (
        [value.size if isinstance(value, TensorRecord) else None for value in shadow]
        if isinstance(shadow, list)
        else []
    )
    if shapes != [value.size for value in used.values()]:
        raise UserError(f"{path}: the EMA weights do not have the shapes of the weights")
    pairs = zip(used, shadow, strict=True)
    return {name: _read_weight(archive, f"{name} (EMA)", value, path) for name, value in pairs}


def _model_sizes(state: Mapping[str, TensorRecord], used: Mapping[str, TensorRecord], pair: bool, path: Path) -> Model:
    """The sizes of the network, from the shapes of its weights."""
    first = "anchor." if pair else ""
    hidden = _shape(used, f"{first}embedding.weight", 2, path)[1]
    head_width = 2 * _shape(state, f"backbone.{ROTARY}", 1, path)[0]
    condition = Model.condition
    if f"{first}trunk.modulation.weight" in used:
        condition = _shape(used, f"{first}trunk.modulation.weight", 2, path)[1]
    if hidden % head_width:
        raise UserError(f"{path}: width {hidden} is not a multiple of the head width {head_width}")
    return Model(
        hidden=hidden,
        heads=hidden // head_width,
        blocks=_count_blocks(used, f"{first}trunk."),
        denoiser_blocks=_count_blocks(used, "denoiser.trunk.") if pair else None,
        bridge="logits",
        condition=condition,
    )


def _shape(weights: Mapping[str, TensorRecord], ending: str, dimensions: int, path: Path) -> tuple[int, ...]:
    """The shape of the first weight whose name ends with `ending`."""
    for name, value in weights.items():
        if name.endswith(ending):
            if len(value.size) != dimensions or not all(0 < size <= MAX_SIZE for size in value.size):
                raise UserError(f"{path}: weight {ending} has shape {value.size}, which is not valid")
            return value.size
    raise UserError(f"{path} has no weight {ending}, so its sizes are unknown")


def _count_blocks(weights: Mapping[str, TensorRecord], prefix: str) -> int:
    """Number of blocks, each of which has at least six weights."""
    indices = {found[1] for name in weights if (found := re.match(rf"{re.escape(prefix)}blocks\.(\d+)\.", name))}
    if not 0 < len(indices) <= len(weights) // 6:
        raise UserError(f"its weights name {len(indices)} blocks, which does not fit the number of weights")
    return len(indices)


def _guess_method(used: Mapping[str, TensorRecord], pair: bool, hints: Mapping[str, Any]) -> str:
    """A pair is anchored, a network without time conditioning causal; MDLM, SEDD and D3PM differ in the config."""
    timeless = not any("trunk.condition." in name for name in used)
    if pair:
        return "a2r" if timeless else "adlm"
    return "ar" if timeless else PARAMETERIZATIONS.get(str(hints.get("parameterization")), "mdlm")


def _find_hints(pickled: Any) -> Iterator[tuple[str, Any]]:
    """Plain values of the keys in HINTS, anywhere in the pickled config."""
    pending, seen = [pickled], {id(pickled)}
    while pending and len(seen) < MAX_CONFIG_NODES:
        value = pending.pop()
        entries = list(itertools.islice(value.items(), MAX_CONFIG_NODES)) if isinstance(value, dict) else []
        for key, inner in entries:
            plain = _plain_value(inner)
            if key in HINTS and plain is not None:
                yield str(key), plain
        children = [inner for _, inner in entries]
        if isinstance(value, ForeignObject):
            children = value.data
        elif isinstance(value, (list, tuple)):
            children = list(value[:MAX_CONFIG_NODES])
        for inner in children:
            if isinstance(inner, (ForeignObject, list, tuple, dict)) and id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)


def _plain_value(value: Any) -> str | int | bool | None:
    """A plain value, or the one inside an omegaconf node."""
    if isinstance(value, ForeignObject):
        states = [state for state in value.data if isinstance(state, dict)]
        value = states[-1].get("_val") if states else None
    if isinstance(value, str):
        return printable_name(value)
    return value if isinstance(value, int) and 0 <= value <= MAX_SIZE else None


def to_model_folder(
    published: PublishedCheckpoint,
    weights: str | None = None,
    tokenizer: Tokenizer | None = None,
    method: str | None = None,
    mask_id: int | None = None,
    length: int | None = None,
) -> ModelFolder:
    """Convert a released checkpoint. Method, mask id and length override what the file implies."""
    if weights == "ema" and published.ema_weights is None:
        raise UserError("--weights ema: the file has no EMA weights; use --weights raw")
    chosen = published.weights if weights == "raw" or published.ema_weights is None else published.ema_weights
    name = method or published.method
    hinted, hinted_times = published.hints.get("length"), published.hints.get("T")
    time_conditioning, num_times = RELEASED.get(name, (False, None))
    if isinstance(published.hints.get("time_conditioning"), bool):
        time_conditioning = published.hints["time_conditioning"]
    if num_times is not None and isinstance(hinted_times, int) and hinted_times > 0:
        num_times = hinted_times
    config = Config(
        method=name,
        tokenizer="" if tokenizer is None else tokenizer.name,
        length=length or (hinted if isinstance(hinted, int) and hinted > 1 else Config.length),
        vocabulary=_choose_vocabulary(published, tokenizer, mask_id),
        schedule=Schedule(eps=1e-3),
        time=Time(steps=num_times or 0),
        model=replace(published.model, time_conditioning=time_conditioning),
        sampling=Sampling(nucleus="published"),
    )
    return ModelFolder(validate(config), chosen, tokenizer)


def _choose_vocabulary(published: PublishedCheckpoint, tokenizer: Tokenizer | None, mask_id: int | None) -> Vocabulary:
    if tokenizer is not None:
        if tokenizer.vocabulary.size != published.num_symbols:
            raise UserError(
                f"tokenizer {tokenizer.name} has {tokenizer.vocabulary.size} symbols and the weights have "
                f"{published.num_symbols}; it is not the one they were trained with"
            )
        return tokenizer.vocabulary
    default_mask_id = BERT_MASK if published.num_symbols == BERT_SYMBOLS else published.num_symbols - 1
    return Vocabulary(published.num_symbols, default_mask_id if mask_id is None else mask_id)
