"""Errors of the memory stack. Each means a defect in the engine, never a client's mistake."""

from collections.abc import Sequence


class MemoryDefectError(RuntimeError):
    """A rank's memory records are wrong or were misused. `engine/` handles this error."""


class OwnershipError(MemoryDefectError):
    """A page was freed twice, was freed or moved under another owner's name, or does not exist."""


class OutOfPagesError(MemoryDefectError):
    """More pages were requested than are free. The caller must evict or retract first."""


class LeaseError(MemoryDefectError):
    """A released lease was used again, or a lease's lengths would break their order."""


class LedgerError(MemoryDefectError):
    """The ledger of a rank does not balance. The text names the rank, the pages, their owners and
    their last transitions. `pages` are the affected pages, if found."""

    def __init__(self, message: str, pages: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.pages = tuple(int(page) for page in pages)
