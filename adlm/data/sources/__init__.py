"""Documents read from local files, the Hugging Face Hub and named corpora."""
