"""Four CPU devices for every test, so that meshes can be tried without accelerators."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 4)
