"""Slices by name."""

import importlib.util

import numpy as np
import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor import devices as devices_module
from sgl_jax.executor.devices import make_mesh
from sgl_jax.planner import topology as topology_module
from sgl_jax.planner.topology import Topology, topology_mesh


@pytest.mark.parametrize(
    ("name", "grid", "devices"),
    [
        ("v6e-1", (1, 1), 1),
        ("v6e-8", (2, 4), 8),
        ("v6e:2x4", (2, 4), 8),
        ("v5e-4", (2, 2), 4),
        ("v5p-8", (2, 2, 1), 4),  # cores are counted, two of them are a device
        ("tpu7x-8", (2, 2, 1), 8),  # cores are counted, each is a device
    ],
)
def test_a_name_is_a_grid_of_chips(name, grid, devices):
    topology = Topology.parse(name)
    assert topology.grid == grid
    assert topology.num_devices == devices
    assert Topology.parse(topology.name) == topology


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e", "must be like v6e-8"),
        ("v9-8", "of v5e, v6e, v5p, tpu7x"),
        ("v6e-9", "sizes of v6e are v6e-1, v6e-4"),
        ("v5e:3x3", "grids of v5e are 1x1, 2x2"),
    ],
)
def test_a_name_that_is_none_is_told_what_there_is(name, message):
    with pytest.raises(ValueError, match=message):
        Topology.parse(name)


def test_a_mesh_larger_than_the_slice_is_refused():
    with pytest.raises(ValueError, match="needs 8 devices, found 4 in v6e-4"):
        topology_mesh(Topology.parse("v6e-4"), 2, 4)


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(topology_module, "has_tpu_compiler", lambda: False)
    with pytest.raises(RuntimeError, match=r"pip install 'sgl-jax\[tpu\]'"):
        topology_mesh(Topology.parse("v6e-4"), 1, 4)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (sgl-jax[tpu]) is not installed"
)
def test_the_chips_of_a_rank_are_neighbours():
    mesh = topology_mesh(Topology.parse("v6e-8"), 2, 4)
    for rank in mesh.devices:
        assert {device.coords[1] // 2 for device in rank} in ({0}, {1})


@pytest.mark.parametrize(
    ("name", "num_hosts", "dp_size", "tp_size", "is_served"),
    [
        ("v6e-8", 1, 1, 8, True),
        ("v6e-8", 1, 1, 4, True),  # some chips of one host stay idle
        ("v6e-16", 4, 1, 16, True),
        ("v6e-16", 4, 4, 4, True),
        ("v6e-16", 4, 1, 8, False),  # two hosts would have no chip of the mesh
        ("v6e-32", 8, 4, 8, True),
        ("tpu7x-16", 2, 2, 8, True),
        ("tpu7x-16", 2, 1, 8, False),
    ],
)
def test_the_planner_starts_what_serve_starts(
    monkeypatch, name, num_hosts, dp_size, tp_size, is_served
):
    topology = Topology.parse(name)
    assert topology.num_hosts == num_hosts
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu describes the devices of a slice")
    described = topology_module._devices(topology)
    assert len({device.process_index for device in described}) == num_hosts  # type: ignore[attr-defined]
    monkeypatch.setattr(devices_module.jax, "devices", lambda platform: described)  # type: ignore[attr-defined]
    args = ServerArgs(device="tpu", nnodes=num_hosts, dp_size=dp_size, tp_size=tp_size)
    if is_served:
        planned, served = topology_mesh(topology, dp_size, tp_size), make_mesh(args)
        ids_of = np.vectorize(lambda device: device.id)
        np.testing.assert_array_equal(ids_of(planned.devices), ids_of(served.devices))
        if tp_size <= len(described) // num_hosts:
            for rank in served.devices:
                assert len({device.process_index for device in rank}) == 1
        return
    with pytest.raises(ValueError, match="all of several hosts"):
        topology.check_mesh(dp_size, tp_size)
    with pytest.raises(RuntimeError, match="all of several hosts"):
        make_mesh(args)
