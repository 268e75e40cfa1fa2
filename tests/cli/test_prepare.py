"""Tests of `adlm prepare`: reports as text and JSON, one-line user errors, no partial output."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from texts import prose

from adlm.cli.main import main


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(prose(40, seed=i).strip() for i in range(60)))
    return path


def prepared_report(capsys, *words) -> dict:
    assert main(["prepare", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_counts_add_up(text, tmp_path, capsys):
    words = (f"data.path={text}", "data.boundary=blank", "tokenizer=bytes", "length=64", "--out", tmp_path / "out")
    report = prepared_report(capsys, *words, "data.held_out=0.2")  # an override may follow an option
    documents = text.read_text().split("\n\n")
    assert report["documents"] == len(documents)
    assert report["tokens"] == sum(len(document) + 1 for document in documents)
    assert report["how"] == "prepared"
    assert set(report["splits"]) == {"train", "valid"}
    for split in report["splits"].values():
        assert split["rows"] == -(-split["tokens"] // 62)
        assert split["tokens_in_rows"] == split["tokens"]
    assert prepared_report(capsys, *words, "data.held_out=0.2")["how"] == "reused"


def test_a_table_is_printed_and_inspect_shows_rows_and_anchors(text, tmp_path, capsys):
    words = ["prepare", f"data.path={text}", "data.boundary=blank", "tokenizer=bytes", "length=64"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["prepare", "--out", str(tmp_path / "out"), "--inspect"]) == 0
    out = capsys.readouterr().out
    assert "{anchors} (at most 5 times in the row)" in out
    assert "<|endoftext|>" in out
    row = next(line for line in out.splitlines() if line.startswith("<|endoftext|>"))
    assert prose(40, seed=0)[:20] in row.replace("{", "").replace("}", "")
    for anchors in re.findall(r"\{(.*?)\}", row):  # neighbours in one pair
        assert anchors
        assert all(row.removeprefix("<|endoftext|>").count(letter) <= 5 for letter in anchors)
    assert "{" in row
    seen = prepared_report(capsys, "--out", tmp_path / "out", "--inspect", "anchor.tau=0")["statistics"]["train"]
    assert seen["anchors"] == 0.0
    assert (
        prepared_report(capsys, "--out", tmp_path / "out", "--inspect", "anchor.tau=64")["statistics"]["train"][
            "anchors"
        ]
        == 1.0
    )


def test_inspect_uses_the_given_length_and_packing(text, tmp_path, capsys):
    words = (f"data.path={text}", "data.boundary=blank", "tokenizer=bytes", "length=64", "--out", tmp_path / "out")
    prepared_report(capsys, *words)
    seen = prepared_report(capsys, "--out", tmp_path / "out", "--inspect", "length=16", "data.packing=padded")
    assert (seen["length"], seen["packing"]) == (16, "padded")
    assert seen["splits"]["train"]["rows"] == seen["splits"]["train"]["documents"]
    assert prepared_report(capsys, "--out", tmp_path / "out", "--inspect")["length"] == 64, "and nothing is written"


def test_inspect_separates_words_and_escapes_control_characters(tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "day", "##s"]))
    (tmp_path / "a.txt").write_text("good days good")
    place = ["--out", str(tmp_path / "out")]
    assert main(["prepare", f"data.path={tmp_path / 'a.txt'}", f"tokenizer={tmp_path / 'vocab.txt'}", *place]) == 0
    assert main(["prepare", *place, "--inspect"]) == 0
    assert "[CLS] {good days good} [SEP]" in capsys.readouterr().out
    (tmp_path / "b.txt").write_text("red \x1b[31m alert \x07 \u202e")
    place = ["--out", str(tmp_path / "steering")]
    assert main(["prepare", f"data.path={tmp_path / 'b.txt'}", "tokenizer=bytes", *place, "--inspect"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31m alert \\x07" in out


def test_inspect_shows_a_character_of_several_tokens_whole(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Janet’s ducks")
    place = ["--out", str(tmp_path / "out")]
    assert main(["prepare", f"data.path={tmp_path / 'a.txt'}", "tokenizer=bytes", *place, "--inspect"]) == 0
    assert "Janet’s ducks" in capsys.readouterr().out


SUMS = [("A pen is 3. Pens for 4?", ["<<3*4=12>>"], "12"), ("A cat?", [], "1"), ("7 + 1.5?", ["<<7+1.5=8.5>>"], "8.5")]
CHAIN = ("Tom is a wug. Every wug is a dax. Is Tom a dax or fep?", ["Tom is a wug.", "Every wug is a dax."])
PROOF = ("Each wumpus is red. Max is a wumpus. True or false: Max is red.", ["Max is a wumpus. Each wumpus is red."])
PROBLEMS = {
    "gsm8k/gsm_valid.json": SUMS,
    "prosqa/prosqa_test.json": [(*CHAIN, "Tom is a dax.")],
    "prontoqa/prontoqa_valid.json": [(PROOF[0], [*PROOF[1], "Max is red."], "True")],
}


@pytest.fixture
def corpora(tmp_path):
    """A root with small files of problems."""
    for name, problems in PROBLEMS.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps([dict(zip(("question", "steps", "answer"), one, strict=True)) for one in problems]))
    return tmp_path / "root"


def problem_words(name, corpora, *words) -> list[str]:
    place = str(corpora.parent / f"{name}-out")
    return [f"data={name}", f"data.root={corpora}", "tokenizer=bytes", "length=256", "--out", place, *words]


def test_inspect_shows_problems_and_what_their_slots_are_trained_towards(corpora, capsys):
    words = problem_words("gsm8k", corpora, "--inspect")
    assert main(["prepare", *words, "reason.slots=2"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "problems: 3, 1 without steps; problems by steps:  0 (1)  1 (2)" in lines
    assert any("2 problems have more labels than the 2 slots of acot" in line for line in lines)
    assert any("50.0% of the labels are split into several tokens (2 problems)" in line for line in lines)
    first = lines.index("problem 1 of 3")
    assert lines[first + 1 : first + 9] == [
        "question  A pen is 3. Pens for 4?",
        "step 1    <<3*4=12>>",
        "answer    12",
        "labels    3 4 (no slot for 12)",
        "slot   target  label",
        "[BOA]  '3'     3",
        "1      '4'     4",
        "2      [EOA]",
    ]
    assert main(["prepare", *words]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    second = lines.index("problem 2 of 3")
    assert lines[second + 2 : second + 7] == [
        "steps     none",
        "answer    1",
        "labels    none",
        "slot        target   label",
        "[BOA] to 6  no loss",
    ]
    assert lines[-3:] == [
        "1       '1'      1.5    split: '1' '.' '5'",
        "2       '8'      8.5    split: '8' '.' '5'",
        "3 to 6  no loss",
    ]


@pytest.mark.parametrize(
    ("name", "split", "labels"),
    [("prosqa", "test", ["Tom", "wug", "dax"]), ("prontoqa", "valid", ["Max", "wumpus"])],
)
def test_problems_are_inspected_as_json_too(name, split, labels, corpora, capsys):
    found = prepared_report(capsys, *problem_words(name, corpora, "--inspect"))["problems"]
    assert list(found) == [split]
    [example] = found[split]["examples"]
    assert [label["text"] for label in example["labels"]] == labels
    assert example["labels"][0]["tokens"] == list(f" {labels[0]}")
    assert [slot["position"] for slot in example["slots"]] == ["[BOA]", *"123456"]
    assert [slot["target"] for slot in example["slots"]] == [" "] * len(labels) + [None] * (7 - len(labels))
    assert found[split]["statistics"]["split_share"] == 1.0


def test_generated_problems_are_inspected(corpora, capsys, monkeypatch):
    monkeypatch.setattr("adlm.apps.reasoning.inspection.MAX_PROBLEMS", 4)
    words = problem_words("prosqa", corpora, "data.problems=5", "--inspect")
    assert main(["prepare", *words]) == 0
    out = capsys.readouterr().out
    assert "problems: the first 4 of 5, 0 without steps" in out
    assert "problem 4 of 5" in out


def test_a_folder_without_its_source_has_a_note_instead_of_slots(corpora, text, tmp_path, capsys):
    words = problem_words("prosqa", corpora)
    prepared_report(capsys, *words)
    report = prepared_report(capsys, *words[-2:], "--inspect")
    [note] = report["notes"]
    assert note.startswith("labels and slots are shown when the source is named")
    assert "data=prosqa" in note
    assert report["problems"] == {}
    plain = prepared_report(capsys, f"data.path={text}", "tokenizer=bytes", "--out", tmp_path / "text", "--inspect")
    assert plain["problems"] == {}


def test_problems_whose_steps_have_no_labels_are_noted(corpora, capsys):
    path = corpora / "prosqa/prosqa_test.json"
    path.write_text(path.read_text().replace('Every wug is a dax."]', 'So it is."]'))
    report = prepared_report(capsys, *problem_words("prosqa", corpora, "--inspect"))
    assert report["problems"] == {}
    assert any("prosqa/prosqa_test.json: 'So it is.' is not a ProsQA fact" in note for note in report["notes"])


def test_statistics_are_counted_once(text, tmp_path, monkeypatch, capsys):
    from adlm.data.rows import anchor_rules

    calls = []
    statistics_of = anchor_rules.statistics_of
    monkeypatch.setattr(anchor_rules, "statistics_of", lambda *given: calls.append(given) or statistics_of(*given))
    words = [f"data.path={text}", "data.held_out=0", "tokenizer=bytes", "--out", str(tmp_path / "out"), "--inspect"]
    assert main(["prepare", *words]) == 0
    assert len(calls) == 1


def test_an_empty_split_is_noted(text, tmp_path, capsys):
    words = ("tokenizer=bytes", "length=64", "data.boundary=blank", "--out")
    notes = prepared_report(capsys, f"data.path={text}", "data.held_out=0.0001", *words, tmp_path / "a")["notes"]
    (note,) = notes
    assert note.startswith(
        "no text is held out: data.held_out 0.0001 of 16,423 tokens in 60 documents selects no document"
    )
    assert prepared_report(capsys, f"data.path={text}", "data.held_out=0", *words, tmp_path / "b")["notes"] == []
    assert prepared_report(capsys, f"data.path={text}", "data.held_out=0.2", *words, tmp_path / "c")["notes"] == []


@pytest.mark.parametrize(("boundary", "where"), [("file", "inside a document"), ("blank", "between documents")])
def test_few_documents_get_a_validation_split_and_a_note(text, tmp_path, capsys, boundary, where):
    words = (f"data.path={text}", f"data.boundary={boundary}", "tokenizer=bytes", "length=64", "--out", tmp_path / "d")
    report = prepared_report(capsys, *words)
    assert report["splits"]["valid"]["rows"] > 1
    (note,) = report["notes"]
    assert note == (
        f"held out: the last {report['splits']['valid']['tokens'] / report['tokens']:.1%} of the text, cut {where}; "
        "there are too few documents to hold out random ones"
    )
    assert prepared_report(capsys, *words)["notes"] == [note], "also where the folder is used again"


def test_the_note_about_few_documents_is_only_for_own_text(tmp_path, capsys):
    (tmp_path / "text8").mkdir()
    (tmp_path / "text8/text8").write_text("anarchism")
    report = prepared_report(
        capsys, "data=text8", f"data.root={tmp_path}", "tokenizer=text8", "--out", tmp_path / "out"
    )
    assert report["notes"] == []


def test_corpora_are_listed(capsys):
    assert main(["prepare", "--list"]) == 0
    assert "wikitext2 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data=ptb"], "--out is not given"),
        (["data=./small.txt", "--out", "x"], "your own text goes by data.path=./small.txt"),
        (["--out", "x"], "no text is given; add data=NAME"),
        (["data=nosuch", "--out", "x"], "data.name 'nosuch' is not a named corpus"),
        (["data.path=nosuch.txt", "tokenizer=bytes", "--out", "x"], "data.path nosuch.txt does not exist"),
        (["data.path=x", "data.packing=loose", "--out", "x"], "data.packing 'loose' is not one of"),
        (["--out", "x", "--inspect"], "x has no manifest.json, so it is not a prepared folder"),
        (["data.path=empty.txt", "tokenizer=bytes", "--out", "x"], "empty.txt holds no text"),
        (["data.path=small.txt", "tokenizer=bytes", "data.packing=packed-published", "--out", "x"], "fill no row"),
        (["data.path=small.txt", "tokenizer=text8", "--out", "x"], "has no id for 'S'"),
    ],
)
def test_a_user_error_is_one_line_and_leaves_no_files(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "small.txt").write_text("Small.")
    assert main(["prepare", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "small.txt"]


def test_a_folder_that_cannot_be_written_is_a_user_error(text, tmp_path, capsys):
    if os.geteuid() == 0:
        place = "/proc/nowhere/out"  # root may write anywhere else
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        place = str(tmp_path / "locked/out")
    assert main(["prepare", f"data.path={text}", "tokenizer=bytes", "--out", place]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.processes
def test_a_full_disk_is_a_user_error_and_the_run_can_be_resumed(text, tmp_path):
    """With a tmpfs too small for the shards: a one-line error; after enlarging it the same command succeeds."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here (that needs root)")
    try:
        command = [sys.executable, "-m", "adlm", "prepare", f"data.path={text}", "tokenizer=bytes"]
        command += ["length=64", "--out", str(place / "out")]
        text.write_text(prose(20_000))
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert "there is no space left to write" in run.stderr
        assert run.stderr.count("\n") == 1
        assert not (place / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", place], check=True)
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
        assert [path.name for path in place.iterdir()] == ["out"]
    finally:
        subprocess.run(["umount", place], check=True)
        shutil.rmtree(place)
