"""Five CPU devices for every test, so that meshes can be tried without accelerators.

Meshes have four at most. While kernels that wait for each other are simulated on four, the fifth
has the thread that converts the arguments of their callbacks.
"""

import os

from tests.quick_compilation import QUICK_FLAGS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"

import hypothesis
import jax
from hypothesis.internal.conjecture import engine

# For who only wants to know that a test fails: `--hypothesis-profile=no_shrink`.
_NO_SHRINK = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
# No test is timed: on a busy machine any example may take long.
hypothesis.settings.register_profile("no_shrink", phases=_NO_SHRINK, database=None, deadline=None)
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")

# The search for the smallest failing case of a state machine ends within its test's time-out.
engine.MAX_SHRINKING_SECONDS = 90

jax.config.update("jax_num_cpu_devices", 5)
