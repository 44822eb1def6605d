"""Plans each step; reaches the device only through a protocol; never imports jax."""
