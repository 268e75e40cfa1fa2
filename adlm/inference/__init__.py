"""How a network is evaluated fast during sampling: frozen weights, KV cache, CUDA graphs, kernels. No samplers."""
