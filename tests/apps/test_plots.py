"""Plots of cards: labels overlap nothing, published metrics only where comparable, damaged cards are an error."""

import json
import re

import numpy as np
import pytest

from adlm.apps.judge.pipeline import FORMAT
from adlm.apps.paper.results import published_sampling
from adlm.errors import UserError

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from adlm.apps import plots  # noqa: E402
from adlm.apps.paper.results import card_points  # noqa: E402
from adlm.apps.plots import COLOURS, LabelPlacer, new_figure  # noqa: E402

STEPS = (128, 256, 512, 1024, 2048, 4096)


def card(method="adlm", steps=1024, perplexity=25.4, entropy=5.35, mauve=0.7, judge="gpt2-large", tokens=1024):
    """A metric card, by default of the published protocol."""
    sampler = "left-to-right" if method == "ar" else "remdm-loop"
    sampling = {"sampler": sampler, "steps": steps, **published_sampling(sampler)}
    made_by = {"model": f"runs/{method}", "method": method, "canvases": [f"[MASK*{tokens}]"], "sampling": sampling}
    made_by["about"] = {"parameters": 1, "symbols": 50258, "trained_on": "openwebtext", "tokens_trained": None}
    label = None if judge == "gpt2-large" else f"not comparable with published perplexities: the judge is {judge}"
    return {
        "card": FORMAT,
        "samples": {"num": 5000, "made_by": made_by},
        "perplexity": {"judge": {"name": judge}, "label": label, "pooled": {"value": perplexity, "stderr": 0.3}},
        "entropy": {"value": entropy, "stderr": 0.01},
        "mauve": {"value": mauve, "spread": 0.01, "featuriser": {"name": "gpt2-large"}, "label": None},
    }


def plot_cards(cards, path):
    plots.plot_cards(card_points(cards), path)


def plot_text(cards, path):
    """The text of a plot, from its SVG."""
    plot_cards({f"{number}.json": each for number, each in enumerate(cards)}, path)
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def curve(method="adlm", **more):
    return [card(method, steps, 60 / (1 + number), 5.6 - 0.08 * number, 0.1 * number + 0.2, **more)
            for number, steps in enumerate(STEPS)]  # fmt: skip


def test_labels_cover_neither_a_curve_nor_each_other():
    figure = new_figure(5, 4)
    axes = figure.subplots()
    draws = np.random.default_rng(0)
    points = draws.uniform(size=(25, 2))
    axes.plot(*points.T, "o-")
    labels = LabelPlacer(axes, [points])
    for number, point in enumerate(points):
        labels.put([tuple(point)], f"label {number}", near=2)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert 3 < len(boxes) < 25
    assert not any(one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number])
    corners = axes.transData.transform(points)
    assert not any(box.contains(*corner) for box in boxes for corner in corners)
    frame = axes.get_window_extent()
    assert all(frame.containsx(box.x0) and frame.containsx(box.x1) and frame.containsy(box.y1) for box in boxes)


def test_a_required_label_is_placed_even_where_it_overlaps():
    figure = new_figure(1, 1)
    axes = figure.subplots()
    axes.plot([0, 1, 0, 1], [0, 1, 1, 0])
    LabelPlacer(axes, [np.array([(0, 0), (1, 1), (0, 1), (1, 0)])]).put(
        [(0.5, 0.5)], "a long name for so small a place"
    )
    assert len(axes.texts) == 1


def test_every_curve_is_labelled_and_steps_are_on_a_log2_axis(tmp_path):
    words = plot_text([*curve(), *curve("mdlm"), card("ar")], tmp_path / "cards.svg")
    for name in ("adlm, remdm-loop", "mdlm, remdm-loop", "ar", "ar, in as many steps as tokens", "4,096", "128 steps"):
        assert name in words
    assert "sampling steps" in words
    assert "1,024 steps" not in words  # of the one that writes from left to right


def test_an_option_shared_by_all_cards_is_named_once_and_one_that_differs_at_each_curve(tmp_path):
    cards = [card(), card("mdlm")]
    for each in cards:
        each["samples"]["made_by"]["sampling"] |= {"top_p": 0.9}
    cards[1]["samples"]["made_by"]["sampling"] |= {"temperature": 0.7}
    words = plot_text(cards, tmp_path / "cards.svg")
    assert "adlm, remdm-loop" in words
    assert "mdlm, remdm-loop, temperature 0.7" in words
    assert sum(each.startswith("top_p 0.9 throughout;") for each in words) == 1


def test_samplers_of_one_model_share_its_colour(tmp_path):
    other = card("adlm", 256, 30.0, 5.5)
    other["samples"]["made_by"]["sampling"] |= {"sampler": "ancestral"}
    plot_cards({"loop.json": card(), "ancestral.json": other, "mdlm.json": card("mdlm")}, tmp_path / "cards.svg")
    drawn = (tmp_path / "cards.svg").read_text()
    assert COLOURS[0] in drawn
    assert COLOURS[1] in drawn
    assert COLOURS[2] not in drawn


def test_published_metrics_are_drawn_only_with_comparable_cards(tmp_path):
    for cards, shown in (
        (curve(), True),
        ([*curve(), card("ar")], True),
        (curve(judge="runs/judge"), True),  # MAUVE compares, perplexity does not
        (curve(tokens=128), False),
        ([*curve(), card("mdlm", tokens=128)], False),
    ):
        words = plot_text(cards, tmp_path / "cards.svg")
        assert any("open diamonds: published" in each for each in words) is shown


def test_a_panel_without_points_is_not_drawn(tmp_path):
    cards = curve()
    for each in cards:
        del each["mauve"]
    words = plot_text(cards, tmp_path / "cards.svg")
    assert not any("MAUVE" in each for each in words)
    with pytest.raises(UserError, match="there is nothing to draw"):
        plot_text([{**cards[0], "entropy": {"value": None, "stderr": None}}], tmp_path / "none.svg")


@pytest.mark.parametrize(
    "damage",
    [
        lambda card: card["perplexity"].pop("pooled"),
        lambda card: card.pop("samples"),
        lambda card: card["perplexity"]["pooled"].update(value="many"),
        lambda card: card["mauve"].update(value=float("nan")),
        lambda card: card["samples"]["made_by"].update(sampling={}),
        lambda card: card.update(entropy=7),
        lambda card: card.update(mauve=[]),
    ],
)
def test_a_damaged_card_is_a_one_line_error_with_its_name(tmp_path, damage):
    broken = json.loads(json.dumps(card()))
    damage(broken)
    with pytest.raises(UserError, match=r"^broken.json is (not a complete card|incomplete|damaged)"):
        plot_cards({"good.json": card(), "broken.json": broken}, tmp_path / "cards.png")
    assert list(tmp_path.iterdir()) == []
