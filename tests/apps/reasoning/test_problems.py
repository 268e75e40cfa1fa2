"""Problems: files are read back, invalid ones are user errors; generated series, canonical forms, and a new set."""

import json
import random
from itertools import pairwise

import pytest
from reasoning_runs import evaluated, generate_prontoqa, generate_prosqa, reason_train, write_problems

from adlm.apps.reasoning import problems
from adlm.apps.reasoning.datasets import prontoqa, prosqa
from adlm.apps.reasoning.problems import (
    GeneratedProblems,
    Problem,
    canonical_form,
    forbidden_forms,
    read_problems,
)
from adlm.cli.main import main
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError

PLAIN = Problem("How many is twice 4,000 – in “words”?\u2028", ("<<2*4000=8000>>",), "8,000")


def good(**changes):
    return {"question": "q", "steps": ["s"], "answer": "a", **changes}


def test_a_file_is_read_in_order_and_other_fields_are_ignored(tmp_path):
    path, problem = tmp_path / "problems.json", Problem("q", ("s",), "a")
    write_problems(path, [PLAIN, problem])
    assert read_problems(path) == (PLAIN, problem)
    path.write_text(json.dumps([good(idx_to_symbol=["Ada"], edges=[], root=0, target=0, neg_target=0)]))
    assert read_problems(path) == (problem,)


def test_empty_steps_are_dropped(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps([good(steps=[""])]))
    assert read_problems(tmp_path / "p.json")[0].steps == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON .it is nested too deeply"),
        ('{"question": "q"}', "holds a dict, not an array"),
        (json.dumps([good(), 3]), "entry 1 is a int"),
        (json.dumps([{"question": "q", "steps": []}]), "entry 0 has no 'answer'"),
        (json.dumps([good(answer=18)]), "'answer' is a int"),
        (json.dumps([good(steps="s")]), "'steps' is not an array of texts"),
        (json.dumps([{"question": "q", "answer": "a"}]), "'steps' is not an array of texts"),
    ],
)
def test_a_damaged_file_is_a_user_error_that_names_it(tmp_path, text, says):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"(?s)^{path}.*{says}") as error:
        read_problems(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_problems(tmp_path / "missing.json")
    with pytest.raises(UserError, match="not UTF-8"):
        read_problems(tmp_path / "binary")


def test_a_file_of_another_kind_cannot_be_forbidden(tmp_path):
    write_problems(tmp_path / "p.json", [*generate_prosqa(1, 0), *generate_prontoqa(1, 0)])
    with pytest.raises(UserError, match=r"p\.json, entry 1: "):
        forbidden_forms([tmp_path / "p.json"], prosqa.structure)


def form(*edges, **colours):
    nodes = {node for a, b, _ in edges for node in (a, b)}
    return canonical_form({node: colours.get(node, "node") for node in nodes}, edges)


def arms(*lengths):
    """Paths of these lengths that meet in one node."""
    edges = []
    for arm, length in enumerate(lengths):
        names = ["centre", *(f"{arm}.{step}" for step in range(length))]
        edges += [(a, b, "is") for a, b in pairwise(names)]
    return edges


def test_renaming_and_reordering_keep_the_form():
    rng = random.Random(0)
    for _ in range(50):
        edges = list({(str(a), str(rng.randrange(a + 1, 9)), rng.choice("xy")) for a in range(8) for _ in range(2)})
        nodes = sorted({node for a, b, _ in edges for node in (a, b)})
        other = dict(zip(nodes, rng.sample("abcdefghi", len(nodes)), strict=True))
        renamed = [(other[a], other[b], kind) for a, b, kind in rng.sample(edges, len(edges))]
        assert form(*edges) == form(*renamed)


def test_a_difference_several_edges_away_changes_the_form():
    assert form(*arms(3, 5)) != form(*arms(4, 4))


def test_the_direction_of_an_edge_changes_the_form():
    circle = [("a", "b", "is"), ("b", "c", "is"), ("c", "d", "is"), ("d", "a", "is")]
    zigzag = [("a", "b", "is"), ("c", "b", "is"), ("c", "d", "is"), ("a", "d", "is")]
    assert form(*circle) != form(*zigzag)


def test_edge_kinds_and_colours_change_the_form():
    path = [("a", "b", "is"), ("b", "c", "is")]
    assert form(*path) != form(("a", "b", "is"), ("b", "c", "is not"))
    assert form(*path, a="asked") != form(*path)
    assert form(*path, a="asked") != form(*path, c="asked")


def test_problems_generated_by_several_processes_are_those_of_one_in_order(monkeypatch):
    source = GeneratedProblems(prontoqa.PRONTOQA, "prontoqa", 25, 3, exclude=())
    alone = list(source.problems())
    monkeypatch.setattr(problems, "PER_PROCESS", 10)
    assert list(source.problems()) == alone
    assert len(alone) == 25


SUMS = """
from adlm.apps.reasoning.problems import Problem, ProblemSet

def labels(problem):
    return (problem.answer,)

def draw(rng):
    return problem(rng.randrange(9), rng.randrange(9))

def problem(a, b):
    return Problem(f"What is {a} and {b}?", (f"{a}+{b}={a + b}",), str(a + b))

def read(path):
    return tuple(problem(*map(int, line.split(","))) for line in path.read_text().splitlines())

SUMS = ProblemSet(
    title="sums of two digits", folders=("sums",), files={"valid": ("sums.csv",)}, labels=labels, draw=draw,
    readers={".csv": read},
)
"""


def test_a_new_set_of_problems_is_one_file_and_one_line_of_the_registry(tmp_path, monkeypatch, capsys):
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(CORPORA.built_in, "sums", "sums:SUMS")
    root, run = tmp_path / "data", tmp_path / "run"
    (root / "sums").mkdir(parents=True)
    (root / "sums" / "sums.csv").write_text("4,0\n4,1\n4,2\n")
    assert reason_train(root, run, "data.name=sums", "data.problems=16", "reason.epochs=1", "reason.slots=1") == 0
    assert evaluated(run, root, capsys, "--data", "sums", "--split", "valid")["num"] == 3
    text = tmp_path / "prepared"
    options = ["data=sums", "data.problems=16", f"data.root={root}", "tokenizer=bytes", "length=32"]
    assert main(["prepare", *options, "--out", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["documents"] == 16
    trained_on = GeneratedProblems(CORPORA["sums"], "sums", 16, 0, (root / "sums" / "sums.csv",)).problems()
    assert not {problem.question for problem in trained_on} & {f"What is 4 and {b}?" for b in range(3)}
