"""Benchmarks for those who serve: `sgl-jax bench serve` and `sgl-jax bench trace`."""
