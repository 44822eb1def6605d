"""Chips that are only described: the TPU's compiler needs no TPU."""

import jax
import pytest

from sgl_jax.executor.devices import set_compilation_cache
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache():
    """Compile every program: those of absent chips cannot be loaded from a cache."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    set_compilation_cache("none")
    yield
    set_compilation_cache(before or "none")


@pytest.fixture(scope="session")
def tpu_mesh():
    """A function of a generation's name: a mesh of one of its devices."""
    if not has_tpu_compiler():
        pytest.skip("libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler")
    return lambda generation: topology_mesh(Topology.all_of(generation)[0], 1, 1)
