"""Blocks of KV pages and states in the host's memory, behind the prefix cache of each rank."""
