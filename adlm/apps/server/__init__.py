"""The HTTP server of `adlm serve`: completions and infilling as the OpenAI client speaks them, with batching."""
