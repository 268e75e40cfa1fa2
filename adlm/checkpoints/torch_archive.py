"""Reading torch .ckpt and .pt files: plain data at once, tensors on request. Independent of networks.

Each tensor's metadata is checked against the size of its storage in the archive before it is read.
"""

import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from adlm.checkpoints.pickle_interpreter import DamagedPickle, TensorRecord, interpret
from adlm.errors import UserError

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
