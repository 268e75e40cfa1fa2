"""Renders one chat template in Jinja's sandbox. `template.py` runs this file in a process of its own.

The first line of the input is the template and each further line the variables of one rendering, in JSON. Each line of
the output is `{"text": ...}` or `{"error": ...}`. Nothing of adlm is imported: the process starts fast.
"""

import json
import sys
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 2**29
"""Bytes. The sandbox limits what a template can reach, but not how long its texts are."""
MAX_CHARACTERS = 2**22


def raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def main() -> None:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    output, source = sys.stdout, json.loads(sys.stdin.readline())
    compiled = cache(environment.from_string)
    for line in sys.stdin:
        try:
            text = compiled(source).render(json.loads(line))
            answer = {"text": text} if len(text) <= MAX_CHARACTERS else {"error": "its text is too long"}
        except Exception as error:  # noqa: BLE001  (a template can raise any, such as ZeroDivisionError)
            answer = {"error": str(error) or type(error).__name__}
        output.write(json.dumps(answer) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
