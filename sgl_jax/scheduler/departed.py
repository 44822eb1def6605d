"""A request that left its row while a step with the row may have been in flight."""

from typing import NamedTuple

from sgl_jax.core.step_plan import Int32Array


class Departed(NamedTuple):
    """The row that the request left, as recorded by a launched step, and the request's prefix."""

    row: int
    epoch: int  # of its lease
    tokens: Int32Array  # that were known
    namespace: str
    matched_len: int  # tokens that were there at its admission
