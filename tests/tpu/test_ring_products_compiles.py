"""The TPU's own compiler accepts the products over a ring, for few tokens and for many."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.ring_products.matrices import RingMatrix
from sgl_jax.kernels.ring_products.tpu.gather import tpu_gather_multiply
from sgl_jax.kernels.ring_products.tpu.scatter import tpu_multiply_scatter
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh
from tests.tpu.compiling import num_kernels

pytestmark = pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed")

# A 70B's feed-forward layer and a 32B's.
WIDTHS = {"70b": (8192, 28672), "32b": (5120, 25600), "34b": (8192, 22016)}


def layer(x, norm, number, matrices):
    gate, up, down = matrices
    inner = tpu_gather_multiply(
        *(x, norm, 1e-5, (gate, up), number, lambda gate, up: jax.nn.silu(gate) * up, "tensor")
    )
    return tpu_multiply_scatter(inner, down, number, x, "tensor")


def compiled(slice_name, num_chips, num_tokens, widths, *, is_quantized):
    mesh = topology_mesh(Topology.parse(slice_name), 1, num_chips)
    hidden, inner = widths

    def array(dtype, spec, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def matrix(spec, of_scales, *dims):
        if not is_quantized:
            return RingMatrix(array(jnp.bfloat16, spec, 4, *dims))
        scales = array(jnp.float32, of_scales, 4, 1, dims[1])
        return RingMatrix(array(jnp.int8, spec, 4, *dims), scales)

    by_output, by_input = P(None, None, "tensor"), P(None, "tensor", None)
    into = matrix(by_output, by_output, hidden, inner)
    arguments = (
        array(jnp.bfloat16, P(None, "tensor"), num_tokens, hidden),
        array(jnp.float32, P(), hidden),
        array(jnp.int32, P()),
        (into, into, matrix(by_input, P(), inner, hidden)),
    )
    specs = jax.tree.map(lambda own: own.sharding.spec, arguments)
    out = P(None, "tensor")
    run = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*arguments).compile()


@pytest.mark.parametrize("num_tokens", [8, 128, pytest.param(512, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    ("slice_name", "num_chips"),
    [
        ("v5e-8", 8),
        pytest.param("v6e-8", 8, marks=pytest.mark.long),
        pytest.param("v5p-8", 4, marks=pytest.mark.long),
        pytest.param("tpu7x-8", 8, marks=pytest.mark.long),
    ],
)
def test_every_generation_multiplies_a_layer_in_place(
    slice_name, num_chips, is_quantized, num_tokens
):
    program = compiled(slice_name, num_chips, num_tokens, WIDTHS["32b"], is_quantized=is_quantized)
    assert num_kernels(program) == 2
    # No matrix is copied, and what one kernel leaves for the next may stay in vector memory.
    assert program.memory_analysis().temp_size_in_bytes < 8 << 20


@pytest.mark.parametrize("model", [pytest.param("32b", marks=pytest.mark.long), "70b"])
def test_widths_of_published_models_compile(model):
    assert num_kernels(compiled("v6e-8", 8, 256, WIDTHS[model], is_quantized=False)) == 2


@pytest.mark.long
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("model", WIDTHS)
@pytest.mark.parametrize(
    ("slice_name", "num_chips"),
    [("v6e-4", 2), ("v6e-4", 4), ("v5e-8", 8), ("v5p-8", 4), ("tpu7x-8", 8), ("tpu7x-8", 4)],
)
def test_blocks_of_long_steps_fit_vector_memory(slice_name, num_chips, model, is_quantized):
    hidden, inner = WIDTHS[model]
    if inner % (num_chips * LANES):
        pytest.skip("a chip has no whole rows of lanes")
    program = compiled(slice_name, num_chips, 2176, (hidden, inner), is_quantized=is_quantized)
    assert num_kernels(program) == 2
