"""What every GPU vendor shares: tiles, splits, products, launch plans, graph capture."""
