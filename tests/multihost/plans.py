"""Plans of decode steps, as a busy engine sends them."""

import numpy as np

from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.step_plan import RankPlan, StepPlan


def decode_plan(dp_size: int, num_rows: int, step_id: int, num_changes: int = 1) -> StepPlan:
    """A step of `num_rows` decode rows on each rank, of which `num_changes` in all get a page."""
    ones = np.ones(num_rows, np.int32)
    rank = RankPlan(
        rows=np.arange(1, num_rows + 1, dtype=np.int32),
        kv_starts=131_000 * ones,
        q_lens=ones,
        samples=np.ones(num_rows, np.bool_),
        num_pages=8192,
        num_decode=num_rows,
        relayed=np.ones(num_rows, np.bool_),
    )
    changes = PageChanges(
        np.arange(num_changes, dtype=np.intp) * 8192, np.full(num_changes, 7, np.int32)
    )
    return StepPlan(step_id, (rank,) * dp_size, changes)
