"""Benchmarks: ratios from one run, machine named."""
