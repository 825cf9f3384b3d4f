"""The loop program family: kernels as loop nests over explicit expression DAGs."""
