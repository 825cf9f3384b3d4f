"""What passes ask of a graph: inferred values, effects, aliases."""
