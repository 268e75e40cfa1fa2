"""The constraints of a request: its fields -> what the text of holes must satisfy, and threads that check them.

OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*` constrain the completion, `constraints` the
holes of a prompt that have a name. Independent of HTTP.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from adlm.apps.server.bodies import ApiError, ConstraintFields, TextConstraint
from adlm.constraints.expressions import OPTION
from adlm.constraints.holes import ConstrainedHole
from adlm.constraints.json_schema import SIMPLE_TYPES, STRING_CHARACTER
from adlm.constraints.kinds import Choices, Constraint, JsonSchema, Regex
from adlm.errors import UserError

MAX_CHARACTERS = 1 << 16
"""Of a constraint as JSON."""
MAX_NESTING = 64
"""Objects and lists of a JSON schema inside each other."""
OBJECT_DEPTH = 3
"""Objects and lists inside each other that `json_object` allows. They need 260 states of an automaton, and 682 are
allowed with a vocabulary of 49,152 tokens. Four need an expression of more than 20,000 characters."""
MAX_TRANSITIONS = 2**22
"""Of the automaton of a hole, in all places that one step looks at: about a second on a CPU, in which others wait."""
NUM_THREADS = 2
MAX_WAITING = 64
RETRY_AFTER = 5  # seconds

Result = TypeVar("Result")


def completion_constraint(request: ConstraintFields) -> tuple[str, Constraint] | None:
    """The field that constrains the completion of a request, and the constraint; a user error if several do."""
    found: list[tuple[str, str, Any]] = []  # field, kind, value
    if (format_ := request.response_format) is not None and format_.type != "text":
        if format_.type == "json_schema" and format_.json_schema is None:
            raise UserError("response_format has type json_schema; give its json_schema too", "response_format")
        schema = None if format_.json_schema is None else format_.json_schema.json_schema
        found.append(("response_format", "json_object" if format_.type == "json_object" else "json", schema))
    if (outputs := request.structured_outputs) is not None:
        kinds = _kinds_of(outputs) + ([("json_object", None)] if outputs.json_object else [])
        if not kinds:
            raise UserError(
                "structured_outputs is empty; give it json, regex, choice or json_object", "structured_outputs"
            )
        found += [(f"structured_outputs.{kind}", kind, value) for kind, value in kinds]
    guided = {"json": request.guided_json, "regex": request.guided_regex, "choice": request.guided_choice}
    found += [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
    _check_single([name for name, _, _ in found])
    return None if not found else (_field(found[0][0]), _constraint(*found[0]))


def hole_constraints(given: dict[str, TextConstraint]) -> dict[str, Constraint]:
    """The constraints of named holes."""
    found: dict[str, Constraint] = {}
    for name, each in given.items():
        kinds = _kinds_of(each)
        if not kinds:
            raise UserError(f"constraints.{name} is empty; give it json, regex or choice", "constraints")
        _check_single([f"constraints.{name}.{kind}" for kind, _ in kinds])
        found[name] = _constraint(f"constraints.{name}.{kinds[0][0]}", *kinds[0])
    return found


def _kinds_of(given: TextConstraint) -> list[tuple[str, Any]]:
    values = {"json": given.json_schema, "regex": given.regex, "choice": given.choice}
    return [(kind, value) for kind, value in values.items() if value is not None]


def _field(name: str) -> str:
    """The field of the request that a name such as `structured_outputs.json` is in."""
    return name.partition(".")[0]


def _check_single(names: list[str]) -> None:
    if len(names) > 1:
        first, second = names[:2]
        raise UserError(f"{first} and {second} are two constraints on one text; leave one out", _field(second))


def _constraint(name: str, kind: str, value: Any) -> Constraint:
    """The constraint of one field; a user error of this field if it is none."""
    try:
        if kind == "json_object":
            return any_object()
        check_json_size(name, value)
        if kind == "json":
            return JsonSchema(_schema(name, value))
        return Choices(value) if kind == "choice" else Regex(value)
    except UserError as error:
        raise UserError(error, _field(name)) from None


def check_json_size(name: str, value: Any) -> None:
    """A user error for a value of JSON that is too large or nested too deeply to be looked at."""
    waiting, num = [(value, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_NESTING:
            raise UserError(f"{name} has more than {MAX_NESTING} objects and lists inside each other; make it flatter")
        if isinstance(part, dict):
            num += sum(map(len, part))
            waiting += [(each, depth + 1) for each in part.values()]
        elif isinstance(part, list):
            waiting += [(each, depth + 1) for each in part]
        num += len(part) if isinstance(part, str) else 1
        if num > MAX_CHARACTERS:
            raise UserError(f"{name} has more than {MAX_CHARACTERS:,} characters; make it smaller")


def _schema(name: str, value: dict[str, Any] | str) -> dict[str, Any]:
    """A schema that may be given as the text of one, as in vLLM's API."""
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        raise UserError(f"{name} is a text that is no JSON; give the schema as an object") from None
    check_json_size(name, found)
    if not isinstance(found, dict):
        raise UserError(f"{name} is the text of a {type(found).__name__}; give that of a JSON schema, an object")
    return found


def check_transitions(holes: Sequence[ConstrainedHole], places_a_step: int | None) -> None:
    """A user error if a step would take too long. `places_a_step` are the places that one looks at, None all."""
    for hole in holes:
        tokens = hole.automaton.tokens
        following = np.bincount(tokens.source, minlength=len(tokens.final))
        of_place = hole.automaton.alive[:-1, : len(following)] @ following
        num = int(np.sort(of_place)[-(places_a_step or len(of_place)) :].sum())
        if num > MAX_TRANSITIONS:
            raise UserError(
                f"the constraint of hole {hole.name} has {num:,} transitions in its {len(of_place)} places, and at "
                f"most {MAX_TRANSITIONS:,} are served; make it simpler, or the hole shorter",
                OPTION,
            )


@cache
def any_object() -> Regex:
    """A JSON object with any members, OBJECT_DEPTH objects and lists inside each other at most, written on one line."""
    scalar = rf'"{STRING_CHARACTER}*"|{"|".join(SIMPLE_TYPES[name] for name in ("number", "boolean", "null"))}'

    def listed(part: str) -> str:
        return rf"(?:{part}(?:, ?{part})*)?"

    value = f"(?:{scalar})"
    for _ in range(OBJECT_DEPTH):
        members = rf'\{{{listed(rf""""{STRING_CHARACTER}*": ?{value}""")}\}}'
        value = rf"(?:{scalar}|\[{listed(value)}\]|{members})"
    return Regex(members)


class PlanThreads:
    """Threads that check requests. Those with constraints have their own, since compiling one may take seconds.

    So other requests do not wait for it. One client occupies one of these threads, and a bounded number of requests
    waits for them.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "adlm-constraints")
        self._clients: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num = 0

    async def run(self, is_constrained: bool, client: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function; 429 if too many requests with constraints wait."""
        if not is_constrained:
            return await asyncio.to_thread(function, *arguments)
        if self._num >= MAX_WAITING:
            message = f"{self._num} requests with constraints are waiting already; try again in {RETRY_AFTER} s"
            raise ApiError(429, message, headers={"retry-after": str(RETRY_AFTER)})
        self._num += 1
        lock = self._clients.setdefault(client, asyncio.Lock())
        try:
            async with lock:
                return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        finally:
            self._num -= 1

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
