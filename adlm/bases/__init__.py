"""Pretrained causal language models to start from: what their files say of them. No networks, no config."""
