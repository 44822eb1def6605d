"""Step programs that XLA compiles four times faster, and that run slower.

A tiny model's programs run for milliseconds and take seconds to compile, so tests of the engine in
this process go without most of XLA's optimisations. Tests of the real server (`tests/live`) and of
accuracy run what users run.
"""

from collections.abc import Iterator

import pytest

from sgl_jax.executor.programs import Programs

QUICKLY: dict[str, bool | str | int] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 0,
}


@pytest.fixture(scope="package", autouse=True)
def quickly_compiled_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_compiler_options", lambda self, bucket: QUICKLY)
        yield
