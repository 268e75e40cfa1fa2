"""The networks: ids in, logits or nats out. Knows no sampling, no time grids and no ranks."""
