"""Whole steps of each kind of model: no row changes another row's result, whatever it holds."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.step_plan import NO_SLOT, StatePlan
from tests.executor.step_driver import Driver, Row
from tests.kernels.not_finite import assert_same_bits
from tests.support.long import long_but

pytestmark = pytest.mark.usefixtures("few_shapes")

GOLDEN = Path(__file__).parents[1] / "golden"
# Windows, sinks and experts; recurrent states and experts; and others.
BY_DEFAULT = "gpt_oss"
MODELS = (
    BY_DEFAULT,
    "qwen3_next",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa_reuse",
    "qwen3",
    "qwen3_moe",
    "gemma3",
    "qwen3_5",
    "kimi_linear",
)
SPOILED = 1  # row, by its number in a driver
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 90, n).tolist() for n in (3, 9, 5, 14)]
STEPS, CHUNK, SPOILED_AFTER = 8, 3, 4


class StateDriver(Driver):
    """Plans the slots of recurrent states, too, and pages of all cache groups."""

    def _rank_plan(self, decode, prefill, chunk):
        rows = decode + prefill
        sources = [NO_SLOT if row.committed else 0 for row in rows]
        plan = super()._rank_plan(decode, prefill, chunk)._replace(return_logprob=True)
        if not self.executor.sizes.num_state_slots:
            return plan
        halves = np.full(len(rows), self.num_steps % 2, np.int32)
        snapshots = np.zeros((0, 3), np.int32)
        return plan._replace(states=StatePlan(np.array(sources, np.int32), halves, snapshots))

    def _all_pages(self):
        pages = {(0, row.row): list(self.pages_of(row)) for row in self.rows}
        return PageChanges.listing(self.executor.sizes, pages)

    def pages_of(self, row):
        """The pages of a row, [groups that have pages, pages]; groups may share a pool."""
        sizes = self.executor.sizes
        groups = [group for group in sizes.groups if not group.is_recurrent]
        ids = np.arange(len(groups) * sizes.pages_per_row, dtype=np.int32).reshape(len(groups), -1)
        return 1 + (row.row - 1) * ids.size + ids


def run(executor, before=None, amid=None):
    """The log-probabilities of each row's new tokens, step by step; `before` changes the memory
    that no token lies in yet, `amid` what the rows have written in two steps."""
    executor.reset()
    if before is not None:
        executor._state = before(executor._state)
    driver = StateDriver(executor, [Row(0, 1 + i, list(p)) for i, p in enumerate(PROMPTS)])
    found = {row.row: [] for row in driver.rows}
    for step in range(STEPS):
        if step == SPOILED_AFTER and amid is not None:
            executor._state = amid(executor._state, driver)
        plan, order = driver.plan(CHUNK)
        (result,) = driver._read([(plan, executor.launch(plan), order)])
        for row, tokens, logprobs, top in zip(
            order[0], result.tokens, result.logprobs, result.top_logprobs, strict=True
        ):
            if tokens[0] >= 0:
                found[row.row].append(np.concatenate([tokens, logprobs, top[0]]))
    return {row: np.array(values) for row, values in found.items()}


def filled(state, value):
    """The state with `value` in all pages, the null page included, and in all slots but the null
    slot: what earlier requests left there."""

    def fill(slots):
        return slots.at[:, 1:].set(value)

    states = state.states
    if states is not None:
        states = states._replace(layers=jax.tree.map(fill, states.layers))
    return state._replace(
        kv_pools=tuple(jnp.full_like(pool, value) for pool in state.kv_pools), states=states
    )


def spoiled(state, driver, value):
    """The state with `value` in the pages and slots of one row."""
    row, states, sizes = driver.rows[SPOILED], state.states, driver.executor.sizes
    pages = driver.pages_of(row).ravel()
    if states is not None:
        slots = np.array([sizes.own_slot(row.row, half) for half in range(2)])
        layers = jax.tree.map(lambda own: own.at[:, slots].set(value), states.layers)
        states = states._replace(layers=layers)
    pools = tuple(pool.at[:, pages].set(value) for pool in state.kv_pools)
    return state._replace(kv_pools=pools, states=states)


@pytest.mark.parametrize("name", long_but(MODELS, BY_DEFAULT))
def test_no_row_changes_another(make_executor, name):
    settings = {"load_format": "safetensors", "context_length": 24}
    executor = make_executor(model_path=str(GOLDEN / name), **settings)
    clean = run(executor)
    assert all(len(values) > 1 for values in clean.values())
    found = run(executor, before=lambda state: filled(state, np.nan))
    for row, values in clean.items():
        assert_same_bits(found[row], values)
    for value in (np.nan, np.inf):
        found = run(executor, amid=lambda *given, value=value: spoiled(*given, value))  # type: ignore[call-arg]
        # The spoiled row gets no more tokens: its results are not finite.
        assert len(found.pop(SPOILED + 1)) < len(clean[SPOILED + 1])
        for row, values in found.items():
            assert_same_bits(values, clean[row])
