"""Conversations as the ids that a chat model reads. Independent of networks."""
