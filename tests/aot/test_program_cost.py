"""Reading a compiled program's text: loops multiply, conditionals take their cheapest branch."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.aot.program_cost import program_cost
from sgl_jax.aot.topology import Topology, topology_mesh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (sgl-jax[tpu]) is not installed"
)


def compile_for(mesh, function, *shapes, donate=()):
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    ]
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*arrays).compile()


def test_a_loop_counts_as_often_as_it_turns():
    mesh = topology_mesh(Topology.parse("v6e-4"), 1, 4)

    def layers(x, weights):
        def layer(x, weight):
            return lax.psum(x @ weight, "tensor"), None

        return lax.scan(layer, x, weights)[0]

    def cycles(num_layers):
        sharded = jax.shard_map(
            layers,
            mesh=mesh,
            in_specs=(P(None, "tensor"), P(None, "tensor", None)),
            out_specs=P(None, None),
            check_vma=False,
        )

        def program(x, weights):
            return sharded(x, weights)

        shapes = (((64, 512), P(None, "tensor")), ((num_layers, 512, 128), P(None, "tensor", None)))
        return program_cost(compile_for(mesh, program, *shapes))

    few, many = cycles(8), cycles(32)
    assert [c.times for c in few.collectives] == [8]
    (reduced,) = many.collectives
    assert (reduced.kind, reduced.times, reduced.group_size) == ("all-reduce", 32, 4)
    assert reduced.in_loop
    assert reduced.num_bytes == 64 * 128 * 2
    assert 2 < many.estimated_cycles / few.estimated_cycles < 5


def test_of_a_conditional_the_cheapest_branch_counts():
    mesh = topology_mesh(Topology.parse("v6e-1"), 1, 1)

    def maybe(x):
        return lax.cond(x[0, 0] > 0, lambda: jnp.exp(x @ x @ x @ x), lambda: x)

    def always(x):
        return jnp.exp(x @ x @ x @ x)

    shape = ((2048, 2048), P())
    cheap = program_cost(compile_for(mesh, maybe, shape))
    dear = program_cost(compile_for(mesh, always, shape))
    assert cheap.estimated_cycles < dear.estimated_cycles / 2


def test_what_is_donated_and_changed_in_place_takes_no_second_room():
    mesh = topology_mesh(Topology.parse("v6e-1"), 1, 1)
    shape = ((4096, 4096), P())
    cost = program_cost(compile_for(mesh, lambda x: x + 1, shape, donate=0))
    assert cost.alias_bytes == cost.argument_bytes == 4096 * 4096 * 2
    assert cost.resident_bytes < 1.1 * cost.argument_bytes
