"""Errors of the memory stack. Each means a defect in the engine, never a client's mistake."""


class OwnershipError(RuntimeError):
    """A page was freed twice, freed or moved by someone who does not own it, or does not exist."""


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free; the caller must evict or retract first."""


class LeaseError(RuntimeError):
    """A released lease was used again, or a lease's lengths would break their order."""


class LedgerError(RuntimeError):
    """The books of a rank do not balance; the text names the rank, the pages and their owners."""
