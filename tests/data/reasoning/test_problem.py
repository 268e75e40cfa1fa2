"""Problem files: written problems are read back, and invalid files are user errors."""

import json

import pytest

from adlm.data.reasoning import prosqa
from adlm.data.reasoning.make_prontoqa import generate_prontoqa
from adlm.data.reasoning.make_prosqa import generate_prosqa
from adlm.data.reasoning.problem import Graph, Problem, read_problems, write_problems
from adlm.data.reasoning.series import forbidden_forms
from adlm.errors import UserError

PLAIN = Problem("How many is twice 4,000 – in “words”?\u2028", ("<<2*4000=8000>>",), "8,000")
DRAWN = Problem("q", (), "a", Graph(("Ada", "wug", "blick"), ((0, 1), (1, 2)), root=0, target=2, neg_target=1))


def good(**changes):
    return {"question": "q", "steps": ["s"], "answer": "a", **changes}


def drawn(**changes):
    return good(idx_to_symbol=["Ada", "wug"], edges=[[0, 1]], root=0, target=1, neg_target=1, **changes)


@pytest.mark.parametrize(
    "problems",
    [[], [PLAIN], [PLAIN, DRAWN], [*generate_prosqa(3, 0), *generate_prontoqa(3, 0)]],
    ids=["none", "one", "two", "made"],
)
def test_written_problems_are_read_back(tmp_path, problems):
    path = tmp_path / "problems.json"
    write_problems(path, iter(problems))
    assert read_problems(path) == tuple(problems)
    assert [file.name for file in tmp_path.iterdir()] == ["problems.json"]


def test_a_file_is_written_atomically(tmp_path):
    path = tmp_path / "problems.json"
    write_problems(path, [PLAIN])

    def breaks_off():
        yield DRAWN
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_problems(path, breaks_off())
    assert read_problems(path) == (PLAIN,)
    assert [file.name for file in tmp_path.iterdir()] == ["problems.json"]


def test_a_reader_of_the_old_file_reads_it_to_its_end(tmp_path):
    path = tmp_path / "problems.json"
    write_problems(path, [PLAIN])
    before = path.read_text()
    with path.open() as reader:
        write_problems(path, [DRAWN])
        assert reader.read() == before
    assert read_problems(path) == (DRAWN,)


def test_the_written_fields_are_those_of_the_real_files(tmp_path):
    path = tmp_path / "problems.json"
    write_problems(path, [*generate_prosqa(1, 0), *generate_prontoqa(1, 0)])
    shared = ["question", "steps", "answer", "idx_to_symbol", "edges", "root", "target", "neg_target"]
    assert [list(entry) for entry in json.loads(path.read_text())] == [shared, [*shared, "chain_concepts"]]


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
        (json.dumps([good(root=0)]), "has root but not all of"),
        (json.dumps([drawn() | {"target": 2}]), "target 2 is not an index"),
        (json.dumps([drawn() | {"root": -1}]), "root -1 is not an index"),
        (json.dumps([drawn() | {"root": [0]}]), "root a list is not an index"),
        (json.dumps([drawn() | {"root": True}]), "root True is not an index"),
        (json.dumps([drawn() | {"edges": [[0, 1, 1]]}]), "'edges' is not an array of pairs"),
        (json.dumps([drawn() | {"edges": [[0, 2]]}]), "edges 2 is not an index"),
    ],
)
def test_a_damaged_file_is_a_user_error_that_names_it(tmp_path, text, says):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"(?s)^{path}.*{says}") as error:
        read_problems(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_a_binary_file_and_a_closed_folder_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_problems(tmp_path / "missing.json")
    with pytest.raises(UserError, match="not UTF-8"):
        read_problems(tmp_path / "binary")
    with pytest.raises(UserError, match="cannot be written"):
        write_problems(tmp_path / "no folder" / "p.json", [PLAIN])


def test_a_file_of_another_kind_cannot_be_forbidden(tmp_path):
    write_problems(tmp_path / "p.json", [*generate_prosqa(1, 0), *generate_prontoqa(1, 0)])
    with pytest.raises(UserError, match=r"p\.json, entry 1: "):
        forbidden_forms([tmp_path / "p.json"], prosqa.content)
