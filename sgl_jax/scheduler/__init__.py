"""Decides what each step computes; knows the device only through a protocol; never imports jax."""
