"""The first run: prepare, train two models, compare, report."""
