"""The memory view: its routes, and the snapshots that it streams."""
