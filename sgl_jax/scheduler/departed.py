"""The record of a request that left its row while a step with the row may have been in flight."""

from typing import NamedTuple

from sgl_jax.core.step_plan import Int32Array


class Departed(NamedTuple):
    """The row that the request left, as recorded by a launched step, and the request's prefix."""

    row: int
    epoch: int  # of its lease
    tokens: Int32Array  # known tokens, int32[n]
    namespace: str
    matched_len: int  # tokens of the cached prefix at its admission
