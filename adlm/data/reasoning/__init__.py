"""Problems that take several steps: GSM8K, ProsQA and ProntoQA, read and made. Knows no tokens and no networks."""
