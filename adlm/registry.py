"""The methods, bridges, noise schedules, samplers and anchor rules that a config names, and where each is implemented.

A built-in implementation is named by "module:attribute" and imported when first used, so that names can be checked
before PyTorch is imported. Other packages add their own by `register`, or by an entry point in one of the groups
adlm.methods, adlm.bridges, adlm.schedules, adlm.samplers, adlm.anchor_rules and adlm.corpora (docs/extending.md).
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from adlm.errors import UserError


class Registry(Mapping[str, Any]):
    """Implementations of one kind by name: built-in ones, registered ones, and those of entry points."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, Any]):
        self.kind, self.group = kind, group
        self.built_in = built_in
        self._registered: dict[str, Any] = {}

    def register(self, name: str, implementation: Any) -> None:
        """Add an implementation for this process. Built-in names cannot be replaced."""
        if name in self.built_in:
            raise UserError(f"{self.kind} {name!r} is built in; register yours under another name")
        self._registered[name] = implementation

    def __getitem__(self, name: str) -> Any:
        if name in self._registered:
            return self._registered[name]
        if name in self.built_in:
            found = self.built_in[name]
            if not isinstance(found, str):
                return found
            module, _, attribute = found.partition(":")
            return getattr(import_module(module), attribute)
        point = self._entry_points()[name]
        try:
            self._registered[name] = point.load()
        except (ImportError, AttributeError, SyntaxError) as error:
            raise UserError(f"{self.kind} {name!r}: its entry point {point.value} cannot be loaded: {error}") from None
        return self._registered[name]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._registered or name in self._entry_points()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.built_in, *self._registered, *self._entry_points())))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _entry_points(self) -> Mapping[str, EntryPoint]:
        return _entry_points(self.group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Those of the packages in `path`, which is `sys.path`: reading the metadata of all packages takes milliseconds."""
    return {point.name: point for point in entry_points(group=group)}


METHODS = Registry(
    "method",
    "adlm.methods",
    {
        "adlm": "adlm.methods.adlm:Adlm",
        "mdlm": "adlm.methods.mdlm:Mdlm",
        "sedd": "adlm.methods.sedd:Sedd",
        "d3pm": "adlm.methods.d3pm:D3pm",
        "ar": "adlm.methods.ar:Ar",
        "a2r": "adlm.methods.a2r:A2r",
    },
)

SCHEDULES = Registry(
    "schedule",
    "adlm.schedules",
    {
        "log-linear": "adlm.diffusion.schedules:LogLinear",
        "linear": "adlm.diffusion.schedules:Linear",
        "cosine": "adlm.diffusion.schedules:Cosine",
        "cosine-squared": "adlm.diffusion.schedules:CosineSquared",
        "geometric": "adlm.diffusion.schedules:Geometric",
    },
)

BRIDGES = Registry(
    "bridge",
    "adlm.bridges",
    {
        "logits": "adlm.models.bridges:LogitsBridge",
        "hidden": "adlm.models.bridges:HiddenBridge",
        "mixture": "adlm.models.bridges:MixtureBridge",
        "hidden-plus-input": "adlm.models.bridges:HiddenPlusInputBridge",
        "none": "adlm.models.bridges:NoBridge",
    },
)

SAMPLER_SUMMARIES = {
    "ancestral": "Reveals the masks in random order; a revealed token stays.",
    "remdm-cap": "Like ancestral, but masks visible tokens again with a constant chance, to redraw errors.",
    "remdm-rescale": "Like remdm-cap, but the chance that a token is masked again falls towards the end.",
    "remdm-conf": "Like ancestral, but also masks visible tokens again, mostly those drawn with a low probability.",
    "remdm-loop": "Reveals most of the text, masks and redraws parts of it for a while, then reveals the rest.",
    "forward-backward": "Reveals about twice as many tokens as needed at each step and masks the surplus again.",
    "dfm": "Reveals and masks again at the rates of the corrector of discrete flow matching.",
    "analytic": "The update published with SEDD; for other methods it is ancestral with the last tokens drawn.",
    "semi-autoregressive": "Ancestral in a window that moves along the text: for texts longer than the model.",
    "left-to-right": "Reveals the leftmost masks first; the only order of autoregressive models (ar, a2r).",
    "confidence": "Draws a token at every mask and keeps those that were drawn with the highest probability.",
    "certainty": "Reveals first where the most probable token has the highest probability, whichever is drawn.",
    "margin": "Reveals first where the most probable token leads the second by most.",
    "entropy": "Reveals first where the model is least uncertain (lowest entropy).",
    "threshold": "Draws a token at every mask and keeps all whose probability reaches a threshold: few steps.",
    "speculative": "Drafts tokens of a block and keeps what the causal model accepts: its distribution, fewer calls.",
    "rates": "Reveals in the order that the model has learnt: next tokens are drawn by the rates it predicts.",
    "anchor-first": "Reveals first where the anchor network is sure of a token that is rare in the text.",
}
"""What each built-in sampler does, in one line for --help and the studio; details are in docs/sampling.md."""

ORDERS = ("left-to-right", "certainty", "margin", "entropy", "anchor-first")
"""Samplers whose order is a function of the visible tokens: the likelihood of their samples is known exactly."""

SAMPLERS = Registry(
    "sampler",
    "adlm.samplers",
    {name: f"adlm.sampling.samplers:{name.upper().replace('-', '_')}" for name in SAMPLER_SUMMARIES},
)

ANCHOR_RULES = Registry(
    "anchor rule",
    "adlm.anchor_rules",
    {
        "count": "adlm.data.rows.anchor_rules:count",
        "rare": "adlm.data.rows.anchor_rules:rare",
        "frequent": "adlm.data.rows.anchor_rules:frequent",
        "tf-idf": "adlm.data.rows.anchor_rules:tf_idf",
        "pattern": "adlm.data.rows.anchor_rules:pattern",
        "content": "adlm.data.rows.anchor_rules:content",
        "random": "adlm.data.rows.anchor_rules:random",
        "syntax": "adlm.data.rows.anchor_rules:syntax",
        "all": "adlm.data.rows.anchor_rules:every",
    },
)
