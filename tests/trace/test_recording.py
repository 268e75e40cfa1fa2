"""Laws of traces and of watching: deltas replay the walk, its text is its ids', and no token breaks out of the page."""

import io
import json
import os
import pty
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
from sampling_runs import TEXT, Knowing, lighthouse, walk
from worlds import wake

from adlm.config.schema import Config, Model, Sampling, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.methods import method_of
from adlm.sampling.frame import first_frame
from adlm.sampling.rng import RowRng
from adlm.tokens import load_tokenizer, train_bpe
from adlm.trace.moments import OTHERS
from adlm.trace.page import as_page, write_trace
from adlm.trace.predictions import GUESSES
from adlm.trace.recording import Trace, TraceInfo, TraceRecorder, record_trace
from adlm.trace.terminal import TerminalView, show_in_terminal
from adlm.trace.token_text import decode_side_by_side, text_of, tokens_bytes

ABOUT = TraceInfo("a model", "remdm-cap", 30, 0)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "</script x",
    "<!--<script ",
    "@@TRACE@@",
    "\u2028&lt;",
    "\x1b[31m\u202e",
)


def replayed(plain: dict) -> list[list[int]]:
    """The ids at every moment, as a program would find them that knows only the JSON."""
    ids, states = list(plain["canvas"]), []
    for moment in plain["moments"]:
        for place, index, _ in moment["changed"]:
            ids[place] = index
        states.append(list(ids))
    return states


def small(ids: list[int] | None = None, **knobs) -> Knowing:
    """Twelve words, the last the mask, and no tokenizer."""
    return Knowing(ids or [3, 1, 4, 1, 5, 9, 2, 6], mask_id=11, size=12, **knobs)


def masks(lm: Knowing, rows: int = 1) -> torch.Tensor:
    return torch.full((rows, len(lm.x)), lm.mask_id)


def test_deltas_replay_to_every_frame_that_changed_something():
    lm, canvas = lighthouse()
    frames = list(walk(lm, canvas, 30, remasking=0.05))
    plain = record_trace(lm, frames, ABOUT).plain()
    states = replayed(json.loads(json.dumps(plain)))
    for moment, ids in zip(plain["moments"], states, strict=True):
        frame = frames[moment["frame"]]
        assert ids == frame.ids[0].tolist()
        assert moment["revealed"] == frame.revealed[0].nonzero().flatten().tolist()
        assert moment["remasked"] == frame.remasked[0].nonzero().flatten().tolist()
        for place, index, chance in moment["changed"]:
            assert chance == pytest.approx(float(frame.chance[0, place]), rel=0.01)
            assert (chance == 0) == (index == lm.mask_id)
    assert states[-1] == frames[-1].ids[0].tolist()
    assert any(moment["remasked"] for moment in plain["moments"])
    assert plain["given"] == (canvas[0] != lm.mask_id).nonzero().flatten().tolist()


def test_the_text_of_every_moment_is_the_decode_of_its_ids():
    lm, canvas = lighthouse()
    trace = record_trace(lm, walk(lm, canvas, 30), ABOUT)
    for ids in trace.states():
        joined = b"".join(trace.pieces[index] for index in ids)
        assert joined.decode(errors="replace") == lm.tokenizer.decode(ids)
    plain = trace.plain()
    assert plain["text"] == lm.tokenizer.decode(trace.last)
    whole = {index: text for index, text in plain["tokens"].items() if index not in plain["bytes"]}
    assert whole
    for index, text in whole.items():
        assert text.encode() == lm.tokenizer.piece(int(index))


@pytest.mark.parametrize("text", ["naïve café — “quoted” 北京 🙂", "plain words\n\tand space  "])
def test_pieces_of_byte_tokenizers_join_to_their_text(text):
    for tokenizer in (load_tokenizer("bytes"), train_bpe([TEXT], 400)):
        ids = tokenizer.encode(text)
        pieces = [tokenizer.piece(index) for index in ids]
        assert b"".join(pieces).decode() == text
        assert "".join(decode_side_by_side(pieces)) == text


def test_pieces_of_word_tokenizers_join_to_their_decode(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "day", "##s"]))
    for name, text in ((str(tmp_path / "vocab.txt"), "good days good"), ("text8", "good days")):
        tokenizer = load_tokenizer(name)
        ids = [*tokenizer.encode(text), tokenizer.vocabulary.mask_id]
        assert b"".join(map(tokenizer.piece, ids)).decode().lstrip() == tokenizer.decode(ids)


def test_a_character_cut_by_a_mask_is_shown_as_its_bytes():
    first, rest = "é".encode()[:1], "é".encode()[1:]
    assert decode_side_by_side([b"caf", first, rest, b"!"]) == ["caf", "é", "", "!"]
    assert decode_side_by_side([b"caf", first, None, b"!"]) == ["caf", "\\xc3", "", "!"]


def of_two_documents() -> tuple[Knowing, list[int]]:
    """A model that knows [eos] one [eos] [eos] two [eos]."""
    tokenizer = train_bpe([TEXT], 400)
    end = tokenizer.vocabulary.eos_id
    ids = [end, *tokenizer.encode("The old"), end, end, *tokenizer.encode(" keeper—"), end]
    return Knowing(ids, tokenizer.vocabulary.mask_id, tokenizer.vocabulary.size, tokenizer), ids


@pytest.mark.parametrize("special_tokens", [False, True])
def test_a_walk_is_shown_with_special_tokens_only_if_asked_for(special_tokens):
    lm, ids = of_two_documents()
    told = lm.tokenizer.decode(ids, special_tokens)
    assert told == ("<|endoftext|>The old<|endoftext|><|endoftext|> keeper—<|endoftext|>" if special_tokens
                    else "The old\n\n keeper—")  # fmt: skip
    assert b"".join(tokens_bytes(lm.tokenizer, ids, special_tokens)).decode() == told
    frames = [first_frame(torch.tensor([ids]), lm.mask_id)]
    console, screen = Console(file=io.StringIO()), TerminalView(lm, 0, special_tokens=special_tokens)
    list(show_in_terminal(lm, frames, console, special_tokens=special_tokens))
    assert console.file.getvalue() == told + "\n"
    screen.see(frames[0])
    assert screen.text().plain == told
    recording = TraceRecorder(lm, ABOUT, special_tokens=special_tokens)
    list(recording.through(frames))
    plain = recording.trace.plain()
    assert (plain["text"], plain["hidden"]) == (told, [] if special_tokens else [ids[0]])


def test_predictions_are_those_of_what_was_read():
    lm, canvas = lighthouse()
    frames = list(walk(lm, canvas, 30, remasking=0.05))
    for moment in record_trace(lm, frames, ABOUT).moments[1:]:
        before = frames[moment.frame].read
        expected = {"denoiser": lm.log_probs(before)[0].exp(), "anchor": lm.anchor_logits(before)[0].softmax(-1)}
        for name, beliefs in expected.items():
            table = getattr(moment, name)
            assert set(moment.revealed) <= set(table)
            for place, guesses in table.items():
                assert before[0, place] == lm.mask_id
                assert len(guesses) == GUESSES
                for index, probability in guesses:
                    assert probability == pytest.approx(float(beliefs[place, index]), rel=0.01)
                assert guesses[0][0] == int(beliefs[place].argmax())


def test_an_anchor_is_what_the_anchor_network_said_first_and_kept_saying():
    lm, canvas = lighthouse()
    frames = list(walk(lm, canvas, 30, remasking=0.03))
    best = [lm.anchor_logits(frame.read)[0].argmax(-1) for frame in frames[1:]]
    seen = 0
    anew = 0
    for moment in record_trace(lm, frames, ABOUT).moments[1:]:
        frame, said = frames[moment.frame], best[moment.frame - 1]
        assert {place for place in moment.revealed if said[place] == frame.ids[0, place]} == set(moment.anchored)
        for place, since in moment.anchored.items():
            if place in moment.remasked:  # within one frame there is no time to be early
                assert since == moment.frame - 1
                anew += 1
                continue
            drawn = frame.ids[0, place]
            assert all(best[number][place] == drawn for number in range(since, moment.frame))
            earlier = since - 1
            assert since == 0 or frames[earlier].ids[0, place] != lm.mask_id or best[earlier][place] != drawn
            seen += since < moment.frame - 1
    assert anew > 0
    assert seen > 10


def test_a_long_walk_is_thinned_and_nothing_that_was_drawn_is_lost():
    lm = small([1 + place % 9 for place in range(100)])
    frames = list(walk(lm, masks(lm), 60, remasking=0.1))
    whole, thin = record_trace(lm, frames, ABOUT), TraceRecorder(lm, ABOUT, limit=10)
    for _ in thin.through(frames):
        pass
    assert len(whole.moments) > 50
    assert len(thin.trace.moments) <= 11
    assert len({moment.changes for moment in thin.trace.moments[1:-1]}) == 1
    at = {moment.frame: ids for moment, ids in zip(whole.moments, whole.states(), strict=True)}
    start = 0
    for moment, ids in zip(thin.trace.moments, thin.trace.states(), strict=True):
        assert ids == at[moment.frame]
        part = [each for each in whole.moments if start < each.frame <= moment.frame]
        assert set(moment.revealed) == {place for each in part for place in each.revealed}
        assert set(moment.remasked) == {place for each in part for place in each.remasked}
        for place in moment.revealed:
            drawn = [each for each in part if place in each.revealed][-1]
            assert moment.denoiser[place] == drawn.denoiser[place], "what it was drawn from"
            assert moment.anchored.get(place) == drawn.anchored.get(place)
        assert len(moment.denoiser) <= OTHERS + len(moment.revealed)
        start = moment.frame


def test_frames_that_leave_the_row_alone_make_no_moment():
    lm = small()
    frames = [replace(frame, t=frame.t) for frame in walk(lm, masks(lm), 40)]
    trace = record_trace(lm, frames, ABOUT)
    assert trace.frames == 41
    assert len(trace.moments) == 1 + sum(bool(frame.revealed.any()) for frame in frames) < 41


def test_each_row_has_a_trace_of_its_own():
    lm = small()
    frames = list(walk(lm, masks(lm, rows=3), 12))
    for row in range(3):
        assert record_trace(lm, frames, ABOUT, row).last == frames[-1].ids[row].tolist()


@pytest.mark.parametrize("anchors", [True, False])
def test_a_model_without_tokenizer_or_anchors_is_traced(anchors, tmp_path):
    lm = small(anchors=anchors)
    trace = record_trace(lm, walk(lm, masks(lm), 12), ABOUT)
    plain = trace.plain()
    assert plain["model"]["anchor_network"] == anchors
    assert any(moment["anchor"] for moment in plain["moments"]) == anchors
    assert plain["text"] == " ".join(map(str, trace.last))
    assert plain["tokens"]["3"] == " 3"
    write_trace(trace, tmp_path / "trace.html")
    write_trace(trace, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(plain))


@pytest.mark.parametrize("method", ["adlm", "mdlm", "sedd", "d3pm", "ar", "a2r"])
def test_every_method_is_traced_with_what_it_drew_from(method):
    model = Model(hidden=16, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0)
    config = Config(method=method, vocabulary=Vocabulary(size=12, mask_id=11, bos_id=0), length=8, model=model)
    if method == "sedd":  # it is told the noise, which must be finite
        config = replace(config, schedule=replace(config.schedule, eps=1e-3))
    if method == "d3pm":  # a method of discrete steps
        config = replace(config, time=replace(config.time, steps=1000))
    maker = method_of(config)
    lm = LanguageModel(config, maker, wake(maker.build()))
    frames = list(maker.generate(lm.network, torch.full((1, 8), 11), config.sampling, RowRng(0, range(1))))
    trace = record_trace(lm, frames, ABOUT)
    assert trace.last == frames[-1].ids[0].tolist()
    for moment in trace.moments[1:]:
        assert set(moment.revealed) <= set(moment.denoiser)
        assert bool(moment.anchor) == (method in ("adlm", "a2r"))
        if method in ("ar", "a2r"):
            (place,) = moment.revealed
            beliefs = lm.log_probs(frames[-1].ids[:, :place])[0, -1].exp()
            for index, probability in moment.denoiser[place]:
                assert probability == pytest.approx(float(beliefs[index]), rel=0.01)


TOLD = [
    *[("adlm", sampler) for sampler in ("ancestral", "remdm-cap", "remdm-conf", "remdm-loop", "dfm", "anchor-first")],
    ("mdlm", "remdm-rescale"),
    ("mdlm", "semi-autoregressive"),
    ("sedd", "ancestral"),
    ("sedd", "analytic"),
    ("d3pm", "ancestral"),
]


@pytest.mark.parametrize(("method", "sampler"), TOLD)
def test_a_network_told_the_noise_is_traced_with_the_beliefs_that_it_drew_from(method, sampler):
    """So the chance that a token had where it was drawn is the one that the trace tells of it."""
    model = Model(hidden=16, heads=2, blocks=1, denoiser_blocks=1, condition=8, dropout=0.0, time_conditioning=True)
    config = Config(
        method=method,
        vocabulary=Vocabulary(size=GUESSES, mask_id=4, bos_id=0),
        length=12,
        model=model,
        schedule=Schedule(eps=1e-3),
        time=Time(steps=1000 if method == "d3pm" else 0),
        sampling=Sampling(sampler, steps=40, t_end=0.1, eta=0.5 if sampler in ("remdm-cap", "remdm-rescale") else None),
    )
    lm = LanguageModel(config, method_of(config), wake(method_of(config).build().double()))
    frames = list(lm.watch(torch.full((2, 12), 4), seed=1))
    seen, again = 0, 0
    for moment in record_trace(lm, frames, ABOUT, row=1).moments[1:]:
        frame = frames[moment.frame]
        for place in moment.revealed:
            told, (index, chance) = dict(moment.denoiser[place]), moment.changed[place]
            clean = sum(probability for symbol, probability in told.items() if symbol != lm.mask_id)
            assert chance == pytest.approx(told[index] / clean, abs=0.003)
            seen += 1
        again += len(moment.remasked)
        if method == "adlm":
            anchor = lm.anchor_logits(frame.read, frame.alpha)[1].softmax(-1)
            for place, guesses in moment.anchor.items():
                assert dict(guesses)[0] == pytest.approx(float(anchor[place, 0]), abs=0.003)
    assert seen >= 12
    assert (again > 0) == (sampler in ("remdm-cap", "remdm-conf", "remdm-loop", "remdm-rescale", "dfm"))


class Elements(HTMLParser):
    """What a reader of HTML finds, and the data of the block that holds the trace."""

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
    """A walk over tokens, and of a model, whose every name means ill."""
    tokenizer = train_bpe([TEXT], 400)
    tokenizer.engine.add_tokens(list(HOSTILE))
    ids = [tokenizer.engine.token_to_id(token) for token in HOSTILE] * 2
    lm = Knowing(ids, tokenizer.vocabulary.mask_id, max(ids) + 1)
    vocabulary = replace(tokenizer.vocabulary, size=max(ids) + 1)
    lm.tokenizer = replace(tokenizer, vocabulary=vocabulary)
    return record_trace(lm, walk(lm, masks(lm), 10), replace(ABOUT, name=HOSTILE[0], sampler=HOSTILE[1]))


def test_no_token_and_no_name_breaks_out_of_the_page():
    trace, (lm, canvas) = hostile_trace(), lighthouse()
    spoken = "".join(trace.plain()["tokens"].values())
    assert all(token in spoken for token in HOSTILE)
    read, harmless = Elements(), Elements()
    read.feed(as_page(trace))
    harmless.feed(as_page(record_trace(lm, walk(lm, canvas, 3), ABOUT)))
    assert read.tags == harmless.tags
    assert "<" not in read.trace, "browsers end a script where this reader of HTML does not"
    assert json.loads(read.trace) == json.loads(json.dumps(trace.plain()))


def test_the_page_needs_nothing_else():
    page = as_page(record_trace(small(), walk(small(), masks(small()), 5), ABOUT))
    assert "default-src 'none'" in page
    assert "@@" not in page
    for reach in ("http:", "https:", "src=", "@import", "url(", "fetch(", "innerHTML", "eval("):
        assert reach not in page, reach


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("walk.htm", "must end in .json (data) or .html"),
        ("walk", "must end in"),
        ("no/walk.json", "there is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_told(name, sentence, tmp_path):
    trace = record_trace(small(), walk(small(), masks(small()), 5), ABOUT)
    with pytest.raises(UserError) as told:
        write_trace(trace, tmp_path / name)
    assert sentence in str(told.value)
    assert not list(tmp_path.iterdir())


def test_a_walk_that_never_began_has_no_trace():
    with pytest.raises(UserError, match="no frame has passed"):
        _ = TraceRecorder(small(), ABOUT).trace


def terminal(**knobs) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60, **knobs)


def test_watching_and_tracing_pass_every_frame_on():
    lm, canvas = lighthouse()
    frames = list(walk(lm, canvas, 20))
    for console in (terminal(height=30), Console(file=io.StringIO())):
        recording = TraceRecorder(lm, ABOUT)
        passed = list(show_in_terminal(lm, recording.through(frames), console))
        assert all(one is other for one, other in zip(passed, frames, strict=True))
        assert recording.trace.last == frames[-1].ids[0].tolist()


def test_a_pipe_gets_the_final_text_alone():
    for lm, canvas in (lighthouse(), (small(), masks(small()))):
        console = Console(file=io.StringIO())
        *_, last = show_in_terminal(lm, walk(lm, canvas, 20), console)
        assert console.file.getvalue() == text_of(lm.tokenizer, last.ids[0].tolist()) + "\n"


def test_what_is_only_read_is_not_shown():
    lm, canvas = lighthouse()
    console = Console(file=io.StringIO())
    *_, last = show_in_terminal(lm, walk(lm, canvas, 20), console, start=3)
    assert console.file.getvalue() == text_of(lm.tokenizer, last.ids[0, 3:].tolist()) + "\n"
    whole, screen = TerminalView(lm, 0), TerminalView(lm, 0, start=3)
    for each in (whole, screen):
        each.see(last)
    before = text_of(lm.tokenizer, last.ids[0, :3].tolist())
    assert whole.text().plain == before + screen.text().plain


def test_a_terminal_keeps_the_whole_text_however_low_it_is():
    lm, canvas = lighthouse()
    console = terminal(height=8, color_system=None)
    *_, last = show_in_terminal(lm, walk(lm, canvas, 20), console)
    told = console.file.getvalue()
    rest = told[told.rindex("\x1b[2K") + 4 :]
    assert "".join(rest.split()).startswith("".join(lm.tokenizer.decode(last.ids[0].tolist()).split()))
    assert "t 0.000  frame 20  0% masked" in rest
    assert "more lines" in told


def test_colours_tell_what_became_of_a_token():
    lm, canvas = lighthouse()
    screen, seen = TerminalView(lm, 0), set()
    for frame in walk(lm, canvas, 20, remasking=0.1):
        screen.see(frame)
        for span in screen.text().spans:
            seen.add(str(span.style).strip())
    assert {"", "bright_black", "cyan", "bold yellow", "cyan reverse", "bold yellow reverse", "magenta"} >= seen
    assert {"bright_black", "cyan", "bold yellow", "magenta"} <= seen


def test_tokens_do_not_steer_the_terminal():
    trace, console = hostile_trace(), terminal(height=30, color_system=None)
    lm = Knowing(trace.last, trace.mask_id, max(trace.last) + 1)
    lm.tokenizer = trace.tokenizer
    list(show_in_terminal(lm, walk(lm, masks(lm), 5), console))
    told = console.file.getvalue()
    assert "\x1b[31m" not in told
    assert "\u202e" not in told
    assert "\\x1b[31m\\u202e" in told


INTERRUPTED = """
import sys, time
sys.path[:0] = {path!r}
from rich.console import Console
from sampling_runs import lighthouse, walk
from adlm.trace.terminal import show
lm, canvas = lighthouse()
def slowly(frames):
    for frame in frames:
        time.sleep(0.05)
        yield frame
try:
    for frame in show(lm, slowly(walk(lm, canvas, 1000)), Console()):
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.processes
def test_an_interrupt_gives_the_terminal_back():
    ours, theirs = pty.openpty()
    script = INTERRUPTED.format(path=[str(Path(__file__).parent.parent)])
    process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    told, deadline, sent = b"", time.monotonic() + 120, False
    try:
        while time.monotonic() < deadline:
            try:
                told += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not sent and told.count(b"\xe2\x96\x91") > 1000:
                process.send_signal(signal.SIGINT)
                sent = True
        assert process.wait(10) == 130, told[-2000:]
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?25l" in told, "the cursor was hidden"
    assert told.rindex(b"\x1b[?25h") > told.rindex(b"\x1b[?25l"), "and is there again"
    assert b"Traceback" not in told
