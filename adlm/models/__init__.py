"""The networks: token ids -> logits or per-token nats. Independent of sampling, time grids and ranks."""
