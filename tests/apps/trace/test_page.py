"""Tests of the trace page in a real browser: slider, keyboard, cards and colours show the content of the trace."""

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import Page, browser, chromium
from sampling_runs import fake_model_and_canvas, sampling_frames
from test_recording import hostile_trace, two_documents

from adlm.apps.trace.page import write_trace
from adlm.apps.trace.recording import Trace, TraceInfo, record_trace

INFO = TraceInfo("a model", "remdm-cap", 40, 0)
# The displayed text without the symbols of line breaks and empty tokens.
SHOWN = "document.getElementById('text').textContent.replaceAll('↵', '').replaceAll('‧', '')"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    binary = chromium()
    if binary is None:
        pytest.skip("Chromium is not installed; install it, or set ADLM_CHROMIUM")
    with browser(binary, tmp_path_factory.mktemp("profile")) as tab:
        tab.emulate()
        yield tab


@pytest.fixture(scope="module")
def trace() -> Trace:
    lm, canvas = fake_model_and_canvas()
    return record_trace(lm, sampling_frames(lm, canvas, 40, remasking=0.03), INFO)


@pytest.fixture(scope="module")
def file(trace, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "trace.html"
    write_trace(trace, path)
    return path


def move_to(page: Page, step: int) -> None:
    page.run(f"(() => {{ const s = document.getElementById('time'); s.value = {step};"
             " s.dispatchEvent(new Event('input')); })()")  # fmt: skip


def colour(page: Page, selector: str, what: str = "backgroundColor") -> str:
    return page.run(f"getComputedStyle(document.querySelector('{selector}')).{what}")


def test_the_slider_moves_the_text(page, trace, file):
    page.open(file, "#frame=0")
    for step, ids in enumerate(trace.states()):
        if step % 9 == 0 or step == len(trace.steps) - 1:
            move_to(page, step)
            masked = [position for position, index in enumerate(ids) if index == trace.mask_id]
            found = page.run(
                "Array.from(document.querySelectorAll('#text .masked'), (e) => Number(e.dataset.position))"
            )
            assert found == masked
            revealed = page.run(
                "Array.from(document.querySelectorAll('#text .revealed'), (e) => Number(e.dataset.position))"
            )
            now = trace.steps[step]
            assert revealed == [position for position in now.revealed if ids[position] != trace.mask_id]
            remasked = page.run(
                "Array.from(document.querySelectorAll('#text .remasked'), (e) => Number(e.dataset.position))"
            )
            assert remasked == [position for position in now.remasked if ids[position] == trace.mask_id]
    assert page.run(SHOWN) == trace.to_dict()["text"], "the last step shows the final text"
    assert not page.problems


def test_special_tokens_are_empty_boxes_and_documents_are_separated_by_a_blank_line(page, tmp_path):
    lm, ids = two_documents()
    trace = record_trace(lm, sampling_frames(lm, torch.full((1, len(ids)), lm.mask_id), 20), INFO)
    trace = replace(trace, canvas=tuple(ids), steps=trace.steps[:1])
    write_trace(trace, tmp_path / "trace.html")
    page.open(tmp_path / "trace.html", "#frame=0")
    assert trace.to_dict()["text"] == "The old\n\n keeper—"
    assert page.run(SHOWN) == "The old\n\n keeper—"
    page.point_at("#text .chip[data-position='0']")
    assert page.run("document.querySelector('#card .token').textContent") == "<|endoftext|>"
    assert page.run("document.querySelector('#card .summary').textContent").startswith("The start token (bos)")
    assert "40 steps, 20 of which reveal tokens" in page.run("document.getElementById('meta').textContent")
    assert not page.problems


def test_the_end_of_a_hole_of_unknown_length_is_not_shown(page, tmp_path):
    lm, ids = two_documents()
    trace = record_trace(lm, sampling_frames(lm, torch.full((1, len(ids)), lm.mask_id), 20), INFO)
    ends = [position for position, index in enumerate(ids) if index == ids[0]][1:]
    trace = replace(trace, canvas=tuple(ids), steps=trace.steps[:1], open=(ends[0] - 1, *ends))
    write_trace(trace, tmp_path / "trace.html")
    page.open(tmp_path / "trace.html", "#frame=0")
    assert trace.to_dict()["text"] == page.run(SHOWN) == "The old keeper—"
    assert colour(page, f"#text .chip[data-position=\\'{ends[0]}\\']", "display") == "none"
    assert not page.problems


def test_keys_move_between_steps_and_play_advances(page, trace, file):
    page.open(file, "#frame=0")
    value = "Number(document.getElementById('time').value)"
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.run(value) == 1
    page.press("End")
    assert page.run(value) == len(trace.steps) - 1
    page.press("Home")
    page.press(" ", text=" ")
    page.wait_for(f"{value} >= 3")
    assert page.run("document.getElementById('play').ariaLabel") == "Pause"
    page.press(" ", text=" ")
    paused_at = page.run(value)
    assert page.run(f"new Promise((done) => setTimeout(() => done({value}), 600))") == paused_at


def test_pointing_at_a_token_shows_the_predictions_of_both_networks(page, trace, file):
    page.open(file, "#frame=40")
    position, step = next(
        (position, each)
        for each, later in ((each, trace.steps[k + 1 :]) for k, each in enumerate(trace.steps))
        for position in each.anchored
        if each.anchored[position] < each.frame - 3 and not any(position in other.remasked for other in later)
    )
    page.point_at(f'#text .chip[data-position="{position}"]')
    assert page.run("document.getElementById('card').hidden") is False
    card = page.run("document.getElementById('card').innerText")
    assert f"Revealed at frame {step.frame}" in card
    assert f"The anchor network had predicted it since frame {step.anchored[position]}" in card
    for name, table in (("of-anchor", step.anchor), ("of-denoiser", step.denoiser)):
        words = page.run(f"Array.from(document.querySelectorAll('#card .{name} .guess-text'), (e) => e.textContent)")
        texts = [trace.tokenizer.piece(index).decode(errors="replace") for index, _ in table[position]]
        assert len(words) == 5
        assert all(
            word == text.strip() for word, text in zip(words, texts, strict=True) if text.strip() and "�" not in text
        )
        widths = page.run(f"Array.from(document.querySelectorAll('#card .{name} .guess'), "
                          "(e) => parseFloat(getComputedStyle(e, '::before').width))")  # fmt: skip
        assert all(one >= other for one, other in itertools.pairwise(widths))
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert page.run("document.getElementById('card').hidden") is True


def test_a_mask_shows_its_current_predictions(page, trace, file):
    page.open(file, "#frame=10")
    shown = next(k for k, step in enumerate(trace.steps) if step.frame >= 10)
    position = next(iter(set(trace.steps[shown + 1].denoiser) - set(trace.steps[shown + 1].revealed)))
    page.point_at(f'#text .chip[data-position="{position}"]')
    card = page.run("document.getElementById('card').innerText")
    assert "Current predictions." in card
    assert page.run("document.querySelectorAll('#card .guess').length") == 10


def test_the_keyboard_reaches_every_token(page, file):
    page.open(file, "#frame=20")
    page.run("document.querySelector('#text .chip[tabindex=\"0\"]').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.run("Number(document.activeElement.dataset.position)") == 3
    assert page.run("document.querySelector('#card .location').textContent").startswith("position 4")
    frame = page.run("document.getElementById('status').textContent")
    page.press(".", text=".")
    assert page.run("document.getElementById('status').textContent") != frame
    page.press("Escape")
    assert page.run("document.getElementById('card').hidden") is True


def test_colours_distinguish_kinds_and_shades_show_probabilities(page, trace, file):
    move = "#frame=25"
    seen = {}
    for dark in (False, True):
        page.emulate(dark=dark)
        page.open(file, move)
        kinds = (
            ".given",
            ".masked:not(.predicted):not(.remasked)",
            ".masked.predicted:not(.remasked)",
            ".drawn:not(.anchored)",
        )
        found = [colour(page, f"#text {kind}") for kind in (*kinds, ".drawn.anchored")]
        assert len(set(found)) == 5
        seen[dark] = [*found, colour(page, "body")]
        shades = page.run(
            "Array.from(document.querySelectorAll('#text .drawn'), (e) => "
            "[Number(e.style.getPropertyValue('--probability')), getComputedStyle(e).backgroundColor])"
        )
        alphas = [(sure, float(re.findall(r"[\d.]+", shade)[-1])) for sure, shade in shades]
        alphas.sort()
        assert all(one[1] <= other[1] + 1e-6 for one, other in itertools.pairwise(alphas))
    assert not set(seen[False]) & set(seen[True]) - {"rgba(0, 0, 0, 0)"}
    page.emulate()


@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_fits_phone_and_desktop_screens(page, file, width, tmp_path):
    page.emulate(width, 800)
    page.open(file, "#frame=25")
    page.point_at("#text .drawn.anchored", click=True)
    sides = page.run("[innerWidth, document.documentElement.scrollWidth]")
    assert sides == [width, width]
    box = page.run("(() => { const b = document.getElementById('card').getBoundingClientRect();"
                   " return [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom]; })()")  # fmt: skip
    assert min(box) >= 0
    screenshot = Path(os.environ.get("ADLM_SCREENSHOTS", tmp_path)) / f"trace-{width}.png"
    page.screenshot(screenshot)
    assert screenshot.read_bytes().startswith(b"\x89PNG")
    page.emulate()


def test_playback_starts_automatically_unless_reduced_motion_is_preferred(page, file):
    value = "Number(document.getElementById('time').value)"
    page.emulate(reduced_motion=False)
    page.open(file)
    page.wait_for(f"{value} >= 2")
    page.emulate()
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
    assert page.run("document.getElementById('name').textContent") == trace.info.name
    assert not page.problems
