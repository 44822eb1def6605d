"""Model architectures in flax nnx, written as one chip sees them, and their registry."""
