"""A torch .ckpt or .pt file: its plain data, and its tensors when they are asked for. Knows no networks.

Each tensor is checked against the bytes that are really there before it is read.
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

LARGEST_PROGRAM = 64 * 2**20  # bytes; GPT-2's slow tokenizer pickled has 3 MB
MOST_ENTRIES = 50_000
MOST_COPIES = 4  # tensors that share bytes may not come to more than this many times the file


class Archive:
    """An opened file: `content` is its plain data, with `Noted` for tensors and `Foreign` for what is not plain."""

    def __init__(self, path: Path, file: zipfile.ZipFile):
        num_bytes = path.stat().st_size
        self._path, self._file = path, file
        self._left = MOST_COPIES * num_bytes
        entries = file.infolist()
        if len(entries) > MOST_ENTRIES or sum(entry.file_size for entry in entries) > num_bytes:
            raise DamagedPickle("its entries claim more than the file holds")
        # Of two entries of one name Python reads the last and torch the first; some readers ignore case.
        names = {entry.filename.lower() for entry in entries}
        if len(names) < len(entries):
            raise DamagedPickle("two of its entries have the same name")
        if any(entry.filename != entry.orig_filename for entry in entries):
            raise DamagedPickle("the name of an entry holds a NUL")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise DamagedPickle("it is compressed, which torch never does")
        programs = [
            entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")
        ]
        if len(programs) != 1:
            raise DamagedPickle("it is a zip file without torch's data.pkl")
        if programs[0].file_size > LARGEST_PROGRAM:
            raise DamagedPickle(
                f"its data.pkl has {programs[0].file_size:,} bytes, and more than {LARGEST_PROGRAM:,} is not read"
            )
        self._folder = programs[0].filename.removesuffix("data.pkl")
        if f"{self._folder}byteorder" in file.namelist() and file.read(f"{self._folder}byteorder") != b"little":
            raise DamagedPickle("its numbers are big-endian; save it again on an ordinary machine")
        self.content, self.foreign = interpret(file.read(programs[0]))

    def tensor(self, noted: TensorRecord) -> Tensor:
        """The numbers, copied out of the archive."""
        with in_words(self._path):
            return self._tensor(noted)

    def _tensor(self, noted: TensorRecord) -> Tensor:
        storage, num_bytes = noted.storage, noted.storage.length * noted.storage.dtype.itemsize
        last = noted.offset + sum((n - 1) * step for n, step in zip(noted.size, noted.stride, strict=True))
        if math.prod(noted.size) and not last < storage.length:
            raise DamagedPickle(f"a tensor of shape {noted.size} does not fit its {storage.length} numbers")
        self._left -= max(noted.num_bytes, num_bytes)  # all of a storage is read, however little of it is wanted
        if self._left < 0:
            raise DamagedPickle("its tensors come to several times the size of the file")
        try:
            entry = self._file.getinfo(f"{self._folder}data/{storage.key}")
        except KeyError:
            raise DamagedPickle(f"its numbers {storage.key!r} are missing") from None
        if entry.file_size != num_bytes:
            raise DamagedPickle(f"its numbers {storage.key!r} are {entry.file_size} bytes, not {num_bytes}")
        if not math.prod(noted.size):
            return torch.empty(noted.size, dtype=storage.dtype)
        flat = torch.frombuffer(bytearray(self._file.read(entry)), dtype=storage.dtype)
        return flat.as_strided(noted.size, noted.stride, noted.offset).clone()


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """A torch file, for as long as its tensors are wanted; one sentence where it is damaged or something else."""
    with in_words(path):
        start = check_directory(path)
        file = zipfile.ZipFile(path)
    with file:
        with in_words(path):
            if file.start_dir != start:  # where Python and torch would look for it differently
                raise DamagedPickle("its list of entries is not where its end says")
            archive = Archive(path, file)
        yield archive


def check_directory(path: Path) -> int:
    """Where a zip's list of entries begins, as its end says; refused is what is no zip, and a list too long to read."""
    if path.exists() and not path.is_file():
        raise DamagedPickle("it is not a file")
    with path.open("rb") as stream:
        is_zip = stream.read(4) == b"PK\x03\x04"
        stream.seek(max(0, path.stat().st_size - 2**17))
        tail = stream.read()
    end = tail.rfind(b"PK\x05\x06")
    if not is_zip:
        raise DamagedPickle("torch's files are zip archives, and this is none")
    if end < 0:
        raise DamagedPickle("it is cut off: a zip archive ends with a list of its entries, and this one does not")
    place, kind = end + 12, "<LL"
    if tail[max(0, end - 76) :].startswith(b"PK\x06\x06") and tail[max(0, end - 20) :].startswith(b"PK\x06\x07"):
        place, kind = end - 36, "<QQ"  # a zip64 record and its locator stand right before the end record
    size, start = struct.unpack_from(kind, tail, place)
    if size > 100 * MOST_ENTRIES:
        raise DamagedPickle(f"it lists more than the {MOST_ENTRIES:,} entries that are read")
    return int(start)


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file, as one sentence."""
    try:
        yield
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, struct.error) as error:
        raise UserError(f"{path} is damaged: {error or 'it is cut off'}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (DamagedPickle, RuntimeError, ValueError) as error:
        raise UserError(f"{path} is damaged or is no checkpoint: {error}") from None
