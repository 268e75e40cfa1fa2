"""The figures of experiments/code are right on programs small enough to judge by hand."""

import ast
import importlib.util
import json
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "code"
PROGRAM = '''"""Text."""
import os

def f(x, *, y=0):
    """Text of a function that is no hole."""
    total = [x + y for each in os.environ]
    return missing(total, unknown) if x else len(total)
'''


@pytest.fixture
def script(monkeypatch):
    def load(name: str):
        spec = importlib.util.spec_from_file_location(f"code_{name}", FOLDER / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded)  # dataclasses look their module up
        spec.loader.exec_module(loaded)
        return loaded

    return load


@pytest.mark.parametrize(
    ("text", "is_beginning", "is_program"),
    [
        ("x = 1\n", True, True),
        ("def f(x):\n", True, False),
        ("x = [1,\n", True, False),
        ("try:\n    x = 1\n", True, False),
        ('"""never closed\n', True, False),
        ("x = = 1\n", False, False),
        ("x = (1 2\ny = 3\n", False, False),
        ("", True, True),
    ],
)
def test_a_text_is_readable_if_it_is_a_program_or_the_beginning_of_one(script, text, is_beginning, is_program):
    measure = script("measure")
    assert measure.is_readable(text, ends=False) == is_beginning
    assert measure.is_readable(text, ends=True) == is_program


def test_names_exist_if_a_scope_the_module_or_python_binds_them(script):
    measure = script("measure")
    assert measure.missing_names(PROGRAM) == {"missing", "unknown"}
    # x, y, os; missing, total, unknown; x; len, total
    assert measure.known_share(PROGRAM) == pytest.approx(7 / 9)
    begin = PROGRAM.index("return")
    assert measure.known_share(PROGRAM, begin, len(PROGRAM)) == pytest.approx(4 / 6)
    assert measure.known_share("x = 1\n") is None
    assert measure.missing_names("from os import *\npath\n") is None
    assert measure.missing_names("def f():\n    global g\n    g = 1\nf()\ng\n") == set()
    assert measure.missing_names("class A:\n    a = 1\n    def f(self):\n        return a\n") == {"a"}


def test_holes_are_statements_and_expressions_between_ends_of_tokens(script):
    measure = script("measure")
    characters = [(place, place + 1) for place in range(len(PROGRAM))]
    for seed in range(8):
        holes = measure.holes_in(seed, PROGRAM, characters)
        assert [hole.kind for hole in holes] == ["expression"]  # the statements are longer than 32 characters
        [hole] = holes
        text = PROGRAM[hole.begin : hole.end].strip()
        assert 8 <= hole.stop - hole.start <= 32
        assert text in ("missing(total, unknown)", "len(total)", "os.environ", "[x + y for each in os.environ]")
    words = [(0, 86), *((place, place + 3) for place in range(86, len(PROGRAM), 3))]
    assert all(hole.start > 0 for hole in measure.holes_in(0, PROGRAM, words))


def test_holes_are_not_in_f_strings_whose_places_depend_on_the_version_of_python(script):
    measure = script("measure")
    text = 'def f(x):\n    """Text."""\n    return f"{len(x) + 1:>{width(x)}} of it" + other.name\n'
    found = {ast.unparse(node) for node in measure.expressions(ast.parse(text).body[0])}
    assert {"other.name", "other"} < found
    assert not {"len(x)", "len(x) + 1", "width(x)", "x"} & found


def test_scores_of_fills_and_texts(script):
    measure = script("measure")
    begin, end = (PROGRAM.index(word) for word in ("missing", " if x"))
    hole = {"file": 3, "kind": "expression", "begin": begin, "end": end, "num_tokens": 4}
    fills = [{**hole, "fill": "f(total, total)", "num_right": 2}, {**hole, "fill": "f(total", "num_right": 1}]
    texts = [{"text": "x = 1\ny = z\nca", "ends": False}, {"text": "x = 1\n= 2\n", "ends": True}]
    scores = measure.scores_of({"texts": texts, "fills": fills}, {"3": PROGRAM})
    assert scores["text readable"] == {"0": 1.0, "1": 0.0}
    assert scores["text lines"] == {"0": 1.0, "1": 0.5}
    assert scores["text names"] == {"0": 0.0}
    assert scores["expression parses"] == {"3": 0.5}
    assert scores["expression exact"] == {"3": 0.0}
    assert scores["expression tokens"] == {"3": 0.375}
    assert scores["expression names"] == {"3": 1.0}
    both = measure.averaged([scores, {"expression parses": {"3": 1.0}}])
    assert both["expression parses"] == {"3": 0.75}


def test_scores_are_compared_seed_by_seed_also_where_nothing_parses(script, tmp_path, capsys):
    measure = script("measure")
    good, bad = [{"text": "x = int(1)\n", "ends": True}], [{"text": "= =\n", "ends": True}]
    records = [
        {"run": "held-out", "files": {}, "texts": good, "fills": []},
        {"run": "other-seed1", "nats": 4.0, "texts": good, "fills": []},
        {"run": "mdlm-seed0", "nats": 2.0, "texts": good, "fills": []},
        {"run": "mdlm-seed1", "nats": 5.0, "texts": bad, "fills": []},
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    paths = {"texts": tmp_path / "texts.jsonl", "json": tmp_path / "scores.json"}
    measure.score(Namespace(**paths, against="mdlm", each=False))
    scores, printed = json.loads((tmp_path / "scores.json").read_text()), capsys.readouterr().out
    assert scores["mdlm"]["nats"] == {"mdlm-seed0": 2.0, "mdlm-seed1": 5.0}
    assert scores["mdlm"]["text readable"][0] == 0.5
    assert scores["other"]["difference"]["text readable"][0] == 1, "seed 0 of mdlm has no pair"
    assert "text names" not in scores["other"]["difference"]
    assert "| other | -1.0000 ± nan | +100.0 ± nan" in printed
    measure.score(Namespace(**paths, against="mdlm-seed0", each=True))
    assert "| mdlm-seed1 | 5.0000 | 0.0 ± nan" in capsys.readouterr().out


def test_a_wheel_is_collected_without_tests_tables_duplicates_and_what_is_generated(script, tmp_path, monkeypatch):
    code = "def f(x):\n    return x\n" * 10
    files = {
        "a/one.py": code,
        "a/two.py": code,
        "a/tests/three.py": code + "#",
        "a/four.py": "# Generated by a script.\n" + code,
        "a/five.py": "x = [" + "12345, " * 100 + "]\n",
        "a/six.py": "print 'x'\n" + code,
        "a/seven.py": "y = 1\r\n" + code,
        "a-1.0.dist-info/METADATA": "Name: A\nVersion: 1.0\nLicense-Expression: MIT\n\n",
    }
    with zipfile.ZipFile(tmp_path / "a-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    collect = script("collect")
    arguments = [str(tmp_path / "a-1.0-py3-none-any.whl"), "--out", str(tmp_path / "code.jsonl")]
    monkeypatch.setattr(sys, "argv", ["collect.py", *arguments, "--packages", str(tmp_path / "packages.md")])
    collect.main()
    records = [json.loads(line) for line in (tmp_path / "code.jsonl").read_text().splitlines()]
    assert {record["source"]: record["text"] for record in records} == {
        "a 1.0 a/one.py": code,
        "a 1.0 a/seven.py": "y = 1\n" + code,
    }
    assert {record["license"] for record in records} == {"MIT"}
    assert "| a | 1.0 | MIT | 2 of 6 | 0.00 |" in (tmp_path / "packages.md").read_text()
