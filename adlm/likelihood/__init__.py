"""Bounds on the negative log-likelihood of texts, with standard errors."""
