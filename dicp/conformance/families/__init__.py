"""Tiny models of each family on each backend: `models`."""
