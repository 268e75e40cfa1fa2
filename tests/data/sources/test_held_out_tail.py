"""The held-out tail: about as long as requested, cut at a natural break, nothing lost."""

from itertools import islice

import pytest
from texts import prose

from adlm.config.schema import Data
from adlm.data.rows.loader import Stream
from adlm.data.sources.source import HeldOutRule, resolve_source
from adlm.tokens import load_tokenizer

LINES = [prose(12, seed=i).replace("\n", " ").strip() for i in range(200)]


def divided(data: Data) -> dict[str, list[str]]:
    """The documents of each split of a source."""
    source, found, number = resolve_source(data), {"train": [], "valid": []}, 0
    for part in source.parts:
        chunks = []
        for text, ends in part.chunks():
            chunks.append(text)
            if ends:
                found[source.split_of(part, number)].append("".join(chunks))
                number, chunks = number + 1, []
    return found


@pytest.mark.parametrize("held_out", [0.01, 0.06, 0.3, 0.9])
@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("\n\n".join(LINES), "\n\n"),
        ("\n".join(LINES), "\n"),
        (" ".join(LINES), ""),
        ("x" * 20_000, ""),
        ("\u4e00" * 20_000, ""),
    ],
    ids=["paragraphs", "lines", "blanks", "none", "no words"],
)
def test_a_single_document_is_cut_in_two(tmp_path, text, before, held_out):
    (tmp_path / "a.txt").write_text(text, newline="")
    found = divided(Data(path=str(tmp_path / "a.txt"), held_out=held_out))
    [head], [tail] = found["train"], found["valid"]
    assert head + tail == text
    assert held_out / 2 <= len(tail) / len(text) <= 2 * held_out
    assert head.endswith(before)
    assert tail[0] == " " or before or " " not in text
    assert divided(Data(path=str(tmp_path / "a.txt"), held_out=held_out, seed=5)) == found, "nothing is drawn"


def test_few_documents_are_split_between_two_of_them_if_that_is_near_enough(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("\n".join(LINES[20 * number : 20 * number + 20]))
    found = divided(Data(path=str(tmp_path), held_out=0.06))
    assert (len(found["train"]), len(found["valid"])) == (9, 1)
    found = divided(Data(path=str(tmp_path), held_out=0.01))  # a tenth would be ten times too much
    assert (len(found["train"]), len(found["valid"])) == (10, 1)
    whole = [(tmp_path / f"{number}.txt").read_text() for number in range(10)]
    assert [*found["train"][:9], found["train"][9] + found["valid"][0]] == whole


def test_random_documents_are_held_out_if_there_are_enough(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    source = resolve_source(Data(path=str(tmp_path / "a.txt"), boundary="line", held_out=0.1))
    assert (source.division.last_from, source.division.cut_at) == (None, None)
    found = divided(Data(path=str(tmp_path / "a.txt"), boundary="line", held_out=0.1))
    assert found["valid"][:3] == [LINES[7], LINES[14], LINES[15]]


def test_the_tail_is_held_out_if_no_document_is_drawn(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES[:6]))
    none = next(seed for seed in range(100) if all(HeldOutRule(0.2, seed).split_of(n) == "train" for n in range(6)))
    found = divided(Data(path=str(tmp_path / "a.txt"), boundary="line", held_out=0.2, seed=none))
    assert found == {"train": LINES[:5], "valid": LINES[5:6]}


def test_a_text_too_short_for_a_tail_is_not_split(tmp_path):
    (tmp_path / "a.txt").write_text(LINES[0])
    assert divided(Data(path=str(tmp_path / "a.txt"))) == {"train": [LINES[0]], "valid": []}


def test_a_stream_reads_the_same_tail(tmp_path, bpe):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    data, tokenizer = Data(path=str(tmp_path / "a.txt"), held_out=0.1), load_tokenizer(bpe)
    [tail] = divided(data)["valid"]
    [batch] = islice(Stream(resolve_source(data), tokenizer, 66, 1, "valid").batches(), 1)
    assert batch.x[0, 1:-1].tolist() == tokenizer.encode(tail)[:64]
