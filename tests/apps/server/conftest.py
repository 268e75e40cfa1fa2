"""Small models for the tests of the server, which are skipped where its packages are missing."""

import importlib.util

import pytest
from small_models import infilling_model, small_model

import adlm

MISSING = [name for name in ("fastapi", "uvicorn", "prometheus_client", "httpx") if not importlib.util.find_spec(name)]


@pytest.fixture(autouse=True, scope="session")
def server_packages():
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} not installed; pip install 'adlm[web,dev]'")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Model folders by name."""
    root = tmp_path_factory.mktemp("models")
    return {method: small_model(root / method, method, length=64) for method in ("adlm", "ar")}


@pytest.fixture(scope="session")
def infilling(tmp_path_factory):
    """A block-causal model that fills holes of unknown length."""
    return adlm.load(infilling_model(tmp_path_factory.mktemp("infilling")))


@pytest.fixture(scope="session")
def models(folders):
    return {name: adlm.load(folder) for name, folder in folders.items()}
