"""The vocabulary every other room shares: requests, sampling parameters, arguments, step plans.

Nothing here imports jax or any other room.
"""
