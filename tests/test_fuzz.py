"""Random command lines over every command and option: exit code 0 or 2, no traceback, no existing file changed.

Command options are read from the parsers and config options from the schema, so new ones are covered. ADLM_FUZZ=N tries
N random command lines per command; by default a few fixed ones are tried.
"""

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from reasoning_runs import TINY, prosqa_root, reason_train
from small_models import small_model

from adlm import limits
from adlm.cli.main import COMMANDS, build_parser, main
from adlm.config.load import resolve
from adlm.config.options import descriptions
from adlm.data.prepare.prepare import prepare
from adlm.errors import UserError
from adlm.likelihood import measurement

TIMEOUT = 2.0
"""Seconds after which a command is interrupted: some of them would take years."""

NETWORK = ["length=16", "tokenizer=bytes", "model.hidden=16", "model.heads=2", "model.blocks=1", "model.condition=8"]
BRIEF = ["train.steps=1", "train.batch_size=2", "train.valid_rows=2", "train.samples=1", "train.compile=off"]
REASONING = [*TINY, "data.root=problems", "reason.epochs=1", "reason.first_epochs=0", "reason.misfits=keep"]

# A valid command line per command; random arguments are added to it or replace one of its arguments.
BASES = {
    "doctor": [],
    "completion": ["bash"],
    "quickstart": [],  # takes minutes, so only immediate errors are tested
    "presets": ["owt/adlm"],
    "plan": [*NETWORK, "--gpus", "2"],
    "prepare": ["data.path=text.txt", "tokenizer=bytes", "length=16", "--out", "new"],
    "train": [*NETWORK, *BRIEF, "sampling.steps=2", "data.prepared=prepared", "--out", "new"],
    "perplexity": ["model", "--data", "text.txt", "--samples", "1", "--max-tokens", "64"],
    "choose": ["model", "--text", "a [MASK]", "--samples", "2", "--choices", "b", "c"],
    "reproduce": ["generation", "card.json"],
    "sample": ["model", "--steps", "2"],
    "serve": ["model"],  # names cannot be resolved in this test, so none listens
    "judge": ["samples.jsonl", "--metrics", "entropy,diversity"],
    "reason train": [*REASONING, "--out", "new"],
    "reason eval": ["reasoning", "--root", "problems"],
    "reason show": ["reasoning", "--root", "problems"],
    "import": ["model.ckpt", "--out", "new"],
    "export": ["model", "--out", "new"],
    "parity": ["golden"],
    "fetch": ["smollm2", "--from", "text.txt"],
    "bench sample": [*NETWORK, "sampling.steps=2", "--repeats", "1"],
    "bench train": [*NETWORK, "--batch", "2", "--steps", "1", "--no-compile"],
}
FILES = [
    *("text.txt", "notes.txt", "samples.jsonl", "card.json", "figures.json", "deep.json", "deep.jsonl", "tags.yaml"),
    *(
        "model",
        "ar",
        "reasoning",
        "problems",
        "prepared",
        "model/config.yaml",
        "model.ckpt",
        "golden",
        "pipe",
        "empty",
        "binary.json",
    ),
    *("/dev/null", "/dev/zero", "/", ".", "new", "new.json", "new.png", "new.html", "no/where", "n" * 300),
    "evil\x1b[31m",
]
NUMBERS = [*map(str, (-1, 0, 1, 2, 3, 0.5, 10**9, 10**12, 10**17, 10**21, 10**30)), "nan", "inf", "1e308", "٣"]
NASTY = [
    *("", " ", "true", "null", "auto", "cpu", "cuda", "meta", "cuda:99", "gpt2", "bytes", "text8", "remdm-conf", "~"),
    *("[1, 2]", "{a: 1}", "!!python/object:os.system x", "!!bool x", "&a [*a]", "[" * 3000, "~nobody/x", "[MASK*3]"),
    *("\x1b]0;evil\x07", "[/red]", "ü", "日本", "\u202e", "a" * 5000, "%s", "{0}", "{task.x}", "--", "=", "a=b=c"),
    *("[MASK*9999999]", "owt-ppl", "entropy", "mauve", "perplexity", "adlm", "valid"),
]


def command_parser(name: str) -> argparse.ArgumentParser:
    command, _, subcommand = name.partition(" ")
    parser = build_parser([command]).commands.choices[command]
    if subcommand:
        [choices] = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        parser = choices[subcommand]
    return parser


def changes(name: str) -> list[tuple[int, list[str]]]:
    """Possible changes of a command line: an index to replace, or -1 to append, and the new arguments.

    Without --help, and without --force, which may change existing files.
    """
    all_values = [*FILES, *NUMBERS, *NASTY]
    found = []
    for action in command_parser(name)._actions:
        values = {int: NUMBERS, Path: FILES}.get(action.type, [*(action.choices or ()), *all_values])
        num = action.nargs if isinstance(action.nargs, int) else 1
        for flag in action.option_strings:
            if flag not in ("-h", "--help", "--force"):
                found += [(-1, [flag, *[str(value)] * num]) for value in (values if num else [""])]
    for option in descriptions():
        found += [(-1, [f"{option}={value}"]) for value in (*NUMBERS, *NASTY[:25])]
    found += [(index, [value]) for index in range(-1, len(BASES[name])) for value in all_values]
    return found


def command_lines(name: str) -> st.SearchStrategy[list[str]]:
    """The valid command line with one or two changes."""

    def changed(chosen: list[tuple[int, list[str]]]) -> list[str]:
        words = list(BASES[name])
        for index, new in chosen:
            words = [*words[:index], *new, *words[index + 1 :]] if index >= 0 else [*words, *new]
        return [*name.split(), *words]

    return st.builds(changed, st.lists(st.sampled_from(changes(name)), min_size=1, max_size=2))


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """A folder with one file of every kind."""
    folder = tmp_path_factory.mktemp("fuzz") / "sandbox"
    folder.mkdir()
    small_model(folder / "model")
    small_model(folder / "ar", "ar")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        brief = ("reason.epochs=1", "reason.first_epochs=0", "reason.misfits=keep")
        assert reason_train(prosqa_root(folder / "problems"), folder.with_name("run"), *brief) == 0
    shutil.copytree(folder.with_name("run") / "model", folder / "reasoning")
    (folder / "text.txt").write_text("law and order, day and night\n" * 40)
    prepare(resolve([f"data.path={folder}/text.txt", "tokenizer=bytes", "length=16"]), folder / "prepared")
    golden = Path(__file__).parent / "parity" / "golden"
    shutil.copytree(golden, folder / "golden")
    shutil.copy(golden / "mdlm-tiny.ckpt", folder / "model.ckpt")
    made = [
        ["sample", "model", "--num", "3", "--steps", "2", "--out", "samples.jsonl"],
        ["judge", "samples.jsonl", "--metrics", "entropy,diversity", "--out", "card.json"],
        ["perplexity", "ar", "--data", "text.txt", "--out", "figures.json"],
    ]
    here = Path.cwd()
    os.chdir(folder)
    with redirect_stdout(io.StringIO()):
        assert [main(words) for words in made] == [0, 0, 0]
    os.chdir(here)
    (folder / "notes.txt").write_text("notes of mine\n")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    (folder / "tags.yaml").write_text(yaml.safe_dump({"length": "x"}) + "a: !!python/object/apply:os.getcwd []\n")
    (folder / "binary.json").write_bytes(random.Random(0).randbytes(300))
    (folder / "empty").touch()
    (folder / "evil\x1b[31m").write_text('{"\x1b[31m": 1}\n')
    os.mkfifo(folder / "pipe")
    shutil.copytree(folder, folder.with_name("copy"), ignore=shutil.ignore_patterns("pipe"))
    return folder


REPLACEABLE = {"card.json", "figures.json", "empty"}  # written by adlm, which may replace them, or without content


def manifest(folder):
    """Every file with its inode, size and time of the last write, which also tells of the same bytes written again."""
    found = {}
    for path in folder.rglob("*"):
        name, status = str(path.relative_to(folder)), path.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            found[name] = status.st_mode
        elif name not in REPLACEABLE:
            found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def restore(folder, before):
    """Delete new files and restore the results of adlm."""
    for path in sorted(folder.rglob("*"), reverse=True):
        name = str(path.relative_to(folder))
        if name not in before and name not in REPLACEABLE:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in REPLACEABLE:
        shutil.copy(folder.with_name("copy") / name, folder / name)


class InterruptAfterTimeout:
    """Raises KeyboardInterrupt every TIMEOUT seconds until the command ends."""

    def __enter__(self):
        self.fired = False
        self.before = signal.signal(signal.SIGALRM, self)
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT, TIMEOUT)
        return self

    def __call__(self, number, frame):
        if frame is not None and frame.f_code.co_name == "gc_callback":
            return  # hypothesis's own: an exception there fails the test, whatever the command does
        self.fired = True
        raise KeyboardInterrupt

    def __exit__(self, *exception):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def attempt(words):
    """The exit code of a command line, whether it was interrupted, its output, and its standard error."""
    out, err = io.StringIO(), io.StringIO()
    with InterruptAfterTimeout() as interrupting, redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return code, interrupting.fired, out.getvalue() + err.getvalue(), err.getvalue()


IGNORED_INTERRUPT = re.compile(r"Exception ignored in: .*\n(Traceback .*\n(  .*\n)*)?KeyboardInterrupt: ?\n")
"""What Python prints where the alarm of a test interrupts a destructor or a callback; no other traceback is allowed."""


def check(words, folder):
    """Check the properties of one command line."""
    note(f"adlm {json.dumps(words)}")
    before = manifest(folder)
    try:
        code, interrupted, printed, errors = attempt(words)
        note(f"exit code {code}: {printed[-2000:]}")
        allowed = {0, 2} | ({1} if words[0] in ("parity", "doctor") else set()) | ({130} if interrupted else set())
        assert code in allowed
        assert "Traceback" not in (IGNORED_INTERRUPT.sub("", printed) if interrupted else printed)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", printed)
        assert code != 2 or re.search("^adlm: .", errors, re.MULTILINE)
        after = manifest(folder)
        assert [name for name in before if before[name] != after.get(name)] == []
        assert all((folder / name).is_file() for name in REPLACEABLE)
    finally:
        torch.set_grad_enabled(True)  # an interrupt inside the exit of torch.no_grad() leaves it off in this process
        restore(folder, before)


EXAMPLES = int(os.environ.get("ADLM_FUZZ", "0"))
NUM = {
    "train": 6,
    "reason train": 8,
    "bench train": 4,
    "bench sample": 8,
    "parity": 4,
    "plan": 6,
    "doctor": 3,
    "perplexity": 8,
}


@pytest.mark.parametrize("name", BASES)
def test_no_command_line_prints_a_traceback_or_changes_an_existing_file(name, sandbox, tmp_path, monkeypatch):
    monkeypatch.chdir(sandbox)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what `adlm fetch` writes
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "PIP_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.delenv("ADLM_DATA", raising=False)

    def unreachable(*address, **options):
        raise socket.gaierror("there is no network in this test")

    def refuse_work(*given):
        raise UserError("this takes minutes")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    for module in (limits, measurement):
        monkeypatch.setattr(module, "memory_of", lambda device: 2**28)
    if name == "quickstart":
        monkeypatch.setattr("adlm.apps.quickstart.recipe._box_texts", refuse_work)  # the first work it does

    @settings(
        max_examples=EXAMPLES or NUM.get(name, 12),
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(command_lines(name))
    def holds(words):
        check(words, sandbox)

    holds()


def test_every_command_is_fuzzed():
    assert {name.split()[0] for name in BASES} == set(COMMANDS) - {"lm-eval"}, (
        "the arguments of lm-eval are another program's"
    )
