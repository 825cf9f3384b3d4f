"""The loop IR: expressions, index expressions, scalar operators, kernels."""
