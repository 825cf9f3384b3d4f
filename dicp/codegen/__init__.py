"""What renderers of C-family languages share."""
