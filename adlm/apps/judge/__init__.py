"""The quality of samples: generative perplexity, MAUVE, diversity, as a metric card."""
