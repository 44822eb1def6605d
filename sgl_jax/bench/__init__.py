"""Benchmarks and evaluations that talk to a running server."""
