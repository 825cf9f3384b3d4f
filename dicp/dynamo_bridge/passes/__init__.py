"""Passes over the FX graph."""
