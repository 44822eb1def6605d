"""The kernels of deterministic inference on a TPU, simulated on the CPU: the bits of a token's
result depend on neither other tokens nor its place, nor on how its prompt is cut.

`attention/tpu/test_invariant.py` has attention.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.core.layer_configs import ExpertChoice, Scheme
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.expert_dispatch.lines import Router
from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.kernels.grouped_matmul.tpu import INVARIANT_LINES
from sgl_jax.kernels.latent_attention.latents import LatentQueries, UpProjections
from sgl_jax.kernels.row_blocks import TPU_BLOCK_ROWS, invariant_rows, matmul, row_wise
from sgl_jax.layers.head_sources import Heads
from sgl_jax.layers.kernels import invariant_kernels, invariant_row_blocks
from sgl_jax.layers.moe import silu_gated
from sgl_jax.layers.rotary import Rotation
from tests.kernels.gated_delta.problems import LAYER, Case, Program, build
from tests.kernels.quantized_matmul.problems import draw
from tests.kernels.simulation import product_rows, simulate
from tests.kernels.state_space.problems import Lines
from tests.support.long import long, long_but

KERNELS = invariant_kernels("cpu", "pallas")
BLOCKS = invariant_row_blocks("cpu", "pallas")
RNG = np.random.default_rng(7)


class Row(NamedTuple):
    """Tokens [first, end) of a problem as a row of a step; it reads and writes such slots."""

    first: int
    end: int
    slot_in: int
    slot_out: int
    snapshots: tuple[tuple[int, int], ...] = ()  # lengths in tokens, and slots
    start: int | None = None  # position of its first token; None: `first`


Recurrence = Callable[[tuple[Any, ...], Any, StateBatch], tuple[Any, Any]]


@lru_cache
def compiled(call: Recurrence) -> Any:
    @jax.jit
    def run(arrays: Any, states: Any, kept: Any, numbers: Any, decodes: Any) -> Any:
        slots, lengths = numbers[:2], numbers[2:]
        batch = StateBatch.build(*slots, kept, *lengths, decodes, len(arrays[0]), 3)
        return call(arrays, states, batch)

    return run


class Recurred(NamedTuple):
    """A recurrence or a convolution, with the arrays of its tokens and its states."""

    call: Recurrence
    arrays: tuple[np.ndarray, ...]
    states: np.ndarray

    def run(
        self, rows: list[Row], states: Any, *, decodes: int = 0, tokens: int = 128
    ) -> tuple[list[np.ndarray], Any]:
        """Return each row's outputs, and the states after the step."""
        numbers = np.zeros((4, 9), np.int32)
        kept = np.zeros((4, 3), np.int32)
        for n, row in enumerate(rows):
            start = row.first if row.start is None else row.start
            numbers[:, n] = row.slot_in, row.slot_out, start, row.end - row.first
            for i, (length, slot) in enumerate(row.snapshots):
                kept[i] = n, length, slot
        arrays = []
        for array in self.arrays:
            flat = np.concatenate([array[row.first : row.end] for row in rows])
            arrays.append(np.pad(flat, ((0, tokens - len(flat)), *[(0, 0)] * (flat.ndim - 1))))

        given = tuple(arrays), states, kept, numbers, np.int32(decodes)
        out, states = simulate(compiled(self.call), *given)
        ends = np.cumsum([row.end - row.first for row in rows])
        return np.split(np.asarray(out), ends)[: len(rows)], states


LARGE = Program(
    *(1, 2, 128, 128),
    dtype=jnp.bfloat16,
    state_dtype=jnp.bfloat16,
    max_drafts=3,
    rows=9,
    tokens=128,
    max_snapshots=4,
)


def gated_delta(*, by_channel: bool = False) -> Recurred:
    problem = build(Case(LARGE._replace(by_channel=by_channel), [], [(0, 100)], [], seed=2))

    def call(arrays: Any, states: Any, batch: StateBatch) -> Any:
        return KERNELS.gated_delta(DeltaInputs(*arrays), states, jnp.int32(LAYER), batch)

    return Recurred(call, problem[:5], problem.states)


def channels() -> Recurred:
    return gated_delta(by_channel=True)


def state_space() -> Recurred:
    lines = Lines.of(Case(LARGE, [], [(0, 100)], [], seed=2), 2)

    def call(arrays: Any, states: Any, batch: StateBatch) -> Any:
        return KERNELS.state_space(DeltaInputs(*arrays), states, jnp.int32(LAYER), batch)

    return Recurred(call, tuple(lines.tokens), lines.problem.states)


def convolution() -> Recurred:
    u, weight, states = build(Case(LARGE, [], [(0, 100)], [], seed=2)).conv

    def call(arrays: Any, states: Any, batch: StateBatch) -> Any:
        return KERNELS.causal_conv(*arrays, weight, states, jnp.int32(LAYER), batch)

    return Recurred(call, (u,), states)


@pytest.mark.parametrize("make", long(gated_delta, channels, state_space, convolution))
def test_a_state_depends_on_neither_cuts_nor_batch_nor_drafts(make: Callable[[], Recurred]) -> None:
    recurred = make()
    (out,), whole = recurred.run([Row(0, 100, 0, 8, ((70, 9),))], recurred.states)
    others = [Row(40 + n, 47 + n, 0, 10 + n, start=0) for n in range(5)]
    rows = [*others[:3], Row(0, 70, 0, 20, ((33, 21),)), *others[3:]]
    found, states = recurred.run(rows, recurred.states, tokens=256)
    assert (found[3] == out[:70]).all()
    assert (states[LAYER, 20] == whole[LAYER, 9]).all()
    (rest,), resumed = recurred.run([Row(33, 70, 21, 22)], states)
    assert (rest == out[33:70]).all()
    assert (resumed[LAYER, 22] == whole[LAYER, 9]).all()
    slot = 20
    for first in range(70, 98, 4):  # a token, and three drafts
        rows = [Row(5, 6, 0, 40), Row(first, first + 4, slot, 24 + first % 8), Row(3, 50, 0, 44)]
        found, states = recurred.run(rows, states, decodes=2)
        slot = 24 + first % 8 + 3
        assert (found[1] == out[first : first + 4]).all()
    found, states = recurred.run([Row(98, 99, slot, 45), Row(9, 30, 0, 46)], states, decodes=1)
    found, states = recurred.run([Row(99, 100, 45, 47)], states, decodes=1)
    assert (states[LAYER, 47] == whole[LAYER, 8]).all()


def check_rows(function: Callable[..., Any], *arrays: np.ndarray, sizes: tuple[int, ...]) -> None:
    """Compare a row's results alone with those in batches of `sizes` rows, at several places."""

    @jax.jit
    def run(*arrays: Any) -> Any:
        with invariant_rows(BLOCKS):
            return function(*arrays)

    def at(place: int, size: int) -> list[np.ndarray]:
        batch = [array[1 : 1 + size].copy() for array in arrays]
        for array, own in zip(batch, arrays, strict=True):
            array[place] = own[0]
        found = jax.tree.leaves(simulate(run, *batch))
        return [np.asarray(values)[place] for values in found]

    expected = at(0, sizes[0])
    for size in sizes:
        for place in {0, size // 3, size - 1}:
            for own, wanted in zip(at(place, size), expected, strict=True):
                assert (own == wanted).all(), (size, place)


def rows_of(num_rows: int, *shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.asarray(RNG.standard_normal((num_rows, *shape)), dtype)


SCHEMES = {
    "int8": Scheme("int8"),
    "groups of int4": Scheme("int4", group_size=32),
    "int8 activations": Scheme("int8", activation="int8"),
    "int4 with zero points": Scheme("int4", has_zero_points=True),
}


@pytest.mark.parametrize("name", long_but(SCHEMES, "groups of int4"))
def test_a_row_of_a_quantized_product_depends_on_no_other(name: str) -> None:
    scheme, inputs = SCHEMES[name], 512
    arrays = draw(scheme, inputs, 256)

    def multiply(x: jax.Array) -> Any:
        own = jax.tree.map(jnp.asarray, arrays)
        return row_wise(lambda x: KERNELS.multiply_quantized(x, own, jnp.int32(1), scheme), x)

    check_rows(multiply, rows_of(700, inputs), sizes=(256, 600))


def quantized_jaxpr(scheme: Scheme) -> str:
    arrays = jax.tree.map(jnp.asarray, draw(scheme, 512, 256))

    def multiply(x: jax.Array) -> Any:
        with invariant_rows(BLOCKS):
            return row_wise(
                lambda x: KERNELS.multiply_quantized(x, arrays, jnp.int32(1), scheme), x
            )

    return str(jax.make_jaxpr(multiply)(rows_of(700, 512)))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_kernel_computes_each_quantized_product(name: str) -> None:
    assert "pallas_call" in quantized_jaxpr(SCHEMES[name]), "XLA would choose the order of sums"


def test_quantized_products_of_xla_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int4 in groups of 8.* needs groups of a multiple of 16"):
        quantized_jaxpr(Scheme("int4", group_size=8))


@pytest.mark.parametrize("transposed", [False, *long(True)])
def test_a_row_of_a_product_depends_on_no_other(transposed: bool) -> None:
    inputs, outputs = 512, 384
    matrix = rows_of(outputs if transposed else inputs, inputs if transposed else outputs)

    def multiply(x: jax.Array) -> Any:
        with invariant_rows(BLOCKS):
            return matmul(x, jnp.asarray(matrix), jnp.float32, transposed=transposed)

    x = rows_of(700, inputs)
    assert "pallas_call" in str(jax.make_jaxpr(multiply)(x)), "XLA would choose the order of sums"
    assert product_rows(multiply, x) == product_rows(multiply, x[:1]) == {TPU_BLOCK_ROWS}
    check_rows(multiply, x, sizes=(1, 256, 600))
    numbers = matrix.astype(np.float64)
    expected = x.astype(np.float64) @ (numbers.T if transposed else numbers)
    np.testing.assert_allclose(simulate(jax.jit(multiply), x), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("inputs", "dtype", "expected"),
    [
        (16_384, jnp.float32, 256),
        (21_504, jnp.float32, 128),
        (28_672, jnp.bfloat16, 256),
        (43_008, jnp.bfloat16, 128),
    ],
)
def test_wide_inputs_are_multiplied_with_fewer_rows_in_every_step(
    inputs: int, dtype: Any, expected: int
) -> None:
    def multiply(x: Any, matrix: Any) -> Any:
        with invariant_rows(BLOCKS):
            return matmul(x, matrix)

    matrix = jax.ShapeDtypeStruct((inputs, 128), dtype)
    for num_rows in (1, 256, 2000):
        x = jax.ShapeDtypeStruct((num_rows, inputs), dtype)
        assert product_rows(multiply, x, matrix) == {expected}


@pytest.mark.parametrize("transposed", [False, *long(True)])
def test_a_line_of_an_experts_product_depends_on_no_other(transposed: bool) -> None:
    inputs, outputs = 256, 384
    shape = (1, 4, outputs, inputs) if transposed else (1, 4, inputs, outputs)
    matrices = GroupMatrices(jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16))
    row = rows_of(1, inputs)
    multiply = jax.jit(KERNELS.multiply_groups, static_argnames="transposed")
    found = []
    for sizes in ((0, 1, 0, 0), (90, 300, 5, 117), (0, 70, 186, 0), (3, 1020, 0, 1)):
        lines = rows_of(max(256, sum(sizes)), inputs)
        for place in {sizes[0], sizes[0] + sizes[1] // 2, sizes[0] + sizes[1] - 1}:
            lines[place] = row
            layer, of_groups = jnp.int32(0), np.asarray(sizes, np.int32)
            given = lines, matrices, layer, of_groups
            call = partial(multiply, transposed=transposed)
            assert product_rows(call, *given) == {INVARIANT_LINES}
            out = simulate(call, *given)
            found.append(np.asarray(out)[place])
    assert all((own == found[0]).all() for own in found)


def test_the_choice_and_the_sum_of_a_tokens_experts_depend_on_no_other_token() -> None:
    hidden, experts = 128, 16
    # Small, so that a token's experts have alike weights; in float32, so that no order is hidden.
    router = jnp.asarray(RNG.standard_normal((1, hidden, experts)) / 16, jnp.float32)
    norm = jnp.ones(hidden, jnp.float32)
    kernels = KERNELS.expert_dispatch

    def move(x: jax.Array) -> Any:
        own = Router(ExpertChoice(4, norm_topk_prob=True), 1e-6, False, norm, router, None)
        is_token = jnp.ones(len(x), bool)
        normed, weights, chosen = kernels.choose(x, own, jnp.int32(0), is_token)
        lines = kernels.sort(chosen, jnp.int32(0), experts)
        own_rows = kernels.gather(normed, lines)
        inner = kernels.gate(silu_gated, own_rows, own_rows, lines)
        return normed, weights.T, chosen.T, kernels.add(inner, weights, lines)

    check_rows(move, rows_of(700, hidden, dtype=jnp.float32), sizes=(256, 600))


def test_the_heads_of_a_token_depend_on_no_other_token() -> None:
    heads = Heads(num_q=4, num_stored_kv=1, num_kv=1, head_dim=128)

    def make(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
        by = Rotation(cos[:, None], sin[:, None])
        return KERNELS.qkv_heads(qkv, heads, (None, None, None), by)

    angles = [rows_of(700, 64, dtype=jnp.float32) for _ in range(2)]
    check_rows(make, rows_of(700, 6 * 128), *angles, sizes=(256, 600))


@pytest.mark.long
def test_attention_to_latents_depends_on_neither_batch_nor_cuts() -> None:
    heads, rank, page, length, rows = 16, 128, 16, 300, 5
    up = UpProjections(
        jnp.asarray(RNG.standard_normal((heads, 64, rank)), jnp.bfloat16),
        jnp.asarray(RNG.standard_normal((heads, rank, 64)), jnp.bfloat16),
    )
    nope, rope = rows_of(rows * length, heads, 64), rows_of(rows * length, heads, 32)
    latents = rows_of(rows * length, rank + 32)
    table = np.arange(rows * 19, dtype=np.int32).reshape(rows, 19) + 1

    def run(cache: Any, steps: list[tuple[int, int, int]], decodes: int, tokens: int) -> Any:
        """Steps are (request, start, count)."""
        picked = np.concatenate([np.arange(n) + r * length + s for r, s, n in steps])
        places = np.zeros(tokens, np.int32)
        places[: len(picked)] = picked
        own = np.zeros((2, rows), np.int32)
        for n, (_, start, count) in enumerate(steps):
            own[:, n] = start, count
        tables = table[[request for request, _, _ in steps] + [0] * (rows - len(steps))]

        @jax.jit
        def attend(cache: Any, places: Any, tables: Any, own: Any) -> Any:
            batch = AttentionBatch.build(tables, *own, jnp.int32(decodes), tokens, 3)
            queries = LatentQueries(jnp.asarray(nope)[places], jnp.asarray(rope)[places])
            given = jnp.asarray(latents)[places]
            with invariant_rows(BLOCKS):
                return KERNELS.attend_latents(queries, given, up, cache, jnp.int32(0), batch, 0.1)

        out, cache, _ = simulate(attend, cache, places, tables, own)
        ends = np.cumsum([count for _, _, count in steps])
        return np.split(np.asarray(out), ends), cache

    empty = np.full((1, 1 + rows * 19, 1, page, 256), np.nan, jnp.bfloat16)
    (expected, _), _ = run(empty, [(0, 0, 290)], 0, 512)
    found, cache = run(empty, [(3, 0, 40), (0, 0, 133), (2, 0, 7)], 0, 256)
    assert (found[1] == expected[:133]).all()
    found, cache = run(cache, [(3, 40, 1), (2, 7, 2), (0, 133, 120)], 2, 256)
    assert (found[2] == expected[133:253]).all()
    found, cache = run(cache, [(0, 253, 4), (3, 41, 3)], 2, 256)
    assert (found[0] == expected[253:257]).all()
    found, cache = run(cache, [(0, 257, 1)], 1, 512)
    assert (found[0] == expected[257:258]).all()
