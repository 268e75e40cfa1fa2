"""Documents -> token ids -> shards on disk, once and resumable."""
