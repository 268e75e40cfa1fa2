"""Networks with frozen weights for fast sampling: KV cache, CUDA graphs, fused kernels."""
