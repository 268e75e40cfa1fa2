"""The arena's rows are the controls they claim to be, and its tables are right before any result is believed."""

import importlib.util
import io
import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sweep
from arena import samples as arena_samples
from arena import tables as arena_tables
from arena import train as arena_train
from arena.tables import ARENA, bounds_tables, generation_table, nats_as_json, nats_of
from arena.train import check_text, work_of
from small_runs import corpus
from sweep import Budget, Results, Trial, key_of

from adlm.cli.main import main
from adlm.config.load import resolve, to_mapping
from adlm.errors import UserError
from adlm.language_model import LanguageModel
from adlm.likelihood.standard_errors import Nats, difference, summarize
from adlm.methods import method_of
from adlm.samples_file import read_samples
from adlm.tokens import load_tokenizer

RUN = Path(__file__).parents[2] / "experiments" / "run.py"


@pytest.fixture(scope="module")
def runner():
    """The module of experiments/run.py, under a name of its own."""
    spec = importlib.util.spec_from_file_location("experiments_run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trial_of(name: str, seed: int = 0) -> Trial:
    return next(trial for trial in ARENA.trials() if trial.key == key_of(name, seed))


def options(*words: str) -> dict[str, object]:
    """The resolved config of a row, or of presets and overrides, flat."""
    flat: dict[str, object] = {}
    overrides = trial_of(words[0]).overrides() if words[0] in ARENA.rows else words
    for section, part in to_mapping(resolve(overrides)).items():
        flat |= (
            {f"{section}.{key}": value for key, value in part.items()} if isinstance(part, dict) else {section: part}
        )
    return flat


def differing(first: str, second: str) -> set[str]:
    ours, theirs = options(first), options(second)
    return {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


@pytest.mark.slow
def test_every_trial_is_a_valid_config_and_every_comparison_is_between_rows_of_one_recipe():
    trials = ARENA.trials()
    assert len({trial.key for trial in trials}) == len(trials)
    assert len(ARENA.rows) == sum(len(group.rows) for group in ARENA.groups.values())
    configs = {trial.key: resolve(trial.overrides()) for trial in trials}
    for config in configs.values():
        method_of(config)
    for group in ARENA.groups.values():
        for name in group.against:
            other = next(each for each in ARENA.groups.values() if name in {row.name for row in each.rows})
            assert (other.common, other.tokenizer) == (group.common, group.tokenizer)


@pytest.mark.parametrize(
    ("control", "model", "changed"),
    [
        ("auxiliary", "adlm", {"model.bridge"}),
        ("auxiliary-all", "auxiliary", {"anchor.rule"}),
        ("adlm-all", "adlm", {"anchor.rule"}),
        ("adlm-gamma-0", "adlm", {"anchor.gamma"}),
        ("adlm-random-0.15", "adlm-rare-0.15", {"anchor.rule"}),
        ("adlm-masked", "adlm", {"anchor.positions"}),
        ("adlm-tied", "adlm", {"model.tie_heads"}),
        ("adlm-published-slow", "adlm-published", {"train.bridge_rate"}),
        ("a2r-auxiliary", "a2r-0.1", {"model.bridge"}),
        ("auxiliary-muon-2e-3", "adlm-muon-2e-3", {"model.bridge", "model.bridge_start"}),
        ("adlm-random-muon-2e-3", "adlm-rare-muon-2e-3", {"anchor.rule"}),
        ("mdlm-matched-muon-2e-3", "mdlm-muon-2e-3", {"model.hidden"}),
        ("books-adlm", "adlm-muon-2e-3", set()),
        ("books-adlm-random", "books-adlm-rare", {"anchor.rule"}),
        ("final-auxiliary", "final-adlm", {"model.bridge", "model.bridge_start"}),
        ("asymmetric-8+4-gamma-0-every-4", "asymmetric-8+4-every-4", {"anchor.gamma"}),
        ("asymmetric-10+2-every-8", "asymmetric-10+2", {"sampling.anchor_every"}),
    ],
)
def test_a_control_differs_from_its_model_in_what_it_controls(control, model, changed):
    assert differing(control, model) == changed


def test_the_published_row_has_the_published_anchor_term():
    found = options("adlm-published")
    names = ("model.bridge", "anchor.gamma", "anchor.tau", "anchor.positions", "anchor.warm_up")
    assert [found[name] for name in names] == ["logits", 3e-3, 5, "all", True]


def test_the_released_rows_are_the_preset_but_for_size_budget_and_eps():
    found, preset = options("released-3e-4"), options("owt/adlm")
    budget = {f"train.{name}" for name in ("steps", "batch_size", "warm_up_steps", "ema", "log_every", "valid_every")}
    budget |= {f"train.{name}" for name in ("checkpoint_every", "keep", "sample_every", "samples")}
    sizes = {"length", "model.hidden", "model.blocks", "model.heads", "model.denoiser_blocks"}
    changed = {name for name in preset if found[name] != preset[name]}
    assert changed <= budget | sizes | {"schedule.eps", "data.name", "data.packing", "sampling.steps", "tokenizer"}


def test_matched_rows_have_as_many_parameters_within_2_percent(runner):
    for matched, model in (("mdlm-matched", "adlm"), ("ar-544", "a2r-0.1"), ("ar-560", "a2r-published")):
        counts = [runner.parameters_of(trial_of(name)) for name in (matched, model)]
        assert counts[0] == pytest.approx(counts[1], rel=0.02)


def test_the_auxiliary_control_is_mdlm_of_12_blocks_and_a_head(runner):
    plain, control = (runner.parameters_of(trial_of(name)) for name in ("mdlm-12", "auxiliary"))
    head, norm, modulation = 8192 * 512 + 8192, 512, 2 * 512 * (128 + 1)
    assert control - plain == head + norm + modulation


def made_up(offset: float, seconds_per_step: float, seed: int, decay: str = "constant", scale: float = 1.0) -> dict:
    """A result whose bound is about 5 + offset, on 6 documents of 100 tokens, with 4 replicates."""
    rng = np.random.default_rng(7)  # the same noise for every row
    documents = 100 * (5 + offset) + scale * rng.normal(size=(6, 4))
    nats = Nats(documents.reshape(3, 2, 4).sum(axis=1), documents, np.full(6, 100), exact=False)
    estimate = summarize(nats)
    return {
        "seed": seed,
        "parameters": 1000,
        "tokens": 2000,
        "steps": 100,
        "train_seconds": 100 * seconds_per_step,
        "anchor_share": 0.25,
        "jobs": 1,
        "device": "card",
        "decay": decay,
        "curve": [[50, 50 * seconds_per_step, 6.0 + offset, 0.01], [100, 100 * seconds_per_step, 5.0 + offset, 0.01]],
        "held_out": {"sha256": "text", "unit": "block", "length": 8},
        "nats": estimate.nats,
        "stderr": arena_tables.stderr_of(estimate),
        **nats_as_json(nats),
    }


def line_of(table: str, title: str, number: int = 0) -> list[str]:
    """The cells of the number-th line with this title."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in lines[number].split("|")[1:-1]]


@pytest.fixture
def results():
    return {
        key_of(name, seed): made_up(offset + 0.01 * seed * (name == "smoke-mdlm"), seconds, seed)
        for name, offset, seconds in (("smoke-mdlm", 0.0, 1.0), ("smoke-auxiliary", -0.25, 2.0))
        for seed in (0, 1)
    }


def test_results_keep_what_paired_differences_need(results):
    ours, theirs = (nats_of(json.loads(json.dumps(results[f"smoke-{name}-seed0"]))) for name in ("auxiliary", "mdlm"))
    gap = difference(ours, theirs)
    assert gap.nats == pytest.approx(-0.25, abs=1e-5)
    assert arena_tables.stderr_of(gap) == pytest.approx(0, abs=1e-4)  # the noise is common
    assert arena_tables.stderr_of(summarize(ours)) > 1e-3


def test_the_table_pairs_trials_of_the_same_seed_and_shows_the_spread_over_seeds(results):
    table = "\n".join(bounds_tables(results, {}))
    assert line_of(table, "MDLM with auxiliary loss", 0)[4:6] == ["", "25.0%"]
    gaps = [line_of(table, "MDLM with auxiliary loss", number)[-1].split(" ± ")[0] for number in (0, 1)]
    assert [float(gap) for gap in gaps] == pytest.approx([-0.25, -0.26], abs=1e-3)
    seeds, _, spread, gap = line_of(table, "MDLM with auxiliary loss", 2)[1:]
    assert (seeds, float(spread)) == ("2", 0.0)
    assert gap == "-0.2550 ± 0.0050 (p = 0.012)"  # -0.25 and -0.26: standard deviation 0.0071, over sqrt(2)
    assert "AR" not in table


def test_at_equal_seconds_bounds_are_interpolated_where_the_fastest_trial_ends(results):
    """MDLM ends after 100 s; the other is then at its step 50."""
    table = "\n".join(bounds_tables(results, {}))
    assert "After 100.0 s, by linear" in table
    _, _, tokens, nats, gap = line_of(table, "MDLM with auxiliary loss", 3)
    assert (tokens, nats) == ("1,000", "5.7500")
    assert gap == f"{(5.75 - 5 + 5.75 - 5.01) / 2:+.4f} ± 0.0050 (p = 0.0043)"
    decaying = {key: {**result, "decay": "trapezoid"} for key, result in results.items()}
    assert "After" not in "\n".join(bounds_tables(decaying, {}))


def test_timings_replace_the_seconds_of_trials_that_shared_the_device(results):
    """Timed alone, the slower row takes 0.8 times as long: it ends after 40 s, when MDLM is at step 80."""
    timing = {"seconds_per_step": 0.4, "device": "card"}
    shared = {key: {**result, "jobs": 3} for key, result in results.items()}
    timed = "\n".join(
        bounds_tables(shared, {"smoke-mdlm": {**timing, "seconds_per_step": 0.5}, "smoke-auxiliary": timing})
    )
    assert "After 40.0 s, by linear" in timed
    assert line_of(timed, "MDLM", 3)[2:4] == ["1,600", f"{(5.4 + 5.41) / 2:.4f}"]
    assert "measured alone on the device" in timed
    assert line_of(timed, "MDLM", 0)[4] == "500.0"


def test_beside_a_doubtful_timing_all_seconds_are_those_in_which_the_gpu_computed(results):
    """Of both steps the GPU computes for 0.4 s, so both end after 40 s."""
    timing = {"seconds_per_step": 0.42, "busy_seconds_per_step": 0.4, "device": "card"}
    timings = {"smoke-mdlm": timing, "smoke-auxiliary": timing | {"seconds_per_step": 1.0}}
    table = "\n".join(bounds_tables(results, timings))
    assert line_of(table, "MDLM", 0)[4] == "420.0"
    assert line_of(table, "MDLM with auxiliary loss", 0)[4] == "GPU 400.0"
    assert "After 40.0 s, by linear" in table
    assert line_of(table, "MDLM with auxiliary loss", 3)[2] == "2,000"
    assert "because the GPU waited for the host in the timing of: MDLM with auxiliary loss." in table
    del timing["busy_seconds_per_step"]
    table = "\n".join(bounds_tables(results, timings | {"smoke-mdlm": timing}))
    assert "no good timing: MDLM with auxiliary loss." in table


def test_seconds_that_cannot_be_compared_are_left_out(results):
    timing = {"seconds_per_step": 0.4, "device": "card"}
    shared = {key: {**result, "jobs": 1 if "mdlm" in key else 2} for key, result in results.items()}
    table = "\n".join(bounds_tables(shared, {}))
    assert line_of(table, "MDLM", 3)[2] == "2,000"  # its trials ran alone
    assert "Left out, because trials shared the device and have no good timing: MDLM with auxiliary loss." in table
    assert "Not timed, by the seconds of trials that ran alone: MDLM." in table
    other = "\n".join(bounds_tables(results, {"smoke-mdlm": {**timing, "device": "other card"}}))
    assert "Seconds of different devices are not compared: other card, card." in other
    assert "After" not in other


@pytest.fixture
def released():
    """The released configuration ends at 6.0 after 200 s, with another rate at 6.1; the others reach 6.0 earlier."""
    of = {"released-1e-3": (1.0, 2.0), "released-3e-4": (1.1, 2.0), "adlm-muon-1e-3": (0.5, 1.0)}
    of |= {"adlm-muon-2e-3": (-0.1, 1.0), "mdlm-muon-1e-3": (1.3, 1.0), "ar-12": (-1.0, 0.5)}
    return {key_of(name, 0): made_up(offset, seconds, 0) for name, (offset, seconds) in of.items()}


def test_the_seconds_until_the_released_bound_are_those_of_its_best_learning_rate(released):
    table = "\n".join(bounds_tables(released, {})).split("## How soon")[1]
    assert "The bound is 6.0000, of ADLM as released, learning rate 1e-3" in table
    title = "ADLM as released, learning rate 1e-3"
    assert line_of(table, title)[2:] == ["6.0000", "200.0", "1.000"]
    assert line_of(table, "ADLM 8 + 4, Muon 1e-3")[3:] == ["75.0", "0.375"]  # 6.5 at 50 s, 5.5 at 100 s
    assert line_of(table, "ADLM 8 + 4, Muon 2e-3")[3:] == ["at most 50.0", "at most 0.250"]
    assert line_of(table, "MDLM 12, Muon 1e-3")[3:] == ["not reached", ""]
    assert arena_tables.released_bound(released, {}).soonest.row.name == "adlm-muon-2e-3"  # not AR
    timing = {"adlm-muon-1e-3": {"seconds_per_step": 2.0, "device": "card"}}
    table = "\n".join(bounds_tables(released, timing)).split("## How soon")[1]
    assert line_of(table, "ADLM 8 + 4, Muon 1e-3")[3:] == ["150.0", "0.750"]


def test_the_released_bound_is_not_compared_with_bounds_on_another_text(released):
    text = {"sha256": "books", "unit": "block", "length": 8}
    other = {**released, "adlm-muon-1e-3-seed0": {**released["adlm-muon-1e-3-seed0"], "held_out": text}}
    assert "ADLM 8 + 4, Muon 1e-3" not in "\n".join(bounds_tables(other, {})).split("## How soon")[1]


def test_other_texts_are_not_compared_silently(results):
    other = {**results["smoke-mdlm-seed0"], "held_out": {"sha256": "other", "unit": "block", "length": 8}}
    table = "\n".join(bounds_tables({**results, "smoke-mdlm-seed0": other}, {}))
    assert line_of(table, "MDLM with auxiliary loss", 0)[-1] == "other text"
    assert "These trials are of different texts" in table
    assert "standard deviation" not in table
    fewer = {**results["smoke-mdlm-seed0"], "group_nats": [[1.0, 2.0]] * 3}
    table = "\n".join(bounds_tables({**results, "smoke-mdlm-seed0": fewer}, {}))
    assert line_of(table, "MDLM with auxiliary loss", 0)[-1] == "not paired"


def test_curves_are_compared_at_the_steps_that_both_have():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    from arena.figures import curve_difference

    first, second = made_up(0.5, 1, 0), made_up(0, 1, 0)
    second["curve"] = [[10, 10, 7.0, 0.01], [50, 50, 6.25, 0.01], [75, 75, 5.5, 0.01]]
    first["curve"] = [[10, 10, 7.5, 0.01], *first["curve"]]  # 10 is within the first fifth of 100 steps
    steps, gaps = curve_difference(first, second)
    assert (steps.tolist(), gaps.tolist()) == ([50], [0.25])


def test_figures_are_drawn_where_there_are_results(results, released, tmp_path):
    pytest.importorskip("matplotlib")
    from arena.figures import plot_groups, plot_released_bound

    (file,) = plot_groups(results, {}, tmp_path)
    assert file.name == "smoke.svg"
    assert file.read_text().lstrip().startswith("<?xml")
    assert plot_released_bound(results, {}, tmp_path) == []
    (file,) = plot_released_bound(released, {}, tmp_path)
    assert file.read_text().lstrip().startswith("<?xml")


def test_work_starts_only_if_it_is_expected_to_end_in_time():
    assert Budget(250).allows(240) is False  # 1.1 x 240 s
    assert Budget(270).allows(240)
    assert Budget(math.inf).allows(1e9)


def test_trials_are_chosen_by_group_row_or_key_in_that_order_and_those_of_other_texts_only_by_name():
    others = {
        "smoke",
        "quickstart",
        "quick-objective",
        "quick-planner",
        "quick-lengths",
        "quick-order",
        "quick-stale",
        "quick-confirm",
        "quick-brief",
    }
    others |= {"books", "once", "finals", "finals-one", "code", "quick-code"}
    assert {trial.group.name for trial in ARENA.chosen(None)} == ARENA.groups.keys() - others
    keys = [trial.key for trial in ARENA.chosen(["auxiliary-seed2", "adlm-seed1", "auxiliary"])]
    assert keys == ["auxiliary-seed2", "adlm-seed1", "auxiliary-seed0", "auxiliary-seed1"]
    with pytest.raises(UserError, match="--only adml: no such group, row or trial"):
        ARENA.chosen(["adml"])


def run(runner, monkeypatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, words)])
    runner.main()


@contextmanager
def refused(problem: str, capsys) -> Iterator[None]:
    """The command ends with one line of error and exit code 2."""
    with pytest.raises(SystemExit) as exit:
        yield
    assert exit.value.code == 2
    assert problem in capsys.readouterr().err


class MainThread(ThreadPoolExecutor):
    """An executor for signal handlers, which only the main thread may install."""

    def submit(self, work):
        future = Future()
        future.set_result(work())
        return future


@pytest.fixture
def in_process(monkeypatch):
    """Commands of adlm run in this process: importing torch takes longer than a small run."""

    def adlm(*words: str) -> str:
        with redirect_stdout(io.StringIO()) as output:
            assert main(list(words)) == 0
        return output.getvalue()

    monkeypatch.setattr(arena_train, "adlm", adlm)
    monkeypatch.setattr(sweep, "ThreadPoolExecutor", MainThread)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"), lines=200)


def test_a_trial_is_trained_measured_and_then_kept(runner, prepared, tmp_path, in_process, monkeypatch, capsys):
    folders = (
        "--data",
        prepared,
        "--out",
        tmp_path / "runs",
        "--results",
        tmp_path / "results.jsonl",
        "--commit",
        "abc",
    )
    chosen = ("run", "arena", *folders, "--samples", "2", "--only", "smoke-auxiliary-seed0")
    run(runner, monkeypatch, *chosen, "--seconds", "100")  # below the 240 s expected of a first trial
    assert "no time for smoke-auxiliary-seed0" in capsys.readouterr().out
    file = tmp_path / "results.jsonl"
    assert not file.exists()
    run(runner, monkeypatch, *chosen)
    written = file.read_bytes()
    (result,) = Results(file).of("trial").values()
    config = resolve(result["overrides"])
    assert (config.model.bridge, config.train.seed) == ("none", 0)
    assert (result["steps"], result["tokens"], result["commit"]) == (8, 8 * 8 * 32, "abc")
    assert [point[0] for point in result["curve"]] == [4, 8]
    assert 0 < result["anchor_share"] < 1
    assert result["nats"] == pytest.approx(summarize(nats_of(result)).nats, abs=1e-3)
    assert str(tmp_path) not in written.decode()
    assert str(prepared) not in written.decode()
    assert not (tmp_path / "runs/smoke-auxiliary-seed0/checkpoints").exists()
    run(runner, monkeypatch, *chosen)
    assert "1 results in" in capsys.readouterr().out
    assert file.read_bytes() == written
    with refused("has smoke-auxiliary-seed0 with other overrides", capsys):
        run(runner, monkeypatch, *chosen, "--extra", "train.steps=9")


def test_trials_do_not_start_on_the_text_of_another_group(prepared, results):
    check_text(prepared, {"smoke"}, {})
    with pytest.raises(UserError, match="has 258 symbols, and the group finals needs the 50258 of tokenizer=gpt2"):
        check_text(prepared, {"smoke", "finals"}, {})
    with pytest.raises(UserError, match="another text than that of the result smoke-mdlm-seed0"):
        check_text(prepared, {"smoke"}, results)


@pytest.mark.slow
def test_the_smoke_group_runs_and_fills_table_and_figure(runner, prepared, tmp_path, monkeypatch, capsys):
    """About 30 s: five trials, each a process of its own, two at a time; then samples of two, judged by the third."""
    pytest.importorskip("matplotlib")
    results = tmp_path / "results.jsonl"
    folders = ("--data", prepared, "--out", tmp_path / "runs", "--results", results)
    run(runner, monkeypatch, "run", "arena", *folders, "--only", "smoke", "--jobs", "2", "--samples", "2")
    assert Results(results).of("trial").keys() == {trial.key for trial in ARENA.groups["smoke"].trials()}
    capsys.readouterr()
    run(runner, monkeypatch, "table", "arena", "--results", results)
    table = capsys.readouterr().out
    assert line_of(table, "AR")[1] == "0"
    assert "Left out, because trials shared the device and have no good timing: MDLM; MDLM with auxiliary loss" in table
    run(runner, monkeypatch, "plot", "arena", "--results", results, "--out", tmp_path / "figures")
    assert (tmp_path / "figures" / "smoke.svg").is_file()

    models = ("--only", "smoke-mdlm-seed0", "smoke-auxiliary-seed0")
    out = ("--out", tmp_path / "runs", "--results", results)
    run(runner, monkeypatch, "samples", *out, *models, "--num", "4", "--batch", "4", "--steps", "2")
    judged = ("--judge", tmp_path / "runs" / "smoke-ar-seed0", "--reference", prepared)
    run(runner, monkeypatch, "judge", *out, *judged)
    cards = Results(results).of("card")
    assert len(cards) >= 4  # two models, two samplers; the slower one may have 1 step too
    made_by = [cards[f"{key}-ancestral-2.smoke-ar-seed0"]["samples"]["made_by"] for key in models[1:]]
    assert [each["method"] for each in made_by] == ["mdlm", "adlm"]
    capsys.readouterr()
    run(runner, monkeypatch, "judge", *out, *judged)
    assert capsys.readouterr().out == ""  # the cards are kept
    for _ in range(2):  # the second time all is there
        run(runner, monkeypatch, "lengths", *out, *models[:2], "--data", prepared, "--num", "3")
    short = Results(results).of("short")
    settings = [f"{sampler}-{length}" for length in (32, 16) for sampler in ("ancestral", "confidence")]
    assert list(short) == [f"smoke-mdlm-seed0-{each}" for each in ("16", *settings)]
    assert all(each["entropy"]["num"] == 3 for name, each in short.items() if name != "smoke-mdlm-seed0-16")
    assert len(results.read_text().split('"kind": "short"')) == 6
    run(runner, monkeypatch, "table", "arena", "--results", results)
    table = capsys.readouterr().out
    assert "| gen-PPL, smoke-ar-seed0 (4 texts) |" in table
    assert float(line_of(table, "held-out text")[5].split(" ± ")[0]) > 1


def test_a_trial_that_cannot_be_trained_is_reported_and_the_others_go_on(
    runner, prepared, tmp_path, monkeypatch, capsys
):
    good = trial_of("smoke-ar")
    bad = replace(good, row=replace(good.row, name="bad", overrides=("model.blocks=2", "model.heads=3")))
    train = arena_train.train
    monkeypatch.setattr(sweep.Sweep, "chosen", lambda self, only: [bad, good])
    monkeypatch.setattr(arena_train, "train", lambda trial, words: train(trial, words) if trial == bad else None)
    monkeypatch.setattr(arena_train, "measure", lambda trial, words: made_up(0, 1, 0) | {"tokens_per_second": 1})
    folders = ("--data", prepared, "--out", tmp_path / "runs", "--results", tmp_path / "results.jsonl")
    with pytest.raises(SystemExit, match="failed: bad-seed0"):
        run(runner, monkeypatch, "run", "arena", *folders)
    assert "model.hidden 32 is not a multiple of twice model.heads 3" in capsys.readouterr().out
    assert Results(tmp_path / "results.jsonl").of("trial").keys() == {"smoke-ar-seed0"}


def test_a_row_whose_anchor_loss_ends_early_is_timed_with_it_and_without(runner, monkeypatch):
    def step(work):
        seconds = 1.0 if "anchor.gamma=0" in work else 3.0
        return {"seconds_per_step": seconds, "busy_seconds_per_step": seconds, "tokens_per_second": 10 / seconds}

    monkeypatch.setattr(arena_train, "time_step", step)
    assert arena_train.time_row(["owt/adlm"])["seconds_per_step"] == 3
    timing = arena_train.time_row(["owt/adlm", "anchor.until=0.75"])
    assert timing == {
        "seconds_per_step": 2.5,
        "busy_seconds_per_step": 2.5,
        "tokens_per_second": 4,
        "with_anchor_loss": 3,
        "without": 1,
    }


def test_a_row_is_timed_once_with_its_own_overrides(runner, tmp_path, in_process, monkeypatch, capsys):
    chosen = ("time", "--results", tmp_path / "results.jsonl", "--commit", "abc", "--only", "smoke-auxiliary")
    run(runner, monkeypatch, *chosen, "--seconds", "10")  # below the 60 s expected of a first timing
    assert "no time for smoke-auxiliary" in capsys.readouterr().out
    run(runner, monkeypatch, *chosen)
    (timing,) = Results(tmp_path / "results.jsonl").of("timing").values()
    assert timing["seconds_per_step"] * timing["tokens_per_second"] == pytest.approx(8 * 32, rel=1e-3)
    config = resolve(timing["work"])
    assert (config.model.bridge, config.length, config.tokenizer) == ("none", 32, "bytes")
    assert (timing["row"], timing["commit"]) == ("smoke-auxiliary", "abc")
    monkeypatch.setattr(arena_train, "time_step", None)
    run(runner, monkeypatch, *chosen)
    with refused("has a timing of smoke-auxiliary with other overrides", capsys):
        run(runner, monkeypatch, *chosen, "--extra", "train.batch_size=4")


def test_rows_share_a_timing_only_if_their_steps_do_the_same_work():
    def work(name: str) -> list[str]:
        return work_of(trial_of(name), [])

    assert work("adlm-muon-1e-3") == work("adlm-muon-4e-3")
    assert work("mdlm-muon-warm-up-25") == work("mdlm-muon-2e-3")
    assert work("adlm-rare-0.15") == work("adlm-frequent-0.15") == work("adlm-random-0.15")  # as many anchors
    names = ["adlm", "mdlm-12", "auxiliary", "adlm-muon-1e-3", "adlm-rare-0.15", "adlm-rare-0.3", "adlm-gamma-0"]
    assert len({tuple(work(name)) for name in names}) == len(names)


@pytest.mark.parametrize(("busy", "doubtful"), [(0.095, False), (0.05, True)])
def test_a_timing_is_doubtful_if_the_gpu_waited_for_the_host(
    runner, tmp_path, monkeypatch, capsys, busy: float, doubtful: bool
):
    timing = {"work": work_of(trial_of("smoke-mdlm"), []), "tokens_per_second": 1, "seconds_per_step": 0.1}
    monkeypatch.setattr(arena_train, "time_step", lambda work: timing | {"busy_seconds_per_step": busy})
    run(runner, monkeypatch, "time", "--results", tmp_path / "results.jsonl", "--only", "smoke-mdlm")
    assert ("doubtful: the GPU computed for 50.00 ms" in capsys.readouterr().out) == doubtful


def test_a_slower_model_also_samples_with_the_steps_that_take_the_seconds_of_the_faster(
    runner, tmp_path, monkeypatch, capsys
):
    milliseconds, written = {"smoke-mdlm-seed0": 3.0, "smoke-auxiliary-seed0": 4.0}, []
    monkeypatch.setattr(arena_samples, "load", lambda folder, device: folder.name)
    monkeypatch.setattr(arena_samples, "time_sampling", lambda lm, *words: milliseconds[lm])
    monkeypatch.setattr(arena_samples, "write_samples", lambda lm, key, *words: written.append((lm, *words[:2])))
    chosen = ("--only", *milliseconds, "--steps", "16", "64")
    run(runner, monkeypatch, "samples", "--out", tmp_path, "--results", tmp_path / "results.jsonl", *chosen)
    ancestral = [(lm, steps) for lm, sampler, steps in written if sampler == "ancestral"]
    fast, slow = milliseconds
    assert ancestral == [(fast, 16), (slow, 16), (slow, 12), (fast, 64), (slow, 64), (slow, 48)]
    written.clear()
    milliseconds[slow] = 3.05  # equally fast
    run(runner, monkeypatch, "samples", "--out", tmp_path, "--results", tmp_path / "results.jsonl", *chosen)
    assert len(written) == 8


def test_samples_and_their_seconds_are_written_once(runner, tmp_path, monkeypatch, capsys):
    config = replace(resolve(trial_of("smoke-mdlm").overrides()), vocabulary=load_tokenizer("bytes").vocabulary)
    method = method_of(config)
    lm = LanguageModel(method.config, method, method.build().eval(), load_tokenizer("bytes"))
    monkeypatch.setattr(arena_samples, "load", lambda folder, device: lm)
    chosen = (
        "samples",
        "--out",
        tmp_path,
        "--results",
        tmp_path / "results.jsonl",
        "--only",
        "smoke-mdlm-seed0",
        "--steps",
        "2",
        "--samplers",
        "ancestral",
    )
    run(runner, monkeypatch, *chosen, "--num", "3", "--batch", "2")
    name = "smoke-mdlm-seed0-ancestral-2"
    speed = Results(tmp_path / "results.jsonl").of("speed")[name]
    assert (speed["steps"], speed["batch"], speed["seconds"] > 0) == (2, 2, True)
    file = read_samples(tmp_path / "samples" / f"{name}.jsonl")
    assert (file.made_by.sampling["sampler"], file.made_by.sampling["top_p"]) == ("ancestral", 0.9)
    assert len(list(file)) == 3
    written = file.path.read_bytes()
    run(runner, monkeypatch, *chosen, "--num", "3", "--batch", "2")
    assert file.path.read_bytes() == written
    with refused("holds samples with other settings: num 3 -> 4", capsys):
        run(runner, monkeypatch, *chosen, "--num", "4", "--batch", "2")


def card(judge: str, perplexity: float, num: int, **mauve: float) -> dict:
    """A metric card of `num` texts, as far as the table reads it."""
    mean = {"value": 0.5, "stderr": 0.01}
    metrics = {
        "perplexity": {"judge": {"name": f"models/{judge}.gguf"}, "pooled": {"value": perplexity, "stderr": 2.0}},
        "entropy": mean,
        "diversity": {"distinct": {"2": mean}, "repeated": mean},
    }
    sampling = {"sampler": "ancestral", "steps": 12}
    made_by = {"model": "runs/smoke-auxiliary-seed0", "length": 32, "sampling": sampling}
    of = {"file": "samples/smoke-auxiliary-seed0-ancestral-12.jsonl", "num": num, "made_by": made_by}
    reference = {name: {**metric, "pooled": {"value": 9.0, "stderr": 1.0}} for name, metric in metrics.items()}
    sections = {"reference": {}, "reference_judged": reference, **({"mauve": mauve} if mauve else {})}
    return {"card": 1, "samples": of, **metrics, **sections}


def test_the_generation_table_has_one_line_per_setting_and_a_column_per_judge(tmp_path):
    results, name = Results(tmp_path / "results.jsonl"), "smoke-auxiliary-seed0-ancestral-12"
    mauve = {"value": 0.25, "spread": 0.02}
    results.add("card", f"{name}.smol", card("smol", 200.0, 512, **mauve))
    results.add("card", f"{name}.tiny", card("tiny", 150.0, 64))
    speed = {"network_calls": 11, "seconds_per_sequence": 0.03, "batch": 128, "device": "card"}
    results.add("speed", name, {**speed, "as_long_as": "smoke-mdlm-seed0 with 16 steps"})
    table = "\n".join(generation_table(results))
    assert "| gen-PPL, smol (512 texts) | gen-PPL, tiny (64 texts) | entropy |" in table
    cells = line_of(table, "MDLM with auxiliary loss, seed 0")
    assert cells[2:7] == ["12 (as long as smoke-mdlm-seed0 with 16 steps)", "11", "3.00", "200 ± 2", "150 ± 2"]
    assert cells[-1] == "0.250 ± 0.020"
    assert line_of(table, "held-out text")[5:7] == ["9 ± 1", "9 ± 1"]
    assert "Texts of 32 tokens" in table
