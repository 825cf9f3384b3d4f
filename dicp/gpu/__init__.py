"""Shared by all GPU vendors: tile sizes, split reductions, matrix products, launches, capture."""
