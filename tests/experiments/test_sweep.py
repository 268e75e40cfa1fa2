"""The runner trains each trial once, after the one it needs; results are only appended; the sweeps are valid."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import sweep
from reasoning import train as reasoning_train
from sweep import Group, Results, Row, Runner, sweep_of

from adlm.config.load import resolve
from adlm.errors import UserError

FIRST, SECOND = Row("first", "", "p", (), seeds=range(2)), Row("second", "", "p", ("a.b=1",), needs="first")
GROUP = Group("group", "?", ("common=1",), (SECOND, FIRST))


class Question:
    """Trains nothing, but leaves a model; notes what it was asked for."""

    def __init__(self, broken: str = ""):
        self.trained, self.measured, self.broken = [], [], broken

    def check(self, trials, results, arguments): ...

    def train(self, trial, arguments):
        self.trained.append(trial.key)
        if trial.key == self.broken:
            raise UserError("broken")
        (arguments.out / trial.key / "model").mkdir(parents=True)

    def measure(self, trial, arguments):
        self.measured.append(trial.key)
        return {"group": trial.group.name, "overrides": trial.overrides(arguments.extra)}

    def summary(self, result):
        return "measured"


def run(tmp_path: Path, question: Question, jobs: int = 1, **options) -> Results:
    defaults = {"extra": [], "seconds": 1e9, "trial_seconds": 1.0, "commit": "abc"}
    arguments = Namespace(**defaults | options, jobs=jobs, out=tmp_path / "runs")
    results = Results(tmp_path / "results.jsonl")
    Runner(question, list(GROUP.trials()), results, arguments).run()
    return results


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_is_trained_after_the_one_it_starts_from_and_only_once(tmp_path, jobs):
    question = Question()
    run(tmp_path, question, jobs)
    assert sorted(question.trained) == ["first-seed0", "first-seed1", "second-seed0"]
    assert question.trained.index("first-seed0") < question.trained.index("second-seed0")
    written = (tmp_path / "results.jsonl").read_bytes()
    assert run(tmp_path, Question(), jobs).of("trial").keys() == {"first-seed0", "first-seed1", "second-seed0"}
    assert (tmp_path / "results.jsonl").read_bytes() == written


def test_after_a_kill_the_broken_line_goes_and_its_trial_is_run_again(tmp_path):
    run(tmp_path, Question())
    whole = (tmp_path / "results.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:20])
    (tmp_path / "runs" / json.loads(lines[2])["name"] / "model").rmdir()
    question = Question()
    run(tmp_path, question)
    assert question.measured == [json.loads(lines[2])["name"]]
    assert (tmp_path / "results.jsonl").read_bytes().startswith(b"".join(lines[:2]))
    assert len(Results(tmp_path / "results.jsonl").of("trial")) == 3


def test_a_model_that_is_needed_and_gone_is_trained_again_without_a_second_result(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for trial in GROUP.trials():
        if trial.row is FIRST:
            results.add("trial", trial.key, {"overrides": trial.overrides()})
    question = Question()
    run(tmp_path, question)
    assert question.trained == ["first-seed0", "second-seed0"]
    assert question.measured == ["second-seed0"]


def test_what_needs_a_failed_trial_fails_too_and_the_others_go_on(tmp_path):
    question = Question(broken="first-seed0")
    with pytest.raises(SystemExit, match="failed: first-seed0, second-seed0"):
        run(tmp_path, question)
    assert question.measured == ["first-seed1"]


def test_no_trial_starts_that_would_not_end_in_time_and_none_waits_for_it(tmp_path, capsys):
    question = Question()
    run(tmp_path, question, jobs=2, seconds=10.0, trial_seconds=60.0)
    assert question.trained == []
    assert "no time for first-seed0, about 66 s" in capsys.readouterr().out


def test_a_trial_with_other_overrides_needs_other_results(tmp_path):
    run(tmp_path, Question())
    with pytest.raises(UserError, match="has second-seed0 with other overrides; give another file"):
        run(tmp_path, Question(), extra=["c.d=2"])


def test_parts_and_templates_are_spelled_out(tmp_path, monkeypatch):
    (tmp_path / "made-up").mkdir()
    (tmp_path / "made-up" / "sweep.yaml").write_text(
        """
        parts: {big: model.blocks=9, all: big train.steps=7, of: "anchor.share={share}"}
        templates: {pair: {one: {train: preset of, seeds: 2}, two: {train: preset, needs: one}}}
        groups:
          g: {question: Why, common: all, rows: pair, values: {share: 0.5}}
        """
    )
    monkeypatch.setattr(sweep, "FOLDER", tmp_path)
    first, needing, second = sweep_of("made-up").trials()
    assert first.overrides() == ["preset", "model.blocks=9", "train.steps=7", "anchor.share=0.5", "train.seed=0"]
    assert (first.key, second.key, needing.needs) == ("g-one-seed0", "g-one-seed1", first)


def test_every_trial_of_the_reasoning_sweep_is_a_valid_config_and_starts_from_a_model():
    for trial in sweep_of("reasoning").trials():
        config = resolve([word for word in trial.overrides() if word != reasoning_train.BASE])
        method = trial.row.name.removeprefix(f"{trial.group.name}-")
        assert config.reason.method == ("cot" if method == "first" else method)
        starts = reasoning_train.BASE in trial.overrides() or trial.needs is not None
        assert starts == ("smollm2" in trial.key or trial.row.needs != "")


def test_groups_of_smollm2_need_its_folder():
    trials = sweep_of("reasoning").chosen(["smollm2-gsm8k-acot-seed1"])
    with pytest.raises(UserError, match="--base is missing: smollm2-gsm8k-acot-seed1 starts from a pretrained model"):
        reasoning_train.check(trials, None, Namespace(base=None, out=Path("nowhere")))


@pytest.mark.parametrize("question", ["arena", "reasoning"])
def test_results_name_no_machine_and_belong_to_trials_of_the_sweep(question):
    path = sweep.FOLDER / question / "results.jsonl"
    text, keys = path.read_text(), {trial.key for trial in sweep_of(question).trials()}
    assert "=/" not in text
    assert '"/' not in text
    earlier = ("scratch-first", "first-again")  # reasoning: trained before the sweep was written, or a second time
    found = {key for key in Results(path).of("trial") if not any(name in key for name in earlier)}
    assert found <= keys
