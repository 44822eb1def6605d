"""Slices by name."""

import importlib.util

import pytest

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
    with pytest.raises(ValueError, match="needs 8 devices, v6e-4 has 4"):
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
