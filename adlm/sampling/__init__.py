"""Walks from masks to text. Knows a denoiser only as a function from noisy ids to beliefs."""
