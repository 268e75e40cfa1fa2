"""Properties of all commands: no foreign file is replaced, no text controls the terminal, no traceback is printed."""

import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from small_models import mostly_slow, small_model

from adlm.cli import console
from adlm.cli.main import main
from adlm.cli.streams import write_error
from adlm.distributed import process_group
from adlm.files import written_by_adlm

EVIL = "\x1b]0;evil\x07[/red]"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A diffusion model, an autoregressive model, a text, samples, a card and perplexity results."""
    folder = tmp_path_factory.mktemp("made")
    small_model(folder / "model")
    small_model(folder / "ar", "ar")
    (folder / "text.txt").write_text("law and order, day and night\n" * 20)
    words = ["sample", folder / "model", "--num", 20, "--steps", 2, "--out", folder / "samples.jsonl"]
    assert main([*map(str, words)]) == 0
    metrics = ["--metrics", "perplexity,entropy", "--model", folder / "ar"]
    assert main([*map(str, ["judge", folder / "samples.jsonl", *metrics, "--out", folder / "card.json"])]) == 0
    words = ["perplexity", folder / "ar", "--data", folder / "text.txt", "--out", folder / "figures.json"]
    assert main([*map(str, words)]) == 0
    return folder


@pytest.fixture
def here(made, monkeypatch, capsys):
    monkeypatch.chdir(made)
    capsys.readouterr()
    return made


def refused(capsys, words, sentence):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


PERPLEXITY = ["perplexity", "ar", "--data", "text.txt", "--max-tokens", "64"]
JUDGE = ["judge", "samples.jsonl", "--metrics", "entropy"]
WRITERS = {
    "perplexity": ([*PERPLEXITY, "--out"], ".json", "text.txt"),
    "judge": ([*JUDGE, "--out"], ".json", "samples.jsonl"),
    "judge --plot": (["judge", "--plot", "card.json", "--out"], ".png", None),
    "reproduce": (["reproduce", "generation", "card.json", "--row", "adlm-1024", "--out"], ".json", "card.json"),
    "reproduce --plot": (["reproduce", "owt-ppl", "--plot"], ".svg", None),
    "sample --trace .html": (["sample", "model", "--steps", "2", "--trace"], ".html", None),
    "sample --trace .json": (["sample", "model", "--steps", "2", "--trace"], ".json", None),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_command_replaces_what_adlm_wrote_and_nothing_else_without_force(name, here, tmp_path, capsys):
    words, suffix, read = WRITERS[name]
    if suffix in (".png", ".svg"):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out, foreign = tmp_path / f"out{suffix}", tmp_path / f"foreign{suffix}"
    foreign.write_text("mine")
    for _ in range(2):
        assert main([*words, str(out)]) == 0
    assert written_by_adlm(out)
    capsys.readouterr()
    refused(capsys, [*words, str(foreign)], "exists and was not written by adlm; give another path, or add --force")
    assert foreign.read_text() == "mine"
    assert main([*words, str(foreign), "--force"]) == 0
    assert written_by_adlm(foreign)
    capsys.readouterr()
    if read is not None:
        before = (here / read).read_bytes()
        for force in ([], ["--force"]):
            refused(capsys, [*words, read, *force], f"{read} is what this command reads; give another path")
        assert (here / read).read_bytes() == before
    refused(capsys, [*words, str(tmp_path / ("n" * 300 + suffix))], "File name too long")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    refused(capsys, [*words, str(tmp_path / f"pipe{suffix}")], "is not a regular file")


def test_sample_resumes_its_own_file_and_replaces_another_one_only_with_force(here, tmp_path, capsys):
    words, out = ["sample", "model", "--steps", "2", "--out"], tmp_path / "samples.jsonl"
    out.write_text("mine\n")
    refused(capsys, [*words, str(out)], "exists and is not a samples file; give another --out, or add --force")
    assert out.read_text() == "mine\n"
    assert main([*words, str(out), "--force"]) == 0
    assert main([*words, str(out), "--seed", "1", "--force"]) == 0
    assert json.loads(out.read_text().splitlines()[1])["seed"] == 1
    capsys.readouterr()
    before = (here / "model" / "config.yaml").read_bytes()
    refused(capsys, [*words, "model/config.yaml", "--force"], "is what this command reads")
    assert (here / "model" / "config.yaml").read_bytes() == before
    refused(capsys, ["reproduce", "owt-ppl", "--out", "same.svg", "--plot", "same.svg"], "--out and --plot are both")


def with_entry(source, place, value):
    content = copy.deepcopy(json.loads(source.read_text()))
    owner = content
    for name in place[:-1]:
        owner = owner[name]
    owner[place[-1]] = value
    return json.dumps(content)


MADE_BY = ("samples", "made_by")


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        *(("card.json", (*MADE_BY, name), value) for name, value in (("model", ["x"]), ("method", {"a": 1}))),
        *(("card.json", (*MADE_BY, "sampling", "steps"), value) for value in ([1], "x", None)),
        *(("card.json", ("entropy", "value"), value) for value in (10**400, "1", [1])),
        ("card.json", ("perplexity", "label"), [1]),
        *(("figures.json", ("figures", 0, "model"), value) for value in (["x"], {"a": 1}, 5)),
        *(("figures.json", ("figures", 0, "perplexity"), value) for value in (10**400, "x", [1])),
        *(("figures.json", ("figures", 0, name), [1]) for name in ("method", "notes", "about", "estimator")),
        ("figures.json", ("figures", 0, "about"), {"tokens_trained": "x", "parameters": [1]}),
    ],
)
def test_results_with_odd_types_are_a_user_error(file, place, value, here, tmp_path, capsys):
    odd = tmp_path / file
    odd.write_text(with_entry(here / file, place, value))
    table = "generation" if file == "card.json" else "owt-ppl"
    commands = [["reproduce", table, str(odd), "--row", "adlm-262B" if table == "owt-ppl" else "adlm-1024"]]
    if file == "card.json":
        commands.append(["judge", "--plot", str(odd), "--out", str(tmp_path / "new.png")])
    codes = [main(words) for words in commands]
    error = capsys.readouterr().err
    assert 2 in codes
    assert set(codes) <= {0, 2}
    assert error.count("\n") == codes.count(2)


DEEP = "[" * 100_000 + "]" * 100_000


def test_too_deeply_nested_json_is_a_user_error_in_every_input_file(here, tmp_path, capsys):
    (tmp_path / "deep.json").write_text(DEEP)
    header = (here / "samples.jsonl").read_text().splitlines()[0]
    (tmp_path / "first.jsonl").write_text(f"{DEEP}\n")
    (tmp_path / "second.jsonl").write_text(f"{header}\n{DEEP}\n")
    (tmp_path / "golden.json").write_text(DEEP)
    for words in (
        ["judge", "--plot", f"{tmp_path}/deep.json", "--out", f"{tmp_path}/p.png"],
        ["judge", f"{tmp_path}/first.jsonl", "--metrics", "entropy"],
        ["judge", f"{tmp_path}/second.jsonl", "--metrics", "entropy"],
        [*JUDGE, "--reference", f"{tmp_path}/second.jsonl"],
        ["reproduce", "generation", f"{tmp_path}/deep.json"],
        ["parity", str(tmp_path)],
        ["sample", "model", "--out", f"{tmp_path}/first.jsonl"],
    ):
        refused(capsys, words, str(tmp_path))


def test_results_of_damaged_journal_lines_are_measured_again(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adlm.likelihood.measurement.TOKENS_A_GROUP", 64)
    out = tmp_path / "figures.json"
    words = ["perplexity", "model", "--data", "text.txt", "--samples", "2", "--out", str(out)]
    assert main(words) == 0
    whole = out.read_bytes()
    out.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("adlm.likelihood.measurement.nats_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(words) == 130
    [journal] = tmp_path.iterdir()
    kept = [json.loads(line) for line in journal.read_text().splitlines() if line]
    odd = [{"group": "0"}, {"nats": [["x", 1.0]]}, {"nats": [[1.0]]}, {"tokens": "many"}, {"documents": [10**30]}]
    odd += [{"group": 10**6}, {"nats": [[float("nan"), 1.0]]}]
    journal.write_text("\n".join([DEEP, *(json.dumps(kept[0] | each) for each in odd), json.dumps(kept[1])]))
    assert main(words) == 0
    assert out.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("option", ["sample", "judge", "--plot", "reproduce", "--reference", "--given-features"])
def test_a_pipe_instead_of_a_file_is_a_user_error(option, here, tmp_path, capsys):
    pipe = str(tmp_path / "pipe.json")
    os.mkfifo(pipe)
    words = {
        "sample": ["sample", pipe],
        "judge": ["judge", pipe, "--metrics", "entropy"],
        "--plot": ["judge", "--plot", pipe, "--out", "p.png"],
        "reproduce": ["reproduce", "generation", pipe],
        "--reference": [*JUDGE, "--reference", pipe],
        "--given-features": ["judge", "samples.jsonl", "--metrics", "mauve", "--given-features", pipe, pipe],
    }
    if option == "--given-features":
        pytest.importorskip("mauve", reason="mauve-text is not installed")
    refused(capsys, words[option], pipe)


def test_foreign_text_cannot_control_the_terminal(here, tmp_path, capsys, monkeypatch):
    """Names in cards, results and samples, names of files and models, and generated text."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "ar", "samples.jsonl", "text.txt"):
        (tmp_path / name).symlink_to(here / name)
    (tmp_path / EVIL.replace("/", "")).symlink_to(here / "ar")
    evil = EVIL.replace("/", "")
    (tmp_path / "card.json").write_text(with_entry(here / "card.json", (*MADE_BY, "model"), EVIL))
    (tmp_path / "figures.json").write_text(with_entry(here / "figures.json", ("figures", 0, "model"), EVIL))
    lines = (here / "samples.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    for name in ("model", "method", "tokenizer"):
        header["made_by"][name] = EVIL
    (tmp_path / "evil.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    (tmp_path / f"{evil}.jsonl").write_text(json.dumps({EVIL: "x"}) + "\n")
    for words in (
        ["reproduce", "generation", "card.json", "--row", "adlm-1024"],
        ["reproduce", "generation", "card.json", "--row", "adlm-1024", "--markdown"],
        ["reproduce", "owt-ppl", "figures.json", "--row", "ar-262B", "--json"],
        ["reproduce", "owt-ppl", "figures.json", "--row", "ar-262B"],
        ["judge", "--plot", "card.json", "--out", f"{evil}.png"],
        ["judge", "evil.jsonl", "--metrics", "entropy", "--json", "--out", f"{evil}.json"],
        ["judge", "evil.jsonl", "--metrics", "entropy", "--out", f"{evil}.json"],
        [*JUDGE, "--reference", f"{evil}.jsonl"],
        ["sample", "model", "--out", "evil.jsonl"],
        ["sample", "model", "--out", f"{evil}-samples.jsonl"],
        ["sample", "model", "--prompt", EVIL, "--steps", "2"],
        ["sample", "model", "--prompt", EVIL, "--steps", "2", "--watch"],
        ["sample", "model", "--prompt", EVIL, "--steps", "2", "--json"],
        ["sample", EVIL],
        ["perplexity", evil, "--data", "text.txt", "--max-tokens", "32"],
        ["presets", f"data.path={EVIL}"],
        ["presets", EVIL],
        [EVIL],
        ["parity", EVIL],
    ):
        assert main(words) in (0, 2), words
        captured = capsys.readouterr()
        assert not {"\x1b", "\x07", "\x9b"} & set(captured.out + captured.err), words


def test_a_progress_bar_does_not_interpret_names_as_markup(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with console.Stages("groups") as stages:
        for done in range(3):
            stages.update(f"{EVIL} {{task.x}} on text", done, 3)
    assert "[/red]" in screen.getvalue()
    assert "]0;evil\x07" not in screen.getvalue()


@pytest.mark.parametrize("environment", ["x", "0", "2", "2 RANK=x", "2 RANK=5", "2 RANK=0", "2 RANK=0 MASTER_PORT=x"])
def test_an_invalid_world_size_is_a_user_error(environment, here, capsys, monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for word in f"WORLD_SIZE={environment}".split():
        monkeypatch.setenv(*word.split("="))
    for words in (PERPLEXITY, JUDGE, ["reproduce", "owt-ppl"]):
        refused(capsys, words, "start several processes with torchrun, or unset WORLD_SIZE")
    assert main(["sample", "model", "--steps", "1"]) == 0
    assert main(["sample", "nowhere"]) == 2


def test_an_address_that_does_not_exist_and_a_port_that_is_taken_are_user_errors(monkeypatch):
    import socket

    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "no.where.invalid", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"MASTER_ADDR 'no.where.invalid' and MASTER_PORT 1 are not an address"):
        process_group(write_error).__enter__()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ValueError, match=r"the 2 processes cannot connect to each other at 127\.0\.0\.1"):
            process_group(write_error).__enter__()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_missing_in_the_encoding_are_escaped(encoding, here, monkeypatch):
    for words in (JUDGE, ["reproduce", "owt-ppl"], ["sample", "model", "--prompt", "日本±"], ["parity", "日本"]):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        assert main(words) == (2 if words[0] == "parity" else 0)
        err.flush()
        shown = out.buffer.getvalue() + err.buffer.getvalue()
        assert (b"\\u65e5" in shown) == ("日本" in "".join(words))


def test_a_full_disk_is_a_one_line_error(here, tmp_path, capsys, monkeypatch):
    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        for name in ("perplexity", "judge", "reproduce", "sample --trace .html"):
            words, suffix, _ = WRITERS[name]
            assert main([*words, str(tmp_path / f"out{suffix}")]) == 2
            assert "cannot be written: No space left on device" in capsys.readouterr().err
    [journal] = [path for path in tmp_path.iterdir() if path.name != "judged"]
    journal.unlink()
    journal.symlink_to("/dev/full")
    refused(capsys, [*PERPLEXITY, "--out", str(tmp_path / "out.json")], "is not a regular file")


def test_excessive_numbers_are_a_user_error_or_show_progress(here, capsys, monkeypatch):
    refused(capsys, [*PERPLEXITY[:1], "model", *PERPLEXITY[2:], "--samples", str(10**20)], "at most 100,000")
    refused(capsys, [*JUDGE, "--seeds", str(10**14)], "--seeds 100000000000000 must be at most 1,000")
    tiny = ["length=8", "tokenizer=bytes", "model.hidden=16", "model.heads=2", "model.blocks=1"]
    refused(capsys, ["bench", "sample", "model", "--batch", str(10**11)], "this machine has")
    refused(capsys, ["bench", "sample", "model", "--batch", str(10**30)], "this machine has")
    refused(capsys, ["bench", "train", *tiny, "--batch", str(10**9)], "this machine has")
    refused(capsys, ["bench", "train", *tiny, "--batch", str(10**11)], "must be at most 2,147,483,647")
    refused(capsys, ["bench", "sample", *tiny[:2], "model.hidden=1000000", "model.heads=2"], "this machine has")
    refused(capsys, ["sample", "model", "--steps", "1000000", "--sampler", "remdm-conf"], "must be at most 20,000")
    monkeypatch.setattr(console, "PROGRESS_INTERVAL", 0.1)
    print_line = console.Progress.print

    def print_and_interrupt(progress, line, style=None):
        print_line(progress, line, style)
        os.kill(os.getpid(), signal.SIGALRM)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(console.Progress, "print", print_and_interrupt)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for words, unit in (
            (["sample", "model", "--num", str(10**13), "--out", "many.jsonl"], "/10,000,000,000,000 samples"),
            (["sample", "model", "--steps", "20000", "--sampler", "remdm-conf"], "/1 samples"),
            (
                ["perplexity", "model", "--data", "text.txt", "--samples", "20000"],
                r"text.txt: [\d,]+/[\d,]+ (tokens|bytes)",
            ),
        ):
            signal.setitimer(signal.ITIMER_REAL, 120)
            assert main(words) == 130
            assert re.search(unit, capsys.readouterr().err)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        (here / "many.jsonl").unlink(missing_ok=True)


def started(words, **streams):
    return subprocess.Popen([sys.executable, "-m", "adlm", *words], **streams)


def has_rows(path):
    return path.exists() and path.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.processes
def test_closed_pipes_and_repeated_ctrl_c_print_no_traceback(here, tmp_path):
    """All processes run at the same time, since each takes seconds to start."""
    pipe = subprocess.PIPE
    endless = ["sample", "model", "--num", "100000", "--steps", "2"]
    without_reader = started(endless, stdout=pipe, stderr=pipe)
    without_reader.stdout.close()
    without_stderr = started(
        [*PERPLEXITY, "--out", str(tmp_path / "without_stderr.json"), "--json"], stdout=pipe, stderr=pipe
    )
    without_stderr.stderr.close()
    interrupted = started([*endless, "--out", str(tmp_path / "cut.jsonl")], stdout=pipe, stderr=pipe)
    begun = time.monotonic()
    while not has_rows(tmp_path / "cut.jsonl") and time.monotonic() - begun < 120:
        time.sleep(0.05)  # before the first row modules are still imported, and Ctrl-C then ends without a word
    for _ in range(5):
        interrupted.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert (without_reader.stderr.read(), without_reader.wait()) == (b"", 0)
    assert json.loads(without_stderr.stdout.read())["figures"]
    assert without_stderr.wait() == 0
    assert written_by_adlm(tmp_path / "without_stderr.json")
    assert interrupted.stderr.read().endswith(b"rerun the same command to resume\n")
    assert interrupted.wait() == 130
    for process in (without_reader, without_stderr, interrupted):
        for stream in (process.stdout, process.stderr):
            stream.close()


@pytest.mark.parametrize("closed", mostly_slow([">&-", "2>&-", ">&- 2>&-", "2>/dev/full"], ">&- 2>&-", "2>/dev/full"))
def test_standard_streams_can_be_closed_or_full(closed):
    command = f"{sys.executable} -m adlm presets"
    assert subprocess.run(f"{command} {closed}", shell=True, stdout=subprocess.DEVNULL, check=False).returncode == 0
    wrong = subprocess.run(f"{command} nothing {closed}", shell=True, capture_output=True, check=False)
    assert wrong.returncode == 2
    assert b"Traceback" not in wrong.stderr
