"""Tests of `adlm reason`: what eval and show print and write; user errors are one line and leave nothing behind."""

import hashlib
import json
from collections import Counter

import pytest
import torch
from kills import contents
from reasoning_runs import (
    NUM_TEST,
    TINY,
    evaluated,
    hugging_face_folder,
    prosqa_problems,
    prosqa_root,
    reason_train,
    write_problems,
)
from small_models import small_model
from small_runs import SMALL, corpus
from torchrun import on_two

from adlm.apps.reasoning.datasets import prosqa
from adlm.apps.reasoning.problems import Problem
from adlm.apps.reasoning.solve import parse_answer, wilson_interval
from adlm.apps.reasoning.training import open_reasoning_task
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.training.run_folder import RunFolder

QUICK = ("reason.first_epochs=0", "reason.epochs=3")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prosqa_root(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(root, tmp_path_factory):
    """A run of acot with three slots, from random weights."""
    out = tmp_path_factory.mktemp("runs") / "acot"
    assert reason_train(root, out, *QUICK) == 0
    return out


@pytest.fixture(scope="module")
def gpt2_model(root, tmp_path_factory):
    """A run of acot from a GPT-2 with room for 128 tokens."""
    folder = tmp_path_factory.mktemp("runs")
    base = hugging_face_folder(folder / "base", "gpt2", positions=128)
    assert reason_train(root, folder / "gpt2", f"reason.base={base}", *QUICK) == 0
    return folder / "gpt2"


def error_of(capsys, words):
    """The one line of a command that fails; lines before it announce the run."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    *_, error = output.err.splitlines()
    assert error.startswith("adlm: ")
    assert output.err.count("adlm: ") == 1
    assert "Traceback" not in output.err
    return error


def refused(root, tmp_path, capsys, *words):
    """The error of `adlm reason train`, which leaves no run."""
    capsys.readouterr()
    assert reason_train(root, tmp_path / "refused", *words) == 2
    assert not (tmp_path / "refused").exists()
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("adlm: ") for line in lines) == 1
    return lines[-1]


def with_problems(root, tmp_path, *problems, split="train", num=16):
    """A copy of the ProsQA files with more problems in one of them."""
    (tmp_path / "prosqa").mkdir()
    for path in (root / "prosqa").iterdir():
        (tmp_path / "prosqa" / path.name).write_bytes(path.read_bytes())
    write_problems(tmp_path / "prosqa" / f"prosqa_{split}.json", [*prosqa_problems(num), *problems])
    return tmp_path


LONG_PROOF = Problem(
    "Tom is a wumpus. Is Tom a dumpus or wumpus?",
    ("Tom is a wumpus.", "Every wumpus is a numpus.", "Every numpus is a rumpus.", "Every rumpus is a dumpus."),
    "Tom is a dumpus.",
)


def test_a_problem_without_steps_is_refused_or_kept(root, tmp_path, capsys):
    data = with_problems(root, tmp_path, Problem("Is Tom a wumpus or dumpus?", (), "Tom is a wumpus."))
    error = refused(data, tmp_path, capsys)
    assert "training problem 17 has no steps" in error
    assert "reason.misfits=keep" in error
    assert reason_train(data, tmp_path / "run", "reason.misfits=keep", *QUICK) == 0


def test_more_steps_than_slots_are_refused_or_kept(root, tmp_path, capsys):
    data = with_problems(root, tmp_path, LONG_PROOF)
    assert "training problem 17 has 4 steps, and the last stage leaves out 3" in refused(data, tmp_path, capsys)
    assert reason_train(data, tmp_path / "run", "reason.misfits=keep", *QUICK) == 0
    assert reason_train(data, tmp_path / "four", "reason.slots=4", "reason.epochs=4") == 0, "the remedy"
    assert reason_train(data, tmp_path / "coconut", "reason.method=coconut", *QUICK) == 0, (
        "its last stage leaves out all"
    )


def test_a_tokenizer_that_splits_a_label_is_refused(root, tmp_path, capsys):
    error = refused(root, tmp_path, capsys, "tokenizer=bytes", "length=1024")
    assert "the tokenizer splits the anchor label" in error
    assert "of training problem 1;" in error


def test_a_model_without_room_is_refused(root, tmp_path, capsys):
    base = hugging_face_folder(tmp_path / "base", "gpt2", positions=48)
    error = refused(root, tmp_path, capsys, f"reason.base={base}")
    assert "tokens with its slots, and the model" in error
    assert "has room for 48" in error
    assert "and length has room for 48" in refused(root, tmp_path, capsys, "length=48")


def test_the_room_of_a_fine_tuned_gpt2_is_known(gpt2_model, root, tmp_path, capsys):
    error = refused(root, tmp_path, capsys, f"reason.base={gpt2_model}", "reason.method=pause", "reason.slots=100")
    assert "has room for 128" in error


def test_a_validation_problem_without_room_is_refused(root, tmp_path, capsys):
    long = Problem("Tom is a wumpus. " * 60 + "Is Tom a dumpus or wumpus?", ("Tom is a wumpus.",), "Tom is a wumpus.")
    data = with_problems(root, tmp_path, long, split="valid", num=0)
    assert "validation problem 1 takes" in refused(data, tmp_path, capsys, "length=256")


def test_without_any_file_problems_are_generated_and_the_output_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ADLM_DATA", raising=False)
    words = ["data.problems=16", "reason.misfits=keep", "length=1024", *QUICK]
    assert main(["reason", "train", *TINY, *words, "--out", str(tmp_path / "run")]) == 0
    assert "problems: 16 generated prosqa problems of seed 0 (train), 200 generated" in capsys.readouterr().err
    assert main(["reason", "eval", str(tmp_path / "run"), "--limit", "3"]) == 0
    assert "on prosqa (200 generated prosqa problems of seed 0): " in capsys.readouterr().out
    assert main(["reason", "show", str(tmp_path / "run")]) == 0
    assert "problem 1 of 200 generated prosqa problems of seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        (
            "prosqa",
            "in the folder data of github.com/facebookresearch/coconut; or generate problems: data.problems",
        ),
        ("prontoqa", "github.com/asaparov/prontoqa; or generate problems: data.problems=20000"),
        ("gsm8k", "train.jsonl and test.jsonl are in github.com/openai/grade-school-math"),
    ],
)
def test_missing_files_are_an_error_that_says_where_they_come_from(name, origin, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ADLM_DATA", raising=False)
    error = error_of(capsys, ["reason", "train", *TINY, f"data.name={name}", "--out", tmp_path / "run"])
    assert f"data.name {name} is not here; put its files into DIR/{name} (train: " in error
    assert origin in error


def test_data_without_training_problems_is_refused(root, tmp_path, capsys):
    data = with_problems(root, tmp_path)
    (data / "prosqa" / "prosqa_train.json").unlink()
    assert "has no training problems in data.root" in refused(data, tmp_path, capsys)
    assert reason_train(data, tmp_path / "run", "data.problems=16", "reason.misfits=keep", "length=1024", *QUICK) == 0


@pytest.mark.parametrize("content", ["[{]", "[" * 100_000])
def test_a_damaged_training_file_is_refused(root, tmp_path, capsys, content):
    data = with_problems(root, tmp_path)
    (data / "prosqa" / "prosqa_train.json").write_text(content)
    words = ["prepare", "data=prosqa", f"data.root={data}", "tokenizer=bytes", "--out", tmp_path / "prepared"]
    assert "prosqa_train.json is not JSON" in error_of(capsys, words)
    assert "prosqa_train.json is not JSON" in refused(data, tmp_path, capsys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.batch_size=32"], "train.batch_size 32 is larger than the 24 training problems"),
        (["reason.base=/nonexistent/model"], "/nonexistent/model is not a folder with a model"),
        (["reason.base={tmp}"], "{tmp} was not loaded as a causal language model"),
        (["method=mdlm"], "method mdlm is not a single causal network; reasoning needs method=ar"),
        (["data.name=text8"], "data.name 'text8' is not a set of problems: gsm8k, prosqa, prontoqa"),
        (["data.root={tmp}/none"], "data.root {tmp}/none is not a folder"),
        (["reason.method=thought"], "reason.method"),
        (["reason.slots=-1"], "reason.slots"),
        (
            ["train.steps=5"],
            "train.steps=5: reason.epochs and the number of problems decide the steps; give reason.epochs",
        ),
        (["train.micro_batch=3"], "train.batch_size 8 is not a multiple of 1 process x 3 sequences"),
        (["tokenizer=text8"], "tokenizer text8 has no end-of-text token"),
    ],
)
def test_a_wrong_option_is_refused(words, sentence, root, tmp_path, capsys):
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    assert sentence.replace("{tmp}", str(tmp_path)) in refused(root, tmp_path, capsys, *words)


def test_another_number_of_epochs_is_named_as_the_difference_to_the_run(model, capsys):
    assert "(reason.epochs 3 -> 4)" in error_of(capsys, ["reason", "train", "reason.epochs=4", "--out", model])


def test_a_base_that_is_not_autoregressive_is_refused(root, tmp_path, capsys):
    base = small_model(tmp_path / "mdlm", "mdlm")
    assert "is a model of method mdlm, which is not a single causal network; reasoning needs method=ar" in refused(
        root, tmp_path, capsys, f"reason.base={base}"
    )
    base = small_model(tmp_path / "ar", "ar", tokenizer=None)
    assert "has no tokenizer.json" in refused(root, tmp_path, capsys, f"reason.base={base}")


ONE_PROCESS = "`adlm reason train` runs in one process; start it without torchrun"


def test_several_processes_are_refused(root, tmp_path):
    config = resolve([*TINY, f"data.root={root}"])
    with pytest.raises(UserError, match=ONE_PROCESS):
        open_reasoning_task(config, RunFolder(tmp_path), Processes(0, 2, torch.device("cpu"), None), print)


@pytest.mark.slow
@pytest.mark.processes
def test_torchrun_is_refused(root, tmp_path):
    words = [*TINY, f"data.root={root}", "--out", tmp_path / "run"]
    result = on_two(tmp_path, "reason", "train", *words)
    assert result.returncode != 0
    assert f"adlm: {ONE_PROCESS}" in result.stderr
    assert not (tmp_path / "run").exists()


def test_training_commands_refuse_the_runs_of_each_other(model, root, tmp_path, capsys):
    before, text = contents(model), tmp_path / "text"
    assert "is trained by `adlm reason train`" in error_of(capsys, ["train", "--out", model])
    words = ["train", *SMALL, "data.path=x.txt", "reason.method=cot", "--out", tmp_path / "run"]
    assert "reason.method cot is trained by `adlm reason train`" in error_of(capsys, words)
    words = [*SMALL, "train.steps=1", "train.warm_up_steps=0", f"data.prepared={corpus(tmp_path, lines=100)}"]
    assert main(["train", *words, "--out", str(text)]) == 0
    assert "no reasoning method is given" in error_of(capsys, ["reason", "train", "--out", text])
    words = ["method=ar", "data.name=prosqa", f"data.root={root}", "--out", tmp_path / "run"]
    assert "no reasoning method is given" in error_of(capsys, ["reason", "train", *words])
    assert contents(model) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("action", ["eval", "show"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "mnli"], "--data mnli is not one of gsm8k, prosqa, prontoqa, nor a file of problems"),
        (["--data", "{tmp}/none.json"], "none.json is not one of"),
        (["--data", "{tmp}/object.json"], "object.json holds a dict, not an array"),
        (["--data", "{tmp}/fields.json"], "fields.json, entry 0 has no 'question'"),
        (["--data", "{tmp}/steps.json"], "'steps' is not an array of texts"),
        (["--data", "{tmp}/sums.json"], "is not a ProsQA fact"),
        (["--data", "{tmp}/nested.json"], "nested.json is not JSON (it is nested too deeply)"),
        (["--data", "{tmp}/long.json"], "tokens with its slots, and the model reads at most 256"),
        (["--data", "{tmp}/empty.json"], "empty.json: there is no problem in it"),
        (["--data", "prontoqa"], "data.name prontoqa is not here"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_wrong_problems_are_one_line(action, words, sentence, model, root, tmp_path, capsys):
    files = {
        "object": {"question": "q"},
        "fields": [{"query": "q"}],
        "steps": [{"question": "q", "steps": "one", "answer": "a"}],
        "sums": [{"question": "q", "steps": ["<<1+1=2>>"], "answer": "2"}],
        "long": [{"question": f"{'Every wumpus is a dumpus. ' * 400}Is Tom a dumpus?", "steps": [], "answer": "a"}],
        "empty": [],
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "nested.json").write_text("[" * 100_000)
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    before = contents(tmp_path)
    out = ["--out", tmp_path / "answers.jsonl"] if action == "eval" else []
    assert sentence in error_of(capsys, ["reason", action, model, "--root", root, *words, *out])
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "{model}", "--slots", "-1"], "--slots -1 must be 0 or more"),
        (["eval", "{model}", "--slots", "2", "1001"], "--slots 1001 must be at most 1,000"),
        (["eval", "{model}", "--limit", "0"], "--limit 0 must be at least 1"),
        (["eval", "{gpt2}", "--slots", "128"], "tokens with its slots, and the model reads at most 128"),
        (["show", "{model}", "--problem", "0"], "--problem 0 must be from 1 to 7"),
        (["show", "{model}", "--problem", "8"], "--problem 8 must be from 1 to 7"),
        (["eval", "{tmp}/none"], "none is not a folder; give a run or model folder of `adlm reason train`"),
        (["eval", "{tmp}"], "has no model.safetensors, so it is not a model folder"),
        (["eval", "{text}"], "is not a reasoning model; train one with `adlm reason train`"),
        (["show", "{text}"], "is not a reasoning model; train one with `adlm reason train`"),
        (["eval", "{model}", "--out", "{tmp}/none/answers.jsonl"], "there is no folder"),
        (["eval", "{model}", "--out", "{tmp}/notes.txt"], "exists and was not written by adlm"),
    ],
)
def test_a_wrong_argument_is_one_line(words, sentence, model, gpt2_model, root, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes")
    names = {"model": model, "gpt2": gpt2_model, "tmp": tmp_path, "text": small_model(tmp_path / "text", "ar")}
    before = contents(tmp_path)
    command = [word.format(**names) for word in words]
    assert sentence in error_of(capsys, ["reason", *command, "--root", root])
    assert contents(tmp_path) == before


def test_slots_of_a_method_without_slots_are_refused(root, tmp_path, capsys):
    assert reason_train(root, tmp_path / "run", "reason.method=cot", *QUICK) == 0
    error = error_of(capsys, ["reason", "eval", tmp_path / "run", "--slots", "2"])
    assert "--slots 2: cot has no slots" in error


def test_the_file_of_problems_is_not_replaced(model, tmp_path, capsys):
    file = tmp_path / "problems.json"
    write_problems(file, prosqa_problems(2))
    before = file.read_bytes()
    error = error_of(capsys, ["reason", "eval", model, "--data", file, "--out", file, "--force"])
    assert "is what this command reads" in error
    assert file.read_bytes() == before


def test_other_commands_refuse_a_fine_tuned_model_of_transformers(gpt2_model, capsys):
    folder = gpt2_model / "model"
    for words in (["sample", folder], ["perplexity", folder, "--data", __file__]):
        assert "is a model of transformers, fine-tuned for reasoning; use `adlm reason eval`" in error_of(capsys, words)


def test_show_prints_json(model, root, capsys):
    words = ["reason", "show", str(model), "--root", str(root), "--problem", "3", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"question", "steps", "expected", "answer", "right", "labels", "slots"} <= shown.keys()
    assert len(shown["slots"]) == shown["num_slots"] + 1  # [BOA] and every slot
    assert all(0 <= share <= 1 for tokens in shown["slots"] for _, share in tokens)


def test_show_prints_the_problem_its_labels_and_the_answer(model, root, capsys):
    problem = prosqa_problems(NUM_TEST, start=30)[2]
    assert main(["reason", "show", str(model), "--root", str(root), "--problem", "3", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert problem.question in shown
    assert all(f"  {step}\n" in shown for step in problem.steps)
    rows = [line.split() for line in shown.partition("most likely tokens")[2].splitlines()[1:]]
    labels = prosqa.anchor_labels(problem)
    assert [row[0] for row in rows[:4]] == ["[BOA]", "1", "2", "3"]
    for row, label in zip(rows[:3], labels, strict=False):
        assert row[1] == label
    assert rows[3][1].startswith("'"), "the last slot has no label: it predicts [EOA]"
    assert shown.splitlines()[-1] in ("right", f"wrong: expected {problem.answer}")


def test_eval_reports_the_fields_and_writes_every_answer(model, root, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    results = evaluated(model, root, capsys, "--slots", "0", "3", "--out", str(out))
    assert [result["slots"] for result in results] == [0, 3]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 * NUM_TEST
    file, problems = root / "prosqa" / "prosqa_test.json", prosqa_problems(NUM_TEST, start=30)
    for result, part in zip(results, (lines[:NUM_TEST], lines[NUM_TEST:]), strict=True):
        assert result["method"] == "acot"
        assert result["data"] == "prosqa"
        assert result["num"] == NUM_TEST
        assert result["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert result["right"] == sum(line["right"] for line in part)
        assert result["accuracy"] == result["right"] / NUM_TEST
        assert result["interval"] == list(wilson_interval(result["right"], NUM_TEST))
        assert result["tokens"] == pytest.approx(sum(line["tokens"] for line in part) / NUM_TEST)
        hops = Counter(len(problem.steps) for problem in problems)
        assert {int(hop): num for hop, (_, num) in result["by_hops"].items()} == hops
        assert [line["question"] for line in part] == [problem.question for problem in problems]
        assert [line["expected"] for line in part] == [problem.answer for problem in problems]
        assert all(line["right"] == (line["answer"] == line["expected"]) for line in part)
        assert all(len(line["slots"]) == (1 + result["slots"] if result["slots"] else 0) for line in part)
        assert {line["num_slots"] for line in part} == {result["slots"]}
    assert results[0]["slots_right"] == []
    assert [num for _, num in results[1]["slots_right"]] == [
        sum(len(problem.steps) >= slot for problem in problems) for slot in range(3)
    ], "a problem of n steps has n + 1 labels, and k slots predict the first k: the last one predicts [EOA]"
    for place, (right, _) in enumerate(results[1]["slots_right"]):
        told = [line for line in lines[NUM_TEST:] if place < len(line["labels"])]
        assert right == sum(line["slots"][place].strip() == line["labels"][place] for line in told)


def test_eval_takes_a_file_a_limit_and_the_model_folder_and_prints_a_summary(model, root, tmp_path, capsys):
    file = tmp_path / "problems.json"
    write_problems(file, prosqa_problems(NUM_TEST, start=30))
    whole = evaluated(model, root, capsys)
    assert evaluated(model / "model", root, capsys, "--data", str(file)) == {
        **whole,
        "file": "problems.json",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert evaluated(model, root, capsys, "--limit", "2")["num"] == 2
    assert main(["reason", "eval", str(model)]) == 0, "the problems are where they were for training"
    printed = capsys.readouterr().out
    assert f"acot with 3 slots on prosqa: {whole['right']} of {NUM_TEST} right" in printed
    assert "labels predicted, from the first on:" in printed


@pytest.mark.parametrize("preset", ["prosqa/small", "prontoqa/small", "prosqa/gpt2"])
def test_presets_of_reasoning_resolve_and_those_from_random_weights_use_muon(preset):
    config = resolve([preset])
    assert config.method == "ar"
    assert config.reason is not None
    assert (config.train.optimizer == "muon") == (config.reason.base == "")


@pytest.mark.parametrize(
    ("right", "num", "interval"),
    [
        (0, 10, (0.0, 0.27753279)),  # statsmodels: proportion_confint(0, 10, method="wilson")
        (5, 10, (0.23659309, 0.76340691)),
        (10, 10, (0.72246721, 1.0)),
        (81, 263, (0.25530, 0.36620)),  # Newcombe, 1998, table I
        (15, 148, (0.06239, 0.16052)),
    ],
)
def test_wilson_intervals(right, num, interval):
    assert wilson_interval(right, num) == pytest.approx(interval, abs=5e-5)
    low, high = wilson_interval(right, num)
    for bound in (low, high):  # the bounds p solve (right / num - p)^2 = z^2 p (1 - p) / num
        assert (right / num - bound) ** 2 == pytest.approx(1.959963984540054**2 * bound * (1 - bound) / num, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("### 18", "18"),
        ("<<9*2=18>>\n### 1,018 ", "1018"),
        ("### 3 #### 4", "4"),
        ("Tom is a wumpus.", "Tom is a wumpus."),
        ("### ", ""),
        ("", ""),
    ],
)
def test_an_answer_is_what_follows_the_last_mark_without_commas(text, answer):
    assert parse_answer(text) == answer
