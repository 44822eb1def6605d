"""Model architectures in flax nnx, written for one chip's shards, and their registry."""
