"""Measure compiler backends against each other: `python -m benchmarks --help`."""
