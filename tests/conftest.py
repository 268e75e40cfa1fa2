"""What tests share: where the golden folder is, and the smallest configs a network can be built from."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from adlm.config.schema import Config, Model, Vocabulary

torch.set_num_threads(1)  # the suite runs one process a core
# A busy machine is slow: no test may fail because of the time that an example takes.
settings.register_profile("adlm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("adlm")


@pytest.fixture(autouse=True)
def _same_arithmetic():
    """A CPU without bf16 units gives up oneDNN for good once a test asks for bf16; float32 then rounds otherwise."""
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture
def test_vectors() -> Path:
    """The small golden folder in this repository."""
    return Path(__file__).parent / "parity" / "golden"


@pytest.fixture
def golden_folder() -> Path:
    """A whole golden folder, if the environment names one."""
    if "ADLM_GOLDEN" not in os.environ:
        pytest.skip("ADLM_GOLDEN names no folder of golden numbers")
    return Path(os.environ["ADLM_GOLDEN"])


@pytest.fixture
def data_folder() -> Path:
    """Real tokenizers and corpora, if the environment names them."""
    if "ADLM_DATA" not in os.environ:
        pytest.skip("ADLM_DATA names no folder of real tokenizers")
    return Path(os.environ["ADLM_DATA"])


@pytest.fixture
def tiny_config() -> Config:
    """Eleven words and a mask in the middle of the vocabulary, two blocks and one, no dropout."""
    return Config(
        vocabulary=Vocabulary(size=12, mask_id=7),
        length=8,
        model=Model(hidden=16, heads=2, blocks=2, denoiser_blocks=1, condition=8, dropout=0.0),
    )


@pytest.fixture
def mdlm_config(tiny_config: Config) -> Config:
    return replace(tiny_config, method="mdlm")
