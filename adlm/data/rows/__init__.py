"""Rows of token ids from shards or streams: packing, shuffling, batches."""
