"""The mutants of experiments/mutation still have something to change."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutation", ROOT / "experiments" / "mutation" / "run.py")
MUTATION = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MUTATION)


@pytest.mark.parametrize(("file", "old", "new"), MUTATION.MUTANTS)
def test_a_mutant_changes_its_file(file, old, new):
    assert old != new
    assert old in (ROOT / "adlm" / file).read_text()
