"""The five tasks of docs/constraints.md run as written, with the real smollm2 where its weights are."""

import json
import re
from pathlib import Path

import pytest

from adlm.bases.named import find_named_base

PAGE = Path(__file__).parents[2] / "docs" / "constraints.md"
FORMS = [
    r"Name: [A-Z][a-z]+ [A-Z][a-z]+\nBorn in: [A-Z][a-z]+\nYear of birth: 1[89]\d\d\n"
    r"Occupation: (farmer|teacher|doctor|sailor)\n",
    r" The architect was (The|Kullen|Magnus Dahlander|1900), and the year was (The|Kullen|Magnus Dahlander|1900)\.",
    r"The war ended on (1\d|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])\.",
    r"Celsius \[0\.9\d+, 0\.0\d+, 0\.0\d+\]",
    r"Les Misérables is a novel by Victor Hugo\. As a record: (\{.*\})",
]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_texts_on_the_page_have_the_form_that_their_tasks_ask_for():
    shown = blocks("text")
    assert len(shown) == len(FORMS) == len(blocks("python")) - 1
    for form, text in zip(FORMS, shown, strict=True):
        assert re.fullmatch(form + r"\n?", text), text


@pytest.mark.slow
def test_the_five_tasks_run_as_written(capsys):
    if find_named_base("smollm2") is None:
        pytest.skip("the weights of smollm2 are not on this machine")
    names: dict = {}
    first, *tasks = blocks("python")
    exec(first, names)
    for form, code in zip(FORMS, tasks, strict=True):
        exec(code, names)
        printed = capsys.readouterr().out
        found = re.fullmatch(form + r"\n?", printed)
        assert found, printed
    record = json.loads(found[1])
    assert {*record} == {"title", "year", "language"}
    assert 1800 <= record["year"] <= 2030
