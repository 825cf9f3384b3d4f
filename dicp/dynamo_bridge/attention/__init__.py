"""Attention in FX graphs: matcher, masks, forward, training."""
