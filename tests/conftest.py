"""Four CPU devices for every test, so that meshes can be tried without accelerators."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

# For who only wants to know that a test fails: `--hypothesis-profile=no_shrink`.
_NO_SHRINK = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("no_shrink", phases=_NO_SHRINK, database=None)

jax.config.update("jax_num_cpu_devices", 4)
