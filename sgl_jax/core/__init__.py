"""Types that all other packages share: requests, sampling parameters, settings, step plans.

Imports neither jax nor any other package of `sgl_jax`.
"""
