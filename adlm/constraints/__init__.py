"""Constraints on the text of a hole: what may be written there, and exact conditioning of beliefs on it."""
