"""From computes to kernels and memory: fusion, loop order, placement."""
