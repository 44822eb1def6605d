"""`sgl-jax doctor`: checks a machine, its kernels and one conversation, for a report to paste."""
