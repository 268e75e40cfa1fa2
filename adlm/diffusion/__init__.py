"""The mathematics of masked diffusion: tensors in, tensors out. No networks, configs or files."""
