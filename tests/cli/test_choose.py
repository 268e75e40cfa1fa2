"""Tests of `adlm choose`: the command gives what the Python call gives, for texts of options and of files."""

import json

import pytest
from small_models import small_model

import adlm
from adlm.cli.main import main


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choose")
    for method in ("mdlm", "ar"):
        small_model(folder / method, method, length=32)
    small_model(folder / "ids", tokenizer=None)
    return folder


def chosen(capsys, *words):
    """The JSON objects that the command prints."""
    assert main(["choose", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_and_the_python_call_agree(models, capsys):
    texts = ["the [MASK]s", "a [MASK]"]
    options = ("--normalise", "prior", "--prior", "my [MASK]", "--samples", 4, "--seed", 3)
    rows = chosen(capsys, models / "mdlm", "--text", texts[0], "--text", texts[1], "--choices", "dog", "cat", *options)
    found = adlm.load(models / "mdlm").choose(
        texts, ["dog", "cat"], normalise="prior", prior="my [MASK]", samples=4, seed=3
    )
    for row, scores in zip(rows, found, strict=True):
        assert (row["text"], row["choices"], row["best"]) == (scores.text, ["dog", "cat"], scores.best)
        for name in ("probabilities", "stderr", "log_scores", "log_score_stderr"):
            assert row[name] == pytest.approx(getattr(scores, name))
        assert (row["settings"]["prior"], row["settings"]["samples"], row["settings"]["seed"]) == ("my [MASK]", 4, 3)


def test_the_model_in_the_box_is_the_default(capsys):
    [row] = chosen(capsys, "--text", "He looked at the [MASK].", "--choices", "sea", "of")  # without eos it is "of"
    assert row["best"] == "sea"
    assert sum(row["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_texts_of_a_file_are_put_into_the_template(models, tmp_path, capsys, name):
    lines = ["a dog", 'a "cat" {x}']
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line, "label": 1}) + "\n" for line in lines))
    words = (models / "ar", "--texts", tmp_path / name, "--choices", "pet", "car")
    rows = chosen(capsys, *words, "--template", "{text} [MASK]!")
    assert [row["text"] for row in rows] == [f"{line} [MASK]!" for line in lines]
    assert [row["stderr"] for row in rows] == [[0, 0]] * 2
    (tmp_path / "texts.jsonl").write_text(json.dumps({"body": "my [MASK]"}))
    assert chosen(capsys, models / "ar", "--texts", tmp_path / "texts.jsonl", "--field", "body", "--choices", "a", "b")


def test_the_table_of_one_text_lists_the_most_probable_choice_first_with_a_bar(models, capsys):
    assert main(["choose", str(models / "ar"), "--text", "the [MASK]", "--choices", "dog", "q\x1b[31m"]) == 0
    header, first, second, note = capsys.readouterr().out.splitlines()
    assert header.split() == ["choice", "probability", "log", "score"]
    assert float(first.split()[1]) >= float(second.split()[1])
    assert "█" in first
    assert "\x1b" not in first + second
    assert note == "nats, normalise none; exact"


def test_the_note_says_where_all_masks_were_enumerated(models, capsys):
    assert main(["choose", str(models / "mdlm"), "--text", "the [MASK]", "--choices", "a", "b"]) == 0
    assert capsys.readouterr().out.endswith("bounds of masked diffusion, all masks enumerated\n")


def test_the_table_of_several_texts_has_the_best_of_each_and_counts(models, capsys):
    words = [str(models / "mdlm"), "--text", "the [MASK]s of", "--text", "an [MASK]", "--choices", "dog", "cat"]
    assert main(["choose", *words, "--samples", "2"]) == 0
    _, *rows, counts, note = capsys.readouterr().out.splitlines()[:5]
    best = [row.split()[0] for row in rows]
    assert counts == f"{best.count('dog')} dog, {best.count('cat')} cat"
    assert " +- " in rows[0]
    assert rows[1].rstrip().endswith("an [MASK]")
    assert "bounds of masked diffusion, 2 masked versions, seed 0" in note


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--choices", "a", "b"], "there is no text; give --text TEXT or --texts FILE"),
        (["--text", "a [MASK]"], "the following arguments are required: --choices"),
        (["--text", "a", "--choices", "a", "b"], "text 'a' has no hole; write [MASK] where the choices belong"),
        (["--text", "a [MASK]", "--choices", "a"], "choices has 1 of them; give at least two"),
        (["--text", "a [MASK]", "--choices", "a", "b", "--normalise", "token"], "did you mean 'tokens'?"),
        (["--text", "a [MASK]", "--choices", "a", "b", "--samples", "1"], "--samples 1 must be at least 2"),
        (["--text", "a [MASK]", "--choices", "a", "b", "--prior", "[MASK]"], "prior is an option of normalise prior"),
        (
            ["--text", "a [MASK]", "--choices", "a", "b", "--template", "{text}"],
            "--template is for the texts of a file",
        ),
        (["--texts", "nowhere.txt", "--choices", "a", "b"], "--texts nowhere.txt: nowhere.txt cannot be read"),
        (["--texts", "x.txt", "--template", "[MASK]", "--choices", "a", "b"], "must have {text} once"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(models, capsys, words, sentence):
    assert main(["choose", str(models / "mdlm"), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_a_model_without_tokenizer_is_refused(models, capsys):
    assert main(["choose", str(models / "ids"), "--text", "a [MASK]", "--choices", "a", "b"]) == 2
    assert "this model has no tokenizer" in capsys.readouterr().err


def test_ties_within_the_error_are_marked(models, capsys):
    words = ["--text", "the [MASK] of the house", "--choices", "oldest", "newest", "--samples", "2"]
    assert main(["choose", str(models / "mdlm"), *words]) == 0
    printed, [row] = capsys.readouterr().out, chosen(capsys, models / "mdlm", *words)
    assert ("1 of 1 undecided" in printed) == (row["gap"] < 2 * row["gap_stderr"])
