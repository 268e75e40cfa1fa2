"""Tests of traces and of the terminal view: differences replay the sampling run, and no token can inject markup."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from sampling_runs import TEXT, FakeModel, fake_model_and_canvas, sampling_frames
from small_models import infilling_model, mostly_slow
from worlds import randomized

from adlm.apps.trace.page import as_animation, as_page, write_trace
from adlm.apps.trace.recording import (
    MAX_OTHER_MASKS,
    NUM_GUESSES,
    Trace,
    TraceInfo,
    TraceRecorder,
    predict,
    record_trace,
)
from adlm.apps.trace.terminal import TerminalView, show_in_terminal
from adlm.config.schema import Config, Model, Sampling, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.language_model import LanguageModel, load
from adlm.methods import method_of
from adlm.sampling.frame import first_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import decode_side_by_side, load_tokenizer, text_of, tokens_bytes, train_bpe

INFO = TraceInfo("a model", "remdm-cap", 30, 0)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "</script x",
    "<!--<script ",
    "@@TRACE@@",
    "\u2028&lt;",
    "\x1b[31m\u202e",
)


def replayed(plain: dict) -> list[list[int]]:
    """The ids after every step, computed from the JSON only."""
    ids, states = list(plain["canvas"]), []
    for step in plain["steps"]:
        for position, index, _ in step["changed"]:
            ids[position] = index
        states.append(list(ids))
    return states


def small(ids: list[int] | None = None, **options) -> FakeModel:
    """A vocabulary of twelve ids, the last one the mask, and no tokenizer."""
    return FakeModel(ids or [3, 1, 4, 1, 5, 9, 2, 6], mask_id=11, size=12, **options)


def masks(lm: FakeModel, rows: int = 1) -> torch.Tensor:
    return torch.full((rows, len(lm.x)), lm.mask_id)


def test_differences_replay_every_frame_with_changes():
    lm, canvas = fake_model_and_canvas()
    frames = list(sampling_frames(lm, canvas, 30, remasking=0.05))
    plain = record_trace(lm, frames, INFO).to_dict()
    states = replayed(json.loads(json.dumps(plain)))
    for step, ids in zip(plain["steps"], states, strict=True):
        frame = frames[step["frame"]]
        assert ids == frame.ids[0].tolist()
        assert step["revealed"] == frame.revealed[0].nonzero().flatten().tolist()
        assert step["remasked"] == frame.remasked[0].nonzero().flatten().tolist()
        for position, index, chance in step["changed"]:
            assert chance == pytest.approx(float(frame.chance[0, position]), rel=0.01)
            assert (chance == 0) == (index == lm.mask_id)
    assert states[-1] == frames[-1].ids[0].tolist()
    assert any(step["remasked"] for step in plain["steps"])
    assert plain["given"] == (canvas[0] != lm.mask_id).nonzero().flatten().tolist()


def test_the_text_of_every_step_is_the_decoded_ids():
    lm, canvas = fake_model_and_canvas()
    trace = record_trace(lm, sampling_frames(lm, canvas, 30), INFO)
    for ids in trace.states():
        joined = b"".join(trace.pieces[index] for index in ids)
        assert joined.decode(errors="replace") == lm.tokenizer.decode(ids)
    plain = trace.to_dict()
    assert plain["text"] == lm.tokenizer.decode(trace.last)
    whole = {index: text for index, text in plain["tokens"].items() if index not in plain["bytes"]}
    assert whole
    for index, text in whole.items():
        assert text.encode() == lm.tokenizer.piece(int(index))


@pytest.mark.parametrize("text", ["naïve café — “quoted” 北京 🙂", "plain words\n\tand space  "])
def test_token_bytes_of_byte_tokenizers_join_to_the_text(text):
    for tokenizer in (load_tokenizer("bytes"), train_bpe([TEXT], 400)):
        ids = tokenizer.encode(text)
        pieces = [tokenizer.piece(index) for index in ids]
        assert b"".join(pieces).decode() == text
        assert "".join(decode_side_by_side(pieces)) == text


def test_token_bytes_of_word_tokenizers_join_to_the_decoded_text(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "day", "##s"]))
    for name, text in ((str(tmp_path / "vocab.txt"), "good days good"), ("text8", "good days")):
        tokenizer = load_tokenizer(name)
        ids = [*tokenizer.encode(text), tokenizer.vocabulary.mask_id]
        assert b"".join(map(tokenizer.piece, ids)).decode().lstrip() == tokenizer.decode(ids)


def test_a_character_split_by_a_mask_is_shown_as_bytes():
    first, rest = "é".encode()[:1], "é".encode()[1:]
    assert decode_side_by_side([b"caf", first, rest, b"!"]) == ["caf", "é", "", "!"]
    assert decode_side_by_side([b"caf", first, None, b"!"]) == ["caf", "\\xc3", "", "!"]


def two_documents() -> tuple[FakeModel, list[int]]:
    """A model that generates [eos] one [eos] [eos] two [eos]."""
    tokenizer = train_bpe([TEXT], 400)
    end = tokenizer.vocabulary.eos_id
    ids = [end, *tokenizer.encode("The old"), end, end, *tokenizer.encode(" keeper—"), end]
    return FakeModel(ids, tokenizer.vocabulary.mask_id, tokenizer.vocabulary.size, tokenizer), ids


@pytest.mark.parametrize("special_tokens", [False, True])
def test_special_tokens_are_shown_only_on_request(special_tokens):
    lm, ids = two_documents()
    text = lm.tokenizer.decode(ids, special_tokens)
    assert text == ("<|endoftext|>The old<|endoftext|><|endoftext|> keeper—<|endoftext|>" if special_tokens
                    else "The old\n\n keeper—")  # fmt: skip
    assert b"".join(tokens_bytes(lm.tokenizer, ids, special_tokens)).decode() == text
    frames = [first_frame(torch.tensor([ids]), lm.mask_id)]
    console, view = Console(file=io.StringIO()), TerminalView(lm, 0, special_tokens=special_tokens)
    list(show_in_terminal(lm, frames, console, special_tokens=special_tokens))
    assert console.file.getvalue() == text + "\n"
    view.update(frames[0])
    assert view.text().plain == text
    recorder = TraceRecorder(lm, INFO, special_tokens=special_tokens)
    list(recorder.record(frames))
    plain = recorder.trace.to_dict()
    assert (plain["text"], plain["hidden"]) == (text, [] if special_tokens else [ids[0]])


def test_predictions_are_those_of_the_network_input():
    lm, canvas = fake_model_and_canvas()
    frames = list(sampling_frames(lm, canvas, 30, remasking=0.05))
    for step in record_trace(lm, frames, INFO).steps[1:]:
        before = frames[step.frame].read
        expected = {"denoiser": lm.log_probs(before)[0].exp(), "anchor": lm.anchor_logits(before)[0].softmax(-1)}
        for name, beliefs in expected.items():
            table = getattr(step, name)
            assert set(step.revealed) <= set(table)
            for position, guesses in table.items():
                assert before[0, position] == lm.mask_id
                assert len(guesses) == NUM_GUESSES
                for index, probability in guesses:
                    assert probability == pytest.approx(float(beliefs[position, index]), rel=0.01)
                assert guesses[0][0] == int(beliefs[position].argmax())


def test_an_anchor_is_the_unchanged_top_prediction_of_the_anchor_network():
    lm, canvas = fake_model_and_canvas()
    frames = list(sampling_frames(lm, canvas, 30, remasking=0.03))
    best = [lm.anchor_logits(frame.read)[0].argmax(-1) for frame in frames[1:]]
    num_early = 0
    num_redrawn = 0
    for step in record_trace(lm, frames, INFO).steps[1:]:
        frame, predicted = frames[step.frame], best[step.frame - 1]
        assert {position for position in step.revealed if predicted[position] == frame.ids[0, position]} == set(
            step.anchored
        )
        for position, since in step.anchored.items():
            if position in step.remasked:  # redrawn in the same frame
                assert since == step.frame - 1
                num_redrawn += 1
                continue
            drawn = frame.ids[0, position]
            assert all(best[number][position] == drawn for number in range(since, step.frame))
            earlier = since - 1
            assert since == 0 or frames[earlier].ids[0, position] != lm.mask_id or best[earlier][position] != drawn
            num_early += since < step.frame - 1
    assert num_redrawn > 0
    assert num_early > 10


def test_a_long_run_is_thinned_without_losing_a_drawn_token():
    lm = small([1 + position % 9 for position in range(100)])
    frames = list(sampling_frames(lm, masks(lm), 60, remasking=0.1))
    whole, thin = record_trace(lm, frames, INFO), TraceRecorder(lm, INFO, limit=10)
    for _ in thin.record(frames):
        pass
    assert len(whole.steps) > 50
    assert len(thin.trace.steps) <= 11
    assert len({step.changes for step in thin.trace.steps[1:-1]}) == 1
    at = {step.frame: ids for step, ids in zip(whole.steps, whole.states(), strict=True)}
    start = 0
    for step, ids in zip(thin.trace.steps, thin.trace.states(), strict=True):
        assert ids == at[step.frame]
        part = [each for each in whole.steps if start < each.frame <= step.frame]
        assert set(step.revealed) == {position for each in part for position in each.revealed}
        assert set(step.remasked) == {position for each in part for position in each.remasked}
        for position in step.revealed:
            drawn = [each for each in part if position in each.revealed][-1]
            assert step.denoiser[position] == drawn.denoiser[position], "the predictions it was drawn from"
            assert step.anchored.get(position) == drawn.anchored.get(position)
        assert len(step.denoiser) <= MAX_OTHER_MASKS + len(step.revealed)
        start = step.frame


def test_frames_without_changes_in_the_row_make_no_step():
    lm = small()
    frames = [replace(frame, t=frame.t) for frame in sampling_frames(lm, masks(lm), 40)]
    trace = record_trace(lm, frames, INFO)
    assert trace.frames == 41
    assert len(trace.steps) == 1 + sum(bool(frame.revealed.any()) for frame in frames) < 41


def test_each_row_has_its_own_trace():
    lm = small()
    frames = list(sampling_frames(lm, masks(lm, rows=3), 12))
    for row in range(3):
        assert record_trace(lm, frames, INFO, row).last == frames[-1].ids[row].tolist()


@pytest.mark.parametrize("anchors", [True, False])
def test_a_model_without_tokenizer_or_anchor_network_is_traced(anchors, tmp_path):
    lm = small(anchors=anchors)
    trace = record_trace(lm, sampling_frames(lm, masks(lm), 12), INFO)
    plain = trace.to_dict()
    assert plain["model"]["anchor_network"] == anchors
    assert any(step["anchor"] for step in plain["steps"]) == anchors
    assert plain["text"] == " ".join(map(str, trace.last))
    assert plain["tokens"]["3"] == " 3"
    write_trace(trace, tmp_path / "trace.html")
    write_trace(trace, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(plain))


@pytest.mark.parametrize("method", ["adlm", "mdlm", "sedd", "d3pm", "ar", "a2r"])
def test_every_method_is_traced_with_the_predictions_it_drew_from(method):
    model = Model(hidden=16, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0)
    config = Config(method=method, vocabulary=Vocabulary(size=12, mask_id=11, bos_id=0), length=8, model=model)
    if method == "sedd":  # conditioned on sigma, which must be finite
        config = replace(config, schedule=replace(config.schedule, eps=1e-3))
    if method == "d3pm":  # uses discrete time steps
        config = replace(config, time=replace(config.time, steps=1000))
    maker = method_of(config)
    lm = LanguageModel(config, maker, randomized(maker.build()))
    frames = list(maker.generate(lm.network, torch.full((1, 8), 11), config.sampling, RowRng(0, range(1))))
    trace = record_trace(lm, frames, INFO)
    assert trace.last == frames[-1].ids[0].tolist()
    for step in trace.steps[1:]:
        assert set(step.revealed) <= set(step.denoiser)
        assert bool(step.anchor) == (method in ("adlm", "a2r"))
        if method in ("ar", "a2r"):
            (position,) = step.revealed
            beliefs = lm.log_probs(frames[-1].ids[:, :position])[0, -1].exp()
            for index, probability in step.denoiser[position]:
                assert probability == pytest.approx(float(beliefs[index]), rel=0.01)


CONDITIONED = [
    *[("adlm", sampler) for sampler in ("ancestral", "remdm-cap", "remdm-conf", "remdm-loop", "dfm", "anchor-first")],
    ("mdlm", "remdm-rescale"),
    ("mdlm", "semi-autoregressive"),
    ("sedd", "ancestral"),
    ("sedd", "analytic"),
    ("d3pm", "ancestral"),
]


@pytest.mark.parametrize(("method", "sampler"), mostly_slow(CONDITIONED, *CONDITIONED[::2]))
def test_a_time_conditioned_network_is_traced_with_the_beliefs_it_drew_from(method, sampler):
    """The recorded probability of a drawn token equals its normalized belief in the trace."""
    model = Model(hidden=16, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0, time_conditioning=True)
    config = Config(
        method=method,
        vocabulary=Vocabulary(size=NUM_GUESSES, mask_id=4, bos_id=0),
        length=12,
        model=model,
        schedule=Schedule(eps=1e-3),
        time=Time(steps=1000 if method == "d3pm" else 0),
        sampling=Sampling(sampler, steps=40, t_end=0.1, eta=0.5 if sampler in ("remdm-cap", "remdm-rescale") else None),
    )
    lm = LanguageModel(config, method_of(config), randomized(method_of(config).build().double()))
    frames = list(lm.watch(torch.full((2, 12), 4), seed=1))
    num_revealed, num_remasked = 0, 0
    for step in record_trace(lm, frames, INFO, row=1).steps[1:]:
        frame = frames[step.frame]
        for position in step.revealed:
            beliefs, (index, chance) = dict(step.denoiser[position]), step.changed[position]
            clean = sum(probability for symbol, probability in beliefs.items() if symbol != lm.mask_id)
            assert chance == pytest.approx(beliefs[index] / clean, abs=0.003)
            num_revealed += 1
        num_remasked += len(step.remasked)
        if method == "adlm":
            anchor = lm.anchor_logits(frame.read, frame.alpha)[1].softmax(-1)
            for position, guesses in step.anchor.items():
                assert dict(guesses)[0] == pytest.approx(float(anchor[position, 0]), abs=0.003)
    assert num_revealed >= 12
    assert (num_remasked > 0) == (sampler in ("remdm-cap", "remdm-conf", "remdm-loop", "remdm-rescale", "dfm"))


class Elements(HTMLParser):
    """The tags of a page, and the content of its trace block."""

    def __init__(self):
        super().__init__()
        self.tags, self.trace, self.inside = [], "", False

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = ("id", "trace") in attributes

    def handle_endtag(self, tag):
        self.inside = False

    def handle_comment(self, data):
        raise AssertionError(data)

    def handle_data(self, data):
        if self.inside:
            self.trace += data


def hostile_trace() -> Trace:
    """A trace whose tokens and model name try to inject markup."""
    tokenizer = train_bpe([TEXT], 400)
    tokenizer.engine.add_tokens(list(HOSTILE))
    ids = [tokenizer.engine.token_to_id(token) for token in HOSTILE] * 2
    lm = FakeModel(ids, tokenizer.vocabulary.mask_id, max(ids) + 1)
    vocabulary = replace(tokenizer.vocabulary, size=max(ids) + 1)
    lm.tokenizer = replace(tokenizer, vocabulary=vocabulary)
    return record_trace(lm, sampling_frames(lm, masks(lm), 10), replace(INFO, name=HOSTILE[0], sampler=HOSTILE[1]))


def test_no_token_or_name_can_inject_markup():
    trace, (lm, canvas) = hostile_trace(), fake_model_and_canvas()
    tokens = "".join(trace.to_dict()["tokens"].values())
    assert all(token in tokens for token in HOSTILE)
    read, harmless = Elements(), Elements()
    read.feed(as_page(trace))
    harmless.feed(as_page(record_trace(lm, sampling_frames(lm, canvas, 3), INFO)))
    assert read.tags == harmless.tags
    assert "<" not in read.trace, "browsers end a script at more places than this parser"
    assert json.loads(read.trace) == json.loads(json.dumps(trace.to_dict()))


def test_the_page_is_self_contained():
    page = as_page(record_trace(small(), sampling_frames(small(), masks(small()), 5), INFO))
    assert "default-src 'none'" in page
    assert "@@" not in page
    for forbidden in ("http:", "https:", "src=", "@import", "url(", "fetch(", "innerHTML", "eval("):
        assert forbidden not in page, forbidden


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("trace.htm", "must end in .json (data), .html (page) or .svg (animation)"),
        ("trace", "must end in"),
        ("no/trace.json", "there is no folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_a_user_error(name, sentence, tmp_path):
    trace = record_trace(small(), sampling_frames(small(), masks(small()), 5), INFO)
    with pytest.raises(UserError) as raised:
        write_trace(trace, tmp_path / name)
    assert sentence in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_recorder_without_frames_has_no_trace():
    with pytest.raises(UserError, match="no frame has been recorded"):
        _ = TraceRecorder(small(), INFO).trace


def terminal(**options) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60, **options)


def test_the_terminal_view_and_the_recorder_pass_every_frame_through():
    lm, canvas = fake_model_and_canvas()
    frames = list(sampling_frames(lm, canvas, 20))
    for console in (terminal(height=30), Console(file=io.StringIO())):
        recorder = TraceRecorder(lm, INFO)
        passed = list(show_in_terminal(lm, recorder.record(frames), console))
        assert all(one is other for one, other in zip(passed, frames, strict=True))
        assert recorder.trace.last == frames[-1].ids[0].tolist()


def test_a_pipe_gets_only_the_final_text():
    for lm, canvas in (fake_model_and_canvas(), (small(), masks(small()))):
        console = Console(file=io.StringIO())
        *_, last = show_in_terminal(lm, sampling_frames(lm, canvas, 20), console)
        assert console.file.getvalue() == text_of(lm.tokenizer, last.ids[0].tolist()) + "\n"


def test_context_tokens_are_not_shown():
    lm, canvas = fake_model_and_canvas()
    console = Console(file=io.StringIO())
    *_, last = show_in_terminal(lm, sampling_frames(lm, canvas, 20), console, start=3)
    assert console.file.getvalue() == text_of(lm.tokenizer, last.ids[0, 3:].tolist()) + "\n"
    whole, view = TerminalView(lm, 0), TerminalView(lm, 0, start=3)
    for each in (whole, view):
        each.update(last)
    before = text_of(lm.tokenizer, last.ids[0, :3].tolist())
    assert whole.text().plain == before + view.text().plain


def test_a_small_terminal_shows_the_complete_final_text():
    lm, canvas = fake_model_and_canvas()
    console = terminal(height=8, color_system=None)
    *_, last = show_in_terminal(lm, sampling_frames(lm, canvas, 20), console)
    printed = console.file.getvalue()
    rest = printed[printed.rindex("\x1b[2K") + 4 :]
    assert "".join(rest.split()).startswith("".join(lm.tokenizer.decode(last.ids[0].tolist()).split()))
    assert "t 0.000  frame 20  0% masked" in rest
    assert "more lines" in printed


def test_tokens_are_coloured_by_kind():
    lm, canvas = fake_model_and_canvas()
    view, seen = TerminalView(lm, 0), set()
    for frame in sampling_frames(lm, canvas, 20, remasking=0.1):
        view.update(frame)
        for span in view.text().spans:
            seen.add(str(span.style).strip())
    assert {"", "bright_black", "cyan", "bold yellow", "cyan reverse", "bold yellow reverse", "magenta"} >= seen
    assert {"bright_black", "cyan", "bold yellow", "magenta"} <= seen


def test_tokens_cannot_control_the_terminal():
    trace, console = hostile_trace(), terminal(height=30, color_system=None)
    lm = FakeModel(trace.last, trace.mask_id, max(trace.last) + 1)
    lm.tokenizer = trace.tokenizer
    list(show_in_terminal(lm, sampling_frames(lm, masks(lm), 5), console))
    printed = console.file.getvalue()
    assert "\x1b[31m" not in printed
    assert "\u202e" not in printed
    assert "\\x1b[31m\\u202e" in printed


INTERRUPTED = """
import sys, time
sys.path[:0] = {path!r}
from rich.console import Console
from sampling_runs import fake_model_and_canvas, sampling_frames
from adlm.apps.trace.terminal import show_in_terminal
lm, canvas = fake_model_and_canvas()
def slowly(frames):
    for frame in frames:
        time.sleep(0.05)
        yield frame
try:
    for frame in show_in_terminal(lm, slowly(sampling_frames(lm, canvas, 1000)), Console()):
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.processes
def test_an_interrupt_restores_the_terminal():
    ours, theirs = pty.openpty()
    script = INTERRUPTED.format(path=[str(Path(__file__).parents[2])])
    process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    printed, deadline, sent = b"", time.monotonic() + 120, False
    try:
        while time.monotonic() < deadline:
            try:
                printed += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not sent and printed.count(b"\xe2\x96\x91") > 1000:
                process.send_signal(signal.SIGINT)
                sent = True
        assert process.wait(60) == 130, printed[-2000:]
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?25l" in printed, "the cursor was hidden"
    assert printed.rindex(b"\x1b[?25h") > printed.rindex(b"\x1b[?25l"), "and is shown again"
    assert b"Traceback" not in printed


def test_the_predictions_in_a_hole_with_text_after_it_are_those_that_the_tokens_were_drawn_from(tmp_path):
    lm, num = load(infilling_model(tmp_path)), 0
    for frame in lm.watch("ab[MASK*..6]c[MASK*3]d", seed=1, sampler="left-to-right", steps=64):
        drawn = (frame.revealed & (frame.chance < 1))[0].nonzero().flatten().tolist()
        for position in drawn:
            predictions = predict(lm, frame, 0)
            predicted = predictions.denoiser[predictions.positions.index(position), frame.ids[0, position]].exp()
            assert float(predicted) == pytest.approx(float(frame.chance[0, position]), rel=1e-5)
            num += 1
    assert num >= 4


def test_an_animation_has_no_blank_line_at_the_end_of_a_hole(tmp_path):
    lm = load(infilling_model(tmp_path))
    trace = record_trace(lm, lm.watch("a[MASK*]b", seed=3), INFO)
    assert len(trace.left_out) > 1
    assert "\n" not in trace.text
    shown = record_trace(lm, lm.watch(f"{trace.text[:-1]}[MASK]"), INFO)
    heights = [re.search(r'viewBox="[^"]*?([\d.]+)"', as_animation(each))[1] for each in (trace, shown)]
    assert heights[0] == heights[1], "one line of text"
