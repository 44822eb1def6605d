"""Bounds on clients: keys, limits, connections, bodies."""
