"""Samplers: from a canvas of masks to text. A denoiser is only a function from noisy ids to beliefs here."""
