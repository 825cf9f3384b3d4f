"""Graph-level fusion: one file per pattern family, and the engine that finds patterns."""
