"""Blocks of KV pages and states in CPU memory: the tier after each rank's prefix cache."""
