"""The locks: requirements.lock pins all that the quickstart needs, requirements-dev.lock the rest, nothing twice."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(name: str) -> list[str]:
    return [canonicalize_name(pin) for pin in re.findall(r"^([\w.-]+)==", (ROOT / name).read_text(), re.MULTILINE)]


def needed(requirements: list[str], extra: str = "") -> set[str]:
    """The packages that these requirements name, and theirs in turn, as installed here."""
    found: set[str] = set()
    todo = [(Requirement(each), extra) for each in requirements]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        found.add(name)
        todo += [(Requirement(each), wanted) for each in requires(name) or [] for wanted in requirement.extras or {""}]
    return found


def test_the_runtime_lock_pins_what_the_quickstart_needs_and_no_more():
    extras = PROJECT["project"]["optional-dependencies"]
    build = PROJECT["build-system"]["requires"]  # an editable install without build isolation
    wanted = needed(PROJECT["project"]["dependencies"] + extras["quickstart"] + build)
    accelerator = {name for name in wanted if name.startswith(("nvidia-", "cuda-", "triton"))}  # pinned by torch
    assert wanted - accelerator - {"setuptools"} == set(pinned("requirements.lock"))


def test_every_extra_is_pinned_and_nothing_twice():
    pins = pinned("requirements.lock") + pinned("requirements-dev.lock")
    assert len(pins) == len(set(pins))
    extras = [Requirement(each) for group in PROJECT["project"]["optional-dependencies"].values() for each in group]
    assert {canonicalize_name(each.name) for each in extras} <= set(pins)
    assert (ROOT / "requirements-dev.lock").read_text().count("\n-r requirements.lock\n") == 1
