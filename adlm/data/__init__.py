"""Data pipeline: text sources -> documents -> shards of token ids -> rows and batches."""
