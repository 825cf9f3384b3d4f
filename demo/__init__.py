"""Train two small models on handwritten digits, eager beside compiled: `python -m demo`."""
