"""Weights from and to disk, straight into their sharding."""
