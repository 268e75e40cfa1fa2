"""Tests of `adlm lm-eval`: tasks end to end, without a network; user errors are one line with exit code 2."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from small_models import small_model

from adlm.cli.lm_eval import LmEvalRequest, run, with_defaults
from adlm.cli.main import main

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    {"question": "the cat", "choices": [" sat on it", " ran from it", " is"], "answer": 0},
    {"question": "the dog", "choices": [" barks at us", " sees"], "answer": 1},
    {"question": "a bird", "choices": [" sings", " eats"], "answer": 1},
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two models and two tasks on the same questions."""
    folder = tmp_path_factory.mktemp("lm-eval")
    for method in ("adlm", "ar"):
        small_model(folder / method, method, "text8", length=32)
    (folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, rest in (("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + rest)
    return folder


@pytest.fixture
def harness(world, monkeypatch):
    """The command with the tasks of `world` alone: reading the thousands of its own takes the harness ten seconds."""
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")
    import lm_eval.__main__
    import lm_eval.tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(lm_eval.__main__, "setup_logging", lambda: None)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    monkeypatch.chdir(world)
    return lambda *words: main(["lm-eval", *words, "--include_path", str(world)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_multiple_choice_and_generation_run_end_to_end(world, harness, capsys, tmp_path, method):
    from lm_eval.api.instance import Instance

    from adlm.apps.harness import HarnessModel

    arguments = ["--model_args", f"path={method},samples=4,seed=3", "--tasks", "choice,generate"]
    assert harness(*arguments, "--output_path", str(tmp_path), "--log_samples", "--device", "cpu") == 0
    assert "|choice" in capsys.readouterr().out
    [results_file] = tmp_path.rglob("results_*.json")
    results = json.loads(results_file.read_text())
    samples = {
        task: [json.loads(line) for line in next(tmp_path.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()]
        for task in ("choice", "generate")
    }
    lm = HarnessModel(method, device="cpu", samples=4, seed=3)
    right = []
    for sample, question in zip(samples["choice"], QUESTIONS, strict=True):
        pairs = [(question["question"], f" {choice}") for choice in question["choices"]]  # the harness adds a space
        scores = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True)
        logged = [float(response[0]) for [response] in sample["resps"]]
        assert logged == pytest.approx([log_likelihood for log_likelihood, _ in scores], rel=1e-5)
        right.append(logged.index(max(logged)) == question["answer"])
    assert results["results"]["choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    for sample in samples["generate"]:
        assert len(sample["resps"][0][0]) <= 6
        assert "e" not in sample["resps"][0][0]
    config = results["config"]
    assert (config["model"], config["adlm_method"], config["batch_size"]) == ("adlm", method, "auto")
    assert (config["loglikelihood_stderr"]["max"] > 0) == (method == "adlm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model_args", "path=nowhere", "--tasks", "choice"], "nowhere is neither a model folder nor a .ckpt file"),
        (["--model_args", "path=adlm,sample=3", "--tasks", "choice"], "'sample'; did you mean 'samples'?"),
        (["--model_args", "path=adlm,samples=3", "--tasks", "choice"], "samples 3 must be an even number"),
        (["--model_args", "path=adlm,target_stderr=-1", "--tasks", "choice"], "target_stderr '-1.0' must be positive"),
        (["--model_args", "path=adlm,length=99", "--tasks", "choice"], "length 99 must be at most 32"),
        (["--model_args", "path=adlm,device=tpu", "--tasks", "choice"], "device 'tpu' is not one that torch sees"),
        (["--model_args", "path=adlm,sampler=best", "--tasks", "generate"], "sampling.sampler 'best' is not one of"),
        (["--model_args", "path=adlm", "--tasks", "choise"], "Tasks not found: choise (see adlm lm-eval --help)"),
        (["--model", "adml", "--tasks", "choice"], "Attempted to load model 'adml'"),
        (["--tasks", "choice"], "path is missing; give --model_args path=FOLDER"),
        (["--model_args", "path=adlm", "--tasks", "generate", "--batch_size", "few"], "batch_size 'few' must be auto"),
        (["--model_args", "path=adlm", "--tasks", "generate", "--gen_kwargs", "top_p=7"], "sampling.top_p 7 must be"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(harness, capfd, words, sentence):
    assert harness(*words) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("adlm: ")]
    assert len(lines) == 1
    assert sentence in lines[0]


@pytest.mark.filterwarnings("ignore")
def test_the_example_task_runs_without_a_network(harness, capsys, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(Path(__file__).parents[2])  # the task names its questions from the root of the repository
    words = ["--model_args", "path=box,samples=4", "--tasks", "sentence_ends", "--include_path", "examples/lm_eval"]
    assert main(["lm-eval", *words, "--limit", "1", "--device", "cpu"]) == 0
    assert "|sentence_ends" in capsys.readouterr().out


def test_the_command_says_what_it_does_before_it_imports_the_harness(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "adlm.apps.harness", None)
    with pytest.raises(ImportError):
        run(LmEvalRequest(words=("ls", "tasks")))
    assert capsys.readouterr().err.startswith("loading the lm-evaluation-harness and its tasks")


def test_without_the_harness_the_error_has_the_command_that_installs_it(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "adlm.apps.harness", raising=False)
    assert main(["lm-eval", "--tasks", "choice"]) == 2
    assert capsys.readouterr().err.endswith(
        "adlm: the package lm-eval is not installed; try pip install 'adlm[lm-eval]'\n"
    )


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["--tasks", "a"], ["--model", "adlm", "--batch_size", "auto", "--device", "auto"]),
        (["run", "--model=adlm", "-b", "8", "--tasks", "a"], ["--device", "auto"]),
        (["--model_args", "path=x", "--device", "cpu"], ["--model", "adlm", "--batch_size", "auto"]),
        (["-M", "hf", "--tasks", "a"], []),
        (["--config", "own.yaml"], []),
        (["ls", "tasks"], []),
        ([], []),
    ],
)
def test_defaults_are_added_to_runs_of_our_models_only(given, added):
    assert with_defaults(given) == [*given, *added]


def test_a_closed_pipe_is_not_taken_for_a_missing_network(monkeypatch):
    def run_harness(arguments):
        raise BrokenPipeError

    monkeypatch.setattr("adlm.apps.harness.run_harness", run_harness)
    with pytest.raises(BrokenPipeError):
        run(LmEvalRequest(words=("ls", "tasks")))
