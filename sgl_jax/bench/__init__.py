"""Benchmarks for operators: `sgl-jax bench serve`, `... bench trace` and `... bench fleet`."""
