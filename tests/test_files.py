"""Writes are atomic, and only files that adlm wrote are replaced."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
from contextlib import closing, suppress

import pytest

from adlm import files
from adlm.errors import UserError, printable
from adlm.files import (
    PART,
    PLOT_METADATA,
    Journal,
    append_synced,
    check_output,
    lock_file,
    move_folder,
    opened,
    parse_json,
    read_bytes,
    read_json,
    remove_parts,
    replacing,
    replacing_folder,
    write_file,
    written_by_adlm,
)

OURS = '{\n "adlm": "0.1.0", "figures": []}'


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "a.json"
    write_file(path, "one")
    with suppress(KeyboardInterrupt), replacing(path) as part:
        part.write_text("two")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    with replacing(path) as part:
        part.write_text("two")
        assert path.read_text() == "one"
    assert path.read_text() == "two"
    assert names(tmp_path) == ["a.json"]


def test_writing_to_a_link_replaces_its_target(tmp_path):
    (tmp_path / "there").write_text("one")
    (tmp_path / "link").symlink_to("there")
    write_file(tmp_path / "link", b"two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "two"


def in_subprocess(statements, *paths):
    """The exit code of the statements in a separate process; `paths` are its arguments."""
    script = f"import os, sys; from pathlib import Path; from adlm.files import *\n{statements}"
    return subprocess.run([sys.executable, "-c", script, *map(str, paths)], check=False).returncode


def test_leftovers_of_a_killed_process_are_removed_by_the_next_write_to_the_same_path(tmp_path):
    path, other = tmp_path / "a[1]*.json", tmp_path / "b.json"
    for target in (path, other):
        assert in_subprocess("with replacing(Path(sys.argv[1])): os._exit(7)", target) == 7
    assert len(names(tmp_path)) == 2
    write_file(path, "whole")
    assert [name for name in names(tmp_path) if name.endswith(PART)] == [
        name for name in names(tmp_path) if name.startswith(".b.json.")
    ]
    remove_parts(tmp_path)
    assert names(tmp_path) == ["a[1]*.json"]


def test_temporary_files_of_running_processes_are_not_removed(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as part:
        part.write_text("slow")
        assert in_subprocess("remove_parts(Path(sys.argv[1]))", tmp_path) == 0
        assert part.read_text() == "slow"
        assert in_subprocess("write_file(Path(sys.argv[1]), 'quick')", path) == 0
        assert path.read_text() == "quick"
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["a.json"]


LOCK = """
try:
    lock_file(file := open(sys.argv[1], "w"), "held by another process")
except UserError as error:
    assert str(error) == "held by another process"
    os._exit(5)
os._exit(7)
"""


def test_a_lock_refuses_other_processes_and_is_free_when_its_process_has_ended(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        assert in_subprocess(LOCK, path) == 7  # ends without unlocking
    with path.open("w") as file:
        lock_file(file, "")
        assert in_subprocess(LOCK, path) == 5
    assert in_subprocess(LOCK, path) == 7


def test_without_locks_in_the_file_system_files_are_written_but_no_lock_is_granted(tmp_path, monkeypatch):
    def unsupported(descriptor, blocking):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files, "lock_descriptor", unsupported)
    write_file(tmp_path / "a", "one")
    with replacing_folder(tmp_path / "model") as part:
        (part / "weights").touch()
    with (tmp_path / "lock").open("w") as file, pytest.raises(UserError, match="lock cannot be written: No locks"):
        lock_file(file, "")
    assert names(tmp_path) == ["a", "lock", "model"]


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "journal"
    with path.open("ab", buffering=0) as file:
        append_synced(file, b"one\n")
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            with pytest.raises(OSError, match="full"):
                append_synced(file, b"two\n")
        append_synced(file, b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_folder_is_replaced_atomically(tmp_path):
    folder = tmp_path / "model"
    for content in ("one", "two"):
        with replacing_folder(folder) as part:
            (part / content).write_text(content)
        assert names(folder) == [content]
    with suppress(KeyboardInterrupt), replacing_folder(folder) as part:
        (part / "three").write_text("three")
        raise KeyboardInterrupt
    assert names(folder) == ["two"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_moved_folder_exchanges_names_with_the_existing_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    for name in ("new", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    move_folder(tmp_path / "new", tmp_path / "place")
    assert names(tmp_path / "place") == ["new"]
    assert names(tmp_path / "new") == ["place"]
    assert names(tmp_path) == ["new", "place"]


def refused(message, *arguments, **options):
    with pytest.raises(UserError, match=re.escape(message)):
        check_output(*arguments, **options)


def test_other_files_are_replaced_only_with_force_and_inputs_never(tmp_path):
    ours, theirs, folder = tmp_path / "ours.json", tmp_path / "theirs.json", tmp_path / "run"
    folder.mkdir()
    ours.write_text(OURS)
    theirs.write_text('{"mine": "adlm"}')
    check_output(None)
    check_output(tmp_path / "new.json")
    check_output(ours)
    refused("theirs.json exists and was not written by adlm; give another path, or add --force", theirs)
    check_output(theirs, force=True)
    (tmp_path / "link.json").symlink_to("theirs.json")
    os.link(theirs, tmp_path / "hard.json")
    for name in ("theirs.json", "link.json", "hard.json"):
        refused("is what this command reads", tmp_path / name, force=True, inputs=[theirs])
    refused("is what this command reads", ours, inputs=[ours])
    (folder / "config.yaml").write_text("length: 8")
    (folder / "figures.json").write_text(OURS)
    (folder / "samples.jsonl").write_text('{"made_by": {"adlm": "0.1.0"}}')
    refused("is what this command reads", folder / "config.yaml", force=True, inputs=[folder])
    check_output(folder / "figures.json", inputs=[folder])
    check_output(folder / "samples.jsonl", force=True, inputs=[folder])
    refused("was not written by adlm", folder / "samples.jsonl", inputs=[folder])
    assert theirs.read_text() == '{"mine": "adlm"}'


def test_a_path_that_cannot_be_written_is_a_user_error_before_any_work(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused("--plot", tmp_path / "no" / "a.json", option="--plot")
    refused("there is no folder", tmp_path / "no" / "a.json")
    refused("is not a regular file", tmp_path)
    refused("is not a regular file", tmp_path / "pipe")
    refused("File name too long", tmp_path / ("n" * 300))
    refused("the file name is too long", tmp_path / ("n" * 250))
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("suffix", PLOT_METADATA)
def test_plots_written_by_adlm_are_recognized_and_others_are_not(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from adlm.apps.plots import new_figure, save_figure

    ours, theirs = tmp_path / f"ours{suffix}", tmp_path / f"theirs{suffix}"
    figure = new_figure(1, 1)
    save_figure(figure, ours)
    figure.savefig(theirs)
    assert written_by_adlm(ours)
    assert not written_by_adlm(theirs)


def test_a_text_that_quotes_our_marks_is_not_recognized_as_ours(tmp_path):
    quoting = tmp_path / "quoting.py"
    quoting.write_text('MARKS = """<!doctype html> <meta name="generator" content="adlm"> {"adlm": """')
    assert not written_by_adlm(quoting)
    (tmp_path / "empty").touch()
    assert written_by_adlm(tmp_path / "empty")


def test_a_full_disk_is_a_user_error_with_a_remedy_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_file(path, "one")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"a.json cannot be written: No space left on device; make room, then run the"):
        write_file(path, "two")
    with pytest.raises(UserError, match="model cannot be written: No space left on device; make room"):  # noqa: SIM117
        with replacing_folder(tmp_path / "model") as part:
            (part / "weights").write_text("two")
    assert path.read_text() == "one"
    assert names(tmp_path) == ["a.json"]


def test_pipes_devices_and_huge_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match="is not a regular file"), opened(tmp_path / path):
            pass
    with pytest.raises(UserError, match="is not a regular file"):
        write_file(tmp_path / "pipe", "")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="more than the limit of 268,435,456"):
        read_bytes(tmp_path / "huge")


def test_invalid_or_deeply_nested_json_is_a_user_error(tmp_path):
    path = tmp_path / "a.json"
    for content in (b"{", b"\xff\xfe\x00", b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000, b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a.json is not JSON"):
            read_json(path)
        with pytest.raises(ValueError, match=r"."):
            parse_json(content)
    path.write_text(json.dumps([1, "ü"]))
    assert read_json(path) == [1, "ü"]


def test_text_from_files_cannot_control_a_terminal():
    assert printable("\x1b]0;evil\x07\x9b2J\u202e\ud800\r") == "\\x1b]0;evil\\x07\\x9b2J\\u202e\\ud800\\r"
    assert str(UserError("weight \x1b[31m\n")) == "weight \\x1b[31m\\n"
    assert printable("plain ± 日本\n\t") == "plain ± 日本\n\t"


# Journals


HEADER = {"of": "é\u2028 \udce9", "seed": 3}
ENTRIES = [{"row": row, "text": f"line\n{row}"} for row in range(5)]


def write_journal(path, entries=ENTRIES, **options) -> list:
    """What a command does that resumes: keeps the entries on disk and appends the others; returns those kept."""
    with closing(Journal(path, "in use", HEADER, **options)) as journal:
        kept = list(journal.entries())
        for entry in entries[len(kept) :]:
            journal.append(entry)
    return kept


def test_a_journal_cut_off_at_any_byte_is_resumed_to_the_same_bytes(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_journal(whole)
    data = whole.read_bytes()
    ends = [end for end, byte in enumerate(data, 1) if byte == 10]
    for end in range(len(data) + 1):
        broken.write_bytes(data[:end])
        assert write_journal(broken) == ENTRIES[: max(0, sum(line <= end for line in ends) - 1)]
        assert broken.read_bytes() == data


@pytest.mark.parametrize("content", [b"my diary", b"my diary\n", b"{}\n", b"\n{}\n", b'{"of": "other"}\n'])
def test_a_journal_with_another_first_line_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "diary.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not the journal of this command; move it away"):
        write_journal(path)
    assert path.read_bytes() == content
    assert write_journal(path, resumes=lambda header: False) == []  # overwritten on request only
    assert write_journal(path) == ENTRIES


def test_a_journal_may_be_resumed_under_the_header_that_it_has(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(b'{"seed": 3}\n[1]\n')
    seen = []
    assert write_journal(path, [[1], [2]], resumes=lambda header: seen.append(header) is None) == [[1]]
    assert seen == [{"seed": 3}]
    assert path.read_bytes() == b'{"seed": 3}\n[1]\n[2]\n'


def test_entries_that_are_not_taken_are_cut_off_by_the_next_append(tmp_path):
    path = tmp_path / "journal"
    write_journal(path)
    with closing(Journal(path, "in use", HEADER)) as journal:
        for entry in journal.entries():
            if entry["row"] == 2:
                break
        journal.append("new")
    with closing(Journal(path, "in use", HEADER)) as journal:
        assert list(journal.entries()) == [*ENTRIES[:2], "new"]
        journal.restart({"other": 1}, "kept")
        journal.append("next")
        with pytest.raises(UserError, match=r"^in use$"):
            Journal(path, "in use", HEADER)
    assert path.read_bytes() == b'{"other": 1}\n"kept"\n"next"\n'


def test_a_journal_that_cannot_be_restarted_is_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    write_journal(path)
    before = path.read_bytes()

    def full(file, content):
        file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(Journal(path, "in use", HEADER)) as journal:
        monkeypatch.setattr("adlm.files.append_synced", full)
        with pytest.raises(OSError, match="No space"):
            journal.restart({"other": 1}, "kept")
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_line_of_a_journal_that_is_not_json_is_none(tmp_path):
    path = tmp_path / "journal"
    write_journal(path, ENTRIES[:1])
    path.write_bytes(path.read_bytes() + b"??\n[2]\n")
    with closing(Journal(path, "in use", HEADER)) as journal:
        assert list(journal.entries()) == [ENTRIES[0], None, [2]]


def test_a_journal_is_open_in_one_process_only(tmp_path):
    with closing(Journal(tmp_path / "journal", "in use", HEADER)), pytest.raises(UserError, match=r"^in use$"):
        Journal(tmp_path / "journal", "in use", HEADER)
    with closing(Journal(tmp_path / "journal", "in use", HEADER)) as journal:
        assert journal.is_empty


def test_an_append_to_a_journal_is_synced_or_leaves_it_as_it_was(tmp_path, monkeypatch):
    path, synced = tmp_path / "journal", []

    def fsync(descriptor):
        status = os.fstat(descriptor)
        synced.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", fsync)
    with closing(Journal(path, "in use", HEADER)) as journal:
        journal.append(ENTRIES[0])
        before = path.read_bytes()
        assert synced == ["folder", len(before)]
        with pytest.raises(OSError, match="full"):
            journal.append(ENTRIES[1])
        assert path.read_bytes() == before
        journal.append(ENTRIES[1])
    assert write_journal(path, []) == ENTRIES[:2]


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/full")])
def test_a_journal_is_a_regular_file(tmp_path, put):
    put(tmp_path / "journal")
    with pytest.raises(UserError, match="is not a regular file"):
        Journal(tmp_path / "journal", "in use", HEADER)
