"""Tests of `adlm sample`: given tokens stay, samples depend only on (seed, row), interrupted files are resumed."""

import io
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from small_models import infilling_model, small_model

import adlm
from adlm.cli.main import main
from adlm.language_model import Run
from adlm.samples_file import read_samples


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Byte-level model folders by method; `text8` has 27 characters and `ids` has no tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for method in ("adlm", "mdlm", "sedd", "d3pm", "ar", "a2r"):
        small_model(folder / method, method)
    small_model(folder / "text8", tokenizer="text8")
    small_model(folder / "ids", tokenizer=None)
    infilling_model(folder)
    return folder


def sampled(capsys, *words):
    """The JSON objects that the command prints."""
    assert main(["sample", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_texts_are_printed_with_a_header_each_if_there_are_several(models, capsys):
    assert main(["sample", str(models / "text8")]) == 0
    first = capsys.readouterr().out
    assert len(first.rstrip("\n")) == 16
    assert main(["sample", str(models / "text8"), "--num", "2"]) == 0
    both = capsys.readouterr().out
    assert both.startswith(f"--- 1 ---\n{first}--- 2 ---\n")


def test_headers_in_a_pipe_with_forced_colours_are_short(models, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["sample", str(models / "text8"), "--num", "2"]) == 0
    assert len(capsys.readouterr().out) < 1000


@pytest.mark.parametrize("method", ["adlm", "mdlm", "sedd", "d3pm", "ar", "a2r"])
def test_every_method_samples_with_and_without_a_prompt(models, capsys, method):
    unconditional, prompted = (sampled(capsys, models / method, *given)[0] for given in ((), ("--prompt", "abc")))
    assert len(unconditional["ids"]) == 16
    assert len(prompted["ids"]) == 15  # bos before the prompt takes one position
    assert prompted["text"].startswith("abc")


def test_given_tokens_stay_at_their_positions(models, capsys):
    row = sampled(capsys, models / "adlm", "--prompt", "abc", "--suffix", "yz", "--length", 9)[0]
    assert row["ids"][:3] == [97, 98, 99]
    assert row["ids"][-2:] == [121, 122]
    assert len(row["ids"]) == 9
    rows = sampled(capsys, models / "text8", "--fill", "a[MASK]c[MASK*2]f", "--fill", "[MASK*4]b", "--num", 2)
    assert [row["canvas"] for row in rows] == [0, 0, 1, 1]
    assert [row["row"] for row in rows] == [0, 1, 2, 3]
    assert all(row["text"][0] + row["text"][2] + row["text"][5:] == "acf" for row in rows[:2])
    assert all(len(row["text"]) == 5 and row["text"][4] == "b" for row in rows[2:])


def test_the_command_and_the_python_call_draw_the_same_samples(models, capsys):
    lm = adlm.load(models / "text8")
    texts = [row["text"] for row in sampled(capsys, models / "text8", "--num", 3, "--seed", 5, "sampling.top_p=0.9")]
    assert texts == lm.sample(3, seed=5, top_p=0.9)
    fills = ["a[MASK*3]", "[MASK]bc"]
    rows = sampled(capsys, models / "text8", "--fill", fills[0], "--fill", fills[1], "--sampler", "confidence")
    assert [row["text"] for row in rows] == lm.fill(fills, sampler="confidence")


def test_special_tokens_are_hidden_in_printed_text_and_included_in_files(models, tmp_path, capsys, monkeypatch):
    words, mark = [models / "adlm", "--num", 60], "<|endoftext|>"
    hidden, shown = sampled(capsys, *words), sampled(capsys, *words, "--special-tokens")
    ended = [row for row in shown if 256 in row["ids"]]
    assert ended
    assert [row["ids"] for row in hidden] == [row["ids"] for row in shown]
    assert not any(mark in row["text"] for row in hidden)
    assert all(row["text"].count(mark) == row["ids"].count(256) for row in ended)
    sampled(capsys, *words, "--out", tmp_path / "samples.jsonl")
    assert [sample.text for sample in read_samples(tmp_path / "samples.jsonl")] == [row["text"] for row in shown]
    for option, found in (([], False), (["--special-tokens"], True)):
        assert main(["sample", *map(str, words), *option]) == 0
        assert (mark in capsys.readouterr().out) == found
    for option, found in (([], False), (["--special-tokens"], True)):
        terminal = as_terminal(monkeypatch)
        assert main(["sample", *map(str, words), *option]) == 0
        assert (mark in terminal.getvalue()) == found


def test_options_and_config_overrides_are_equivalent(models, capsys):
    by_option = sampled(capsys, models / "adlm", "--steps", 3, "--sampler", "remdm-cap")
    assert by_option == sampled(capsys, models / "adlm", "sampling.steps=3", "sampling.sampler=remdm-cap")
    assert by_option == sampled(capsys, models / "adlm", "--steps", 3, "sampling.sampler=remdm-cap")


def test_constrained_holes_are_filled_as_demanded(models, capsys):
    words = ["--fill", "on[MASK*4:day] at[MASK*2:hour]", "--num", 3, "--constrain", r"day=\d\d-\d"]
    for row in sampled(capsys, models / "adlm", *words, "--constrain", 'hour=choices:["12","7h"]'):
        assert re.fullmatch(r"on\d\d-\d at(12|7h)", row["text"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x"], "--constrain 'x' is no constraint; give NAME=PATTERN"),
        (["x=json:{"], "--constrain 'x=json:{' has no valid JSON after json"),
        (["y=regex:a"], "names 'y', and no hole has this name"),
        (["x=regex:aa"], "the constraint of hole x cannot be satisfied with 1 token; it can have 2"),
        (["x=regex:a", "--constrain", "x=regex:b"], "--constrain constrains 'x' twice"),
        (["x=regex:a", "--out", "x.jsonl"], "--constrain cannot be combined with --out"),
    ],
)
def test_a_wrong_constraint_is_one_line(models, capsys, words, sentence):
    assert main(["sample", str(models / "text8"), "--fill", "[MASK*1:x]", "--constrain", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_a_sliding_window_makes_texts_longer_than_the_model(models, capsys):
    words = [models / "adlm", "--prompt", "abc", "--length", 40, "--sampler", "semi-autoregressive"]
    row = sampled(capsys, *words)[0]
    assert len(row["ids"]) == 40
    assert 257 not in row["ids"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["text8", "--fill", "the union"], "'the union' has no masks to fill in; write [MASK]"),
        (["text8", "--fill", "the [MASK*3] and [mask]"], "[mask] is not a hole; write [MASK] for one token"),
        (["adlm", "--fill", "[MASK] [MASK*4 was"], "[MASK*4 is not a hole; write [MASK] for one token"),
        (["adlm", "--prompt", "[MASK*4 was"], "[MASK*4 is not a hole; write [MASK] for one token"),
        (["text8", "--fill", "[MASK*17]"], "the canvas is 17 tokens long and the model was made for length 16"),
        (["text8", "--length", "17"], "the canvas is 17 tokens long and the model was made for length 16"),
        (["text8", "--fill", "Union [MASK]"], "has no id for 'U'"),
        (["text8", "--fill", "a [MASK*0]"], "[MASK*0] has no masks"),
        (["text8", "--fill", "a [MASK*9999999]"], "asks for more than 1,000,000 masks"),
        (["text8", "--fill", "a [MASK]", "--fill", "b"], "'b' has no masks"),
        (["text8", "--fill", "a [MASK]", "--length", "8"], "leave out --length, or --fill"),
        (["text8", "--fill", "a [MASK]", "--prompt", "b"], "leave out --prompt, or --fill"),
        (["text8", "--prompt", "a [MASK]"], "prompt 'a [MASK]' contains a mask"),
        (["text8", "--prompt", "abcd", "--length", "4"], "length 4 leaves no room: prompt and suffix have 4 tokens"),
        (["text8", "--num", "0"], "--num 0 must be at least 1"),
        (["text8", "--batch", "0"], "--batch 0 must be at least 1"),
        (["text8", "--seed", "-1"], "seed -1 must be 0 or more"),
        (["text8", "--steps", "0"], "--steps 0 must be at least 1"),
        (["text8", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["text8", "sampling.top_p=0"], "sampling.top_p 0 must be more than 0"),
        (["text8", "sampling.topp=0.5"], "there is no sampling option 'topp'; did you mean 'top_p'?"),
        (["text8", "--sampler", "remdm-lop"], "did you mean 'remdm-loop'?"),
        (["text8", "--sampler", "remdm-loop", "sampling.eta=0.5"], "sampling.eta 0.5 is above"),
        (["text8", "--sampler", "remdm-cap", "sampling.eta=2"], "sampling.eta 2 must be at most 1"),
        (
            ["text8", "--steps", "3", "sampling.steps=3"],
            "--steps 3 and sampling.steps=3 set the same option; give only one",
        ),
        (["text8", "length=8"], "'length=8' is not a sampling option"),
        (["text8", "hello"], "'hello' is neither a model folder, such as runs/own, nor a sampling option"),
        (["mdlm", "--sampler", "anchor-first"], "anchor-first needs an anchor network, and mdlm has none"),
        (["ar", "--sampler", "remdm-cap"], "remdm-cap does not work with method ar; use ancestral or left-to-right"),
        (["ar", "--suffix", "z"], "gives a token after a mask, and ar writes from left to right"),
        (["d3pm", "--sampler", "dfm"], "does not work with method d3pm; use ancestral"),
        (["ids"], "`adlm import FILE.ckpt --out FOLDER --tokenizer gpt2`, or, in Python, use lm.complete"),
        (["none"], "is neither a model folder nor a .ckpt file: there is nothing of that name; give a run folder"),
        (["adlm/config.yaml"], "config.yaml is neither a model folder nor a .ckpt file; give a run folder"),
        (["adlm", "--prompt", "a", "--length", "99999999999"], "length 99999999999 must be at most 1,000,000"),
        (["text8", "--device", "abacus"], "device 'abacus' is not one that torch sees here"),
    ],
)
def test_a_user_error_is_one_line_and_leaves_no_files(models, tmp_path, capsys, words, sentence):
    assert main(["sample", str(models / words[0]), *words[1:], "--out", str(tmp_path / "samples.jsonl")]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


def test_a_samples_file_records_its_provenance(models, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    words = [models / "text8", "--fill", "a[MASK*3]", "--num", 5, "--seed", 2, "--batch", 2, "--sampler", "remdm-cap"]
    rows = sampled(capsys, *words)
    assert sampled(capsys, *words, "--out", out) == [{"out": str(out), "samples": 5, "drawn": 5}]
    samples = read_samples(out)
    assert [sample.text for sample in samples] == [row["text"] for row in rows]
    made_by = samples.made_by
    assert (made_by.adlm, made_by.method, made_by.tokenizer) == (adlm.__version__, "adlm", "text8")
    assert (made_by.canvases, made_by.num, made_by.seed, made_by.batch) == (["a[MASK*3]"], 5, 2, 2)
    assert (made_by.sampling["sampler"], made_by.sampling["eta"], made_by.sampling["steps"]) == ("remdm-cap", 0.04, 4)
    assert (made_by.device, made_by.dtype, made_by.model) == ("cpu", "float32", str(models / "text8"))


def test_a_truncated_file_is_completed_to_the_same_bytes_and_a_complete_one_is_unchanged(models, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    words = ["sample", str(models / "adlm"), "--num", "7", "--batch", "3", "--out", str(out)]
    assert main(words) == 0
    whole = out.read_bytes()
    ends = [0, len(whole) - 1, len(whole), *random.Random(1).sample(range(len(whole)), 8)]
    for end in ends:
        out.write_bytes(whole[:end])
        assert main(words) == 0
        assert out.read_bytes() == whole
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drawn"] == 0


def test_a_command_with_other_settings_does_not_change_the_file(models, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    words = ["sample", str(models / "adlm"), "--num", "3", "--out", str(out)]
    assert main(words) == 0
    before = out.read_bytes()
    for other, message in (
        (["--seed", "1"], "seed 0 -> 1"),
        (["--batch", "2"], "batch 16 -> 2"),
        (["--prompt", "ab"], "canvases ['[MASK*16]'] -> ['ab[MASK*13]']"),
        (["sampling.temperature=0.5"], "sampling.temperature 1.0 -> 0.5"),
    ):
        capsys.readouterr()
        assert main([*words, *other]) == 2
        assert f"with other settings: {message}; give another --out" in capsys.readouterr().err
    small_model(tmp_path / "other", "mdlm")
    assert main(["sample", str(tmp_path / "other"), "--num", "3", "--out", str(out)]) == 2
    assert "method adlm -> mdlm" in capsys.readouterr().err
    assert out.read_bytes() == before


def _child(words):
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(main(words))


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_run_resumes_to_the_same_bytes(models, tmp_path):
    out, uninterrupted = tmp_path / "killed.jsonl", tmp_path / "uninterrupted.jsonl"
    words = ["sample", str(models / "adlm"), "--num", "60", "--batch", "2", "--steps", "16"]
    context, chance, exits = multiprocessing.get_context("forkserver"), random.Random(0), []
    context.set_forkserver_preload(["adlm.cli.sample", "torch._dynamo"])
    for _ in range(3):
        process = context.Process(target=_child, args=([*words, "--out", str(out)],))
        process.start()
        size = out.stat().st_size if out.exists() else 0
        while process.is_alive() and not (out.exists() and out.stat().st_size > size):
            time.sleep(0.001)
        process.join(chance.uniform(0, 0.2))
        process.kill()
        process.join()
        exits.append(process.exitcode)
    assert exits[0] == -signal.SIGKILL
    assert main([*words, "--out", str(out)]) == 0
    assert main([*words, "--out", str(uninterrupted)]) == 0
    assert out.read_bytes() == uninterrupted.read_bytes()


def test_every_batch_is_written_before_the_next_one_starts(models, tmp_path, monkeypatch):
    out, seen, frames = tmp_path / "samples.jsonl", [], Run.frames

    def recorded(batch):
        start = batch.rng.rows[0]
        seen.append((start, len(list(read_samples(out))) if start else 0))
        return frames(batch)

    monkeypatch.setattr(Run, "frames", recorded)
    assert main(["sample", str(models / "adlm"), "--num", "7", "--batch", "3", "--out", str(out)]) == 0
    assert seen == [(0, 0), (3, 3), (6, 6)]


def test_a_device_out_of_memory_names_the_batch(models, tmp_path, capsys, monkeypatch):
    def out_of_memory(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    words = ["sample", str(models / "adlm"), "--num", "9", "--batch", "8", "--out", str(tmp_path / "samples.jsonl")]
    monkeypatch.setattr(Run, "frames", out_of_memory)
    assert main(words) == 2
    assert "--batch 8 of 16 tokens does not fit the memory of the device; try --batch 4" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def as_terminal(monkeypatch):
    """Replace standard output by a terminal; not a fixture, because pytest resets it when the test begins."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    return screen


def test_on_a_terminal_the_prompt_is_dim_and_control_characters_are_escaped(models, monkeypatch):
    terminal = as_terminal(monkeypatch)
    assert main(["sample", str(models / "adlm"), "--num", "4", "--prompt", "\x1b[2J\x07ü"]) == 0
    shown = terminal.getvalue()
    assert "\x1b[2mü\x1b[0m" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert shown.count("───") >= 4


def test_watch_shows_the_first_sample_and_prints_the_others(models, monkeypatch):
    terminal = as_terminal(monkeypatch)
    lm = adlm.load(models / "text8")
    assert main(["sample", str(models / "text8"), "--num", "3", "--watch"]) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    first, *others = lm.sample(3)
    assert "░" in plain
    assert plain.index("░") < plain.index(first) < plain.index(others[0]) < plain.index(others[1])
    assert [plain.count(text) for text in others] == [1, 1]
    assert first not in plain[plain.index(others[0]) :]  # not shown again with the others


def test_watch_has_no_effect_without_a_terminal(models, capsys):
    assert main(["sample", str(models / "text8"), "--num", "2"]) == 0
    plain = capsys.readouterr().out
    assert main(["sample", str(models / "text8"), "--num", "2", "--watch"]) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_the_trace_is_of_the_first_sample(models, tmp_path, capsys, method):
    words = [models / method, "--fill", "ab[MASK*9]", "--fill", "c[MASK*2]", "--num", 2]
    rows = sampled(capsys, *words, "--trace", tmp_path / "trace.json", "--out", tmp_path / "samples.jsonl")
    assert rows == [{"out": str(tmp_path / "samples.jsonl"), "samples": 4, "drawn": 4}]
    first = next(iter(read_samples(tmp_path / "samples.jsonl")))
    trace = json.loads((tmp_path / "trace.json").read_text())
    ids = list(trace["canvas"])
    for step in trace["steps"]:
        for position, index, _ in step["changed"]:
            ids[position] = index
    assert ids == [256, *first.ids]  # the prompt follows bos
    capsys.readouterr()
    assert main(["sample", *map(str, words), "--trace", str(tmp_path / "trace.html")]) == 0
    assert (tmp_path / "trace.html").read_text().startswith("<!")
    assert f"wrote the trace to {tmp_path / 'trace.html'}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trace", "trace.txt"], "trace trace.txt must end in .json"),
        (["--trace", "nowhere/trace.html"], "there is no folder"),
        (["--trace", "trace.html", "--length", "40", "--sampler", "semi-autoregressive"], "on all 40 tokens"),
        (["--watch", "--json"], "--watch cannot be combined with --json"),
    ],
)
def test_trace_and_watch_options_are_checked_before_sampling(models, tmp_path, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", str(models / "text8"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_option_is_refused_before_torch_is_imported(models):
    wrong = [
        ["sampling.topp=0.5"],
        ["sampling.top_p=2"],
        ["--sampler", "remdm-lop"],
        ["--steps", "0"],
        ["--num", "0"],
        ["--seed", "-1"],
        ["--length", "0"],
        ["--fill", "a [MASK*4 was"],
        ["--fill", "no hole"],
        ["--prompt", "[MASK]"],
        ["--trace", "trace.txt"],
        ["--watch", "--json"],
        [str(models / "nothing")],
        [str(models / "adlm"), "--sampler", "remdm-loop", "sampling.eta=0.5"],
    ]
    script = f"""
import sys
from adlm.cli.main import main
for words in {wrong!r}:
    assert main(["sample", *words]) == 2, words
    assert "torch" not in sys.modules, words
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("\n") == len(wrong), process.stderr


def test_sampling_imports_neither_training_nor_pytorchs_compiler(models):
    heavy = ["torch._dynamo", "torch.distributed.tensor", "scipy", "sympy", "transformers", "datasets", "adlm.training"]
    script = f"""
import sys
from adlm.cli.main import main
for words in (["box", "--length", "8"], [{str(models / "ar")!r}, "--out", {str(models / "ar.jsonl")!r}]):
    assert main(["sample", *words, "--steps", "2", "--device", "cpu"]) == 0
sys.exit(",".join({{*{heavy!r}}} & {{*sys.modules}}) or 0)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_holes_of_unknown_length_are_printed_and_written_without_their_end(models, capsys, tmp_path, monkeypatch):
    words = ["--fill", "(A[MASK*]B[MASK*..3]C)", "--num", "6"]
    samples = sampled(capsys, models / "infilling", *words)
    assert len({len(sample["ids"]) for sample in samples}) > 2
    tokenizer = adlm.load(models / "infilling").tokenizer
    for sample in samples:
        assert re.fullmatch(r"\(A.{,16}B.{,3}C\)", sample["text"])
        assert tokenizer.decode(sample["ids"]) == sample["text"]
    assert main(["sample", str(models / "infilling"), *words, "--out", str(tmp_path / "samples.jsonl")]) == 0
    assert [sample.text for sample in read_samples(tmp_path / "samples.jsonl")] == [each["text"] for each in samples]
    capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["sample", str(models / "infilling"), *words]) == 0
    shown = capsys.readouterr().out
    given = [f"\x1b[2m{letter}\x1b[0m" for letter in "(AC)"]
    assert "".join([*given[:2], samples[0]["text"][2:-2], *given[2:]]) in shown, "the given text is dim"


@pytest.mark.parametrize("words", [["--watch"], ["--trace", "trace.json"]])
def test_the_end_of_a_hole_is_neither_in_the_view_nor_in_the_trace(models, capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    options = ["--fill", "(A[MASK*]B)", "--seed", "3"]
    [sample] = sampled(capsys, models / "infilling", *options)
    assert len(sample["ids"]) < 16, "eos was drawn"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["sample", str(models / "infilling"), *options, *words]) == 0
    printed = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", capsys.readouterr().out)
    assert sample["text"] in printed
    if words[0] == "--trace":
        trace = json.loads((tmp_path / "trace.json").read_text())
        assert (trace["text"], trace["open"]) == (sample["text"], list(range(3, 19)))


def test_prompt_and_suffix_without_a_length_are_a_hole_of_unknown_length(models, capsys):
    given = ["--prompt", "(A", "--suffix", "B)", "--num", "4"]
    samples = sampled(capsys, models / "infilling", *given)
    assert samples == sampled(capsys, models / "infilling", "--fill", "(A[MASK*]B)", "--num", "4")
    assert {len(sample["ids"]) for sample in sampled(capsys, models / "infilling", *given, "--length", "9")} == {9}


def test_holes_of_unknown_length_need_a_model_trained_for_them(models, capsys):
    assert main(["sample", str(models / "adlm"), "--fill", "a[MASK*..4]b"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "[MASK*..4] is a hole of unknown length" in message
    assert "give its length, such as [MASK*12]" in message
