"""Placements of experts: every expert has a slot, copies lie apart, and chips' loads are level."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.expert_placement import (
    chip_loads,
    place_experts,
    placement_for,
    unplaced_imbalance,
)
from tests.models.configs import EXPERTS, read

LAYERS = read().num_layers
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}


def zipf(num_experts, seed, exponent=1.0):
    """Loads of one layer by rank, in random order."""
    loads = 1e6 / np.arange(1, num_experts + 1) ** exponent
    return np.random.default_rng(seed).permutation(loads).astype(np.int64)[None]


@st.composite
def problems(draw):
    """(loads [1, experts], copies, chips)."""
    chips = draw(st.sampled_from([2, 3, 4, 8]))
    experts = draw(st.integers(1, 24))
    copies = -experts % chips + chips * draw(st.integers(0, 3))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return np.array([loads]), copies, chips


@given(problems())
def test_each_expert_has_slots_and_its_copies_lie_on_chips_of_their_own(problem):
    loads, copies, chips = problem
    num_experts = loads.shape[1]
    (slots,) = place_experts(loads, copies, chips).experts
    assert len(slots) == num_experts + copies
    assert set(slots) == set(range(num_experts))
    if copies <= num_experts * (chips - 1):
        for own in np.reshape(slots, (chips, -1)):
            assert len(set(own)) == len(own)


@given(problems())
def test_no_chip_has_more_than_the_mean_and_one_share(problem):
    """Graham's bound."""
    loads, copies, chips = problem
    (slots,) = place_experts(loads, copies, chips).experts
    totals = chip_loads(slots, loads[0], chips)
    shares = loads[0] / np.bincount(slots)
    assert totals.sum() == pytest.approx(loads.sum())
    assert totals.max() <= totals.mean() + shares.max() + 1e-6


@given(
    st.sampled_from([8, 32, 128]),
    st.sampled_from([2, 4, 8]),
    st.floats(0.3, 1.5),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_neither_a_placement_nor_copies_make_it_worse(experts, chips, exponent, more, seed):
    """A hundredth above the mean is level: a copy is more to place, and no chip waits for it."""
    loads = zipf(experts, seed, exponent)
    unplaced = unplaced_imbalance(loads, chips)
    placed = place_experts(loads, 0, chips).imbalance(loads, chips)
    copied = place_experts(loads, more * chips, chips).imbalance(loads, chips)
    assert placed <= max(unplaced, 1.01)
    assert copied <= max(placed, 1.01)


@given(problems())
def test_a_placement_depends_on_the_loads_alone(problem):
    loads, copies, chips = problem
    both = np.concatenate([loads, np.roll(loads, 1), loads])
    first, _, last = place_experts(both, copies, chips).experts
    assert first == last == place_experts(loads, copies, chips).experts[0]


@pytest.mark.parametrize("chips", [4, 8])
def test_copies_level_zipfs_loads(chips):
    """Prints the figures of docs/measurements/planning.md: layers are permutations."""
    loads = np.concatenate([zipf(128, seed) for seed in range(20)])
    unplaced = unplaced_imbalance(loads, chips)
    placed = [place_experts(loads, n, chips).imbalance(loads, chips) for n in (0, 8, 16, 32)]
    print(f"{chips} chips: {unplaced:.2f} in order; placed, 0 to 32 copies:", np.round(placed, 3))
    assert unplaced > 1.5
    assert placed[0] < unplaced
    assert max(placed[1:]) < 1.001


def test_slots_of_each_expert_are_padded_to_the_most_copies():
    placement = place_experts(np.array([[6, 1, 1, 1], [1, 1, 1, 6]]), 2, 2)
    assert placement.experts[0] == (0, 1, 2, 0, 1, 3)
    table = placement.slots((1, 0))
    assert table.shape == (2, 4, 2)
    for layer, own in zip((1, 0), table, strict=True):
        for expert, slots in enumerate(own):
            held = [slot for slot, of in enumerate(placement.experts[layer]) if of == expert]
            assert [slot for slot in slots if slot >= 0] == held


def args(**own):
    return ServerArgs(tp_size=2, ep_size=2, **own)


def test_without_flags_experts_lie_in_order():
    assert placement_for(args(), read(**EXPERTS, **MOE)) is None


def test_copies_that_the_chips_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="--ep-num-redundant-experts 1: --ep-size 2 must divide"):
        EngineConfig.resolve(args(ep_num_redundant_experts=1), read(**EXPERTS, **MOE), "cpu")


@pytest.mark.parametrize("own", [{"ep_num_redundant_experts": 1}, {"init_expert_location": "x"}])
def test_one_chip_for_each_expert_is_refused(own):
    with pytest.raises(ValueError, match="need --ep-size above 1"):
        ServerArgs(**own)


def test_fewer_copies_than_none_are_refused():
    with pytest.raises(ValueError, match="--ep-num-redundant-experts must be in"):
        args(ep_num_redundant_experts=-1)


def test_a_record_of_a_model_without_experts_is_refused():
    recorded = ServerArgs(expert_distribution_recorder_mode="stat")
    with pytest.raises(ValueError, match="recorder-mode stat needs a model with experts"):
        EngineConfig.resolve(recorded, read(), "cpu")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{}", "is no file of"),
        ("nothing", "is no file of"),
        ("[1]", "is no file of"),
        (json.dumps({"logical_count": [[1, 2]]}), r"must hold counts of .* got int64 \[1, 2\]"),
        (json.dumps({"logical_count": [[1], [2, 3]]}), "is no file of"),
        (json.dumps({"logical_count": [[0.5] * 4] * LAYERS}), "must hold counts of .* got float64"),
        (json.dumps({"logical_count": [[-1] * 4] * LAYERS}), "must hold counts of"),
    ],
)
def test_a_bad_file_of_loads_is_refused_by_name(tmp_path, text, fault):
    file = tmp_path / "loads.json"
    file.write_text(text)
    own = args(ep_num_redundant_experts=2, init_expert_location=str(file))
    with pytest.raises(ValueError, match=f"{file}.*{fault}"):
        placement_for(own, read(**EXPERTS, **MOE))


def test_a_missing_file_of_loads_is_refused():
    own = args(ep_num_redundant_experts=2, init_expert_location="/no/file")
    with pytest.raises(ValueError, match="--init-expert-location '/no/file'"):
        placement_for(own, read(**EXPERTS, **MOE))
