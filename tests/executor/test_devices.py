"""The mesh that is asked for, or a clear refusal; a compilation cache that others cannot write."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.devices import make_mesh, platform_of, set_compilation_cache
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh


def test_the_mesh_holds_tp_chips_for_each_rank():
    mesh = make_mesh(ServerArgs(device="cpu", dp_size=2, tp_size=2))
    assert dict(mesh.shape) == {"data": 2, "tensor": 2}
    assert platform_of(mesh) == "cpu"


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu describes the slices")
@pytest.mark.parametrize(
    ("name", "dp_size", "tp_size"),
    [
        ("v6e-4", 1, 4),
        ("v6e-8", 1, 8),
        ("v6e-8", 2, 4),
        ("v6e-16", 1, 16),
        ("v5p-8", 1, 4),
        ("v5p-16", 1, 8),
        ("tpu7x-8", 1, 8),
    ],
)
def test_chips_of_a_rank_fill_a_block_of_the_slice(name, dp_size, tp_size):
    mesh = topology_mesh(Topology.parse(name), dp_size, tp_size)
    assert len(set(mesh.devices.flat)) == dp_size * tp_size
    for rank in mesh.devices:
        coords = np.array([device.coords for device in rank])
        extent = coords.max(axis=0) - coords.min(axis=0) + 1
        assert extent.prod() == len(np.unique(coords, axis=0))


def test_too_few_devices_are_named():
    needed = 2 * len(jax.devices())
    with pytest.raises(RuntimeError, match=rf"needs {needed} devices, found {needed // 2}"):
        make_mesh(ServerArgs(device="cpu", dp_size=needed))


_MORE_DEVICES = """
import jax
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.devices import make_mesh
jax.config.update("jax_num_cpu_devices", 3)
assert make_mesh(ServerArgs(device="cpu", tp_size=2)).size == 2
assert len(jax.devices()) == 3
"""


def test_more_cpu_devices_than_an_engine_needs_stay_as_configured():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", _MORE_DEVICES], env=environment, check=True, timeout=120)


def test_a_platform_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match="--device tpu"):
        make_mesh(ServerArgs(device="tpu"))


@pytest.fixture
def restore_cache():
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    yield
    set_compilation_cache(before or "none")


@pytest.mark.usefixtures("restore_cache")
def test_the_cache_folder_is_made_private_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = set_compilation_cache(None)
    assert folder == tmp_path / "sgl_jax" / "xla"
    assert folder.stat().st_mode & 0o777 == 0o700
    jax.jit(lambda x: x * 5 + 3)(2.0)
    assert any(folder.iterdir())


@pytest.mark.usefixtures("restore_cache")
def test_a_cache_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="--compilation-cache-dir"):
        set_compilation_cache(str(tmp_path))


@pytest.mark.usefixtures("restore_cache")
def test_the_cache_can_be_switched_off():
    assert set_compilation_cache("none") is None
    assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]
