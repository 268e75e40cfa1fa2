"""Properties of several processes: two train like one, however weights are sharded, and either resumes the other."""

import pytest
import torch
from small_runs import NEEDS, corpus, logged, run, run_on, weights

from adlm.config.schema import Train
from adlm.errors import UserError
from adlm.training.sharding import mesh_shape
from adlm.training.step import micro_batch_shape

EXACT = (
    "model.blocks=1",
    "train.precision=float64",
    "model.dropout=0.0",
    "anchor.warm_up=false",
    "train.valid_every=0",
)
SEDD = ("method=sedd", "train.steps=4", *NEEDS["sedd"])
D3PM = ("method=d3pm", "train.steps=4", *NEEDS["d3pm"])
RATES = ("time.masks=counted", "rates.rule=text", "train.steps=4")
ANCHORS = ("time.masks=counted", "rates.rule=anchors", "anchor.rule=rare", "train.steps=4")
MEMORY = ("model.memory=true", "train.steps=4")
UNIGRAMS = ("train.unigram_start=true", "model.start=neighbours", "train.steps=4")

# On two processes: the options, and the single-process run that the result must equal.
CASES = {
    "replicate": (("train.micro_batch=2",), "single"),
    "shard": (("train.shard=2", "train.micro_batch=2", "train.recompute=true"), "single"),
    "float32": (("train.shard=2", "train.precision=float32"), "single in float32"),
    "sedd": (("train.shard=2", *SEDD), "single with sedd"),
    "d3pm": (("train.shard=2", *D3PM), "single with d3pm"),
    "rates": (("train.shard=2", *RATES), "single with rates"),
    "memory": (("train.shard=2", *MEMORY), "single with memory"),
    "anchors": (("train.micro_batch=2", *ANCHORS), "single with anchors"),
    "unigrams": (("train.micro_batch=2", *UNIGRAMS), "single from unigrams"),
    "two then one": (("train.shard=2", "train.steps=10"), "single"),
    "one then two": (("train.shard=2",), "single"),
}
REFERENCES = {
    "single": (),
    "single in float32": ("train.precision=float32",),
    "single with sedd": SEDD,
    "single with rates": RATES,
    "single with anchors": ANCHORS,
    "single with memory": MEMORY,
    "single from unigrams": UNIGRAMS,
    "single with d3pm": D3PM,
}


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_train_like_one(tmp_path):
    """To 1e-10 after 20 steps in float64, to 1e-5 in float32; each resumes checkpoints of the other."""
    prepared = corpus(tmp_path)
    for name, words in REFERENCES.items():
        run(prepared, tmp_path / name, *EXACT, *words)
    run(prepared, tmp_path / "one then two", *EXACT, "train.steps=10")
    run_on(2, prepared, {name: (tmp_path / name, (*EXACT, *words)) for name, (words, _) in CASES.items()})
    run(prepared, tmp_path / "two then one", *EXACT)
    for name, (_, reference) in CASES.items():
        tolerance = 1e-5 if name == "float32" else 1e-10
        ours, theirs = weights(tmp_path / name), weights(tmp_path / reference)
        assert ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")
        theirs = {line["step"]: line for line in logged(tmp_path / reference)}
        for line in logged(tmp_path / name):
            if "valid_nats" not in line or line["step"] == 20:  # a run with train.steps=10 validated there as well
                assert line == pytest.approx(theirs[line["step"]], rel=1e-4 if name == "float32" else 1e-6), name


@pytest.mark.parametrize(
    ("train", "processes", "shape"),
    [
        (Train(), 1, (1, 1)),
        (Train(), 8, (8, 1)),
        (Train(shard=8), 8, (1, 8)),
        (Train(shard=4), 8, (2, 4)),
    ],
)
def test_the_mesh_shape_multiplies_to_the_number_of_processes(train, processes, shape):
    assert mesh_shape(train, processes) == shape


@pytest.mark.parametrize(
    ("train", "processes", "error"),
    [
        (Train(shard=3), 8, "train.shard 3 does not fit 8 processes"),
        (Train(shard=16), 8, "train.shard 16 does not fit 8 processes: .*try train.shard=8 or train.shard=1$"),
        (Train(shard=2), 1, "train.shard 2 does not fit 1 process:"),
    ],
)
def test_a_mesh_that_does_not_fit_is_rejected(train, processes, error):
    with pytest.raises(UserError, match=error):
        mesh_shape(train, processes)


def test_the_batch_size_is_a_multiple_of_the_micro_batch_on_every_process():
    assert micro_batch_shape(Train(batch_size=512, micro_batch=32), 8) == (2, 32)
    assert micro_batch_shape(Train(batch_size=512), 8) == (1, 64)
    with pytest.raises(
        UserError, match=r"train.batch_size 500 is not a multiple of 8 processes x 64 sequences; try.*512"
    ):
        micro_batch_shape(Train(batch_size=500, micro_batch=64), 8)
