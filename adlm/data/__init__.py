"""Text from anywhere -> documents -> ids once -> flat shards -> rows of ids, and problems to reason about."""
