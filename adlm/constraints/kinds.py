"""The kinds of constraints on the text of a hole, and how the command line writes them.

A constraint is a frozen, hashable value. Its `expression` (`expressions.py`) is what the whole text of the hole must
match. Independent of tokenizers, NumPy and PyTorch.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adlm.constraints.expressions import ANYTHING, OPTION, Expression, Intersection, OneOf
from adlm.constraints.json_schema import schema_expression
from adlm.errors import UserError, whole_number

MAX_CHOICES = 200_000
"""Characters of all texts of Choices."""
MAX_WORDS = 10_000
"""Characters of all texts of Words."""
MAX_REQUIRED = 16
"""Required texts of Words: each may double the states."""
MAX_PARTS = 32
"""Constraints of AllOf."""
MAX_SCHEMA = 1_000_000
"""Characters of a JSON schema."""
MAX_LENGTH = 1_000_000
"""Characters that Characters may name; longer texts are in no hole."""
MAX_FILE = 4_000_000
"""Bytes of a file that the command line names."""

NOT_WORD = r"[\x00-/:-@\[-^`{-\u00bf\u00d7\u00f7\u2000-\u2bff\u3000-\u303f]"
"""What stands beside a whole word. All else is a word character: in ASCII letters, digits and the underscore."""


@dataclass(frozen=True)
class Choices:
    """The text is one of these."""

    texts: Sequence[str]

    def __post_init__(self) -> None:
        texts = _checked_texts("Choices", self.texts, MAX_CHOICES)
        if not texts:
            raise UserError("Choices must have at least one text; give one", OPTION)
        object.__setattr__(self, "texts", texts)

    @property
    def expression(self) -> Expression:
        return OneOf(tuple(self.texts))


@dataclass(frozen=True)
class Regex:
    """The whole text matches a regular expression of Python, without lookaround and back-references.

    \\d, \\w and \\s are those of ASCII.
    """

    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise UserError(f"Regex needs a text, not a {type(self.pattern).__name__}", OPTION)

    @property
    def expression(self) -> Expression:
        return self.pattern


@dataclass(frozen=True)
class JsonSchema:
    """The text is JSON that a schema allows: on one line, at most one space after a comma or colon, and the properties
    of an object in the order of the schema, without others. Values of enum and const are as `json.dumps` writes them.

    Keywords that would be ignored, such as `uniqueItems`, are refused.
    """

    schema: Mapping[str, Any] = field(compare=False)
    text: str = field(init=False, repr=False)
    """The schema as JSON, by which schemas are compared; later changes of the dict have no effect."""

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Mapping):
            raise UserError(f"JsonSchema needs a dict, not a {type(self.schema).__name__}", OPTION)
        try:
            text = json.dumps(self.schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"the JSON schema has a part that is no JSON: {error}; leave it out", OPTION) from None
        except RecursionError:
            raise UserError("the JSON schema has too many parts inside each other; make it flatter", OPTION) from None
        if len(text) > MAX_SCHEMA:
            raise UserError(
                f"the JSON schema has {len(text):,} characters, and at most {MAX_SCHEMA:,} are allowed; make it "
                "smaller",
                OPTION,
            )
        object.__setattr__(self, "text", text)

    @property
    def expression(self) -> Expression:
        return schema_expression(json.loads(self.text))


@dataclass(frozen=True)
class Words:
    """All of `required` occur in the text, in any order and place, and none of `forbidden`. Case matters.

    With `whole` a text occurs where no word character stands directly before or after it. Word characters are letters,
    digits and the underscore; outside ASCII all characters but U+0080 to U+00BF, U+00D7, U+00F7, U+2000 to U+2BFF and
    U+3000 to U+303F, which are spaces, punctuation and symbols. Without `whole` it occurs inside of words too.
    """

    required: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    whole: bool = True

    def __post_init__(self) -> None:
        for name in ("required", "forbidden"):
            object.__setattr__(self, name, _checked_texts(f"{name} of Words", getattr(self, name), MAX_WORDS))
        if not isinstance(self.whole, bool):
            raise UserError(f"whole of Words must be True or False, not {self.whole!r:.60}", OPTION)
        if not self.required and not self.forbidden:
            raise UserError("Words must have required or forbidden texts; give one", OPTION)
        if len(self.required) > MAX_REQUIRED:
            raise UserError(
                f"Words have {len(self.required):,} required texts, and at most {MAX_REQUIRED} are allowed; give fewer",
                OPTION,
            )

    @property
    def expression(self) -> Expression:
        required = [self._occurring([text]) for text in self.required]
        return Intersection((*required, ANYTHING), (self._occurring(self.forbidden),) if self.forbidden else ())

    def _occurring(self, texts: Sequence[str]) -> Expression:
        """A regular expression of the texts in which one of these occurs."""
        found = "|".join(map(re.escape, texts))
        if self.whole:
            return rf"(?:{ANYTHING}{NOT_WORD})?(?:{found})(?:{NOT_WORD}{ANYTHING})?"
        return f"{ANYTHING}(?:{found}){ANYTHING}"


@dataclass(frozen=True)
class Characters:
    """The text has `least` to `most` characters (Unicode code points); None is no limit."""

    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "least", whole_number("least of Characters", self.least, 0, MAX_LENGTH))
        if self.most is None:
            return
        object.__setattr__(self, "most", whole_number("most of Characters", self.most, 1, MAX_LENGTH))
        if self.least > self.most:
            raise UserError(f"Characters has least {self.least} above most {self.most}; exchange them", OPTION)

    @property
    def expression(self) -> Expression:
        return rf"[\s\S]{{{self.least},{'' if self.most is None else self.most}}}"


@dataclass(frozen=True)
class AllOf:
    """The text satisfies all of these constraints."""

    constraints: "Sequence[Constraint]"

    def __post_init__(self) -> None:
        given = self.constraints
        if not isinstance(given, Sequence) or not given or not all(isinstance(each, Constraint) for each in given):
            raise UserError(f"AllOf needs a list of constraints ({KINDS}), not {given!r:.60}", OPTION)
        parts = [part for each in given for part in (each.constraints if isinstance(each, AllOf) else [each])]
        parts = [*dict.fromkeys(parts)]
        if len(parts) > MAX_PARTS:
            raise UserError(
                f"AllOf has {len(parts):,} constraints, and at most {MAX_PARTS} are allowed; give fewer", OPTION
            )
        object.__setattr__(self, "constraints", tuple(parts))

    @property
    def expression(self) -> Expression:
        return Intersection(tuple(each.expression for each in self.constraints))


Constraint = Choices | Regex | JsonSchema | Words | Characters | AllOf
KINDS = "Choices, Regex, JsonSchema, Words, Characters or AllOf"


def _checked_texts(what: str, texts: object, limit: int) -> tuple[str, ...]:
    """A list of texts as a tuple; a user error if it is none, or one of them is empty, or it is too long."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise UserError(f"{what} must be a list of texts, not {texts!r:.60}", OPTION)
    if not all(texts):
        raise UserError(f"{what} {texts!r:.60} has a text that is empty; leave it out", OPTION)
    if (num := sum(map(len, texts))) > limit:
        raise UserError(f"{what} have {num:,} characters in all, and at most {limit:,} are allowed; give fewer", OPTION)
    return tuple(texts)


ANY_TEXT = Regex(r"[\s\S]*")


FORMS = {
    "choices": 'choices:["yes","no"]',
    "json": 'json:{"type": "integer"}',
    "words": 'words:{"required": ["a"], "forbidden": ["b"]}',
    "characters": "characters:3..10",
    "regex": "regex:PATTERN",
}
"""How the command line writes the kinds of constraints."""


def parse_constraints(words: Sequence[str], option: str) -> dict[str, Constraint]:
    """Constraints by the names of their holes, of words such as NAME=[0-9]+; `option` is what gives them."""
    found: dict[str, Constraint] = {}
    for word in words:
        name, constraint = _parse(word, option)
        if name in found:
            raise UserError(f"{option} constrains {name!r:.60} twice; give one constraint for each hole", option)
        found[name] = constraint
    return found


def _parse(word: str, option: str) -> tuple[str, Constraint]:
    """The hole and the constraint of NAME=PATTERN or NAME=KIND:VALUE; what begins with no kind is a pattern."""
    name, equals, rest = word.partition("=")
    if not name or not equals:
        raise UserError(
            f"{option} {word!r:.60} is no constraint; give NAME=PATTERN, such as name=[A-Z][a-z]*, or NAME=KIND:VALUE, "
            'such as name=choices:["yes","no"]',
            option,
        )
    kind, colon, value = rest.partition(":")
    if kind == "characters":
        return name, _characters(word, value, option)
    if colon and (meant := _mistyped_kind(kind)):
        raise UserError(
            f"{option} {word!r:.60} has no kind of constraint before the colon; did you mean {FORMS[meant]}? A regular "
            f"expression that begins with {kind}: is written regex:{kind}:...",
            option,
        )
    if kind not in ("choices", "json", "words"):
        return name, Regex(value if kind == "regex" else rest)
    content = _json(word, kind, value, option)
    if kind == "choices":
        return name, Choices(content)
    if kind == "json":
        return name, JsonSchema(content)
    if not isinstance(content, dict) or content.keys() - {"required", "forbidden", "whole"}:
        raise UserError(
            f'{option} {word!r:.60} is no words; give NAME=words:{{"required": [...], "forbidden": [...]}}', option
        )
    return name, Words(**content)


def _mistyped_kind(word: str) -> str | None:
    """The kind that a word such as choice or char probably stands for; None for a kind, and for other words."""
    if word in FORMS or not word.isalpha():
        return None
    close = difflib.get_close_matches(word.lower(), FORMS, n=1, cutoff=0.83)  # works is not words
    close += [kind for kind in FORMS if len(word) > 3 and kind.startswith(word.lower())]
    return close[0] if close else None


def _characters(word: str, value: str, option: str) -> Characters:
    """3..10, 3.. and ..10, or 3 for exactly three."""
    found = re.fullmatch(r"(\d{1,9})|(\d{0,9})\.\.(\d{0,9})", value, re.ASCII)
    if found is None or value == "..":
        raise UserError(f"{option} {word!r:.60} is no length; give NAME=characters:3..10", option)
    if found[1]:
        return Characters(int(found[1]), int(found[1]))
    return Characters(int(found[2] or 0), int(found[3]) if found[3] else None)


def _json(word: str, kind: str, value: str, option: str) -> Any:
    """The JSON of a value, or of the file that @FILE names."""
    from adlm.files import parse_json, read_bytes  # imports what `import adlm` does not need

    if value.startswith("@"):
        try:
            content: str | bytes = read_bytes(Path(value[1:]), MAX_FILE)
        except UserError as error:
            raise UserError(f"{option} {word!r:.60}: {error}", option) from None
        where, remedy = f"in the file {value[1:]}", "correct it"
    else:
        content, where, remedy = value, f"after {kind}", f"write NAME={FORMS[kind]}, in quotes for the shell"
    try:
        return parse_json(content)
    except ValueError:
        raise UserError(f"{option} {word!r:.60} has no valid JSON {where}; {remedy}", option) from None
