"""User errors, whole-number arguments, and text that is safe to print. Imports no other module of the package."""

import operator
import unicodedata


class UserError(ValueError):
    """Invalid input by the user; the message is one line: the option, its value, the remedy.

    The command line prints the message and exits with code 2; any other exception is a bug and shows its traceback.
    Messages may quote names from untrusted files, so they are made printable here. `option` is the name of the one
    argument or config option that is wrong, such as `sampling.top_p`; None if that is not known.
    """

    def __init__(self, message: object, option: str | None = None):
        super().__init__(printable(str(message), keep="\t"))
        self.option = option


def whole_number(name: str, value: object, least: int = 0, most: int = 2**63 - 1) -> int:
    """An argument that must be an integer from `least` to `most`, as int; numpy and torch integers are accepted."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # torch: several elements, or the meta device
        number = None
    if number is None or str(getattr(value, "dtype", "")) == "torch.bool":
        is_plain = value is None or isinstance(value, (bool, float, str))
        given = f"{value!r:.60}" if is_plain else f"a {type(value).__name__}"
        raise UserError(f"{name} must be a whole number, not {given}", name)
    shown = str(number) if abs(number) < 10**30 else f"of {number.bit_length()} bits"
    if number < least:
        raise UserError(f"{name} {shown} must be {f'at least {least}' if least else '0 or more'}", name)
    if number > most:
        raise UserError(f"{name} {shown} must be at most {most:,}", name)
    return number


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
