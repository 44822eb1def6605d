"""Reading a compiled program's text: loops multiply, conditionals take a branch."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import Topology, topology_mesh
from tests.support.long import long

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (sgl-jax[tpu]) is not installed"
)


def compile_for(mesh, function, *shapes, donate=(), options=None):
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    ]
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*arrays)
        return lowered.compile(compiler_options=options)


def layers_cost(slice_name, num_devices, num_layers, tokens, width):
    """Of a loop over layers, each a product of [tokens, width] whose parts the devices add up."""
    mesh = topology_mesh(Topology.parse(slice_name), 1, num_devices)

    def layers(x, weights):
        def layer(x, weight):
            return lax.psum(x[:, : weight.shape[0]] @ weight, "tensor"), None

        return lax.scan(layer, x, weights)[0]

    sharded = jax.shard_map(
        layers,
        mesh=mesh,
        in_specs=(P(), P(None, "tensor")),
        out_specs=P(),
        check_vma=False,
    )

    def program(x, weights):
        return sharded(x, weights)

    shapes = (((tokens, width), P()), ((num_layers, width, width), P(None, "tensor")))
    return program_cost(compile_for(mesh, program, *shapes))


def test_a_loop_counts_as_often_as_it_turns():
    few, many = (layers_cost("v6e-4", 4, num_layers, 64, 512) for num_layers in (8, 32))
    assert [c.times for c in few.collectives] == [8]
    (reduced,) = many.collectives
    assert (reduced.kind, reduced.times, reduced.group_size) == ("all-reduce", 32, 4)
    assert reduced.in_loop
    assert reduced.num_bytes == 64 * 512 * 2
    assert 2 < many.estimated_cycles / few.estimated_cycles < 5


# A tpu7x has SparseCores do this one: the program calls it, and computes on meanwhile.
@pytest.mark.parametrize("slice_name", ["v5e-8", *long("v5p-16", "v6e-8"), "tpu7x-8"])
def test_every_generation_counts_the_exchange_of_each_layer(slice_name):
    cost = layers_cost(slice_name, 8, 4, 128, 4096)
    (reduced,) = cost.collectives
    assert (reduced.kind, reduced.times, reduced.group_size) == ("all-reduce", 4, 8)
    assert reduced.in_loop
    assert reduced.num_bytes == 128 * 4096 * 2
    assert 0 < cost.estimated_cycles < 1_000_000  # a SparseCore's are not the program's


def product_beside_gather(slice_name, options):
    """The exchange in a program that gathers x while it multiplies something else."""
    mesh = topology_mesh(Topology.parse(slice_name), 1, 4)

    def program(x, y, weights):
        return lax.all_gather(x, "tensor", tiled=True) @ weights, y @ weights

    sharded = jax.shard_map(
        program, mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P(), check_vma=False
    )
    shapes = (((1024, 2048), P("tensor")), ((2048, 2048), P()), ((2048, 2048), P()))
    cost = program_cost(compile_for(mesh, sharded, *shapes, options=options))
    (gathered,) = (c for c in cost.collectives if c.kind == "all-gather")
    assert gathered.times == 1
    return gathered


@pytest.mark.long
@pytest.mark.parametrize(
    ("slice_name", "options"),
    [
        pytest.param(
            "v6e-4",
            ["xla_tpu_enable_sparse_core_collective_offload_all_gather"],
            id="SparseCore",
        ),
        pytest.param(
            "v5e-4",
            [
                "xla_enable_async_all_gather",
                "xla_tpu_enable_async_collective_fusion",
                "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
                "xla_tpu_enable_async_collective_fusion_multiple_steps",
            ],
            id="fusions",
            marks=pytest.mark.long,
        ),
    ],
)
def test_cycles_between_the_start_and_the_end_of_an_exchange_are_beside_it(slice_name, options):
    alone = product_beside_gather(slice_name, {"xla_enable_async_all_gather": False})
    beside = product_beside_gather(slice_name, dict.fromkeys(options, True))
    assert alone.beside_cycles == 0
    assert beside.beside_cycles > 10_000
    assert beside._replace(beside_cycles=0) == alone


def test_of_a_conditional_the_cheapest_branch_counts():
    mesh = topology_mesh(Topology.parse("v6e-1"), 1, 1)

    def maybe(x):
        return lax.cond(x[0, 0] > 0, lambda: jnp.exp(x @ x @ x @ x), lambda: x)

    def always(x):
        return jnp.exp(x @ x @ x @ x)

    shape = ((512, 512), P())
    cheap = program_cost(compile_for(mesh, maybe, shape))
    dear = program_cost(compile_for(mesh, always, shape))
    assert cheap.estimated_cycles < dear.estimated_cycles / 2


def test_of_a_conditional_the_branch_counts_that_exchanges_least():
    """As plain greedy rows do; their cycles may be more than those of rows that are drawn."""
    mesh = topology_mesh(Topology.parse("v6e-4"), 1, 4)

    def maybe(x):
        return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "tensor"), lambda: x @ x)

    sharded = jax.shard_map(maybe, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    cost = program_cost(compile_for(mesh, sharded, ((1024, 1024), P())))
    assert [c for c in cost.collectives if c.num_bytes > 4] == []
    assert cost.estimated_cycles > 1000


def test_what_is_donated_and_changed_in_place_takes_no_second_room():
    mesh = topology_mesh(Topology.parse("v6e-1"), 1, 1)
    shape = ((4096, 4096), P())
    cost = program_cost(compile_for(mesh, lambda x: x + 1, shape, donate=0))
    assert cost.alias_bytes == cost.argument_bytes == 4096 * 4096 * 2
    assert cost.resident_bytes < 1.1 * cost.argument_bytes
