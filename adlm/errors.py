"""User errors, and text that is safe to print. Imports no other module of the package."""

import unicodedata


class UserError(ValueError):
    """Invalid input by the user; the message is one line: the option, its value, the remedy.

    The command line prints the message and exits with code 2; any other exception is a bug and shows its traceback.
    Messages may quote names from untrusted files, so they are made printable here.
    """

    def __init__(self, message: object):
        super().__init__(printable(str(message), keep="\t"))


TEXT = "\n\t\u00ad\u200c\u200d"
"""Control characters to keep in generated text: line breaks, tabs, soft hyphens and zero-width joiners."""


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control, invisible and unencodable characters escaped, except those in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in keep and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character
        for character in text
    )
