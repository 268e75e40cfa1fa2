"""Tests of `adlm reproduce`: saved results equal measured ones, all output formats agree, errors are one line."""

import json
import struct

import pytest
from small_models import small_model
from torchrun import close, on_two

from adlm.apps import perplexity
from adlm.apps.paper.results import TABLES
from adlm.checkpoints.model_folder import load_model_folder, save_model_folder
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.data.prepare.prepare import prepare


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two byte-level models, a published corpus and a stand-in corpus."""
    folder = tmp_path_factory.mktemp("reproduce")
    for method in ("adlm", "ar"):
        small_model(folder / method, method)
    (folder / "data" / "ptb").mkdir(parents=True)
    (folder / "data" / "ptb" / "ptb.valid.txt").write_text("the state of the union\n it is strong\n" * 20)
    (folder / "data" / "arxiv-standin").mkdir()
    (folder / "data" / "arxiv-standin" / "papers.txt").write_text("We show that.\n\nIt follows.\n\n" * 20)
    (folder / "speech.txt").write_text("Peace, and order, and law. " * 30)
    words = [f"data.path={folder}/speech.txt", "data.held_out=0", "tokenizer=bytes", "length=16"]
    prepare(resolve(words), folder / "prepared")
    return folder


@pytest.fixture(autouse=True)
def _local(world, monkeypatch):
    monkeypatch.setenv("ADLM_DATA", str(world / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def report(capsys, *words) -> dict:
    assert main(["reproduce", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("table", TABLES)
def test_without_a_model_the_published_table_is_printed(table, capsys):
    found = report(capsys, table)["comparisons"]
    assert [(each["row"], each["column"], each["published"]) for each in found] == [
        (row.name, column, value) for row in TABLES[table].rows for column, value in row.figures.items()
    ]
    assert {each["verdict"] for each in found} == {"missing"}
    assert main(["reproduce", table]) == 0
    shown = capsys.readouterr().out
    assert "no standard error is published" in shown
    assert "missing" not in shown


def test_saved_results_are_compared_like_measured_ones(world, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    read = []
    for estimator in ("published", "nelbo"):
        words = ["--data", "zero-shot", "--packing", "packed-published", "--estimator", estimator, "--out", figures]
        assert main(["perplexity", str(world / "adlm"), *map(str, words)]) == 0
        capsys.readouterr()
        compared = report(capsys, "zero-shot", figures)["comparisons"]
        read += [each for each in compared if each["ours"] is not None]
    measured = report(capsys, "zero-shot", world / "adlm")["comparisons"]
    ours = [each for each in measured if each["ours"] is not None]
    order = [(each["how"], each["column"]) for each in ours]
    assert {each["column"] for each in ours} == {"ptb", "arxiv"}
    assert sorted(read, key=lambda each: order.index((each["how"], each["column"]))) == ours
    assert {each["how"] for each in ours} == {"published", "nelbo"}


def test_a_byte_level_model_is_not_comparable_with_the_table(world, capsys):
    found = report(capsys, "zero-shot", world / "adlm", world / "ar")["comparisons"]
    ours = [each for each in found if each["ours"] is not None]
    assert {each["verdict"] for each in ours} == {"not comparable"}
    reasons = {(each["row"], each["column"]): each["because"] for each in ours}
    assert "not GPT-2's 50,258" in reasons["ar", "ptb"]
    assert "a stand-in for arxiv" in reasons["adlm-524B", "arxiv"]
    assert [each["how"] for each in ours if each["row"] == "ar"] == ["exact", "exact"]
    lambada = next(each for each in found if (each["row"], each["column"]) == ("ar", "lambada"))
    assert "--data lambada" in lambada["command"]


def test_own_text_is_not_comparable_with_the_table(world, capsys):
    words = ("--data", world / "prepared", "--packing", "packed", "--row", "adlm-262B")
    found = report(capsys, "owt-ppl", world / "adlm", *words)["comparisons"]
    ours = [each for each in found if each["ours"] is not None]
    assert all("speech.txt, not openwebtext" in each["because"] for each in ours)
    assert all("packing packed, not packed-published" in each["because"] for each in ours)
    assert {each["held_because"] for each in ours} == {"by --row"}


@pytest.mark.parametrize("table", ["zero-shot", "generation", "reasoning"])
@pytest.mark.parametrize("model", [False, True])
def test_markdown_has_the_same_number_of_columns_in_every_row(world, table, model, capsys, tmp_path):
    accuracy = tmp_path / "right.json"
    accuracy.write_text(json.dumps({"method": "acot", "accuracy": {"gsm8k": {"right": 600, "of": 1319}}}))
    models = {"zero-shot": [str(world / "ar")], "reasoning": [str(accuracy)]}.get(table, []) if model else []
    assert main(["reproduce", table, *models, "--markdown"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert len(rows) == 2 + sum(len(row.figures) for row in TABLES[table].rows)


def test_the_written_json_equals_the_printed_json(world, tmp_path, capsys):
    out = tmp_path / "table.json"
    shown = report(capsys, "zero-shot", world / "ar", "--out", out)
    assert json.loads(out.read_text()) == shown
    assert list(tmp_path.iterdir()) == [out]


SMALL_GROUPS = "import adlm.likelihood.measurement as l; l.TOKENS_A_GROUP = 96"


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_print_the_same_report_as_one(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adlm.likelihood.measurement.TOKENS_A_GROUP", 96)
    words = ("zero-shot", world / "adlm", world / "ar", "--samples", 2)
    one, out = report(capsys, *words), tmp_path / "two.json"
    run = on_two(tmp_path, "reproduce", *words, "--json", "--out", out, first=SMALL_GROUPS)
    assert run.returncode == 0, run.stderr[-2000:]
    two = json.loads(run.stdout)
    assert json.loads(out.read_text()) == two
    assert {path.name for path in tmp_path.iterdir()} == {"command.py", "two.json"}
    assert close(two, one)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("zero-shot", "{nan}", "--data", "{prepared}"), "holds a NaN or an infinity"),
        (("zero-shot", "nowhere"), "is neither a model folder nor a .ckpt file"),
    ],
)
def test_two_processes_print_a_user_error_once(world, tmp_path, words, sentence):
    model = load_model_folder(world / "adlm")
    next(iter(model.weights.values())).fill_(float("nan"))
    save_model_folder(model, tmp_path / "nan")
    places = {"nan": tmp_path / "nan", "prepared": world / "prepared"}
    run = on_two(tmp_path, "reproduce", *(word.format(**places) for word in words), first=SMALL_GROUPS)
    errors = [line for line in run.stderr.splitlines() if line.startswith("adlm: ")]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert run.stdout == ""
    assert "exitcode  : 2" in run.stderr  # torchrun's own is 1


def test_journals_are_kept_until_the_results_are_written(world, tmp_path, capsys, monkeypatch):
    """After an interruption, results of the published estimator are not measured again."""
    words = ["reproduce", "zero-shot", str(world / "adlm"), "--out", str(tmp_path / "table.json")]
    with monkeypatch.context() as patched:
        measure_models = perplexity.measure_models
        estimators = []

        def interrupted_at_auto(models, texts, settings, *more):
            estimators.append(settings.estimator)
            if settings.estimator == "auto":
                raise KeyboardInterrupt
            return measure_models(models, texts, settings, *more)

        patched.setattr(perplexity, "measure_models", interrupted_at_auto)
        assert main(words) == 130
    assert estimators == ["published", "auto"]
    assert len(list(tmp_path.iterdir())) == 2  # a journal for each text
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_the_plot_is_written_as_png_and_svg(world, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("table.png", "table.svg"):
        assert main(["reproduce", "zero-shot", str(world / "ar"), "--plot", str(tmp_path / name)]) == 0
    width, height = struct.unpack(">II", (tmp_path / "table.png").read_bytes()[16:24])
    assert min(width, height) > 300
    assert "<svg" in (tmp_path / "table.svg").read_text()
    assert "not comparable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["owt"], "TABLE 'owt' is not one of owt-ppl, |; did you mean 'owt-ppl'?"),
        (["owt-ppl", "{neither}"], "is neither what `adlm perplexity --out` nor what `adlm judge --out` writes"),
        (["owt-ppl", "{broken}"], "is not JSON"),
        (["owt-ppl", "{half}"], "is incomplete: it has no"),
        (["owt-ppl", "nowhere.json"], "cannot be read"),
        (["owt-ppl", "nowhere"], "nowhere is neither a model folder nor a .ckpt file"),
        (["owt-ppl", "{none}"], "has no tokenizer, so it cannot read text; give --tokenizer"),
        (["owt-ppl", "{adlm}"], "openwebtext"),
        (["owt-ppl", "{adlm}", "--data", "{prepared}"], "give --row, one of adlm-110B|several rows of method adlm"),
        (["owt-ppl", "{adlm}", "--row", "adlm-262"], "its rows are ar-110B, "),
        (["owt-ppl", "{adlm}", "--row", "ar-262B", "--row", "ar-524B"], "--row is given 2 times for 1 models"),
        (["generation", "{adlm}"], "adlm judge S.jsonl --out card.json"),
        (["reasoning", "{adlm}"], "give accuracies as JSON"),
        (["owt-ppl", "--plot", "table.txt"], "is not a plot file; it must end in .png, .svg, .pdf"),
        (["owt-ppl", "--out", "{none}/no/table.json"], "there is no folder"),
    ],
)
def test_user_errors_are_one_line(world, words, sentence, capsys):
    if not (world / "none").exists():
        small_model(world / "none", tokenizer=None)
        (world / "neither.json").write_text('{"loss": 3}')
        (world / "broken.json").write_text("{")
        (world / "half.json").write_text('{"figures": [{"model": "m", "data": "openwebtext"}]}')
    places = {name: str(world / name) for name in ("adlm", "prepared", "none")}
    places |= {name: str(world / f"{name}.json") for name in ("neither", "broken", "half")}
    assert main(["reproduce", *(word.format(**places) for word in words)]) == 2
    shown = capsys.readouterr().err
    assert any(part in shown for part in sentence.split("|"))
    assert shown.count("\n") == 1
