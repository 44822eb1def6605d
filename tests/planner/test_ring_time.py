"""Products over a ring: a device's part, and the part of their exchange that is exposed."""

import pytest

from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.placement import place_model
from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.kernel_time import HEADS_CYCLES
from sgl_jax.planner.ring_products import RingProduct, ring_products
from sgl_jax.planner.ring_time import RING_BUNDLES, ring_time
from sgl_jax.planner.topology import CHIPS, ICI_HOP_S, topology_mesh

V6E = CHIPS["v6e"]
MI = 2**20
LONG = RingProduct(gathers=True, num_layers=3, inputs=8192, outputs=8192, num_bytes=128 * MI)


def test_a_product_longer_than_its_exchange_hides_it():
    found = ring_time((LONG,), 128, 8, 2, V6E)
    assert found.exposed_s == pytest.approx(0, abs=1e-12)
    assert found.hbm_s == pytest.approx(3 * 128 * MI / V6E.hbm_bytes_per_s)
    assert found.products_s > found.hbm_s


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(
    ("chips", "tokens", "full_hops", "half_hops"),
    [(2, 32, 0, 1), (2, 8, 1, 0), (3, 32, 1, 0), (4, 32, 1, 1), (8, 128, 3, 1), (8, 8, 4, 0)],
)
def test_the_farthest_chip_is_half_the_ring_away(gathers, chips, tokens, full_hops, half_hops):
    own = RingProduct(gathers, 1, chips * 128, chips * 128, num_bytes=0)
    message = tokens * 128 * 2 / V6E.ici_link_bytes_per_s
    found = ring_time((own,), tokens, chips, 2, V6E)
    # And one for the barrier at the start.
    latency = (1 + full_hops + half_hops) * ICI_HOP_S
    wanted = latency + (full_hops + half_hops / 2) * message
    assert found.transfers_s == pytest.approx(wanted)
    assert found.exposed_s < found.transfers_s


def test_sums_cannot_leave_before_they_are_made():
    gather, scatter = (LONG._replace(gathers=gathers, num_layers=1) for gathers in (True, False))
    short, long = (ring_time((own,), 512, 8, 2, V6E).exposed_s for own in (gather, scatter))
    assert 0 <= short <= long


def test_instructions_count_where_they_take_longer_than_bytes():
    own = LONG._replace(num_layers=1, num_bytes=0)
    count, cycles = RING_BUNDLES[V6E.device_kind], HEADS_CYCLES[V6E.device_kind].call
    cycles += 64 * (count.product.tile + 128 * count.product.token) + 8 * count.chip
    cycles += 128 * 8192 / MI * (count.activations + count.sums)
    found = ring_time((own,), 128, 8, 2, V6E)
    assert found.products_s == pytest.approx(cycles / V6E.clock_hz)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(
    ("chip", "activation", "rate"),
    [
        ("v5e", None, 1),
        ("v6e", "int8", 2),
        ("v6e", "fp8", 1),
        ("tpu7x", None, 1),
        ("tpu7x", "fp8", 2),
    ],
)
def test_no_product_is_faster_than_the_matrix_units(gathers, chip, activation, rate):
    own = RingProduct(gathers, 1, 8192, 8192, 0, activation=activation)
    least = 2 * 2048 * 8192**2 / (rate * CHIPS[chip].bf16_flops_per_s)
    assert ring_time((own,), 2048, 8, 2, CHIPS[chip]).products_s > least


def test_long_steps_go_in_blocks_of_tokens_that_each_read_the_matrix():
    one, two = (ring_time((LONG,), tokens, 8, 2, V6E) for tokens in (1024, 2048))
    assert one.hbm_s == pytest.approx(3 * 128 * MI / V6E.hbm_bytes_per_s)
    assert two.hbm_s == pytest.approx(2 * one.hbm_s)
    assert two.weights_s == one.weights_s == one.hbm_s
    assert two.transfers_s == pytest.approx(2 * one.transfers_s)
    assert 1.9 < two.products_s / one.products_s <= 2
    assert (one.bound, two.bound) == ("MXU", "MXU")
    assert ring_time((LONG,), 8, 8, 2, V6E).bound == "HBM"


def test_columns_in_8_bits_are_gathered_in_half_the_time_and_scattered_in_the_same():
    def times(*, gathers):
        own = LONG._replace(gathers=gathers, num_layers=1, num_bytes=0)
        quantized = own._replace(activation="int8")
        return [ring_time((each,), 512, 8, 2, V6E) for each in (own, quantized)]

    gather, scatter = times(gathers=True), times(gathers=False)
    hops = 5 * ICI_HOP_S  # with the barrier
    assert gather[1].transfers_s - hops == pytest.approx((gather[0].transfers_s - hops) / 2)
    assert scatter[1].transfers_s == pytest.approx(scatter[0].transfers_s)
    assert gather[1].products_s < gather[0].products_s


def products(*words):
    words = ("--topology", "v6e-8", "--tp-size", "8", *words)
    request = parse_plan_request(words)
    options = EngineConfig.resolve(request.args, request.config, "tpu").build_options
    placed = place_model(request.config, topology_mesh(request.topology, 1, 8), options)
    return ring_products(placed, 8)


def test_a_devices_part_of_every_product_is_found():
    words = ("--model-path", "llama-3.3-70b", "--hidden-sharding", "tensor")
    assert products(*words) == (
        RingProduct(True, 80, 8192, 1280, 8192 * 1280 * 2),
        RingProduct(False, 80, 1024, 8192, 1024 * 8192 * 2),
        RingProduct(True, 80, 8192, 2 * 3584, 8192 * 2 * 3584 * 2, matrices=2),
        RingProduct(False, 80, 3584, 8192, 3584 * 8192 * 2),
    )
    # Experts take whole hidden states.
    sparse = products("--model-path", "qwen3-30b-a3b", *words[2:])
    assert [(own.gathers, own.inputs) for own in sparse] == [(True, 2048), (False, 512)]
    # A byte for each value, and a scale for each output: all of them where inputs are split.
    first, *_, last = products(*words, "--quantization", "int8")
    assert first.num_bytes == 1280 * (8192 + 4)
    assert last.num_bytes == 8192 * (3584 + 4)


@pytest.mark.parametrize(
    "words",
    [
        ("llama-3.3-70b",),
        ("llama-3.3-70b", "--hidden-sharding", "tensor", "--quantization", "int4"),
        ("gemma-3-27b", "--hidden-sharding", "tensor"),
    ],
    ids=" ".join,
)
def test_steps_with_all_reduces_have_none(words):
    assert products("--model-path", *words) == ()
