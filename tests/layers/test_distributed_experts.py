"""Whole experts on some chips of a mesh compute the same as slices of all on each."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.kernels.expert_dispatch import lines as expert_dispatch
from sgl_jax.kernels.expert_dispatch.interface import XLA_MOVES
from sgl_jax.layers.kernels import Kernels, kernels_of
from sgl_jax.layers.moe import ExpertCopies, clamped_swiglu, copy_keys
from sgl_jax.models.expert_placement import place_experts
from tests.layers.modules import declared_shapes, declared_specs, mixture_of_experts
from tests.models.configs import EXPERTS, read
from tests.support.long import long, long_but

TOKENS, HIDDEN = 12, 8  # of a rank
NUM_EXPERTS = 5


class Layout(NamedTuple):
    dp: int
    tp: int
    over_ranks: bool

    @property
    def axes(self):
        return ("data", "tensor") if self.over_ranks else "tensor"

    @property
    def num_stored(self):
        """Experts, and zeros after them, that the chips divide."""
        chips = self.tp * (self.dp if self.over_ranks else 1)
        return -(-NUM_EXPERTS // chips) * chips


LAYOUTS = (
    Layout(1, 4, False),
    Layout(2, 2, False),
    Layout(2, 1, True),
    Layout(2, 2, True),
)


def weights(has_biases):
    module = mixture_of_experts(None, norm_topk_prob=True, has_biases=has_biases)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda own: rng.normal(size=own.shape), declared_shapes(module))
    return jax.tree.map(np.float32, drawn)


def padded(params, num_stored):
    """Rows of the experts' parameters that are split over chips, with zeros after them."""

    def pad(path, array):
        is_shared = path[0].key == "router" or [key.key for key in path] == ["down", "bias"]
        zeros = [(0, 0 if is_shared else num_stored - NUM_EXPERTS)]
        return np.pad(array, zeros + [(0, 0)] * (array.ndim - 1))

    return jax.tree.map_with_path(pad, params)


def run(layout, x, is_token, params, *, axes=None, simulate=False, copies=None, **options):
    """x [ranks, T, hidden] through a layer whose experts are distributed over `axes`.

    `copies` are a placement's slots and the tokens' keys [ranks, T]: params are in slots then.
    """
    num_stored = NUM_EXPERTS if axes is None else layout.num_stored
    slots, keys = (None, np.zeros(x.shape[:2], np.int32)) if copies is None else copies
    kernels = kernels_of("cpu", "pallas" if simulate else "xla")
    module = mixture_of_experts(
        kernels.multiply_groups,
        norm_topk_prob=True,
        moves=kernels.expert_dispatch,
        expert_axes=axes,
        num_stored=num_stored,
        **options,
    )
    graphdef = nnx.graphdef(module)
    devices = np.array(jax.devices()[: layout.dp * layout.tp]).reshape(layout.dp, layout.tp)

    def local(params, x, is_token, keys):
        copied = ExpertCopies.of_layer(slots, jnp.int32(0), keys[0])
        return nnx.merge(graphdef, params)(x[0], is_token[0], copied)[0][None]

    call = jax.shard_map(
        local,
        mesh=Mesh(devices, ("data", "tensor")),
        in_specs=(declared_specs(module), P("data"), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    params = params if slots is not None else padded(params, num_stored)
    return np.asarray(jax.jit(call)(params, x, is_token, keys))


def tokens(layout, seed=1):
    x = np.random.default_rng(seed).normal(size=(layout.dp, TOKENS, HIDDEN)) / 4
    return x.astype(np.float32), np.ones(x.shape[:2], bool)


def any_tokens(x, is_token, params):
    """Nothing special."""


def all_to_two_experts(x, is_token, params):
    x[:] = x[0, 0]


def one_chips_experts_alone(x, is_token, params):
    """The last experts' logits are lowest; experts 0 and 1 lie on the first chip."""
    params["router"]["weight"][:] = [5, 4, -1, -2, -3]
    x[:] = abs(x)


def ties(x, is_token, params):
    params["router"]["weight"][:] = 0


def an_idle_rank(x, is_token, params):
    is_token[-1] = False
    x[-1] = np.nan


def one_token(x, is_token, params):
    is_token[:] = False
    is_token[0, 0] = True


CHOICES = (
    any_tokens,
    all_to_two_experts,
    one_chips_experts_alone,
    ties,
    an_idle_rank,
    one_token,
)
BY_DEFAULT = (any_tokens, one_chips_experts_alone, ties, an_idle_rank)


def check(layout, choose, *, has_biases=False, **options):
    params = weights(has_biases)
    x, is_token = tokens(layout)
    choose(x, is_token, params)
    options["has_biases"] = has_biases
    one_chip = Layout(1, 1, over_ranks=False)
    expected = [
        run(one_chip, x[rank : rank + 1], is_token[rank : rank + 1], params, **options)[0]
        for rank in range(layout.dp)
    ]
    actual = run(layout, x, is_token, params, axes=layout.axes, **options)
    for own, result, wanted in zip(is_token, actual, expected, strict=True):
        np.testing.assert_allclose(result[own], wanted[own], rtol=0, atol=1e-5)
        assert np.isfinite(result[own]).all()


def every_choice(*layouts):
    """Parameters of a test: each with each choice. By default all have one, and the last four."""
    return [
        pytest.param(
            *(*layout, choose),
            id=f"{'-'.join(map(str, layout))}-{choose.__name__}",
            marks=()
            if choose is any_tokens or (layout == layouts[-1] and choose in BY_DEFAULT)
            else pytest.mark.long,
        )
        for layout in layouts
        for choose in CHOICES
    ]


@pytest.mark.parametrize(("layout", "choose"), every_choice(*((layout,) for layout in LAYOUTS)))
def test_every_choice_of_the_router_gives_the_same_sums(layout, choose):
    check(layout, choose)


@pytest.mark.parametrize("layout", [Layout(2, 2, True), *long(Layout(1, 2, False))], ids=str)
def test_experts_with_biases(layout):
    check(layout, any_tokens, has_biases=True, gated=partial(clamped_swiglu, limit=0.5, alpha=1.7))


@pytest.mark.parametrize("choose", long_but(CHOICES, all_to_two_experts, an_idle_rank))
def test_lines_in_parts_lose_no_token(choose, monkeypatch):
    """Four chips take a part of the lines at a time, and one chip may have them all."""
    monkeypatch.setattr(expert_dispatch, "UNDIVIDED_TOKENS", 0)
    monkeypatch.setattr(expert_dispatch, "_MULTIPLE", 1)
    check(Layout(2, 2, over_ranks=True), choose)


@pytest.mark.parametrize("layout", [Layout(1, 4, False), Layout(2, 2, True)], ids=str)
def test_padding_has_lines_on_no_chip(layout, monkeypatch):
    """Chips do not divide the experts: the last one has slots to spare."""
    num_used = []

    def sort(*args):
        lines = XLA_MOVES.sort(*args)
        jax.debug.callback(lambda own: num_used.append(int(own)), lines.num_used)
        return lines

    kernels = Kernels(expert_dispatch=XLA_MOVES._replace(sort=sort))
    monkeypatch.setitem(globals(), "kernels_of", lambda *_: kernels)
    x, is_token = tokens(layout)
    is_token[:, 7:] = False
    run(layout, x, is_token, weights(has_biases=False), axes=layout.axes)
    jax.effects_barrier()
    assert sum(num_used) == 2 * is_token.sum()


@pytest.mark.parametrize("choose", [one_chips_experts_alone, any_tokens, an_idle_rank])
@pytest.mark.long
def test_the_tpus_kernels_simulated(choose):
    params = weights(has_biases=False)
    layout = Layout(2, 1, over_ranks=True)
    x, is_token = tokens(layout)
    choose(x, is_token, params)
    actual, expected = (
        run(layout, x, is_token, params, axes=layout.axes, simulate=simulate)
        for simulate in (True, False)
    )
    np.testing.assert_allclose(actual[is_token], expected[is_token], rtol=0, atol=1e-5)


def placed(params, placement):
    """The experts' parameters in the slots of a placement's one layer."""

    def take(path, array):
        is_shared = path[0].key == "router" or [key.key for key in path] == ["down", "bias"]
        return array if is_shared else array[list(placement.experts[0])]

    return jax.tree.map_with_path(take, params)


LOADS = np.array([[50, 10, 1, 20, 3]])


@pytest.mark.parametrize(
    ("layout", "num_copies", "choose"),
    every_choice((Layout(1, 2, False), 1), (Layout(1, 4, False), 7), (Layout(2, 2, True), 3)),
)
def test_copies_of_experts_give_the_same_sums(layout, num_copies, choose):
    params = weights(has_biases=True)
    x, is_token = tokens(layout)
    choose(x, is_token, params)
    num_chips = layout.tp * (layout.dp if layout.over_ranks else 1)
    placement = place_experts(LOADS, num_copies, num_chips)
    keys = np.random.default_rng(2).integers(0, 2**16, x.shape[:2]).astype(np.int32)
    actual = run(
        *(layout, x, is_token, placed(params, placement)),
        axes=layout.axes,
        copies=(placement.slots([0]), keys),
        has_biases=True,
    )
    for rank in range(layout.dp):
        own = slice(rank, rank + 1)
        one = Layout(1, 1, over_ranks=False)
        wanted = run(one, x[own], is_token[own], params, has_biases=True)[0]
        valid = is_token[rank]
        np.testing.assert_allclose(actual[rank][valid], wanted[valid], rtol=0, atol=1e-5)


def test_a_token_has_the_same_bits_at_any_place_of_a_step():
    """Its key, and not its place, chooses the copies, whose chips group the terms of its sum."""
    layout, params = Layout(1, 4, over_ranks=False), weights(has_biases=False)
    x, is_token = tokens(layout)
    placement = place_experts(LOADS, 7, 4)
    keys = np.asarray(copy_keys(jnp.arange(TOKENS)[None] * 7, jnp.arange(TOKENS)[None]))

    def results(order):
        copies = placement.slots([0]), keys[:, order]
        own = placed(params, placement)
        return run(layout, x[:, order], is_token, own, axes=layout.axes, copies=copies)[0]

    order = np.random.default_rng(3).permutation(TOKENS)
    np.testing.assert_array_equal(results(np.arange(TOKENS))[order], results(order))


def test_keys_spread_tokens_over_all_copies():
    """Equal positions, as in a benchmark of equal prompts, and equal tokens alike."""
    placement = place_experts(np.array([[9, 1, 1, 1]]), 4, 4)
    ids = np.random.default_rng(0).integers(0, 150_000, 4000).astype(np.int32)
    some = np.full_like(ids, 77)
    for keys in (copy_keys(ids, some), copy_keys(some, np.arange(4000, dtype=np.int32))):
        copies = ExpertCopies.of_layer(placement.slots([0]), jnp.int32(0), keys)
        chosen = np.asarray(copies.chosen(jnp.zeros((1, 4000), jnp.int32)))[0]
        own = [slot for slot in placement.slots([0])[0, 0] if slot >= 0]
        counts = np.bincount(chosen, minlength=8)
        assert len(own) == 4
        assert counts[own].min() > 900


@pytest.mark.parametrize(("dp", "tp", "allowed"), [(2, 4, "1, 4, 8"), (1, 4, "1, 4")])
def test_other_sizes_are_refused(dp, tp, allowed):
    with pytest.raises(ValueError, match=f"--ep-size must be one of {allowed} .*got 2"):
        ServerArgs(dp_size=dp, tp_size=tp, ep_size=2)


def test_a_model_without_experts_is_refused():
    args = ServerArgs(tp_size=2, ep_size=2)
    with pytest.raises(ValueError, match="--ep-size 2 needs a model with experts"):
        EngineConfig.resolve(args, read(), "cpu")
    assert EngineConfig.resolve(args, read(**EXPERTS, **MOE), "cpu").build_options.ep_size == 2


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}


def test_the_shared_arrays_of_a_rank_are_whole_on_each_chip():
    module = mixture_of_experts(None, norm_topk_prob=True, has_biases=True, expert_axes="tensor")
    specs = declared_specs(module)
    assert specs["gate"] == {"weight": P("tensor", None, None), "bias": P("tensor", None)}
    assert specs["down"] == {"weight": P("tensor", None, None), "bias": P(None, None)}
