"""Where commands print: a terminal as wide as it is, a pipe or a file as wide as what is told. Knows no command."""

from typing import NoReturn

from rich.console import Console as Terminal

NO_EDGE = 1_000_000
"""Columns of what is no terminal: nothing is cut or folded there, whoever reads it has a width of his own."""


class Console(Terminal):
    """Standard output, or standard error."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr)
        if not self.file.isatty():  # rich calls a pipe a terminal where FORCE_COLOR is set
            self.width = NO_EDGE

    def on_broken_pipe(self) -> NoReturn:
        """The reader has seen enough: `main` decides what that means, for every command."""
        self.quiet = True
        raise BrokenPipeError
