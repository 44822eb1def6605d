"""Chips that are only described: the TPU's compiler needs no TPU."""

import importlib.util
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}


@pytest.fixture(scope="session")
def tpu_mesh():
    """A function of a generation's name: a mesh of one of its chips."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler")
    # Ask no metadata server for a TPU, and let test processes load the compiler side by side.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

    def mesh(generation: str) -> Mesh:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=TOPOLOGIES[generation]
        )
        return jax.sharding.Mesh(np.array(description.devices[:1]), ("x",))

    return mesh
