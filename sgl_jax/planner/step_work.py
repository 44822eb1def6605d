"""The work of a step, and the time of a kernel for it."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    tokens: int  # queries of all rows
    kv_tokens_read: int  # total over all rows
    query_key_pairs: int  # of attention
    rows: int = 0  # rows with recurrent states read and written
    is_prefill: bool = True  # in decode, reads hide the products


class KernelTime(NamedTuple):
    """Seconds of all layers on one device."""

    hbm_s: float
    instructions_s: float
    feeds_mxu: bool = False  # True if the instructions feed the matrix units

    @property
    def total_s(self) -> float:
        return max(self.hbm_s, self.instructions_s)

    @property
    def bound(self) -> str:
        """Return the main bound: "HBM", "MXU" or "instructions"."""
        if self.hbm_s >= self.instructions_s:
            return "HBM"
        return "MXU" if self.feeds_mxu else "instructions"
