"""A JSON schema -> the expression of the JSON texts that it allows.

The texts are on one line, with at most one space after a comma or colon, and the properties of an object are in the
order of the schema, without others. Not every valid JSON text is one of them, but every one of them is valid.
What a schema says and this cannot promise is refused.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from adlm.constraints.expressions import (
    OPTION,
    Alternatives,
    Concatenation,
    Expression,
    Intersection,
    OneOf,
    OptionalParts,
    Repetition,
    Search,
)
from adlm.errors import UserError

MAX_DEPTH = 64
"""Parts of a JSON schema inside each other, references included."""
MAX_DIGITS = 18
"""Digits of a bound of numbers before the point, and after it."""
NUM_DECIMALS = 6
"""Decimals of a number with bounds; none if a bound is 10^9 or more."""

STRING_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])'
PLAIN_STRING = r'[^"\\\x00-\x1f]*'
"""The inside of a string without escapes: its text and its value are equal."""
INTEGER = r"-?(?:0|[1-9][0-9]*)"
SIMPLE_TYPES = {
    "integer": INTEGER,
    "number": rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
    "boolean": "(?:true|false)",
    "null": "null",
}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
KEYWORDS_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": BOUNDS,
    "number": BOUNDS,
    "boolean": set[str](),
    "null": set[str](),
}
PYTHON_TYPES: dict[str, type] = {"string": str, "array": list, "object": dict, "null": type(None)}
KINDS = ("$ref", "const", "enum", "anyOf", "allOf", "type")
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions"}

# years 0001 to 9999, as datetime.date has them; 00:00:00 to 23:59:59, without leap seconds
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
LEAP_YEAR = f"(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[-+]{HOUR})"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{LABEL}(?:\.{LABEL})+",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
}
"""Texts that have the format; not all that have it, such as quoted names in email addresses."""


def schema_expression(schema: Mapping[str, Any]) -> Expression:
    """The expression of the texts that a schema allows; a user error if it is not understood."""
    return _Schema(schema).expression(schema, 0)


class _Schema:
    """References are to parts of the whole schema; the expression of each is made once."""

    def __init__(self, whole: Mapping[str, Any]):
        self.whole = whole
        self.referred: dict[str, Expression | None] = {}
        """By reference; None while it is made."""

    def expression(self, part: Any, depth: int) -> Expression:
        """The expression of a part of the schema."""
        if depth > MAX_DEPTH:
            raise _refusal(f"the JSON schema has more than {MAX_DEPTH} parts inside each other; make it flatter")
        if not isinstance(part, Mapping):
            raise _refusal(f"a part of the JSON schema is {part!r:.60}, and must be an object with a type")
        kind = next((name for name in KINDS if name in part), None)
        if kind is None:
            raise _refusal(
                f"the part {_shown(part)} of the JSON schema needs type, enum, const, anyOf or $ref; give one"
            )
        types = _types(part) if "type" in part else []
        used = {kind}.union(*(KEYWORDS_OF_TYPE[each] for each in types)) if kind == "type" else {kind}
        if kind in ("const", "enum"):
            used.add("type")
        ignored = sorted(str(name) for name in part.keys() - used - ANNOTATIONS)
        if ignored:
            raise _refusal(
                f"the JSON schema has {ignored[0]!r:.60} beside {kind}, which is not supported there; leave it out"
            )
        if kind == "type":
            return Alternatives(tuple(self._of_type(each, part, depth) for each in types))
        if kind == "$ref":
            return self._reference(part["$ref"], depth)
        if kind == "anyOf":
            return Alternatives(tuple(self.expression(each, depth + 1) for each in _list(part, "anyOf")))
        if kind == "allOf":
            parts = _list(part, "allOf")
            if len(parts) > 1:
                raise _refusal("allOf of the JSON schema has several parts, and one is supported; merge them")
            return self.expression(parts[0], depth + 1)
        values = [part["const"]] if kind == "const" else _list(part, "enum")
        allowed = [value for value in values if not types or any(_is_of_type(value, each) for each in types)]
        if not allowed:
            raise _refusal(f"{kind} of the JSON schema has no value of type {part['type']!r:.60}; change one of them")
        return OneOf(tuple(map(_json_of, allowed)))

    def _reference(self, reference: Any, depth: int) -> Expression:
        """The expression of the part that `#/$defs/name` names."""
        name = str(reference)
        if name not in self.referred:
            part: Any = self.whole
            for step in name.removeprefix("#").split("/")[1:]:
                part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
            if part is None or not name.startswith("#"):
                raise _refusal(f"the JSON schema has no part {reference!r:.60}; refer to one as #/$defs/name")
            self.referred[name] = None
            self.referred[name] = self.expression(part, depth + 1)
        found = self.referred[name]
        if found is None:
            raise _refusal(f"the JSON schema is recursive: {reference!r:.60} refers to itself; write out a few levels")
        return found

    def _of_type(self, name: str, part: Mapping[str, Any], depth: int) -> Expression:
        if name == "string":
            return _string(part)
        if name == "array":
            return self._array(part, depth)
        if name == "object":
            return self._object(part, depth)
        if name in ("integer", "number") and BOUNDS & part.keys():
            return _bounded_number(name, part)
        return SIMPLE_TYPES[name]

    def _array(self, part: Mapping[str, Any], depth: int) -> Expression:
        least, most = _sizes(part, "minItems", "maxItems")
        if "prefixItems" in part:
            given = [self.expression(each, depth + 1) for each in _list(part, "prefixItems")]
            if (least, most) != (len(given), len(given)) or part.get("items", False) is not False:
                raise _refusal(
                    f"prefixItems of the JSON schema has {len(given)} parts; give minItems and maxItems {len(given)}, "
                    "and no items"
                )
            return Concatenation(("\\[", OptionalParts(tuple(given), (True,) * len(given), ", ?"), "\\]"))
        if most == 0:
            return r"\[\]"
        if "items" not in part:
            raise _refusal(f"the array {_shown(part)} of the JSON schema needs items; give their schema")
        item = self.expression(part["items"], depth + 1)
        items = Repetition(item, max(least, 1), most, ", ?")
        return Concatenation(("\\[", items if least else Repetition(items, 0, 1), "\\]"))

    def _object(self, part: Mapping[str, Any], depth: int) -> Expression:
        """Properties in the order of the schema; those that are not required may be left out."""
        properties, required = part.get("properties", {}), part.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _refusal(f"the object {_shown(part)} of the JSON schema needs properties; give a dict")
        unknown = [name for name in required if name not in [*properties]]
        if unknown:
            raise _refusal(f"the JSON schema requires {unknown[0]!r:.60}, which is not in its properties")
        others = part.get("additionalProperties", False)
        if not properties and others not in (False, True, {}):
            raise _refusal(
                f"the object {_shown(part)} of the JSON schema has additionalProperties only, whose names are not "
                "known; list its properties"
            )
        members = [
            Concatenation((f"{re.escape(_json_of(name))}: ?", self.expression(value, depth + 1)))
            for name, value in properties.items()
        ]
        listed = OptionalParts(tuple(members), tuple(name in required for name in properties), ", ?")
        return Concatenation((r"\{", listed, r"\}"))


def _string(part: Mapping[str, Any]) -> Expression:
    """A string with a pattern or format is written without escapes: its value is then the text between the quotes."""
    least, most = _sizes(part, "minLength", "maxLength")
    times = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    if not part.keys() & {"pattern", "format"}:
        return f'"{STRING_CHARACTER}{times}"'
    conditions: list[Expression] = [PLAIN_STRING]
    if times != "*":
        conditions.append(rf"[\s\S]{times}")
    if "pattern" in part:
        pattern = part["pattern"]
        if not isinstance(pattern, str):
            raise _refusal(f"pattern of the JSON schema is {pattern!r:.60}, and must be a regular expression")
        conditions.append(Search(pattern))
        # \W and [^\w] have characters outside ASCII in one dialect of regular expressions and not in another
        if re.search(r"\\[DWS]|\[\^", pattern) and re.search(r"\\[dwsDWS]", pattern):
            conditions.append(r"[\x00-\x7f]*")
    if "format" in part:
        name = part["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise _refusal(f"format of the JSON schema is {name!r:.60}; use {', '.join(FORMATS)}, or leave it out")
        conditions.append(FORMATS[name])
    return Concatenation(('"', Intersection(tuple(conditions)), '"'))


def _bounded_number(name: str, part: Mapping[str, Any]) -> Expression:
    """Numbers without exponents that all bounds of the part allow."""
    bounds = {keyword: _bound(keyword, part[keyword]) for keyword in sorted(BOUNDS & part.keys())}
    # json.loads rounds no decimal of at most 15 digits to another one, and so none to an exclusive bound
    has_decimals = name == "number" and all(abs(bound) < 10 ** (15 - NUM_DECIMALS) for bound in bounds.values())
    conditions: list[Expression] = [rf"{INTEGER}(?:\.[0-9]{{1,{NUM_DECIMALS}}})?" if has_decimals else INTEGER]
    for keyword, bound in bounds.items():
        strict = keyword.startswith("exclusive")
        if keyword.lower().endswith("minimum"):
            least = _magnitudes(abs(bound), above=bound >= 0, strict=strict)
            conditions.append(least if bound >= 0 else Alternatives((r"[0-9.]*", Concatenation(("-", least)))))
        else:
            most = _magnitudes(abs(bound), above=bound <= 0, strict=strict)
            if bound > 0:
                conditions.append(Alternatives((most, r"-[0-9.]*")))
            else:
                zero = ("0",) if bound == 0 and not strict else ()
                conditions.append(Alternatives((Concatenation(("-", most)), *zero)))
    return Intersection(tuple(conditions))


def _magnitudes(bound: Decimal, above: bool, strict: bool) -> str:
    """A regular expression of the decimals above or below a bound of at least 0, the bound included unless strict.

    For 20.5 above: more than 20 before the point, or 20 and then a fraction of at least 5.
    """
    whole, _, fraction = f"{bound:f}".partition(".")
    fraction = fraction.rstrip("0")
    digits = len(whole)
    other = [_digits(whole, above)]  # as many digits before the point, or more or fewer
    if above:
        other.append(f"[1-9][0-9]{{{digits},}}")
    elif digits > 1:
        other.append(f"[0-9]{{1,{digits - 1}}}")
    different = rf"(?:{'|'.join(each for each in other if each)})(?:\.[0-9]+)?" if any(other) else ""
    included = [] if strict else [rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(?:\.0+)?"]
    equal = _fractions(fraction, above)
    found = [different, *(rf"{whole}{each}" for each in equal), *included]
    return f"(?:{'|'.join(each for each in found if each)})" if any(found) else "[^\\s\\S]"


def _digits(bound: str, above: bool) -> str:
    """Texts of as many digits as the bound that are greater, or less, as numbers; empty if there are none."""
    found = []
    for place, digit in enumerate(bound):
        first, last = (int(digit) + 1, 9) if above else (0, int(digit) - 1)
        if first <= last:
            found.append(f"{bound[:place]}[{first}-{last}][0-9]{{{len(bound) - place - 1}}}")
    return "|".join(found)


def _fractions(bound: str, above: bool) -> list[str]:
    """Fractions, with their points, that are greater or less than the one of these digits; the last is not 0."""
    found = [] if above or not bound else [r"(?:\.0+)?"]
    for place, digit in enumerate(bound):
        first, last = (int(digit) + 1, 9) if above else (0, int(digit) - 1)
        if first <= last:
            found.append(rf"\.{bound[:place]}[{first}-{last}][0-9]*")
        if not above and place:
            found.append(rf"\.{bound[:place]}0*")
    if above:
        found.append(rf"\.{bound}[0-9]*[1-9][0-9]*")
    return found


def _bound(keyword: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refusal(f"{keyword} of the JSON schema is {value!r:.60}, and must be a number")
    bound = Decimal(int(value)) if value == int(value) else Decimal(repr(value))
    whole, _, fraction = f"{abs(bound):f}".partition(".")
    if len(whole) > MAX_DIGITS or len(fraction) > MAX_DIGITS:
        raise _refusal(
            f"{keyword} {value!r:.60} of the JSON schema has more than {MAX_DIGITS} digits before or after the point; "
            "round it"
        )
    return bound


def _refusal(message: str) -> UserError:
    return UserError(message, OPTION)


def _shown(part: Mapping[str, Any]) -> str:
    return f"{dict(part)!r:.60}"


def _types(part: Mapping[str, Any]) -> list[str]:
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if not types or not all(isinstance(each, str) and each in KEYWORDS_OF_TYPE for each in types):
        raise _refusal(f"the JSON schema has type {part['type']!r:.60}; use {', '.join(KEYWORDS_OF_TYPE)}")
    return types


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if name == "number":
        return isinstance(value, int | float)
    return name in PYTHON_TYPES and isinstance(value, PYTHON_TYPES[name])


def _list(part: Mapping[str, Any], keyword: str) -> list[Any]:
    values = part[keyword]
    if not isinstance(values, list) or not values:
        raise _refusal(f"{keyword} of the JSON schema is {values!r:.60}, and must be a list of at least one")
    return values


def _json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sizes(part: Mapping[str, Any], least_name: str, most_name: str) -> tuple[int, int | None]:
    least, most = part.get(least_name, 0), part.get(most_name)
    for name, value in ((least_name, least), (most_name, most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _refusal(f"{name} of the JSON schema is {value!r:.60}, and must be 0 or more")
    if most is not None and most < least:
        raise _refusal(f"the JSON schema has {least_name} {least} above {most_name} {most}; exchange them")
    return least, most
