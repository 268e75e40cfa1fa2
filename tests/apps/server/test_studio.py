"""The studio in a real browser, and its endpoints: runs step by step, the bound of a text, hostile requests."""

import asyncio
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest
import torch
from browser import browser, chromium

pytest.importorskip("fastapi", reason="fastapi is not installed; pip install 'adlm[web]'")
httpx = pytest.importorskip("httpx", reason="httpx is not installed; pip install 'adlm[dev]'")

from running_server import PATIENCE, get, metrics, post, running, wait_until  # noqa: E402
from small_models import small_model  # noqa: E402

import adlm  # noqa: E402
from adlm.apps.server.app import ServerSettings  # noqa: E402
from adlm.apps.server.choosing import in_turns  # noqa: E402
from adlm.apps.server.completion import Limits  # noqa: E402
from adlm.apps.server.responses import EventStream  # noqa: E402
from adlm.apps.server.studio import page_files  # noqa: E402
from adlm.apps.trace.recording import TraceInfo, record_trace  # noqa: E402
from adlm.language_model import Run  # noqa: E402
from adlm.registry import SAMPLER_SUMMARIES  # noqa: E402

KEY = "right-key"
TEXT = "The [MASK*4] was [MASK]."
SCRIPT = "<script>alert(2)</script><img src=x onerror=alert(1)>[MASK*3]"


@pytest.fixture(scope="module")
def studio_models(models, infilling, tmp_path_factory):
    root = tmp_path_factory.mktemp("more")
    mdlm = adlm.load(small_model(root / "mdlm", "mdlm", length=64))
    blocks = adlm.load(small_model(root / "blocks", length=64, block_length=4))
    return {**models, "mdlm": mdlm, "blocks": blocks, "infilling": infilling}


@pytest.fixture(scope="module")
def address(studio_models):
    with running(studio_models, ServerSettings(batch=2, limits=Limits(rows=4, steps=64, body_bytes=20_000))) as address:
        yield address


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    binary = chromium()
    if binary is None:
        pytest.skip("Chromium is not installed; install it, or set ADLM_CHROMIUM")
    with browser(binary, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(tab, address):
    """The studio in a window of desktop size. No test may leave an error in the console."""
    tab.emulate(1280, 900)
    open_studio(tab, address)
    yield tab
    assert not tab.problems
    tab.problems.clear()


def open_studio(tab, address, fragment=""):
    tab.send("Page.navigate", url="about:blank")  # changing only the fragment would not reload the page
    tab.wait_for("document.readyState == 'complete'")
    tab.send("Page.navigate", url=f"{address}/{fragment}")
    ready = "document.getElementById('model')?.value || document.getElementById('key-form')?.hidden === false"
    tab.wait_for(f"location.protocol == 'http:' && ({ready})")


def write(page, text):
    page.run("document.getElementById('source').select()")
    page.send("Input.insertText", text=text)


def choose(page, name, value):
    page.run(f"(() => {{ const e = document.getElementById('{name}'); e.value = {json.dumps(str(value))};"
             " e.dispatchEvent(new Event('change')); })()")  # fmt: skip


def run_to_the_end(page):
    page.point_at("#run", click=True)
    wait_until_complete(page)


def wait_until_complete(page):
    page.wait_for("document.getElementById('message').textContent.includes('omplete')")


def shown(page, pane=0):
    """The displayed text of a pane, with masks as [M]."""
    return page.run(
        f"Array.from(document.querySelectorAll('#panes .token-text')[{pane}].childNodes, (n) => "
        "n.classList?.contains('masked') ? '[M]' : n.textContent).join('').replaceAll('‧', '')"
    )


def trace_events(address, body, **headers):
    answer = post(f"{address}/v1/trace", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_holes_of_unknown_length_are_marked_and_filled_without_their_end(page):
    choose(page, "model", "infilling")
    write(page, "(A[MASK*]B[MASK*..4]C[MASK*2]D)")
    counts = "3 holes, 2 tokens and 2 of unknown length to fill in"
    assert page.run("document.getElementById('counts').textContent") == counts
    run_to_the_end(page)
    shown = page.run(
        "[...document.querySelectorAll('#panes .chip')].filter((chip) => getComputedStyle(chip).display !== 'none')"
        ".map((chip) => chip.textContent).join('')"
    )
    assert re.fullmatch(r".\(A[a-f ]{,16}B[a-f ]{,4}C.*D\)", shown), "after the dot of bos"


def test_a_sentence_with_holes_is_filled_in_while_one_watches(page, address):
    page.emulate(1280, 900, reduced_motion=False)
    assert page.run("document.querySelector('h1').textContent").count(".") == 1, "one sentence"
    write(page, TEXT)
    assert page.run("document.getElementById('counts').textContent") == "2 holes, 5 tokens to fill in"
    assert page.run("document.querySelectorAll('#backdrop mark').length") == 2
    page.run(
        "(() => { window.seen = new Set(); new MutationObserver(() => "
        "seen.add(document.querySelectorAll('#panes .masked').length))"
        ".observe(document.getElementById('panes'), {subtree: true, childList: true, attributes: true}); })()"
    )
    run_to_the_end(page)
    assert page.run("document.querySelectorAll('#panes .masked').length") == 0, "complete is said after the last step"
    assert page.run("[...seen].length") >= 3, "masks disappear step by step"
    loaded = page.run("performance.getEntriesByType('resource').map((each) => each.name)")
    assert all(url.startswith(f"{address}/") for url in loaded), "nothing comes from elsewhere"
    events = trace_events(address, {"model": "adlm", "text": TEXT, "steps": 4, "seed": 0})
    assert page.run("document.querySelectorAll('#panes .chip').length") == len(events[0]["begin"]["canvas"])
    assert page.run("document.querySelectorAll('#panes .given').length") == len(events[0]["begin"]["given"])


def test_the_slider_goes_back_and_hovering_compares_both_networks(page):
    write(page, TEXT)
    run_to_the_end(page)
    page.run(
        "(() => { const s = document.getElementById('time'); s.value = 0; s.dispatchEvent(new Event('input')) })()"
    )
    assert page.run("document.querySelectorAll('#panes .masked').length") == 5
    page.point_at("#panes .masked")
    assert page.run("document.querySelectorAll('#card .of-anchor .guess').length") == 5
    assert page.run("document.querySelectorAll('#card .of-denoiser .guess').length") == 5
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert page.run("document.getElementById('card').hidden")
    page.run("document.querySelector('#panes .chip').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelector('#card .location').textContent").startswith("position 2")
    page.press("Escape")
    page.press("End")
    assert page.run("document.querySelectorAll('#panes .masked').length") == 0
    page.press("ArrowLeft")
    assert page.run("document.querySelectorAll('#panes .masked').length") > 0


def test_keys_in_the_text_field_are_text(page):
    write(page, "a[MASK*2]")
    run_to_the_end(page)
    before = page.run("document.getElementById('time').value")
    page.run("document.getElementById('source').focus()")
    for key in (" ", ",", "."):
        page.press(key, text=key)
    assert page.run("document.getElementById('source').value").endswith(" ,.")
    assert page.run("document.getElementById('time').value") == before


def test_a_form_says_what_named_holes_are_filled_with_and_the_link_keeps_it(page, address):
    page.point_at("[data-example=form]", click=True)
    assert page.run("[...document.querySelectorAll('.constraint label')].map((e) => e.textContent)") == ["who", "day"]
    write(page, "On [MASK*4:day] the [MASK*3:who] said [MASK*2:no].")
    choose(page, "kind-no", "regex")
    for name, content in (("day", "[12][0-9]{3}"), ("who", " bat\ncow\n\ncow"), ("no", "(un|be)")):
        page.run(f"document.getElementById('content-{name}').select()")
        page.send("Input.insertText", text=content)
    run_to_the_end(page)
    assert re.fullmatch(r"On [12]\d{3} the (bat|cow) said (un|be)\.", shown(page).lstrip("."))
    page.wait_for("location.hash.includes('constraint=')")
    link = page.run("location.hash")
    words = ['who=choices:["bat","cow"]', "day=regex:[12][0-9]{3}", "no=regex:(un|be)"]
    assert sorted(parse_qs(link[1:])["constraint"]) == sorted(words)
    page.press("Home")
    page.point_at("#panes .masked:nth-of-type(n + 7)")
    page.wait_for("!!document.querySelector('#card .of-constraint .guess')")
    tokens = page.run("[...document.querySelectorAll('#card .of-constraint .guess-text')].map((e) => e.textContent)")
    assert {*tokens} <= {"1", "2"}, "the first digit of the year"
    assert "would satisfy its constraint with probability" in page.run("document.getElementById('card').textContent")
    text = shown(page)
    open_studio(page, address, link)
    page.wait_for("document.querySelectorAll('.constraint').length == 3")
    run_to_the_end(page)
    page.press("Home")
    assert shown(page) == text
    page.point_at(".constraint:nth-of-type(2) .link", click=True)
    page.wait_for("document.querySelectorAll('.choices li').length == 2")
    shares = page.run(
        "[...document.querySelectorAll('.choices li')].map((e) => Number(e.style.getPropertyValue('--p')))"
    )
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)


def test_the_theme_follows_the_system_and_is_remembered_once_switched(page, address):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.point_at("#theme", click=True)
    dark = page.run(background)
    assert light != dark
    open_studio(page, address)
    assert page.run(background) == dark
    page.run("localStorage.clear()")
    open_studio(page, address)
    assert page.run(background) == light
    page.emulate(1280, 900, dark=True)
    page.wait_for(f"{background} == '{dark}'")


def test_two_samplers_are_compared_side_by_side(page, address):
    text = "The [MASK*40]."
    write(page, text)
    page.point_at("#compare", click=True)
    choose(page, "model2", "adlm")
    choose(page, "sampler2", "remdm-cap")
    choose(page, "steps", 60)
    run_to_the_end(page)
    details = page.run("Array.from(document.querySelectorAll('.pane-detail'), (e) => e.textContent)")
    assert ["ancestral" in details[0], "remdm-cap" in details[1]] == [True, True]
    for pane, sampler in enumerate(("ancestral", "remdm-cap")):
        body = {"model": "adlm", "text": text, "steps": 60, "seed": 0, "sampler": sampler}
        kept = [step["step"] for step in trace_events(address, body) if "step" in step]
        assert page.run(f"document.querySelectorAll('.pane-status')[{pane}].textContent").startswith(
            f"frame {kept[-1]['frame']} of"
        )
    page.press("Home")
    assert shown(page, 0) == shown(page, 1)
    assert page.run("document.querySelectorAll('#panes .masked').length") == 80
    page.emulate(1280, 900, reduced_motion=False)
    names = page.run(
        "(() => { const s = document.getElementById('time'), names = new Set();"
        " for (let k = 0; k <= s.max; k++) { s.value = k; s.dispatchEvent(new Event('input'));"
        " document.querySelectorAll('#panes .remasked').forEach((e) => names.add(getComputedStyle(e).animationName)); }"
        " return [...names]; })()"
    )
    assert names == ["remask"], "remasked tokens flash"


def test_models_without_anchors_have_one_column_and_left_to_right_models_their_own_samplers(page):
    for model, text in (("mdlm", TEXT), ("ar", "The [MASK*3]")):
        choose(page, "model", model)
        write(page, text)
        run_to_the_end(page)
        page.point_at("#panes .drawn")
        page.wait_for("document.querySelectorAll('#card .of-denoiser .guess').length === 5")
        assert page.run("document.querySelectorAll('#card .of-anchor').length") == 0
    assert page.run("Array.from(document.getElementById('sampler').options, (o) => o.value)") == [
        "ancestral",
        "left-to-right",
    ]
    choose(page, "model", "mdlm")
    assert "anchor-first" not in page.run("Array.from(document.getElementById('sampler').options, (o) => o.value)")


def test_the_link_restores_text_settings_step_and_result(page, address):
    write(page, TEXT)
    for name, value in (("model", "mdlm"), ("sampler", "remdm-loop"), ("steps", 12), ("temperature", 0.7), ("seed", 5)):
        choose(page, name, value)
    run_to_the_end(page)
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    text, step = shown(page), page.run("document.getElementById('time').value")
    page.wait_for(f"location.hash.endsWith('step={step}')")
    link = page.run("location.hash")
    assert KEY not in link
    assert parse_qs(link[1:])["seed"] == ["5"]
    open_studio(page, address, link)
    page.wait_for("document.getElementById('message').textContent.includes('Press')")
    assert page.run("document.getElementById('result').hidden"), "a link alone does not make the server compute"
    page.point_at("#run", click=True)
    page.wait_for("!!document.querySelector('.pane-actions button') && document.querySelector('#form:not(.busy)')?.id")
    assert (shown(page), page.run("document.getElementById('time').value")) == (text, step)
    values = [page.run(f"document.getElementById('{name}').value") for name in ("model", "sampler", "steps", "seed")]
    assert values == ["mdlm", "remdm-loop", "12", "5"]
    assert page.run("location.hash") == link


def test_a_link_with_nonsense_leaves_the_defaults(page, address):
    state = {"model": "../../etc/passwd", "sampler": "<b>", "steps": "many", "seed": "NaN", "text": SCRIPT, "show": "x"}
    open_studio(page, address, f"#{urlencode(state)}")
    values = [page.run(f"document.getElementById('{name}').value") for name in ("model", "sampler", "steps", "seed")]
    assert values == ["adlm", "ancestral", "4", "0"]
    assert page.run("document.getElementById('source').value") == SCRIPT


def test_the_bound_of_a_text_is_shown_as_heat(page, address):
    write(page, "A short text")
    page.point_at("#score", click=True)
    page.wait_for("!document.getElementById('heat').hidden")
    found = post(f"{address}/v1/bound", json={"model": "adlm", "text": "A short text"}).json()
    assert f"{found['nats_per_token']:.2f}" in page.run("document.querySelector('#heat .pane-status').textContent")
    shade = "[Number(e.style.getPropertyValue('--probability')), getComputedStyle(e).backgroundColor]"
    shades = page.run(f"Array.from(document.querySelectorAll('#heat .chip'), (e) => {shade})")
    assert len(shades) == len(found["ids"])
    ordered = sorted((share, float(re.findall(r"[\d.]+", shade)[-1])) for share, shade in shades)
    assert ordered == sorted(ordered, key=lambda pair: pair[1])
    assert len({alpha for _, alpha in ordered}) > 3
    page.point_at("#heat .chip:nth-of-type(3)")
    assert " nats. " in page.run("document.getElementById('card').textContent")
    page.wait_for("location.hash.includes('show=score')")


def test_trace_text_and_page_can_be_saved(page, address, tmp_path):
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    write(page, TEXT)
    run_to_the_end(page)
    name = "adlm-adlm-ancestral-0"
    for number, suffix in enumerate((".txt", ".json", ".html")):
        page.point_at(f".pane-actions .link:nth-of-type({number + 2})", click=True)
        wait_until((tmp_path / f"{name}{suffix}").exists)
    expected = record_trace_of_events(trace_events(address, {"model": "adlm", "text": TEXT, "steps": 4, "seed": 0}))
    assert json.loads((tmp_path / f"{name}.json").read_text()) == expected
    assert (tmp_path / f"{name}.txt").read_text() == expected["text"]
    page.open(tmp_path / f"{name}.html", "#frame=0")
    assert page.run("document.querySelectorAll('#text .masked').length") == 5


def test_a_script_in_the_text_is_text(page):
    write(page, SCRIPT)
    run_to_the_end(page)
    assert page.run("document.querySelectorAll('#panes img, #panes script').length") == 0
    assert shown(page).startswith("<script>alert(2)</script><img src=x onerror=alert(1)>")


def clear_refusals(tab, num, status):
    """Wait for the browser's own lines about refused requests, which may come late, and forget them."""
    wait_until(lambda: tab.run("1") and len(tab.problems) >= num)
    assert [status in problem for problem in tab.problems] == [True] * num
    tab.problems.clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no hole at all", "The text has no hole; write [MASK] for one token, or [MASK*4] for four."),
        ("[MASK*10000]", "10000 tokens to fill in are too many for the model's length 64; give fewer."),
    ],
)
def test_a_refused_request_is_one_sentence_on_the_page(tab, address, text, message):
    tab.emulate(1280, 900)
    open_studio(tab, address)
    write(tab, text)
    tab.point_at("#run", click=True)
    tab.wait_for(f"document.getElementById('message').textContent == {json.dumps(message)}")
    assert tab.run("document.getElementById('message').className") == "error"
    clear_refusals(tab, 1, "400 (Bad Request)")


def test_a_key_can_be_typed(tab, studio_models):
    with running(studio_models, ServerSettings(api_key=KEY)) as address:
        tab.emulate(1280, 900)
        open_studio(tab, address)
        for key in ("wrong", KEY):
            tab.run("document.getElementById('key').value = ''; document.getElementById('key').focus()")
            tab.send("Input.insertText", text=key)
            tab.point_at("#key-form button", click=True)
            if key == "wrong":
                tab.wait_for("document.getElementById('message').textContent.startsWith('The server refuses this key')")
        tab.wait_for("document.getElementById('key-form').hidden && document.getElementById('model').value")
        write(tab, TEXT)
        run_to_the_end(tab)
        assert KEY not in tab.run("location.href")
    clear_refusals(tab, 2, "401 (Unauthorized)")


SCREENS = pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])


def show_everything(page, address, width, dark):
    """A page with two runs, a bound, the explanation and the card of a token."""
    page.emulate(width, 900, dark=dark)
    state = {"text": TEXT, "seed": 1, "model2": "adlm", "sampler2": "remdm-cap"}
    open_studio(page, address, f"#{urlencode(state)}")
    run_to_the_end(page)
    page.run("document.querySelector('.pane-actions button').click()")
    page.wait_for("!document.getElementById('heat').hidden")
    page.run("document.querySelector('details').open = true")
    page.run("document.querySelector('#panes .drawn').focus()")


@SCREENS
def test_the_page_fits_its_screen(page, address, width, dark, tmp_path):
    folder = Path(os.environ.get("ADLM_SCREENSHOTS", tmp_path))
    page.emulate(width, 900, dark=dark)
    page.screenshot(folder / f"studio-first-{width}.png")
    button = page.run("document.getElementById('run').getBoundingClientRect().bottom")
    assert button < 900, "the one button is on the first screen"
    show_everything(page, address, width, dark)
    assert page.run("document.documentElement.scrollWidth") == width
    box = page.run("(() => { const b = document.getElementById('card').getBoundingClientRect();"
                   " return [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom]; })()")  # fmt: skip
    assert min(box) >= 0
    page.screenshot(folder / f"studio-{width}.png")


def test_at_900_pixels_the_controls_have_no_gap_and_the_legend_is_not_covered(page, address):
    page.emulate(900, 720)
    open_studio(page, address)
    boxes = "['sampler', 'steps'].map((id) => document.getElementById(id).getBoundingClientRect())"
    assert page.run(f"(([a, b]) => [b.left - a.right < 20, b.top - a.top])({boxes})") == [True, 0]
    choose(page, "sampler", "remdm-cap")
    assert page.run("document.getElementById('sampler-summary').textContent") == SAMPLER_SUMMARIES["remdm-cap"]
    write(page, TEXT)
    run_to_the_end(page)
    covered = "['legend', 'bar'].map((id) => document.getElementById(id).getBoundingClientRect())"
    page.wait_for(f"(([legend, bar]) => legend.bottom <= bar.top)({covered})")


@SCREENS
def test_axe_finds_no_violations(page, address, width, dark):
    if "ADLM_AXE" not in os.environ:
        pytest.skip("ADLM_AXE is not set; set it to the path of axe.min.js of the npm package axe-core")
    axe = Path(os.environ["ADLM_AXE"]).read_text() + "; 0"
    found = "axe.run().then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html.slice(0, 200))]))"
    page.emulate(width, 900, dark=dark)
    page.run(axe)
    assert page.run(found) == []
    show_everything(page, address, width, dark)
    page.run(axe)
    assert page.run(found) == []


# ---- the endpoints


def record_trace_of_events(events):
    """The trace that the events add up to."""
    begin, *steps, end = events
    trace = {**begin["begin"], "steps": [], "text": end["end"]["text"]}
    trace["sampling"]["frames"] = end["end"]["frames"]
    for event in steps:
        step = event["step"]
        trace["tokens"].update(step.pop("tokens"))
        trace["bytes"].update(step.pop("bytes"))
        trace["steps"].append(step)
    return trace


@pytest.mark.parametrize(("model", "sampler"), [("adlm", "remdm-cap"), ("mdlm", "confidence"), ("blocks", "ancestral")])
def test_a_trace_has_the_predictions_given_the_constraint(address, studio_models, model, sampler):
    text, constraints = "a[MASK*3:x]", {"x": {"choice": ["cat", "dog"]}}
    body = {"model": model, "text": text, "sampler": sampler, "steps": 9, "seed": 3, "constraints": constraints}
    trace, lm = record_trace_of_events(trace_events(address, body)), studio_models[model]
    assert trace["text"] in ("acat", "adog")
    del body["text"]
    completion = post(f"{address}/v1/completions", json={**body, "prompt": text}).json()
    assert completion["choices"][0]["text"] == trace["text"]
    assert trace["constraints"] == [{"name": "x", "starts": [trace["canvas"].index(lm.mask_id)], "length": 3}]
    first, start = trace["steps"][1], trace["constraints"][0]["starts"][0]
    held = {int(position) - start: dict(map(tuple, best)) for position, best in first["conditioned"].items()}
    allowed = [set(b"cd"), set(b"ao"), set(b"tg")]
    assert held
    assert all({*best} <= allowed[place] and sum(best.values()) > 0.99 for place, best in held.items())
    z = torch.tensor([trace["canvas"]])
    log_p = lm.log_probs(z)[0, [start, start + 1, start + 2]].double()
    if model != "blocks":  # there a hole is longer than a block
        log_mass = torch.logsumexp(torch.stack([log_p[range(3), list(word)].sum() for word in (b"cat", b"dog")]), dim=0)
        assert first["log_mass"]["0"] == pytest.approx(float(log_mass), rel=2e-3)
    assert "log_mass" not in trace["steps"][0]


def test_choices_are_compared_as_in_python(address, studio_models):
    body = {"model": "adlm", "text": "The [MASK] sat.", "choices": ["cat", "dog"], "samples": 8, "seed": 1}
    answer = post(f"{address}/v1/choose", json=body).json()
    expected = studio_models["adlm"].choose("The [MASK] sat.", ["cat", "dog"], samples=8, seed=1)
    assert answer["probabilities"] == pytest.approx(expected.probabilities, rel=1e-4)
    assert (answer["best"], answer["choices"]) == (expected.best, ["cat", "dog"])


def test_work_in_turns_runs_between_them_only_and_ends_when_its_consumer_leaves():
    done = []

    def work(report):
        for number in range(4):
            done.append(number)
            report(number)
        if len(done) > 8:
            raise ValueError("failed")
        return {"sum": sum(done)}

    turns = in_turns(work)
    assert [next(turns), next(turns)] == [{"done": 0}, {"done": 1}]
    assert done == [0, 1]
    turns.close()
    assert done == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name == "adlm-turns"]
    assert list(in_turns(work))[-1] == {"sum": 0 + 1 + 6}
    with pytest.raises(ValueError, match="failed"):
        list(in_turns(work))


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"text": "no hole"}, "text", "has no hole; write [MASK]"),
        ({"text": "[MASK] [MASK]"}, "text", "has 2 holes; leave one"),
        ({"choices": ["a"]}, "choices", "at least 2 items"),
        ({"choices": ["a", "a"]}, "choices", "is given twice"),
        ({"choices": ["a", "b" * 90]}, "text", "has 96 tokens, and the model reads 64"),
        ({"choices": ["a", "b" * 9_000]}, "choices", "choices has 9,000 characters"),
        ({"samples": 3}, "samples", "multiple of 2"),
    ],
)
def test_choices_that_cannot_be_compared_are_refused_with_their_field(address, changed, param, message):
    answer = post(
        f"{address}/v1/choose", json={"model": "adlm", "text": "The [MASK]", "choices": ["a", "b"], **changed}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "sampler", "text"),
    [
        ("adlm", "remdm-conf", TEXT),
        ("mdlm", "entropy", TEXT),
        ("ar", "ancestral", "a[MASK*5]"),
        ("blocks", "remdm-cap", "a[MASK*9]"),
        ("blocks", "speculative", "a[MASK*9]"),
        ("infilling", "speculative", "a[MASK*..9]b"),
        ("infilling", "left-to-right", "a[MASK*]b[MASK*2]c"),
    ],
)
def test_the_events_are_the_recorded_trace_and_the_completion_of_the_same_seed(
    address, studio_models, model, sampler, text
):
    body = {"model": model, "text": text, "sampler": sampler, "steps": 9, "seed": 3}
    first, second = trace_events(address, body), trace_events(address, body)
    assert first == second
    trace = record_trace_of_events(first)
    lm = studio_models[model]
    frames = lm.watch(text, seed=3, sampler=sampler, steps=9)
    recorded = record_trace(lm, frames, TraceInfo(model, sampler, 9, 3)).to_dict()
    assert trace["steps"] == json.loads(json.dumps(recorded["steps"]))
    times = [step["t"] for step in trace["steps"]]
    assert times == sorted(times, reverse=True) or sampler.startswith("remdm"), "of the text, not of its blocks"
    assert {**trace, "steps": []} == {**json.loads(json.dumps(recorded)), "steps": []}
    completion = post(f"{address}/v1/completions", json={**body, "prompt": body.pop("text")})
    assert completion.status_code == 400, "text is not a field of a completion"
    completion = post(f"{address}/v1/completions", json={**body, "prompt": text}).json()
    assert completion["choices"][0]["text"] == trace["text"]


@pytest.mark.parametrize("model", ["adlm", "mdlm", "ar"])
def test_the_bound_of_tokens_adds_up_to_the_perplexity_of_the_text(address, studio_models, model):
    text = "Some words to score"
    found = post(f"{address}/v1/bound", json={"model": model, "text": text, "samples": 1024}).json()
    expected = studio_models[model].perplexity(text, samples=16)
    assert found["nats"] == pytest.approx(sum(found["token_nats"]), rel=1e-3)
    assert found["num_tokens"] == expected.tokens
    if model == "ar":
        assert found["exact"]
        assert found["nats_per_token"] == pytest.approx(expected.nats, rel=1e-5)
    else:
        error = 4 * (found["nats_stderr"] / found["num_tokens"] + expected.nats_stderr)
        assert found["nats_per_token"] == pytest.approx(expected.nats, abs=error)
        assert error < 0.15 * expected.nats
        again = post(f"{address}/v1/bound", json={"model": model, "text": text, "samples": 1024}).json()
        assert again == found


WRONG = [
    ("/v1/trace", {}, 400, "model is missing"),
    ("/v1/trace", {"model": "adlm"}, 400, "text is missing"),
    ("/v1/trace", {"model": "../../etc/passwd", "text": TEXT}, 404, "there is no model"),
    ("/v1/trace", {"model": "adlm", "text": {"file": "/etc/passwd"}}, 400, "text"),
    ("/v1/trace", {"model": "adlm", "text": "none"}, 400, "no hole"),
    ("/v1/trace", {"model": "adlm", "text": "[MASK]" * 2000}, 400, "2000 tokens to fill in"),
    ("/v1/trace", {"model": "adlm", "text": "[MASK*999999999999]"}, 400, "tokens to fill in"),
    ("/v1/trace", {"model": "adlm", "text": TEXT, "steps": 65}, 400, "at most 64"),
    ("/v1/trace", {"model": "adlm", "text": TEXT, "temperature": -1}, 400, "temperature"),
    ("/v1/trace", {"model": "adlm", "text": TEXT, "sampler": "magic"}, 400, "is not one of"),
    ("/v1/trace", {"model": "mdlm", "text": TEXT, "sampler": "anchor-first"}, 400, "anchor network"),
    ("/v1/trace", {"model": "ar", "text": "[MASK] a"}, 400, "from left to right"),
    ("/v1/trace", {"model": "adlm", "text": TEXT, "n": 5}, 400, "n is not a field"),
    ("/v1/trace", {"model": "adlm", "text": "x" * 30_000}, 413, "larger than"),
    ("/v1/bound", {"model": "adlm", "text": TEXT}, 400, "fill them in"),
    ("/v1/bound", {"model": "adlm", "text": "x" * 65}, 400, "shorten it"),
    ("/v1/bound", {"model": "adlm", "text": ""}, 400, "text"),
    ("/v1/bound", {"model": "adlm", "text": "a", "samples": 10**9}, 400, "samples"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG, ids=lambda value: repr(value)[:60])
def test_a_wrong_request_is_refused_with_one_clear_message(address, path, body, status, message):
    answer = post(f"{address}{path}", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_files_come_from_a_fixed_table_with_strict_headers_and_without_key(studio_models):
    with running(studio_models, ServerSettings(api_key=KEY)) as address:
        for path in page_files():
            answer = get(f"{address}{path}")
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = get(f"{address}{path}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            if path != "/studio/trace-page.html" and not path.endswith(".svg"):
                assert not re.search(r"https?://|innerHTML|eval\(| on[a-z]+=|<style|<script>", answer.text), path
        for path in ("/v1/studio", "/studio/", "/studio/../app.py", "/studio/%2e%2e/routes.py", "//studio/studio.js"):
            assert get(f"{address}{path}").status_code == 401
        keyed = {"authorization": f"Bearer {KEY}"}
        for path in ("/studio/", "/studio/%2e%2e/routes.py", "/studio/studio.js%00.txt", "/studio/..%2f..%2fapp.py"):
            assert get(f"{address}{path}", headers=keyed).status_code == 404
        for path in ("/v1/trace", "/v1/bound"):
            assert post(f"{address}{path}", json={"model": "adlm", "text": TEXT}).status_code == 401


def test_header_tricks_change_nothing(address):
    tricks = {"x-forwarded-host": "evil.example", "origin": "null", "x-http-method-override": "PUT"}
    answer = get(f"{address}/", headers=tricks)
    assert answer.status_code == 200
    assert "evil" not in answer.text + str(answer.headers)
    assert "access-control-allow-origin" not in answer.headers


@pytest.fixture
def slow_frames(monkeypatch):
    """Every frame waits for the event, which is set at the end; `frames` counts them."""

    class Gate(threading.Event):
        frames = 0

    gate, run_frames = Gate(), Run.frames

    def gated(frames):
        for frame in frames:
            gate.frames += 1
            if gate.frames > 2:
                assert gate.wait(PATIENCE)
            yield frame

    monkeypatch.setattr(Run, "frames", lambda run: gated(run_frames(run)))
    yield gate
    gate.set()


def test_a_run_ends_when_its_client_leaves_and_the_next_request_is_answered(studio_models, slow_frames):
    with running(studio_models, ServerSettings(batch=1)) as address:
        body = json.dumps({"model": "adlm", "text": "[MASK*40]", "steps": 500, "seed": 0}).encode()
        head = f"POST /v1/trace HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: slow_frames.frames == 3)
        wait_until(lambda: 'route="/v1/trace"' in metrics(address))
        slow_frames.set()
        wait_until(lambda: 'adlm_running_rows{model="adlm"} 0.0' in metrics(address))
        assert slow_frames.frames <= 5
        assert trace_events(address, {"model": "adlm", "text": TEXT, "seed": 0})


def test_the_stop_button_ends_the_run_on_the_server(tab, studio_models, slow_frames):
    with running(studio_models, ServerSettings(batch=1)) as address:
        tab.emulate(1280, 900)
        open_studio(tab, address, f"#{urlencode({'text': '[MASK*40]', 'steps': 500})}")
        tab.point_at("#run", click=True)
        wait_until(lambda: slow_frames.frames == 3)
        tab.wait_for("document.getElementById('run').textContent == 'Stop'")
        tab.point_at("#run", click=True)
        tab.wait_for("document.getElementById('message').textContent == 'Stopped.'")
        wait_until(lambda: 'route="/v1/trace"' in metrics(address))
        slow_frames.set()
        wait_until(lambda: 'adlm_running_rows{model="adlm"} 0.0' in metrics(address))
        assert slow_frames.frames <= 5
    assert not tab.problems


def test_a_failing_run_is_an_error_without_details_and_the_next_one_works(studio_models, monkeypatch):
    def fail(run):
        raise RuntimeError("private details")

    with running(studio_models, ServerSettings()) as address:
        with monkeypatch.context() as patched:
            patched.setattr(Run, "frames", fail)
            answer = post(f"{address}/v1/trace", json={"model": "adlm", "text": TEXT})
        assert '"message": "sampling failed"' in answer.text
        assert "private" not in answer.text
        assert "[DONE]" not in answer.text
        assert trace_events(address, {"model": "adlm", "text": TEXT, "seed": 0})


def test_a_stream_that_nobody_reads_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr("adlm.apps.server.responses.AFTER_DEADLINE_SECONDS", 0.1)
    closed = []

    async def events():
        try:
            while True:
                yield "data: {}\n\n"
        finally:
            closed.append(True)

    async def blocked(message):
        await asyncio.sleep(600 if message.get("body") else 0)

    async def stream():
        unread = events()
        await anext(unread)  # it has begun, however soon the deadline comes
        await EventStream(unread, time.monotonic() + 0.1).stream_response(blocked)

    asyncio.run(stream())
    assert closed == [True]


def test_runs_wait_in_the_bounded_queue(studio_models, slow_frames):
    settings = ServerSettings(batch=1, max_waiting=1)
    with running(studio_models, settings) as address, ThreadPoolExecutor(2) as pool:
        body = {"model": "adlm", "text": "[MASK*9]", "seed": 0}
        first = pool.submit(post, f"{address}/v1/trace", json=body)
        wait_until(lambda: slow_frames.frames == 3)
        second = pool.submit(post, f"{address}/v1/bound", json={"model": "adlm", "text": "ab"})
        wait_until(lambda: 'adlm_queue_rows{model="adlm"} 1.0' in metrics(address))
        refused = post(f"{address}/v1/trace", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        slow_frames.set()
        assert [each.result().status_code for each in (first, second)] == [200, 200]


def test_runs_that_take_too_long_or_wait_too_long_time_out(studio_models, slow_frames):
    for timeout in (0.5, 5, 50):  # long enough for a run to begin, on a busy machine too
        with running(studio_models, ServerSettings(batch=1, timeout=timeout)) as address:
            run = post(f"{address}/v1/trace", json={"model": "adlm", "text": "[MASK*9]", "seed": 0})
            assert "timed out" in run.text
            if slow_frames.frames == 3:  # and the worker waits
                assert post(f"{address}/v1/bound", json={"model": "adlm", "text": "ab"}).status_code == 503
                slow_frames.set()
                return
        slow_frames.frames = 0
    pytest.fail("no run has begun")


def test_completions_are_the_same_while_the_studio_runs(address):
    body = {"model": "adlm", "prompt": "Some", "max_tokens": 20, "seed": 7, "logprobs": 0, "steps": 32}
    alone = post(f"{address}/v1/completions", json=body).json()["choices"]
    with ThreadPoolExecutor(4) as pool:
        traces = [
            pool.submit(trace_events, address, {"model": "adlm", "text": "[MASK*40]", "steps": 32}) for _ in range(3)
        ]
        beside = pool.submit(post, f"{address}/v1/completions", json=body).result().json()["choices"]
        assert all(trace.result() for trace in traces)
    assert beside == alone
