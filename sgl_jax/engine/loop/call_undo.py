"""Steps that undo the latest calls, for callers that no longer wait for the reply.

A call may be made just before its caller gets a 503. The `CancelCall` that follows then finds the
step here. It is left alone if a later call has changed the same thing, because that call's caller
got its reply.
"""

from collections.abc import Callable

# No more calls can be without a reply (`Frontend.call`), so no older one can still be cancelled.
_MAX_STEPS = 1024


class CallUndo:
    """For each subject, such as one session, the call that changed it last, and how to undo it."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str, Callable[[], object]]] = {}

    def note(self, rid: str, subject: str, undo: Callable[[], object]) -> None:
        """Record that call `rid` has changed `subject`."""
        self._steps.pop(subject, None)
        self._steps[subject] = rid, undo
        if len(self._steps) > _MAX_STEPS:
            del self._steps[next(iter(self._steps))]

    def undo(self, rid: str) -> None:
        """Undo call `rid`, unless it has changed nothing or its subject has changed since."""
        for subject, (noted, undo) in self._steps.items():
            if noted == rid:
                del self._steps[subject]
                undo()
                return
