"""Each method of the field as one file with the same verbs: build, loss, bound, generate."""

from adlm.config.load import validate
from adlm.config.schema import Config
from adlm.methods.a2r import A2r
from adlm.methods.adlm import Adlm
from adlm.methods.ar import Ar
from adlm.methods.d3pm import D3pm
from adlm.methods.mdlm import Mdlm
from adlm.methods.method import Method
from adlm.methods.sedd import Sedd

METHODS: dict[str, type[Adlm | Mdlm | Sedd | D3pm | Ar | A2r]] = {
    "adlm": Adlm,
    "mdlm": Mdlm,
    "sedd": Sedd,
    "d3pm": D3pm,
    "ar": Ar,
    "a2r": A2r,
}


def method_of(config: Config) -> Method:
    """The method that a Config names, its knobs checked."""
    return METHODS[config.method](validate(config))
