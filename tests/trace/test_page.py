"""Laws of the page of a trace, held against a real browser: what is moved, pointed at and coloured is what is shown."""

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import Page, browser, chromium
from sampling_runs import lighthouse, walk
from test_recording import hostile_trace, of_two_documents

from adlm.trace.page import write_trace
from adlm.trace.recording import Trace, TraceInfo, record_trace

ABOUT = TraceInfo("a model", "remdm-cap", 40, 0)
# The text as it stands: boxes and the spaces between them, masks empty.
SHOWN = "document.getElementById('text').textContent.replaceAll('↵', '').replaceAll('‧', '')"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    binary = chromium()
    if binary is None:
        pytest.skip("there is no Chromium here to open a page with; install it, or name it in ADLM_CHROMIUM")
    with browser(binary, tmp_path_factory.mktemp("profile")) as tab:
        tab.look()
        yield tab


@pytest.fixture(scope="module")
def trace() -> Trace:
    lm, canvas = lighthouse()
    return record_trace(lm, walk(lm, canvas, 40, remasking=0.03), ABOUT)


@pytest.fixture(scope="module")
def file(trace, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("page") / "walk.html"
    write_trace(trace, place)
    return place


def move_to(page: Page, moment: int) -> None:
    page.run(f"(() => {{ const s = document.getElementById('time'); s.value = {moment};"
             " s.dispatchEvent(new Event('input')); })()")  # fmt: skip


def colour(page: Page, selector: str, what: str = "backgroundColor") -> str:
    return page.run(f"getComputedStyle(document.querySelector('{selector}')).{what}")


def test_the_slider_moves_the_text(page, trace, file):
    page.open(file, "#frame=0")
    for moment, ids in enumerate(trace.states()):
        if moment % 9 == 0 or moment == len(trace.moments) - 1:
            move_to(page, moment)
            masked = [place for place, index in enumerate(ids) if index == trace.mask_id]
            found = page.run("Array.from(document.querySelectorAll('#text .masked'), (e) => Number(e.dataset.place))")
            assert found == masked
            fresh = page.run("Array.from(document.querySelectorAll('#text .fresh'), (e) => Number(e.dataset.place))")
            now = trace.moments[moment]
            assert fresh == [place for place in now.revealed if ids[place] != trace.mask_id]
            again = page.run("Array.from(document.querySelectorAll('#text .again'), (e) => Number(e.dataset.place))")
            assert again == [place for place in now.remasked if ids[place] == trace.mask_id]
    assert page.run(SHOWN) == trace.plain()["text"], "at the end the page has the text itself"
    assert not page.problems


def test_special_tokens_are_empty_boxes_and_the_end_of_a_document_is_a_blank_line(page, tmp_path):
    lm, ids = of_two_documents()
    trace = record_trace(lm, walk(lm, torch.full((1, len(ids)), lm.mask_id), 20), ABOUT)
    trace = replace(trace, canvas=tuple(ids), moments=trace.moments[:1])
    write_trace(trace, tmp_path / "walk.html")
    page.open(tmp_path / "walk.html", "#frame=0")
    assert trace.plain()["text"] == "The old\n\n keeper—"
    assert page.run(SHOWN) == "The old\n\n keeper—"
    page.point_at("#text .chip[data-place='0']")
    assert page.run("document.querySelector('#card .token').textContent") == "<|endoftext|>"
    assert not page.problems


def test_keys_step_and_play_goes_on_by_itself(page, trace, file):
    page.open(file, "#frame=0")
    value = "Number(document.getElementById('time').value)"
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.run(value) == 1
    page.press("End")
    assert page.run(value) == len(trace.moments) - 1
    page.press("Home")
    page.press(" ", text=" ")
    page.wait_for(f"{value} >= 3")
    assert page.run("document.getElementById('play').ariaLabel") == "Pause"
    page.press(" ", text=" ")
    stood = page.run(value)
    assert page.run(f"new Promise((done) => setTimeout(() => done({value}), 600))") == stood


def test_pointing_at_a_token_shows_what_both_networks_expected(page, trace, file):
    page.open(file, "#frame=40")
    place, moment = next(
        (place, each)
        for each, later in ((each, trace.moments[k + 1 :]) for k, each in enumerate(trace.moments))
        for place in each.anchored
        if each.anchored[place] < each.frame - 3 and not any(place in other.remasked for other in later)
    )
    page.point_at(f'#text .chip[data-place="{place}"]')
    assert page.run("document.getElementById('card').hidden") is False
    said = page.run("document.getElementById('card').innerText")
    assert f"Revealed at frame {moment.frame}" in said
    assert f"The anchor network had named it since frame {moment.anchored[place]}" in said
    for name, table in (("of-anchor", moment.anchor), ("of-denoiser", moment.denoiser)):
        words = page.run(f"Array.from(document.querySelectorAll('#card .{name} .word'), (e) => e.textContent)")
        texts = [trace.tokenizer.piece(index).decode(errors="replace") for index, _ in table[place]]
        assert len(words) == 5
        assert all(
            word == text.strip() for word, text in zip(words, texts, strict=True) if text.strip() and "�" not in text
        )
        widths = page.run(f"Array.from(document.querySelectorAll('#card .{name} .guess'), "
                          "(e) => parseFloat(getComputedStyle(e, '::before').width))")  # fmt: skip
        assert all(one >= other for one, other in itertools.pairwise(widths))
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert page.run("document.getElementById('card').hidden") is True


def test_a_mask_shows_what_is_expected_there_now(page, trace, file):
    page.open(file, "#frame=10")
    shown = next(k for k, moment in enumerate(trace.moments) if moment.frame >= 10)
    place = next(iter(set(trace.moments[shown + 1].denoiser) - set(trace.moments[shown + 1].revealed)))
    page.point_at(f'#text .chip[data-place="{place}"]')
    said = page.run("document.getElementById('card').innerText")
    assert "What is expected here now." in said
    assert page.run("document.querySelectorAll('#card .guess').length") == 10


def test_the_keyboard_reaches_every_token(page, file):
    page.open(file, "#frame=20")
    page.run("document.querySelector('#text .chip[tabindex=\"0\"]').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.run("Number(document.activeElement.dataset.place)") == 3
    assert page.run("document.querySelector('#card .where').textContent").startswith("place 4")
    frame = page.run("document.getElementById('now').textContent")
    page.press(".", text=".")
    assert page.run("document.getElementById('now').textContent") != frame
    page.press("Escape")
    assert page.run("document.getElementById('card').hidden") is True


def test_colours_tell_kinds_apart_and_shades_tell_chances(page, trace, file):
    move = "#frame=25"
    seen = {}
    for dark in (False, True):
        page.look(dark=dark)
        page.open(file, move)
        kinds = (".given", ".masked:not(.named):not(.again)", ".masked.named:not(.again)", ".drawn:not(.anchored)")
        found = [colour(page, f"#text {kind}") for kind in (*kinds, ".drawn.anchored")]
        assert len(set(found)) == 5
        seen[dark] = [*found, colour(page, "body")]
        shades = page.run(
            "Array.from(document.querySelectorAll('#text .drawn'), (e) => "
            "[Number(e.style.getPropertyValue('--sure')), getComputedStyle(e).backgroundColor])"
        )
        alphas = [(sure, float(re.findall(r"[\d.]+", shade)[-1])) for sure, shade in shades]
        alphas.sort()
        assert all(one[1] <= other[1] + 1e-6 for one, other in itertools.pairwise(alphas))
    assert not set(seen[False]) & set(seen[True]) - {"rgba(0, 0, 0, 0)"}
    page.look()


@pytest.mark.parametrize("width", [390, 1100])
def test_nothing_sticks_out_on_a_phone_or_a_desk(page, file, width, tmp_path):
    page.look(width, 800)
    page.open(file, "#frame=25")
    page.point_at("#text .drawn.anchored", click=True)
    sides = page.run("[innerWidth, document.documentElement.scrollWidth]")
    assert sides == [width, width]
    box = page.run("(() => { const b = document.getElementById('card').getBoundingClientRect();"
                   " return [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom]; })()")  # fmt: skip
    assert min(box) >= 0
    picture = Path(os.environ.get("ADLM_SCREENSHOTS", tmp_path)) / f"walk-{width}.png"
    page.screenshot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    page.look()


def test_the_walk_plays_by_itself_unless_motion_is_unwanted(page, file):
    value = "Number(document.getElementById('time').value)"
    page.look(still=False)
    page.open(file)
    page.wait_for(f"{value} >= 2")
    page.look()
    page.open(file)
    assert page.run(f"new Promise((done) => setTimeout(() => done({value}), 1200))") == 0


def test_hostile_tokens_are_text_on_the_page(page, tmp_path):
    trace = hostile_trace()
    write_trace(trace, tmp_path / "hostile.html")
    page.open(tmp_path / "hostile.html", "#frame=99")
    assert page.run("document.images.length") == 0
    assert page.run("document.scripts.length") == 2
    assert "</script><img src=x onerror=alert(1)>" in page.run("document.getElementById('text').textContent")
    assert "⟨1B⟩[31m⟨202E⟩" in page.run("document.getElementById('text').textContent")
    page.point_at("#text .chip")
    assert page.run("document.getElementById('name').textContent") == trace.about.name
    assert not page.problems
