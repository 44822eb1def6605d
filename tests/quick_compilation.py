"""Programs that XLA compiles three times faster, and that run slower.

What runs for milliseconds and takes seconds to compile, as a tiny model or a simulated kernel, goes
without most of XLA's optimisations. Tests of the real server (`tests/live`) and of accuracy run
what users run, unless all programs are to be compiled before the first request.
"""

from collections.abc import Iterator
from functools import partial

import jax
import pytest

from sgl_jax.executor.programs import Programs

QUICKLY: dict[str, bool | str | int] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 0,
}

# The same for another process, in its XLA_FLAGS.
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICKLY.items())

quick_jit = partial(jax.jit, compiler_options=QUICKLY)


@pytest.fixture(scope="package", autouse=True)
def quickly_compiled_programs() -> Iterator[None]:
    """For all engines of the package whose conftest imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_compiler_options", lambda self, bucket: QUICKLY)
        yield
