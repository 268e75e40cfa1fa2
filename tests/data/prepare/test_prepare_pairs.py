"""Prepared pairs: which ids are answers, one conversation a row, the same bytes after an interruption."""

import hashlib
import json

import numpy as np
import pytest

from adlm.data.prepare import prepare as preparing
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import open_prepared
from adlm.errors import UserError


@pytest.fixture
def words(tmp_path):
    """Two files of pairs, with prompts and answers of several lengths."""
    (tmp_path / "texts").mkdir()
    for name in "ab":
        pairs = [{"prompt": f"{name}{number}?", "answer": "x" * (number % 9 + 1)} for number in range(200)]
        (tmp_path / f"texts/{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [f"data.path={tmp_path / 'texts'}", "data.format=pairs", "data.held_out=0.1", "tokenizer=bytes", "length=16"]


def sums(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_row_is_a_conversation_with_its_answer_marked(words, resolve_config, tmp_path):
    prepared = prepare(resolve_config(*words), tmp_path / "out").prepared
    eos, found = prepared.tokenizer.vocabulary.eos_id, {}
    for split in ("train", "valid"):
        rows = prepared.rows(split)
        x, pad = rows.read(range(len(rows)))
        given = rows.given(range(len(rows)))
        assert (rows.counted(x, pad)[~given]).all()
        for row, row_pad, row_given in zip(x, pad, given, strict=True):
            assert row[0] == eos  # bos is the same symbol
            answer = row[~row_given]
            assert answer[-1] == eos
            prompt, text = (
                prepared.tokenizer.decode(ids.tolist()) for ids in (row[1:][row_given[1:] & ~row_pad[1:]], answer[:-1])
            )
            found[prompt] = text
    assert found == {f"{name}{number}?": "x" * (number % 9 + 1) for name in "ab" for number in range(200)}
    assert 10 < len(prepared.rows("valid")) < 80


def test_conversations_longer_than_a_row_are_left_out_and_counted(words, resolve_config, tmp_path):
    prepared = prepare(resolve_config(*words), tmp_path / "out").prepared
    rows = prepared.rows("train", length=9)
    fits = [len(f"a{number}?") + number % 9 + 1 + 2 <= 9 for number in range(200) for _ in "ab"]
    assert len(rows) + len(prepared.rows("valid", length=9)) == sum(fits)
    total = rows.tokens.extent.documents
    [note] = rows.notes()
    assert note.startswith(f"{total - len(rows):,} of {total:,} conversations in train are left out")
    assert prepared.rows("train").notes() == ()
    with pytest.raises(
        UserError, match=r"none of the .* conversations of split train fits into a row of length 4; give a l"
    ):
        prepared.rows("train", length=4)


def test_pairs_have_no_other_packing(words, resolve_config, tmp_path):
    prepared = prepare(resolve_config(*words, "data.packing=packed"), tmp_path / "out").prepared
    assert prepared.manifest["packing"] == prepared.rows("train", packing="packed").packing == "pairs"


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_bytes(words, resolve_config, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH", 400)
    monkeypatch.setattr(preparing, "COMMIT", 1000)
    prepare(resolve_config(*words), tmp_path / "unbroken")
    for num_tokens in (300, 1500, 2500):

        def stop(progress, num_tokens=num_tokens):
            if progress.tokens > num_tokens:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(resolve_config(*words), tmp_path / f"broken-{num_tokens}", stop)
        assert prepare(resolve_config(*words), tmp_path / f"broken-{num_tokens}").how in ("resumed", "prepared")
        assert sums(tmp_path / f"broken-{num_tokens}") == sums(tmp_path / "unbroken")


def test_another_template_prepares_anew(words, resolve_config, tmp_path):
    template = (
        "{% for message in messages %}<{{ message['content'] }}>{% endfor %}{% if add_generation_prompt %}<{% endif %}"
    )
    prepare(resolve_config(*words), tmp_path / "out")
    outcome = prepare(resolve_config(*words), tmp_path / "out", chat_template=template)
    assert outcome.how == "prepared anew"
    rows = outcome.prepared.rows("train")
    x, given = rows.read([0])[0][0], rows.given([0])[0]
    decode = outcome.prepared.tokenizer.decode
    assert decode(x[~given].tolist()) == "x><|endoftext|>"
    assert decode(x[1 : np.flatnonzero(~given)[0]].tolist()) == "<a0?><"
    assert prepare(resolve_config(*words), tmp_path / "out").how == "prepared anew"


def test_marks_that_are_cut_off_or_changed_are_refused(words, resolve_config, tmp_path):
    folder = prepare(resolve_config(*words), tmp_path / "out").prepared.folder
    marks = folder / "train/answers.bin"
    content = marks.read_bytes()
    marks.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"answers.bin has .* bytes and had"):
        open_prepared(folder)
    marks.write_bytes(bytes([1 - content[0]]) + content[1:])
    with pytest.raises(UserError, match=r"answers.bin is not what was written"):
        open_prepared(folder)


@pytest.mark.parametrize(("num", "held_out"), [(1, 0), (2, 1), (30, 1)])
def test_of_few_pairs_whole_ones_at_the_end_are_held_out(resolve_config, tmp_path, num, held_out):
    pairs = [{"prompt": f"{number}?", "answer": "x" * 3000} for number in range(num)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    words = [f"data.path={tmp_path / 'few.jsonl'}", "data.format=pairs", "data.held_out=0.03", "tokenizer=bytes"]
    prepared = prepare(resolve_config(*words, "length=3100"), tmp_path / "out").prepared
    assert len(prepared.rows("train")) == num - held_out
    assert ("valid" in prepared.splits) == bool(held_out)


def test_a_bpe_tokenizer_is_trained_on_the_messages_and_not_on_their_json(words, resolve_config, tmp_path):
    config = resolve_config(*[word for word in words if not word.startswith("tokenizer")], "tokenizer=bpe-300")
    symbols = prepare(config, tmp_path / "out").prepared.tokenizer.engine.get_vocab()
    assert "xx" in symbols
    assert not any("role" in symbol or "user" in symbol or "line" in symbol for symbol in symbols)


def test_a_message_that_the_template_refuses_is_an_error_with_its_line(words, resolve_config, tmp_path):
    template = "{{ raise_exception('no') if messages[0]['content'] == 'a2?' else '' }}"
    template += "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(UserError, match=r"line 3 of a.jsonl: the chat template of this model refuses the messages: no"):
        prepare(resolve_config(*words), tmp_path / "out", chat_template=template)
