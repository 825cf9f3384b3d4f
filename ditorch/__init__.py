"""`import ditorch` in a CUDA program: see `dicp.switch`, whose objects these are."""

from dicp.switch import arch, framework, switched, undo

__all__ = ["arch", "framework", "switched", "undo"]
