"""The work of a step, and the time that a kernel takes for it."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    tokens: int  # queries of all rows
    kv_tokens_read: int  # by all rows together
    query_key_pairs: int  # of attention
    rows: int = 0  # whose states are read and written
    is_prefill: bool = True  # decode's products hide behind its reads


class KernelTime(NamedTuple):
    """Seconds of all layers on one device."""

    hbm_s: float
    instructions_s: float
    feeds_mxu: bool = False  # the instructions are there to feed the matrix units

    @property
    def total_s(self) -> float:
        return max(self.hbm_s, self.instructions_s)

    @property
    def bound(self) -> str:
        """The main wait: "HBM", "MXU" or "instructions"."""
        if self.hbm_s >= self.instructions_s:
            return "HBM"
        return "MXU" if self.feeds_mxu else "instructions"
