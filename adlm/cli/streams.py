"""Standard output and standard error as the commands use them: never closed, never failing. Imports no rich."""

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from adlm.errors import printable


def open_streams() -> None:
    """Redirect closed standard streams to /dev/null, and escape characters that a stream's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Redirect a stream that cannot be written any more to /dev/null, so that the flush at exit does not fail."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


class StandardError:
    """The current sys.stderr. Write errors (closed pipe, full disk) are ignored, so that the command continues."""

    @property
    def _stream(self) -> TextIO:
        stream: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich replaces it during a live bar
        return stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


def write_error(line: str) -> None:
    """Print a line on standard error."""
    stream = StandardError()
    stream.write(f"{printable(line)}\n")
    stream.flush()
