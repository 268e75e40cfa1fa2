"""Properties of the training benchmark: the random text it uses and the operations it counts."""

from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from worlds import seeded

from adlm.apps import bench
from adlm.apps.bench import measure_training
from adlm.config.schema import Anchor, Vocabulary
from adlm.registry import METHODS
from adlm.training.build import recompute_blocks
from adlm.training.metrics import zipf


class RecordedProgress:
    """Records what is announced and what is done."""

    def __init__(self) -> None:
        self.announced, self.done = None, []

    def begin(self, steps, seconds):
        self.announced = (steps, seconds)

    def step(self, done):
        self.done.append(done)


IGNORED = RecordedProgress()


def test_random_text_never_contains_the_mask_and_follows_zipfs_law(tiny_config):
    config = replace(tiny_config, vocabulary=Vocabulary(size=6, mask_id=2), length=60_000)
    shares = torch.bincount(zipf(config, 1, seeded())[0], minlength=6) / 60_000
    expected = torch.tensor([1, 1 / 2, 0, 1 / 3, 1 / 4, 1 / 5])
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0.05, atol=0)
    assert shares[2] == 0


@pytest.mark.parametrize("name", mostly_slow(METHODS, "adlm", "ar"))
def test_every_method_can_be_measured(tiny_config, name):
    schedule, steps = replace(tiny_config.schedule, eps=1e-3), 20 if name == "d3pm" else 0
    config = replace(tiny_config, method=name, schedule=schedule, time=replace(tiny_config.time, steps=steps))
    speed = measure_training(config, 2, 2, compiled=False, device=torch.device("cpu"), profiled=True, progress=IGNORED)
    assert speed.tokens_a_step == 16
    assert speed.tokens_per_second == pytest.approx(16e3 / speed.milliseconds)
    assert speed.of_product == pytest.approx(1e3 * speed.tflop_a_step / speed.milliseconds / speed.product_tflops)
    assert {"matrix products", "attention"} <= dict(speed.profile).keys()


def test_the_operations_are_counted_not_guessed(tiny_config):
    """A symbol more costs a head of width 16 three products of 2 x 16 operations at each of its 4 x 7 predictions."""
    counted = []
    for size in (12, 13):
        config = replace(tiny_config, method="ar", vocabulary=Vocabulary(size, 7), anchor=Anchor(gamma=0.0))
        cpu = torch.device("cpu")
        speed = measure_training(config, 4, 1, compiled=False, device=cpu, profiled=False, progress=IGNORED)
        counted.append(speed.tflop_a_step)
    assert 1e12 * (counted[1] - counted[0]) == pytest.approx(3 * 2 * 16 * 28)


def test_an_anchor_loss_that_ends_early_is_measured(tiny_config):
    counted = {}
    for gamma, until in ((0.1, 1.0), (0.1, 0.65), (0.0, 1.0)):
        anchor = replace(tiny_config.anchor, gamma=gamma, until=until, positions="all")
        config, cpu = replace(tiny_config, anchor=anchor), torch.device("cpu")
        speed = measure_training(config, 4, 1, compiled=False, device=cpu, profiled=False, progress=IGNORED)
        counted[gamma, until] = speed.tflop_a_step
    assert counted[0.1, 0.65] == counted[0.1, 1.0] > counted[0.0, 1.0]


def test_every_step_is_announced_before_the_first_and_then_counted(tiny_config):
    progress = RecordedProgress()
    measure_training(tiny_config, 2, 2, compiled=False, device=torch.device("cpu"), profiled=True, progress=progress)
    steps, seconds = progress.announced
    assert progress.done == list(range(1, steps + 1))
    assert seconds > 0


def test_recomputed_blocks_are_measured_and_their_second_forward_pass_is_no_work(tiny_config, monkeypatch):
    """Counted are the shapes; a step of this network, as torch counts it, differs by what the heads happen to score."""
    calls, blocks = [], []
    monkeypatch.setattr(bench, "recompute_blocks", lambda network: (calls.append(network), recompute_blocks(network)))
    for recompute in (False, True):
        config = replace(tiny_config, train=replace(tiny_config.train, recompute=recompute))
        cpu = torch.device("cpu")
        speed = measure_training(config, 2, 1, compiled=False, device=cpu, profiled=False, progress=IGNORED)
        blocks.append(speed.tflop_a_step)
    assert len(calls) == 1
    assert blocks[1] == pytest.approx(blocks[0], rel=0.2)
