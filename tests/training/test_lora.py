"""Runs with LoRA: frozen weights cost nothing, runs resume bit-exactly, two processes train like one."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from small_models import mostly_slow, small_model
from small_runs import RecordingReporter, corpus, logged, run_on
from small_runs import run as small_run
from worlds import randomized

from adlm import load
from adlm.checkpoints.model_folder import ModelFolder, save_model_folder
from adlm.checkpoints.tensor_files import on_cpu
from adlm.cli.main import main
from adlm.config.load import resolve
from adlm.config.schema import Config, Model
from adlm.distributed import Processes
from adlm.methods import method_of
from adlm.models.lora import trained_parameters
from adlm.tokens import load_tokenizer
from adlm.training.build import compile_trunks
from adlm.training.run_folder import RunFolder
from adlm.training.step import MicroBatch, count_tokens, generator_of, train_step
from adlm.training.text import open_text_task
from adlm.training.train import train

SHORT = (
    "train.lora_rank=2",
    "train.lora_scale=0.5",
    "train.batch_size=8",
    "train.learning_rate=1e-2",
    "train.warm_up_steps=0",
    "train.valid_rows=4",
    "train.valid_every=0",
    "train.sample_every=0",
    "train.threads=1",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder to start from and prepared text."""
    folder = tmp_path_factory.mktemp("lora")
    return small_model(folder / "base"), corpus(folder, lines=100)


def words_of(folders, *words):
    base, prepared = folders
    return [f"init={base}", f"data.prepared={prepared}", *SHORT, *words]


def run(folders, out, *words):
    return train(resolve(words_of(folders, *words)), out, RecordingReporter())


def adapter_of(out, which="model"):
    return load_file(out / which / "adapter.safetensors")


def state_of(folders, tmp_path, *words):
    processes = Processes(0, 1, torch.device("cpu"), None)
    task = open_text_task(resolve(words_of(folders, *words)), RunFolder(tmp_path), processes, print)
    return task, task.build_state(processes, print, resumes=False)


def steps(state, num=3):
    for step in range(num):
        batches = [MicroBatch(torch.randint(256, (4, 16), generator=generator_of(0, "order", step)))]
        train_step(state, batches, count_tokens(state.method, batches), 0.5, generator_of(0, "noise", step)).check()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_weights_do_not_change_and_have_no_moments_and_no_ema(folders, tmp_path, optimizer):
    _, state = state_of(folders, tmp_path, f"train.optimizer={optimizer}")
    network = state.network
    trained = trained_parameters(network)
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    steps(state)
    changed = {name for name, weight in network.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == set(trained) == set(state.ema.weights)
    assert set(state.optimizer.state) == set(trained.values())
    saved = {name.split(".", 1)[1] for name in state.named_tensors() if name.startswith(("weights.", "ema."))}
    assert saved == set(trained)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("ema", mostly_slow(["0.9", "0"], "0.9"))
def test_a_run_resumes_to_the_same_bits(folders, tmp_path, optimizer, ema):
    words = (f"train.optimizer={optimizer}", f"train.ema={ema}", "train.lora_norms=true", "model.dropout=0.1")
    run(folders, tmp_path / "whole", *words, "train.steps=6")
    run(folders, tmp_path / "resumed", *words, "train.steps=3")
    assert main(["train", "--out", str(tmp_path / "resumed"), "train.steps=6"]) == 0
    whole, resumed = adapter_of(tmp_path / "whole"), adapter_of(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_loaded_model_is_the_trained_one_and_the_base_is_unchanged(folders, tmp_path):
    base, _ = folders
    before = (base / "model.safetensors").read_bytes()
    task, state = state_of(folders, tmp_path, "train.precision=float64", "train.ema=0.5")
    steps(state)
    task.save_model(state.model_weights(), tmp_path / "model", on_cpu)
    z = torch.randint(258, (3, 16), generator=generator_of(1, "order"))
    with state.with_ema():
        trained = state.network.eval()(z)
    loaded, original = load(tmp_path / "model").network(z), load(base).network(z)
    torch.testing.assert_close(loaded.double(), trained, rtol=0, atol=1e-5)  # the base is in float32
    assert (loaded - original).abs().max() > 1e-2
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_share_one_graph_and_train_like_plain_ones(folders, tmp_path):
    trained = []
    for compiled in (False, True):
        _, state = state_of(folders, tmp_path, "train.precision=float64", "model.dropout=0.0")
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            assert compile_trunks(state.network, backend="eager") == ""
        steps(state)
        trained.append(trained_parameters(state.network))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "the blocks, and the final layers"
    torch._dynamo.reset()
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=0, atol=1e-12)


def test_recomputed_blocks_train_like_plain_ones(folders, tmp_path):
    for out, recompute in (("plain", "false"), ("recomputed", "true")):
        run(folders, tmp_path / out, "train.steps=3", f"train.recompute={recompute}")
    plain, recomputed = adapter_of(tmp_path / "plain"), adapter_of(tmp_path / "recomputed")
    for name in plain:
        torch.testing.assert_close(plain[name], recomputed[name], rtol=0, atol=1e-6)


def tied_llama(folder):
    """A block-causal model whose head is the embedding, of which LoRA trains one row."""
    tokenizer = load_tokenizer("bytes")
    model = Model(family="llama", hidden=16, heads=2, kv_heads=1, blocks=2, tie_embedding=True, block_length=4)
    config = Config(method="mdlm", tokenizer="bytes", vocabulary=tokenizer.vocabulary, length=16, model=model)
    weights = randomized(method_of(config).build()).state_dict()
    save_model_folder(ModelFolder(config, weights, tokenizer), folder)
    return folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("family", "optimizer"), [("published", "adamw"), ("published", "muon"), ("llama", "adamw")])
def test_two_processes_train_like_one(folders, tmp_path, family, optimizer):
    base, prepared = tied_llama(tmp_path / "llama") if family == "llama" else folders[0], folders[1]
    words = words_of((base, prepared), "train.steps=4", "train.precision=float64", "model.dropout=0.0")
    words += [f"train.optimizer={optimizer}", "model.bridge=logits"]
    small_run(prepared, tmp_path / "single", *words)
    cases = {name: (tmp_path / name, (*words, *more)) for name, more in PROCESSES.items()}
    run_on(2, prepared, cases)
    for name in cases:
        ours, single = adapter_of(tmp_path / name), adapter_of(tmp_path / "single")
        for key in single:
            torch.testing.assert_close(ours[key], single[key], rtol=1e-10, atol=1e-10, msg=f"{name}: {key}")
        assert logged(tmp_path / name) == [pytest.approx(line, rel=1e-6) for line in logged(tmp_path / "single")]


PROCESSES = {
    "replicated": ("train.micro_batch=2",),
    "sharded": ("train.shard=2", "train.micro_batch=2", "train.recompute=true"),
}


@pytest.mark.parametrize("rank", mostly_slow([0, 2], 2))
def test_the_alignment_term_lowers_the_misalignment_and_is_the_same_for_any_micro_batch(tmp_path, rank):
    folders = small_model(tmp_path / "base", "mdlm", block_length=4), corpus(tmp_path, lines=100)
    words = [f"train.lora_rank={rank}", "train.steps=20", "train.log_every=5", "train.learning_rate=3e-3"]
    words += ["train.precision=float64", "model.dropout=0"]
    run(folders, tmp_path / "whole", *words, "train.align_weight=20")
    split = ["train.micro_batch=2", "train.recompute=true"]
    run(folders, tmp_path / "split", *words, "train.align_weight=20", *split)
    run(folders, tmp_path / "none", *words, "train.align_weight=1e-9")  # logged, but without effect
    whole = logged(tmp_path / "whole")
    assert logged(tmp_path / "split") == [pytest.approx(line, rel=1e-6) for line in whole]
    assert whole[-1]["align"] < 0.8 * logged(tmp_path / "none")[-1]["align"]


@pytest.mark.parametrize(("method", "rank"), mostly_slow([("mdlm", 2), ("adlm", 0)], ("mdlm", 2)))
def test_a_chain_learns_the_clean_copys_distribution_for_any_micro_batch_and_resumes(tmp_path, method, rank):
    folders = small_model(tmp_path / "base", method, block_length=4), corpus(tmp_path, lines=100)
    words = ["model.chain=8", "train.chain_target=causal", f"train.lora_rank={rank}", "train.decay=constant"]
    words += ["train.precision=float64", "model.dropout=0", "train.log_every=5", "train.learning_rate=3e-3"]
    run(folders, tmp_path / "whole", *words, "train.steps=20")
    run(folders, tmp_path / "split", *words, "train.steps=20", "train.micro_batch=2", "train.recompute=true")
    run(folders, tmp_path / "resumed", *words, "train.steps=10")
    assert main(["train", "--out", str(tmp_path / "resumed"), "train.steps=20"]) == 0
    whole = logged(tmp_path / "whole")
    assert logged(tmp_path / "resumed")[-1] == whole[-1]
    assert logged(tmp_path / "split") == [pytest.approx(line, rel=1e-6) for line in whole]


def test_an_adapter_is_trained_further_by_lora_or_in_full(folders, tmp_path):
    base, prepared = folders
    run(folders, tmp_path / "first", "train.steps=3")
    still = ["train.learning_rate=1e-12", "train.ema=0", "train.steps=1", "train.warm_up_steps=0"]
    ids = torch.randint(258, (2, 16), generator=generator_of(1, "order"))
    first = load(tmp_path / "first").network(ids)
    ways = {"same": [], "higher": ["train.lora_rank=5"], "norms": ["train.lora_norms=true"]}
    for name, words in (ways | {"full": ["train.lora_rank=0"]}).items():
        out = tmp_path / name
        arguments = [f"init={tmp_path / 'first'}", f"data.prepared={prepared}", "train.batch_size=8", *still, *words]
        assert main(["train", *arguments, "--out", str(out)]) == 0
        torch.testing.assert_close(load(out).network(ids), first, rtol=0, atol=1e-5)
    assert (tmp_path / "full" / "model" / "model.safetensors").is_file()
    shutil.rmtree(tmp_path / "first")  # adapters name the base, not the adapter they continued
    assert resolve([f"init={tmp_path / 'higher'}"]).train.lora_rank == 5
    assert load(tmp_path / "higher").config.init == str(base.resolve())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.lora_rank=1"], "train.lora_rank 1 is below the 2 of init"),
        (["train.lora_norms=false"], "norm1.weight, which this network lacks or leaves frozen; leave out method"),
        (["method=a2r"], "does not fit: "),
    ],
)
def test_an_adapter_that_cannot_be_continued_is_a_user_error(words, sentence, folders, tmp_path, capsys):
    run(folders, tmp_path / "first", "train.steps=1", "train.lora_norms=true")
    words = [f"init={tmp_path / 'first'}", f"data.prepared={folders[1]}", "train.steps=1", *words]
    assert main(["train", *words, "train.warm_up_steps=0", "--out", str(tmp_path / "second")]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_lora_without_a_model_to_start_from_is_a_user_error(tmp_path, capsys):
    assert main(["train", "own", "train.lora_rank=4", "data.path=x", "--out", str(tmp_path / "run")]) == 2
    error = "adlm: train.lora_rank 4 needs a model to start from; add init=MODEL, or train.lora_rank=0 to train all"
    assert error in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_rank_above_that_of_the_matrices_is_a_user_error(tmp_path, capsys):
    words = ["train", "own", "init=box", "data.path=x", "--out", str(tmp_path / "run")]
    assert main([*words, "train.lora_rank=225"]) == 2
    assert "train.lora_rank 225 is above model.hidden 224" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "train.lora_rank=224"]) == 2
    assert "x does not exist" in capsys.readouterr().err


def test_reasoning_runs_have_no_lora(tmp_path, capsys):
    words = ["prosqa/small", "train.lora_rank=4", "data.problems=16", "train.batch_size=8", "train.warm_up_steps=1"]
    assert main(["reason", "train", *words, "--out", str(tmp_path / "run")]) == 2
    assert "train.lora_rank 4 is for `adlm train`; leave it out" in capsys.readouterr().err


def test_a_run_does_not_resume_on_another_base(folders, tmp_path, capsys):
    base, prepared = folders
    shutil.copytree(base, tmp_path / "base")
    run((tmp_path / "base", prepared), tmp_path / "run", "train.steps=2")
    other = load_file(tmp_path / "base" / "model.safetensors")
    from safetensors.torch import save_file

    save_file({name: value * 2 for name, value in other.items()}, tmp_path / "base" / "model.safetensors")
    assert main(["train", "--out", str(tmp_path / "run"), "train.steps=4"]) == 2
    assert "train.base_sha256" in capsys.readouterr().err.splitlines()[-1]
