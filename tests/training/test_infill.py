"""Training with `train.infill`: rows with holes, in which hole ids and copies have no loss."""

import pytest
from small_runs import RecordingReporter, corpus

from adlm import load
from adlm.config.load import resolve
from adlm.errors import UserError
from adlm.training.train import train

NETWORK = ("model.hidden=32", "model.heads=2", "model.blocks=2", "model.condition=8", "model.block_length=3")
RUN = ("length=48", "train.steps=2", "train.batch_size=16", "train.warm_up_steps=0", "train.threads=1")


@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_a_run_learns_from_rearranged_rows_and_fills_holes(method, tmp_path):
    words = [f"data.prepared={corpus(tmp_path)}", f"method={method}", *NETWORK, *RUN, "train.sample_every=0"]
    words += ["train.causal_weight=0.5", "train.random_blocks=true", "model.hole_id=255"]  # no byte of UTF-8
    plain, infill = (
        train(resolve([*words, f"train.infill={share}"]), tmp_path / f"run-{share}", RecordingReporter())
        for share in (0, 1)
    )
    assert plain.counters.tokens == 2 * 16 * 47
    assert plain.counters.tokens * 0.5 < infill.counters.tokens < plain.counters.tokens - 2 * 16
    text = load(infill.folder / "model").fill("sun [MASK*..6] queen [MASK*2] law", seed=1)
    assert text.startswith("sun ")
    assert " queen " in text
    assert text.endswith(" law")


def test_streams_are_not_rearranged(tmp_path):
    (tmp_path / "text.txt").write_text("sun and moon " * 500)
    words = [
        f"data.path={tmp_path / 'text.txt'}",
        "data.streaming=true",
        "tokenizer=bytes",
        "method=mdlm",
        *NETWORK,
        *RUN,
    ]
    with pytest.raises(UserError, match=r"train\.infill 0\.3 rearranges prepared rows; use data\.streaming=false"):
        train(resolve([*words, "model.hole_id=255", "train.infill=0.3"]), tmp_path / "run", RecordingReporter())
