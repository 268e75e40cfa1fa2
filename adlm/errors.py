"""User errors, and text that is safe to print. Imports nothing of the package."""

import unicodedata


class UserError(ValueError):
    """A mistake in what was given to us; the message is one line: the option, its value, the remedy.

    The command line prints it and exits with code 2; anything else that escapes is our bug and keeps its traceback.
    Messages quote names out of foreign files, so they are made printable here, for every caller.
    """

    def __init__(self, message: object):
        super().__init__(printable(str(message), keep="\t"))


TEXT = "\n\t\u00ad\u200c\u200d"
"""What stays as it is in text that a model writes: line breaks, tabs, and invisible characters that languages need."""


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with every character that could control a terminal, hide, or not be encoded written as its escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in keep and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character
        for character in text
    )
