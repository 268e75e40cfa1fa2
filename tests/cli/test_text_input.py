"""Files that are no text, in every command that reads text: one line with the remedy, from one reader."""

import json

import pytest
from small_models import small_model

from adlm.cli.main import main

FILES = {
    "book.pdf": (b"%PDF-1.7\n1 0 obj", "book.pdf looks like a PDF, not text; convert it with pdftotext"),
    "latin.txt": (
        "Le café est fermé.\n".encode("latin-1"),
        "it looks like Latin-1; convert it: iconv -f ISO-8859-1 -t",
    ),
    "blank.txt": (b" \n\r\n\t", "blank.txt holds no text"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    small_model(folder / "model", "mdlm")
    assert main(["sample", str(folder / "model"), "--out", str(folder / "samples.jsonl")]) == 0
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "words",
    [
        "prepare tokenizer=bytes --out new data.path={}",
        "train own data.path={} --out new",
        "train own tokenizer=bytes data.streaming=true data.path={} --out new",
        "perplexity model --data {}",
        "judge samples.jsonl --metrics entropy --reference {}",
    ],
    ids=["prepare", "train", "stream", "perplexity", "judge"],
)
def test_what_is_no_text_is_named_with_its_remedy(world, monkeypatch, capsys, words, name):
    monkeypatch.chdir(world)
    assert main(words.format(name).split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert FILES[name][1] in error
    assert error.startswith("adlm: ")
    assert ("data." in error) == (name == "blank.txt" and words.startswith(("prepare", "train"))), (
        "options of this command"
    )


def test_windows_line_breaks_give_the_same_shards_and_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small_model(tmp_path / "model", "mdlm")
    lines = [f"line {number} of the text" for number in range(40)]
    shards = []
    for name, end in (("unix", "\n"), ("windows", "\r\n")):
        (tmp_path / f"{name}.txt").write_text(end.join(lines), newline="")
        words = [f"data.path={name}.txt", "tokenizer=bytes", "length=32", "data.held_out=0.2"]
        assert main(["prepare", *words, "--out", name, "--json"]) == 0
        prepare_notes = json.loads(capsys.readouterr().out)["notes"]
        assert main(["perplexity", "model", "--data", f"{name}.txt", "--samples", "1", "--json"]) == 0
        [figure] = json.loads(capsys.readouterr().out)["figures"]
        noted = [any("line breaks of Windows" in note for note in notes) for notes in (prepare_notes, figure["notes"])]
        assert noted == [name == "windows"] * 2
        shards.append(
            [(tmp_path / name / path).read_bytes() for path in ("train/tokens-00000.bin", "valid/documents.bin")]
        )
    assert shards[0] == shards[1]
