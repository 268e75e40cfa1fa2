"""Each method of the field as one file with the same verbs: build, loss, bound, generate."""

from adlm.config.load import check
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.methods.adlm import Adlm
from adlm.methods.mdlm import Mdlm
from adlm.methods.method import Method

METHODS: dict[str, type[Adlm] | type[Mdlm]] = {"adlm": Adlm, "mdlm": Mdlm}


def method_of(config: Config) -> Method:
    """The method that a Config names, its knobs checked."""
    if config.method not in METHODS:
        raise UserError(f"method {config.method} has a preset but no code yet; there are {', '.join(METHODS)}")
    return METHODS[config.method](check(config))
