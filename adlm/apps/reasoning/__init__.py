"""Chain-of-thought methods for causal language models: anchored slots (ACoT) and the baselines beside it."""
