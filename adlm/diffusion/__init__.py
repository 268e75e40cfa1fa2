"""The mathematics of masked diffusion: tensors in, tensors out. Knows no networks, knobs or files."""
