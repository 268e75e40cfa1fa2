"""Multi-step reasoning problems: GSM8K, ProsQA and ProntoQA, read from files or generated. No tokens, no networks."""
