"""An engine's counts of experts, and experts that a file of them places, with copies."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.layers.moe import count_experts, join_layers
from tests.executor.step_driver import Driver, Row
from tests.models.golden_server import GOLDEN

FAMILY = GOLDEN / "qwen3_moe_mixed"
TOP_K = 2


def test_counts_are_numpys():
    rng = np.random.default_rng(0)
    chosen = [rng.integers(0, 6, (2, 40)).astype(np.int32), None]  # 5 stands for padding's
    counts = count_experts([None if own is None else jnp.asarray(own) for own in chosen], 5)
    wanted = [np.bincount(chosen[0].ravel(), minlength=6)[:5], np.zeros(5)]
    np.testing.assert_array_equal(counts, wanted)
    parts = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(join_layers([parts, parts[:1]])[6:], parts[0])
    assert join_layers([count_experts(chosen, None)]) is None  # type: ignore[arg-type]


def served(executor):
    """The outputs of two requests."""
    executor.reset()
    rows = [
        Row(rank % executor.sizes.dp_size, 1 + rank, [3 + rank, 9, 27, 4 * rank, 5])
        for rank in range(2)
    ]
    return Driver(executor, rows).run(6)


@pytest.mark.parametrize("mesh", [{"tp_size": 2}, {"dp_size": 2}], ids=str)
@pytest.mark.long
def test_a_record_places_the_experts_of_the_next_server(make_executor, tmp_path, mesh):
    own = {
        "model_path": str(FAMILY),
        "load_format": "auto",
        "expert_distribution_recorder_mode": "stat",
        **mesh,
    }
    plain = make_executor(**own)
    plain.expert_recorder.start()
    outputs = served(plain)
    plain.expert_recorder.stop()
    counts = plain.expert_recorder.counts()
    num_tokens = 2 * (5 + 5)
    dense = counts.sum(axis=1) == 0
    np.testing.assert_array_equal(counts.sum(axis=1)[~dense], num_tokens * TOP_K)
    assert 0 < dense.sum() < len(dense)
    file = tmp_path / "loads.json"
    file.write_text(json.dumps({"logical_count": counts.tolist()}))
    placed = make_executor(
        **own, ep_size=2, ep_num_redundant_experts=3, init_expert_location=str(file)
    )
    placed.expert_recorder.start()
    assert served(placed) == outputs
    np.testing.assert_array_equal(placed.expert_recorder.counts(), counts)
    placed.update_weights(str(FAMILY))
    assert served(placed) == outputs
