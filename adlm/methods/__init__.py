"""The methods, one file each with the same interface: build, loss, bound, log_beliefs, generate."""

from adlm.config.load import validate
from adlm.config.schema import Config
from adlm.methods.method import Method
from adlm.registry import METHODS


def method_of(config: Config) -> Method:
    """The method that a Config names; the Config is validated."""
    return METHODS[config.method](validate(config))  # type: ignore[no-any-return]
