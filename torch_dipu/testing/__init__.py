"""Tests of programs that were written for torch_dipu."""
