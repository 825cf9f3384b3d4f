"""Conformance: whether operators on a device, or compiled by a backend, do what PyTorch's do."""
