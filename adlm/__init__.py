"""adlm: the Anchored Diffusion Language Model, exact and readable."""

__version__ = "0.1.0"
