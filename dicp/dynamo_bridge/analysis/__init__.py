"""Analyses of FX graphs for the passes: inferred values, effects, aliases."""
