"""Stores of blocks behind the host's memory: a folder, or a distributed store."""
