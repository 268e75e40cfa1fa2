"""Traces of sampling runs: recorded as data, shown as an HTML page or live in the terminal."""
