"""`prepare` writes the same bytes after any interruption, never reuses stale data, and leaves nothing incomplete."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from texts import prose

from adlm.data.prepare import prepare as preparing
from adlm.data.prepare import shards
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import FORMAT, JOURNAL, JournalEntry, append_entry, open_prepared, opened_journal
from adlm.data.sources.corpora import BUILT_IN
from adlm.data.sources.source import HeldOutRule
from adlm.errors import UserError
from adlm.files import Journal
from adlm.tokens import load_tokenizer


def num_entries(work: Path) -> int:
    """Complete lines of a journal after its header."""
    return max(0, (work / JOURNAL).read_text().count("\n") - 1) if (work / JOURNAL).exists() else 0


# A run of its own, slow and committing often, that kills itself some seconds after a call of its progress.
SLOW = """
import os, signal, sys, threading, time
from pathlib import Path
from adlm.config.load import resolve
from adlm.data.prepare import prepare as preparing
preparing.BATCH, preparing.COMMIT = 400, 1000
out, last, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
num_calls = 0
def report(progress):
    global num_calls
    num_calls += 1
    if num_calls == last:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(0.004)
preparing.prepare(resolve(sys.argv[4:]), out, report)
print(num_calls)
"""


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        documents = [prose(3 + (7 * i) % 60, seed=100 * number + i).strip() for i in range(40)]
        (folder / f"{number}.txt").write_text("\n\n".join(documents))
    return folder


@pytest.fixture
def words(corpus, bpe):
    return [f"data.path={corpus}", "data.boundary=blank", "data.held_out=0.2", f"tokenizer={bpe}", "length=32"]


def sums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_shards_hold_every_document_of_the_source_once_and_in_order(words, corpus, resolve_config, tmp_path, bpe):
    made = prepare(resolve_config(*words), tmp_path / "out").prepared
    tokenizer, division = load_tokenizer(bpe), HeldOutRule(0.2, 0)
    texts = [text for file in sorted(corpus.iterdir()) for text in file.read_text().split("\n\n")]
    expected = {"train": [], "valid": []}
    for number, text in enumerate(texts):
        expected[division.split_of(number)].append([*tokenizer.encode(text), tokenizer.vocabulary.eos_id])
    for split, documents in expected.items():
        tokens = made.tokens(split)
        assert tokens.extent.documents == len(documents)
        for number, document in enumerate(documents):
            start, stop = tokens.document(number)
            row = np.zeros(stop - start, np.int64)
            tokens.copy_to(row, start, stop)
            assert row.tolist() == document
    assert 0.1 < len(expected["valid"]) / len(texts) < 0.3


def test_held_out_documents_depend_only_on_the_seed():
    splits = [HeldOutRule(0.1, 0).split_of(number) for number in range(10_000)]
    # this is what every folder prepared so far was divided by; a change here makes held-out text into training text
    assert [number for number, split in enumerate(splits[:60]) if split == "valid"] == [7, 14, 15, 20, 29, 30, 42, 45]
    larger = [HeldOutRule(0.2, 0).split_of(number) for number in range(10_000)]
    assert all(after == "valid" for before, after in zip(splits, larger, strict=True) if before == "valid")
    assert 900 < splits.count("valid") < 1100
    assert splits != [HeldOutRule(0.1, 1).split_of(number) for number in range(10_000)]
    assert set(map(HeldOutRule(0.0).split_of, range(1000))) == {"train"}


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_killed_at_five_random_moments_writes_the_same_bytes(words, tmp_path, resolve_config):
    prepare(resolve_config(*words), tmp_path / "unbroken")
    out = tmp_path / "broken"
    rng, resumed_from = random.Random(0), []
    for _ in range(5):
        moment = [str(rng.randrange(1, 10)), str(rng.uniform(0.0, 0.01))]
        killed = subprocess.run([sys.executable, "-c", SLOW, str(out), *moment, *words], check=False)
        assert killed.returncode == -signal.SIGKILL
        resumed_from.append(num_entries(out.with_name("broken.preparing")))
        assert not out.exists(), "nothing is there until all of it is"
    assert subprocess.run([sys.executable, "-c", SLOW, str(out), "0", "0", *words], check=False).returncode == 0
    assert max(resumed_from) > 0, "some run must have got somewhere"
    assert sums(out) == sums(tmp_path / "unbroken")


@pytest.mark.parametrize("torn", ["journal", "tokens", "documents"])
def test_data_that_was_not_synced_is_written_again(words, resolve_config, tmp_path, torn, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    prepare(resolve_config(*words), tmp_path / "unbroken")

    def stop(progress):
        if progress.tokens > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(resolve_config(*words), tmp_path / "out", stop)
    work = tmp_path / "out.preparing"
    assert num_entries(work) > 3
    if torn == "journal":
        with (work / JOURNAL).open("r+b") as file:
            file.truncate(file.seek(0, 2) - 7)
    elif torn == "tokens":
        os.truncate(work / "train" / shards.shard_name(0), 1000)
    else:
        os.truncate(work / "train" / shards.ENDS, 64)
    outcome = prepare(resolve_config(*words), tmp_path / "out")
    assert outcome.how == "resumed"
    assert sums(tmp_path / "out") == sums(tmp_path / "unbroken")


def test_shards_have_equal_sizes_regardless_of_documents(words, resolve_config, tmp_path, monkeypatch):
    whole = prepare(resolve_config(*words), tmp_path / "whole").prepared
    one_file = (tmp_path / "whole/train/tokens-00000.bin").read_bytes()
    monkeypatch.setattr(shards, "SHARD", 100)
    prepare(resolve_config(*words), tmp_path / "cut")
    files = sorted((tmp_path / "cut/train").glob("tokens-*.bin"))
    assert b"".join(file.read_bytes() for file in files) == one_file
    assert {file.stat().st_size for file in files[:-1]} == {200}
    assert len(whole.tokens("train")) == len(one_file) // 2


def test_a_second_run_reuses_the_folder(words, resolve_config, tmp_path):
    prepare(resolve_config(*words), tmp_path / "out")
    before = sums(tmp_path / "out")
    assert prepare(resolve_config(*words), tmp_path / "out").how == "reused"
    assert sums(tmp_path / "out") == before


def test_another_length_or_packing_needs_no_tokenising(words, resolve_config, tmp_path):
    prepare(resolve_config(*words), tmp_path / "out")
    outcome = prepare(resolve_config(*words, "length=16", "data.packing=padded"), tmp_path / "out")
    assert outcome.how == "reused"
    rows = outcome.prepared.rows("train")
    assert rows.length == 16
    assert len(rows) == rows.tokens.extent.documents
    assert len(open_prepared(tmp_path / "out").rows("train", 64, "packed")) < len(rows)


@pytest.mark.parametrize("change", ["text", "same size and time", "new file", "tokenizer", "seed", "boundary"])
def test_a_changed_source_or_option_is_prepared_anew(words, corpus, resolve_config, tmp_path, change):
    prepare(resolve_config(*words), tmp_path / "out")
    before = sums(tmp_path / "out")
    file = corpus / "1.txt"
    if change == "text":
        file.write_text(file.read_text() + " more")
    elif change == "same size and time":
        stat = file.stat()
        file.write_text(file.read_text()[::-1])
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "new file":
        (corpus / "9.txt").write_text("another file")
    else:
        words = [
            *words,
            {"tokenizer": "tokenizer=bytes", "seed": "data.seed=5", "boundary": "data.boundary=line"}[change],
        ]
    outcome = prepare(resolve_config(*words), tmp_path / "out")
    assert outcome.how == "prepared anew"
    assert sums(tmp_path / "out") != before
    prepare(resolve_config(*words), tmp_path / "fresh")
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "texts"]


def test_a_source_that_changes_while_resuming_is_not_trusted(words, corpus, resolve_config, tmp_path, monkeypatch):
    """A file changes after a run was cut off, and the next run is cut off while it looks where to go on."""
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)

    def stop(progress):
        if progress.tokens > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(resolve_config(*words), tmp_path / "out", stop)
    (corpus / "0.txt").write_text("changed " + (corpus / "0.txt").read_text())
    num_cut_off = 0

    def cut_off(journal, *arguments):
        nonlocal num_cut_off
        num_cut_off += 1
        restart(journal, *arguments)
        raise KeyboardInterrupt

    restart = Journal.restart
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "restart", cut_off)
        with pytest.raises(KeyboardInterrupt):
            prepare(resolve_config(*words), tmp_path / "out")
    assert num_cut_off == 1
    prepare(resolve_config(*words), tmp_path / "out")
    prepare(resolve_config(*words), tmp_path / "fresh")
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")


def test_after_a_file_is_fixed_the_work_before_it_is_kept(words, corpus, resolve_config, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    good = (corpus / "2.txt").read_bytes()
    (corpus / "2.txt").write_bytes(good + b"\xff")
    with pytest.raises(UserError, match=r"2\.txt is not UTF-8.*what is done is kept in out\.preparing"):
        prepare(resolve_config(*words), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (corpus / "2.txt").write_bytes(good)
    outcome = prepare(resolve_config(*words), tmp_path / "out")
    assert outcome.how == "resumed"
    prepare(resolve_config(*words), tmp_path / "fresh")
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing"])
def test_a_modified_shard_is_a_user_error_and_never_used(words, resolve_config, tmp_path, damage):
    prepare(resolve_config(*words), tmp_path / "out")
    path = tmp_path / "out/train/tokens-00000.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[:-2])
    sentence = {"flipped": "is not what was written", "shorter": "bytes and had", "missing": "is missing"}[damage]
    for again in (lambda: prepare(resolve_config(*words), tmp_path / "out"), lambda: open_prepared(tmp_path / "out")):
        with pytest.raises(
            UserError, match=rf"tokens-00000\.bin .*{sentence}.*delete the folder .*out and prepare the data again"
        ):
            again()


@pytest.mark.parametrize("damage", ["{", "{}", '{"format": 99}', '{"format": 1, "splits": {"train": {}}}'])
def test_a_damaged_manifest_is_a_user_error(words, resolve_config, tmp_path, damage):
    prepare(resolve_config(*words), tmp_path / "out")
    (tmp_path / "out/manifest.json").write_text(damage)
    with pytest.raises(
        UserError, match=r"manifest.json is (damaged|of format 99).*delete the folder .*out and prepare"
    ):
        open_prepared(tmp_path / "out")


EMPTY = [("a.txt", ""), ("a.txt", "\n\n \n"), ("a.jsonl", ""), ("a.csv", "text\n"), ("a.json", "[]")]


@pytest.mark.parametrize(("name", "text"), EMPTY)
def test_nothing_to_read_leaves_nothing_behind(name, text, resolve_config, bpe, tmp_path):
    (tmp_path / name).write_text(text)
    words = [f"data.path={tmp_path / name}", f"tokenizer={bpe}", "data.boundary=line"]
    with pytest.raises(UserError, match=r"holds no text"):
        prepare(resolve_config(*words), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def stopped_at(num_tokens):
    def stop(progress):
        if progress.tokens > num_tokens:
            raise KeyboardInterrupt

    return stop


def test_shards_after_the_resumed_position_are_removed(words, corpus, resolve_config, tmp_path, monkeypatch):
    """A run gets into its second file of ids; its source then shrinks to less than one."""
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    monkeypatch.setattr(shards, "SHARD", 2000)
    with pytest.raises(KeyboardInterrupt):
        prepare(resolve_config(*words), tmp_path / "out", stopped_at(6000))
    assert (tmp_path / "out.preparing/train" / shards.shard_name(2)).exists()
    for number in (1, 2, 3):
        (corpus / f"{number}.txt").write_text("Few words.\n\nFew more.")
    outcome = prepare(resolve_config(*words), tmp_path / "out")
    assert outcome.how == "resumed"
    assert len(outcome.prepared.tokens("train")) < 4000
    prepare(resolve_config(*words), tmp_path / "fresh")
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")


def test_a_longer_source_starts_over_if_its_last_documents_are_held_out(resolve_config, bpe, tmp_path, monkeypatch):
    """What is held out depends on how many documents there are, so no part is as it was."""
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    monkeypatch.setitem(BUILT_IN, "openwebtext", replace(BUILT_IN["openwebtext"], last=20))
    folder = tmp_path / "data/openwebtext"
    folder.mkdir(parents=True)

    def write(number, num):
        lines = [json.dumps({"text": prose(30, seed=100 * number + i)}) for i in range(num)]
        (folder / f"train-{number}.jsonl").write_text("\n".join(lines))

    write(0, 60)
    write(1, 10)
    words = ["data=openwebtext", f"data.root={tmp_path / 'data'}", f"tokenizer={bpe}", "length=32"]
    with pytest.raises(KeyboardInterrupt):
        prepare(resolve_config(*words), tmp_path / "out", stopped_at(3000))
    assert num_entries(tmp_path / "out.preparing") > 0
    write(1, 30)
    assert prepare(resolve_config(*words), tmp_path / "out").how == "prepared"
    prepare(resolve_config(*words), tmp_path / "fresh")
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")


def test_a_journal_of_another_held_out_rule_is_not_resumed(tmp_path):
    """The same parts, the same rest, but other documents are the last."""
    recipe = {"parts": [{"name": "a"}], "held_out": {"last_from": 5}, "dtype": "uint16"}
    work, out = tmp_path / "out.preparing", tmp_path / "out"
    with opened_journal(work, out, recipe) as (journal, _):
        append_entry(journal, JournalEntry(1, 0, 3, {}), [])
    with opened_journal(work, out, recipe) as (_, start):
        assert start.documents == 3
    with opened_journal(work, out, {**recipe, "parts": [*recipe["parts"], {"name": "b"}]}) as (_, start):
        assert start.documents == 0


@pytest.mark.parametrize(
    "line", ['{"part": 0, "pieces": 3, "documents": 2, "splits": {}}', "??", "[]", '{"recipe": 1}']
)
def test_an_unfinished_journal_of_another_version_is_refused_and_left_as_it_is(words, resolve_config, tmp_path, line):
    work = tmp_path / "out.preparing"
    work.mkdir()
    (work / JOURNAL).write_text(f"{line}\n")
    (work / "recipe.json").write_text("{}")
    with pytest.raises(UserError, match=r"out\.preparing is unfinished work of another version of adlm") as caught:
        prepare(resolve_config(*words), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert (work / JOURNAL).read_text() == f"{line}\n"


def test_a_length_without_room_for_text_is_a_user_error_before_tokenising(words, resolve_config, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "recipe_of", None)
    with pytest.raises(UserError, match=r"length 2 leaves no room"):
        prepare(resolve_config(*words, "length=2"), tmp_path / "out")


def test_no_training_text_is_a_user_error(resolve_config, bpe, tmp_path):
    (tmp_path / "a.txt").write_text("One.\nTwo.\nThree.\n")
    words = [f"data.path={tmp_path / 'a.txt'}", "data.boundary=line", f"tokenizer={bpe}", "data.held_out=0.9999"]
    with pytest.raises(UserError, match=r"all of its 3 documents were drawn to be held out.*try data.held_out=0"):
        prepare(resolve_config(*words), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_empty_file_does_not_hide_the_total_size(words, corpus, resolve_config, tmp_path):
    (corpus / "4.txt").write_text("")
    seen = []
    prepare(resolve_config(*words), tmp_path / "out", seen.append)
    assert {progress.bytes_in_all for progress in seen} == {sum(file.stat().st_size for file in corpus.iterdir())}


def test_a_folder_of_another_format_is_prepared_anew(words, resolve_config, tmp_path):
    """What an id file is made of may change while the manifest looks the same."""
    manifest = prepare(resolve_config(*words), tmp_path / "out").prepared.manifest
    assert manifest["recipe"]["format"] == FORMAT
    recipe = {**manifest["recipe"], "format": FORMAT - 1}
    (tmp_path / "out/manifest.json").write_text(json.dumps({**manifest, "recipe": recipe}))
    assert prepare(resolve_config(*words), tmp_path / "out").how == "prepared anew"


def test_a_full_disk_keeps_what_is_done(words, resolve_config, tmp_path, monkeypatch):
    """The disk refuses in the middle; with room again the run goes on to the same bytes."""
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    append = shards.ShardWriter.append

    def refusing(self, *documents):
        if self.tokens > 3000:
            raise OSError(28, "No space left on device")
        append(self, *documents)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "append", refusing)
        with pytest.raises(
            UserError,
            match=r"no space left to write .*out; what is done is kept in out.preparing: run the same command again",
        ):
            prepare(resolve_config(*words), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert prepare(resolve_config(*words), tmp_path / "out").how == "resumed"
    prepare(resolve_config(*words), tmp_path / "fresh")
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")


def test_a_document_of_many_chunks_is_one_document(resolve_config, bpe, tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.text_files.CHUNK", 100)
    monkeypatch.setattr(preparing, "BATCH", 400)
    text = prose(3000)
    (tmp_path / "a.txt").write_text(text)
    words = [f"data.path={tmp_path / 'a.txt'}", "data.held_out=0", f"tokenizer={bpe}"]
    made = prepare(resolve_config(*words), tmp_path / "out").prepared
    tokenizer, tokens = load_tokenizer(bpe), made.tokens("train")
    assert tokens.extent.documents == 1
    row = np.zeros(len(tokens), np.int64)
    tokens.copy_to(row, 0, len(tokens))
    assert row.tolist() == [*tokenizer.encode(text), tokenizer.vocabulary.eos_id]


def ids(prepared, split: str) -> list[int]:
    tokens = prepared.tokens(split)
    row = np.zeros(len(tokens), np.int64)
    tokens.copy_to(row, 0, len(tokens))
    return row.tolist()


def test_the_end_of_a_single_document_is_held_out(resolve_config, bpe, tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.text_files.CHUNK", 100)
    monkeypatch.setattr(preparing, "BATCH", 400)
    text = "\n\n".join(prose(30, seed=i).strip() for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    words = [f"data.path={tmp_path / 'a.txt'}", f"tokenizer={bpe}", "data.held_out=0.1"]
    made = prepare(resolve_config(*words), tmp_path / "out").prepared
    cut = made.manifest["recipe"]["held_out"]["cut_at"]
    assert text[:cut].endswith("\n\n"), "cut between two paragraphs"
    assert 0.09 < 1 - cut / len(text) < 0.11
    tokenizer = load_tokenizer(bpe)
    eos = tokenizer.vocabulary.eos_id
    assert ids(made, "train") == [*tokenizer.encode(text[:cut]), eos]
    assert ids(made, "valid") == [*tokenizer.encode(text[cut:]), eos]


def test_a_run_interrupted_in_a_single_document_resumes_to_the_same_bytes(resolve_config, bpe, tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.data.sources.text_files.CHUNK", 100)
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    (tmp_path / "a.txt").write_text(prose(6000))
    words = [f"data.path={tmp_path / 'a.txt'}", f"tokenizer={bpe}", "data.held_out=0.3"]
    prepare(resolve_config(*words), tmp_path / "unbroken")
    train = open_prepared(tmp_path / "unbroken").tokens("train")
    for num_tokens in (1000, len(train) + 500):  # before and after the cut
        out = tmp_path / f"broken-{num_tokens}"
        with pytest.raises(KeyboardInterrupt):
            prepare(resolve_config(*words), out, stopped_at(num_tokens))
        assert prepare(resolve_config(*words), out).how == "resumed"
        assert sums(out) == sums(tmp_path / "unbroken")


def test_a_folder_of_the_user_is_never_overwritten(words, resolve_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"out exists already"):
        prepare(resolve_config(*words), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_two_processes_cannot_prepare_one_folder(words, resolve_config, tmp_path):
    seen = []

    def meanwhile(progress):
        with pytest.raises(UserError, match=r"being prepared by another process"):
            prepare(resolve_config(*words), tmp_path / "out")
        seen.append(progress)

    assert prepare(resolve_config(*words), tmp_path / "out", meanwhile).how == "prepared"
    assert seen


def test_a_tokenizer_with_more_ids_than_the_dtype_is_refused(words, resolve_config, tmp_path):
    engine = json.loads(Path(words[3].removeprefix("tokenizer=")).read_text())
    engine["added_tokens"] += [
        {"id": 400 + i, "content": f"<{i}>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i in range(70_000)
    ]  # fmt: skip
    (tmp_path / "large.json").write_text(json.dumps(engine))
    words = [*words[:3], f"tokenizer={tmp_path / 'large.json'}", "length=32"]
    with pytest.raises(UserError, match=r"data.dtype uint16 holds ids up to 65,535, and the tokenizer has 70,"):
        prepare(resolve_config(*words, "data.dtype=uint16"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    made = prepare(resolve_config(*words), tmp_path / "out").prepared
    assert made.manifest["recipe"]["dtype"] == "uint32"
    assert made.tokens("train").dtype == np.uint32


def test_the_recipe_of_a_text_does_not_depend_on_its_folder(words, corpus, resolve_config, tmp_path):
    (corpus / "deep").mkdir()
    (corpus / "3.txt").rename(corpus / "deep/0.txt")
    prepare(resolve_config(*words), tmp_path / "out")
    names = [part["name"] for part in open_prepared(tmp_path / "out").manifest["recipe"]["parts"]]
    assert names == ["0.txt", "1.txt", "2.txt", "deep/0.txt"], "two files of one name are told apart"
    corpus.rename(tmp_path / "elsewhere")
    words = [f"data.path={tmp_path / 'elsewhere'}", *words[1:]]
    assert prepare(resolve_config(*words), tmp_path / "out").how == "reused"
