"""Benchmarks of training and sampling speed."""
