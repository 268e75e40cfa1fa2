"""Doors for people and other programs."""
