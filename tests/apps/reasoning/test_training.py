"""`adlm reason train`: every method and every kind of base model, resuming, batches and model folders."""

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kills import contents, without_timings
from reasoning_runs import (
    NUM_STEPS,
    STEPS_PER_STAGE,
    TINY,
    evaluated,
    gsm8k_root,
    hugging_face_folder,
    prosqa_problems,
    prosqa_root,
    reason_train,
    tokenizer_of,
)
from small_models import mostly_slow, small_model
from small_runs import logged, weights
from worlds import randomized

from adlm.apps.reasoning.datasets.prosqa import PROSQA
from adlm.apps.reasoning.network import HuggingFaceModel, OwnModel
from adlm.apps.reasoning.rows import REASONING_METHODS, Encoder, Stage, special_ids, with_reasoning_tokens
from adlm.apps.reasoning.solve import load_solver
from adlm.apps.reasoning.training import ReasoningBatches, open_reasoning_task
from adlm.config.load import resolve
from adlm.config.schema import Model
from adlm.data.rows.loader import START, Position
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.models.transformer import Transformer
from adlm.training import train
from adlm.training.run_folder import RunFolder

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
FROZEN = "train.learning_rate=1e-30"  # changes no weight that is not 0
NUM_SPECIAL = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prosqa_root(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of every kind; ours has another size than the options of the runs."""
    folder = tmp_path_factory.mktemp("bases")
    found = {kind: hugging_face_folder(folder / kind, kind) for kind in ("gpt2", "llama", "tied-llama")}
    (folder / "tokenizer").mkdir()
    tokenizer_of(prosqa_problems(24)).save(folder / "tokenizer")
    return {**found, "ar": small_model(folder / "ar", "ar", str(folder / "tokenizer"), length=256)}


def answers(out: Path) -> list[str]:
    return [json.loads(line)["written"] for line in out.read_text().splitlines()]


@pytest.mark.parametrize("method", mostly_slow(REASONING_METHODS, "acot", "cot", "coconut"))
def test_every_method_trains_from_random_weights_and_answers_as_in_validation(method, root, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "answers.jsonl"
    assert reason_train(root, run, f"reason.method={method}", "train.samples=6") == 0
    first, *_, last = logged(run)
    assert last["step"] == NUM_STEPS
    assert last["answer"] < first["answer"]
    assert evaluated(run, root, capsys, "--split", "valid", "--out", str(out))["accuracy"] == last["valid_accuracy"]
    samples = (run / "samples" / f"step-{NUM_STEPS:08}.txt").read_text()
    assert all(f"\n{written}\n(" in samples for written in answers(out))
    assert len(answers(out)) == samples.count("(wrong") + samples.count("(right)") == 6


@pytest.mark.parametrize("method", mostly_slow(["acot", "no-cot", "cot"], "acot"))
def test_the_accuracy_of_the_final_validation_is_that_of_an_evaluation(method, tmp_path, capsys):
    """With an EMA too, as the model folder has its weights."""
    root, run = gsm8k_root(tmp_path), tmp_path / "run"
    options = ("data.name=gsm8k", "train.learning_rate=3e-2", "train.ema=0.5", "reason.epochs=12", "model.dropout=0.0")
    assert reason_train(root, run, f"reason.method={method}", *options) == 0
    found = evaluated(run, root, capsys, "--split", "valid")
    assert 0 < found["accuracy"] == logged(run)[-1]["valid_accuracy"]
    assert found["num"] == 8


@pytest.mark.parametrize("kind", mostly_slow(["gpt2", "llama", "tied-llama"], "gpt2", "tied-llama"))
def test_a_run_from_a_hugging_face_model_is_loaded_by_transformers_with_the_same_logits(kind, bases, root, tmp_path):
    assert reason_train(root, tmp_path / "run", f"reason.base={bases[kind]}") == 0
    folder = tmp_path / "run" / "model"
    model, ours = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), load_solver(folder, CPU)
    assert type(model) is type(ours.network.model)
    ids = torch.tensor([ours.tokenizer.encode(prosqa_problems(1)[0].question)])
    hidden = ours.network.reader().read(ours.network.embed(ids), torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(model(ids).logits, ours.network.logits(hidden))
    valid = prosqa_problems(6, start=24)
    nats, _, _ = replace(ours, network=HuggingFaceModel(model)).answer_nats(valid)
    assert nats == pytest.approx(logged(tmp_path / "run")[-1]["valid_nats"], rel=1e-6)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(valid[0].question).input_ids == ours.tokenizer.encode(valid[0].question)
    assert theirs.eos_token_id == ours.tokenizer.vocabulary.eos_id
    assert theirs.convert_tokens_to_ids("[BOA]") == special_ids(ours.tokenizer).boa


@pytest.mark.parametrize("kind", mostly_slow(["gpt2", "llama", "tied-llama", "ar"], "llama", "ar"))
def test_a_run_begins_with_the_weights_of_its_base_and_new_rows_for_new_symbols(kind, bases, root, tmp_path):
    before = weights(bases[kind].parent, kind)
    assert reason_train(root, tmp_path / "run", f"reason.base={bases[kind]}", FROZEN) == 0
    after = weights(tmp_path / "run")
    assert after.keys() == before.keys()
    grown = [name for name in after if after[name].shape != before[name].shape]
    assert len(grown) == {"gpt2": 1, "tied-llama": 1, "llama": 2, "ar": 3}[kind]
    for name in after:
        known = len(before[name]) - (kind == "ar" and name in grown)  # the row of our mask, which no model uses
        torch.testing.assert_close(after[name][:known], before[name][:known], rtol=0, atol=1e-20)
        mask = 0 if kind == "ar" else 1
        assert name not in grown or len(after[name]) == len(before[name]) + NUM_SPECIAL + mask


@pytest.mark.parametrize("kind", mostly_slow(["gpt2", "ar"], "gpt2"))
def test_a_reasoning_run_is_a_base(kind, bases, root, tmp_path):
    assert reason_train(root, tmp_path / "first", f"reason.base={bases[kind]}", "reason.method=cot") == 0
    assert reason_train(root, tmp_path / "second", f"reason.base={tmp_path / 'first'}", FROZEN) == 0
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    for name in ("tokenizer.json", "config.json"):
        first, second = (tmp_path / run / "model" / name for run in ("first", "second"))
        assert first.exists() == second.exists()
        assert not first.exists() or first.read_text() == second.read_text()


def stopping_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM while step `steps` is computed."""
    step, count = train.train_step, itertools.count(1)

    def stopping(*values):
        if next(count) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*values)

    monkeypatch.setattr(train, "train_step", stopping)


def files_of(folder: Path) -> dict[str, bytes]:
    return contents(folder, {"metrics.jsonl": without_timings})


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("", [1, STEPS_PER_STAGE - 1, 4]),
        pytest.param("gpt2", [STEPS_PER_STAGE - 1], marks=pytest.mark.slow),
        pytest.param("ar", [8], marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_resumes_to_the_same_bytes(kind, stops, bases, root, tmp_path, monkeypatch):
    """Also where the next batch would have reset the optimizer, and with dropout."""
    options = ("train.keep=1", "train.ema=0.9", *([f"reason.base={bases[kind]}"] if kind else []))
    assert reason_train(root, tmp_path / "whole", *options) == 0
    for steps in stops:
        with monkeypatch.context() as patch:
            stopping_after(steps, patch)
            assert reason_train(root, tmp_path / "run", *options) == 128 + signal.SIGTERM
    assert reason_train(root, tmp_path / "run", *options) == 0
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("resets", [True, False])
def test_the_optimizer_is_reset_at_the_first_batch_of_the_stages_that_say_so(resets, root, tmp_path, monkeypatch):
    step, moments = train.train_step, []

    def recording(state, *values):
        moments.append(len(state.optimizer.state))
        return step(state, *values)

    monkeypatch.setattr(train, "train_step", recording)
    assert reason_train(root, tmp_path / "run", f"reason.reset_optimizer={str(resets).lower()}") == 0
    fresh = [number for number, num in enumerate(moments) if num == 0]
    assert fresh == ([0, 3, 6, 9] if resets else [0]), "the first stage has no optimizer to reset"
    assert len(moments) == NUM_STEPS


def test_rows_as_long_as_the_model_are_trained_on_though_padding_makes_batches_longer(root, tmp_path, monkeypatch):
    widths, step = [], train.train_step
    config = resolve([*TINY, f"data.root={root}"])
    task = open_reasoning_task(config, RunFolder(tmp_path), Processes(0, 1, CPU, None), print)
    problems = [*task.problems, *replace(task.encoder, misfits="keep").encode(task.held_out)]
    longest = max(len(task.encoder.row(each, task.method, stage).ids) for each in problems for stage in task.stages)
    monkeypatch.setattr(train, "train_step", lambda *values: widths.append(values[1][0].x.shape[1]) or step(*values))
    assert reason_train(root, tmp_path / "run", f"length={longest}") == 0
    assert max(widths) > longest
    assert reason_train(root, tmp_path / "short", f"length={longest - 1}") == 2


STAGES = [Stage(1), Stage(2, slots=1, left_out=1, reset_optimizer=True), Stage(1, slots=3, left_out=2)]


@pytest.fixture(scope="module")
def batches() -> ReasoningBatches:
    """37 problems in batches of 2: 18 batches an epoch, which are two groups, and one problem left over."""
    problems = prosqa_problems(37)
    tokenizer = with_reasoning_tokens(tokenizer_of(problems))
    encoder = Encoder(tokenizer.encode_batch, PROSQA, special_ids(tokenizer))
    return ReasoningBatches(encoder.encode(problems), encoder, REASONING_METHODS["acot"], STAGES, 2, seed=5)


def taken(batches, num, start=START):
    iterator = batches.batches(start)
    try:
        return list(itertools.islice(iterator, num))
    finally:
        iterator.close()


def numbers_of(batches, batch):
    """The numbers of the problems of a batch."""
    questions = {tuple(problem.question.tolist()): number for number, problem in enumerate(batches.problems)}
    newline = batches.problems[0].question[-1]
    found = []
    for row in batch.x.tolist():
        text = [token for token in row if token != batches.encoder.ids.pad]
        found.append(questions[tuple(text[: text.index(newline) + 1])])
    return found


def test_an_epoch_has_each_problem_at_most_once_and_one_stage(batches):
    found, ids = taken(batches, 5 * 18), batches.encoder.ids
    orders = []
    for epoch in range(5):
        part = found[18 * epoch : 18 * (epoch + 1)]
        numbers = [number for batch in part for number in numbers_of(batches, batch)]
        assert len(numbers) == len(set(numbers)) == 36
        orders.append(numbers)
        stage = STAGES[(0, 1, 1, 2, 2)[epoch]]  # the last stage goes on
        for number, batch in enumerate(part):
            assert batch.resets_optimizer == (epoch == 1 and number == 0)
            boa, eoa = ((batch.x == token).nonzero()[:, 1].tolist() for token in (ids.boa, ids.eoa))
            assert [b - a - 1 for a, b in zip(boa, eoa, strict=True)] == ([stage.slots] * 2 if stage.slots else [])
            for row, n in zip(batch.x, numbers_of(batches, batch), strict=True):
                expected = batches.encoder.row(batches.problems[n], batches.method, stage)
                assert row[row != ids.pad].tolist() == expected.ids.tolist()
    assert len({tuple(order) for order in orders}) == 5, "every epoch is shuffled anew"


def test_starting_at_a_position_gives_the_batches_that_follow_it(batches):
    whole = taken(batches, 40)
    positions = [START, *(batch.after for batch in whole)]
    assert positions[18] == Position(1, 0)
    for first in (0, 1, 7, 15, 16, 17, 18, 19, 35, 36):
        for ours, theirs in zip(taken(batches, 3, positions[first]), whole[first : first + 3], strict=True):
            assert torch.equal(ours.x, theirs.x)
            assert torch.equal(ours.pad, theirs.pad)
            assert ours[2:] == theirs[2:]


def test_batches_of_a_group_have_questions_of_similar_length(batches):
    lengths = [len(problem.question) for problem in batches.problems]
    in_order = np.mean([abs(a - b) for a, b in zip(lengths[::2], lengths[1::2], strict=False)])
    spread = np.mean([np.ptp([lengths[n] for n in numbers_of(batches, batch)]) for batch in taken(batches, 18)])
    assert spread < in_order / 3


@pytest.mark.slow
def test_gradient_accumulation_gives_the_weights_of_the_whole_batch(root, tmp_path):
    options = ("train.precision=float64", "model.dropout=0.0")
    for name, size in (("whole", 8), ("parts", 2)):
        assert reason_train(root, tmp_path / name, *options, f"train.micro_batch={size}") == 0
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert next(iter(whole.values())).dtype == torch.float64
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-9, atol=1e-9)


def test_the_cached_reader_equals_the_trunk_on_rows_padded_on_the_right():
    network = Transformer(Model(hidden=16, heads=2, blocks=2, dropout=0.0), 20, causal=True, modulated=False)
    model = OwnModel(randomized(network)).double()
    ids, lengths = torch.arange(24).reshape(3, 8) % 20, torch.tensor([8, 5, 2])
    pad = torch.arange(8) >= lengths[:, None]
    expected = model.network.trunk(model.embed(ids), None, pad)
    reader = model.reader()
    parts = [reader.read(model.embed(ids[:, a:b]), ~pad[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 8))]
    torch.testing.assert_close(torch.cat(parts, dim=1)[~pad], expected[~pad], rtol=1e-12, atol=1e-12)


def test_answers_end_where_the_model_can_read_no_further_each_row_as_alone(bases, root, tmp_path):
    """Prompts of several lengths and positions for the longest of them and three tokens."""
    assert reason_train(root, tmp_path / "run", f"reason.base={bases['gpt2']}", "reason.method=cot") == 0
    solver, problems = load_solver(tmp_path / "run", CPU), prosqa_problems(6, start=24)
    solver.network.logits = never(solver.network.logits, solver.tokenizer.vocabulary.eos_id)
    prompts = [len(problem.question) for problem in solver.encoder().encode(problems)]
    longest = max(prompts) + 3
    solver.network.max_length = longest
    solver.network.model.transformer.wpe.weight.data = solver.network.model.transformer.wpe.weight.data[:longest]
    together, alone = list(solver.solve(problems)), [next(solver.solve([problem])) for problem in problems]
    assert together == alone
    assert [solution.num_tokens for solution in together] == [min(12, longest + 1 - length) for length in prompts]
    assert not any(solution.ended for solution in together)
    solver.network.max_length = max(prompts) - 1
    number = prompts.index(max(prompts)) + 1
    with pytest.raises(UserError, match=f"problem {number} takes {max(prompts)} tokens with its slots, and the model"):
        list(solver.solve(problems))


def never(logits, index):
    """Logits that never have their maximum at `index`."""
    return lambda hidden: logits(hidden).index_fill(-1, torch.tensor([index]), -torch.inf)


def test_float8_is_refused(tmp_path):
    config = resolve(["prosqa/small", "train.precision=float8", "data.problems=16"])
    with pytest.raises(UserError, match=r"train.precision float8 is for `adlm train`; use train.precision=auto"):
        open_reasoning_task(config, RunFolder(tmp_path), Processes(0, 1, torch.device("cpu"), None), print)
