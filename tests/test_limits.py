"""What cannot fit is refused before work begins, by bounds that are exact or below the truth."""

from dataclasses import replace

import pytest
import torch

from adlm import limits
from adlm.config.schema import Config, Model, Schedule, Time, Vocabulary
from adlm.errors import UserError
from adlm.methods import METHODS, method_of
from adlm.models.meta import on_meta
from adlm.models.transformer import num_parameters

CPU = torch.device("cpu")


def config_of(method="adlm", **sizes) -> Config:
    model = Model(**{"hidden": 16, "heads": 2, "blocks": 3, "condition": 8, **sizes})
    time = Time(steps=10 if method == "d3pm" else 0)
    return Config(
        method=method, vocabulary=Vocabulary(12, 7), length=8, model=model, schedule=Schedule(eps=1e-3), time=time
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("denoiser_blocks", [None, 0, 1, 2, 5])
def test_the_number_of_parameters_is_known_without_building_the_network(method, denoiser_blocks):
    for blocks in (1, 2, 5):
        config = config_of(method, blocks=blocks, denoiser_blocks=denoiser_blocks, bridge="hidden")
        assert limits.num_parameters_of(config) == num_parameters(on_meta(method_of(config).build))
