"""Tokenises documents into shards on disk, once and resumably."""
