"""Benchmarks for operators: `sgl-jax bench serve` and `sgl-jax bench trace`."""
