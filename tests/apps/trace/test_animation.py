"""The animated image of a trace: it is XML without scripts, ends with the text, and shows what the trace records."""

import itertools
import re
from xml.etree import ElementTree

import pytest
from sampling_runs import fake_model_and_canvas, sampling_frames
from test_recording import HOSTILE, INFO, hostile_trace

from adlm.apps.trace.page import COLUMNS, _history, _places, as_animation, write_trace
from adlm.apps.trace.recording import record_trace
from adlm.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace():
    lm, canvas = fake_model_and_canvas()
    return record_trace(lm, sampling_frames(lm, canvas, 30, remasking=0.05), INFO)


def shown(element) -> bool:
    return "hidden" not in element.get("class").split()


def test_without_animation_the_image_shows_the_final_text(trace):
    root = ElementTree.fromstring(as_animation(trace))
    words = [text.text for text in root.iter(f"{SVG}text") if shown(text) and "small" not in text.get("class")]
    assert "".join(words) == re.sub(r"\s", "", trace.to_dict()["text"])
    assert not any(shown(box) for box in root.iter(f"{SVG}rect") if box.get("style"))


def test_every_position_is_masked_or_has_a_token_at_any_time(trace):
    for position in range(len(trace.canvas)):
        history = _history(trace, position)
        intervals = sorted([*history.masked, *(interval for _, interval in history.tokens)])
        assert intervals[0][0] == 0
        assert intervals[-1][1] == 1
        assert all(before[1] == after[0] for before, after in itertools.pairwise(intervals))
        assert history.tokens[-1][0] == trace.last[position]
        for begins, ends in history.lit:
            assert any(begins >= start and ends == end for start, end in history.masked)


def test_remasked_tokens_pass_and_anchors_are_lit(trace):
    root = ElementTree.fromstring(as_animation(trace))
    kinds = [element.get("class").split()[0] for element in root.iter() if element.get("class")]
    num_remasked = sum(len(step.remasked) for step in trace.steps)
    assert num_remasked > 0
    assert 0 < kinds.count("passing") <= num_remasked
    anchored = {position for step in trace.steps for position in step.anchored}
    assert 0 < kinds.count("lit") <= len(anchored)


def test_lines_break_at_words_and_newlines():
    texts = [*[" abcdefgh"] * 20, "\n", "x", "y"]
    places = list(_places(texts))
    assert all(column + len(text.strip()) <= COLUMNS for (column, _), text in zip(places, texts, strict=True))
    assert places[0] == (0, 0)
    assert [line for _, line in places][-3:] == [places[19][1], places[19][1] + 1, places[19][1] + 1]
    assert places[-1] == (1, places[19][1] + 1)


def test_hostile_tokens_and_names_are_text():
    image = as_animation(hostile_trace())
    root = ElementTree.fromstring(image)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "metadata", "title", "style", "rect", "text", "tspan"}
    assert HOSTILE[0] in {text.text for text in root.iter(f"{SVG}text")}
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", image)
    attributes = {name for element in root.iter() for name in element.keys()}  # noqa: SIM118
    places = {"height", "rx", "text-anchor", "viewBox", "width", "x", "y"}
    assert attributes <= {"aria-label", "class", "role", "style", *places}
    style = root.find(f"{SVG}style").text
    assert not re.search(r"url\(|@import", style)


def test_an_image_is_replaced_and_another_file_is_not(trace, tmp_path):
    path = tmp_path / "run.svg"
    write_trace(trace, path)
    write_trace(trace, path)
    path.write_text("<svg/>")
    with pytest.raises(UserError, match="not written by adlm"):
        write_trace(trace, path)
