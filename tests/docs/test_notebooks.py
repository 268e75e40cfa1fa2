"""The notebooks are valid, and run from top to bottom (slow tests): inference as it is, training with fewer steps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL
from test_documentation import commands, parse

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = ("inference", "train_your_own")
# A row of the notebooks is longer than one of SMALL; counting symbols for the initial weights takes seconds.
TINY = (
    "length=64",
    "train.unigram_start=false",
    *(word for word in SMALL if not word.startswith(("length", "train.valid_every"))),
)
TEXT = "The President of the United States met the members of the Congress today. The people are at peace.\n" * 300


def read_notebook(name: str) -> dict[str, Any]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())


def sources(name: str, kind: str) -> dict[str, str]:
    """The texts of the cells of one kind, by cell id."""
    return {cell["id"]: "".join(cell["source"]) for cell in read_notebook(name)["cells"] if cell["cell_type"] == kind}


def execute(name: str, folder: Path, replacements: dict[str, str]) -> dict[str, list[Any]]:
    """The outputs by cell id of the notebook, run in `folder` after these replacements in its code."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra dev)")
    import nbformat

    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for old, new in replacements.items():
        assert sum(old in cell.source for cell in code) == 1, f"{name} has no single cell with {old}"
        for cell in code:
            cell.source = cell.source.replace(old, new)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {cell.id: cell.outputs for cell in code}


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def has_picture(outputs: list[Any]) -> bool:
    return any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_cell_ids_and_no_stored_outputs(name):
    notebook = read_notebook(name)
    cells = notebook["cells"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    nbformat.validate(notebook)


def test_the_first_cell_of_inference_loads_the_model_in_the_package():
    first = next(iter(sources("inference", "code").values()))
    assert "model = adlm.load()" in first.replace("  #", "\n#").splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_links_and_commands_of_a_notebook_are_valid(name, tmp_path):
    text = "\n\n".join(sources(name, "markdown").values())
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert links
    assert [link for link in links if not (NOTEBOOKS / link).exists()] == []
    (tmp_path / "page.md").write_text(text)
    for line in commands(tmp_path / "page.md"):
        parse(line)


@pytest.mark.slow
@pytest.mark.processes
def test_inference_runs_and_the_model_prefers_a_sentence_to_its_words_in_random_order(tmp_path):
    outputs = execute("inference", tmp_path, {})
    assert {name for name, found in outputs.items() if has_picture(found)} == {
        "order-plot",
        "anchor-predictions",
        "bound-plot",
    }
    first, *_, last = printed(outputs["watch-frames"]).splitlines()
    assert first.count("_") == 30
    assert "_" not in last
    assert (tmp_path / "trace.html").is_file()
    filled = printed(outputs["fill-holes"]).splitlines()
    assert len(filled) == 4
    assert all(" of the people" in line and line.endswith(" peace.") for line in filled), "the given text stays"
    perplexities = re.findall(r"perplexity +([\d.]+)", printed(outputs["perplexity"]))
    ordered, shuffled = map(float, perplexities)
    assert ordered < shuffled


@pytest.mark.slow
@pytest.mark.processes
def test_train_your_own_trains_and_resumes(tmp_path):
    (tmp_path / "my_text.txt").write_text(TEXT)
    tiny = ", ".join(map(repr, (*TINY, "tokenizer=bpe-300", "train.valid_every=2", "train.log_every=2")))
    replacements = {
        '"train.valid_every=50"': tiny,
        '"train.steps=200"': '"train.steps=4"',
        '"train.steps=300"': '"train.steps=6"',
    }
    outputs = execute("train_your_own", tmp_path, replacements)
    assert f"{len(TEXT):,} characters" in printed(outputs["text-file"])
    tokens = 8 * 64  # train.batch_size x length
    assert printed(outputs["train-model"]) == f"4 steps, {4 * tokens:,} tokens\n"
    assert printed(outputs["train-longer"]) == f"6 steps, {6 * tokens:,} tokens\n"
    lines = [output["data"]["text/plain"] for output in outputs["train-longer"] if output.output_type == "display_data"]
    assert any("resum" in line for line in lines), lines
    assert has_picture(outputs["loss-curve"])
    assert has_picture(outputs["train-longer"])
    assert re.findall(r"^step +(\d+)", printed(outputs["held-out"]), re.MULTILINE) == ["2", "4", "6"]
