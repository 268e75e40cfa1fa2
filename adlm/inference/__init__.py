"""The trained networks arranged for sampling: frozen weights, KV cache, CUDA graphs, kernels."""
