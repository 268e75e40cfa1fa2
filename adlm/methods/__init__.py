"""The methods, one file each with the same interface: build, loss, bound, log_beliefs, generate."""

from adlm.config.load import validate
from adlm.config.schema import Config
from adlm.methods.a2r import A2r
from adlm.methods.adlm import Adlm
from adlm.methods.ar import Ar
from adlm.methods.causal import Causal
from adlm.methods.d3pm import D3pm
from adlm.methods.masked_diffusion import MaskedDiffusion
from adlm.methods.mdlm import Mdlm
from adlm.methods.method import Method
from adlm.methods.sedd import Sedd

METHODS: dict[str, type[MaskedDiffusion | Causal]] = {
    "adlm": Adlm,
    "mdlm": Mdlm,
    "sedd": Sedd,
    "d3pm": D3pm,
    "ar": Ar,
    "a2r": A2r,
}


def method_of(config: Config) -> Method:
    """The method that a Config names; the Config is validated."""
    return METHODS[config.method](validate(config))
