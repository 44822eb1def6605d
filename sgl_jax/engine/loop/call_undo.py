"""Undoes the latest calls if their callers no longer wait for the reply.

A call may take effect just before its caller receives a 503. The `CancelCall` that follows finds
the undo step here. The step is not run if a later call, which was confirmed to its caller, has
changed the same subject.
"""

from collections.abc import Callable

# Upper bound on calls without a reply (`Frontend.call`), so older calls can no longer be cancelled.
_MAX_STEPS = 1024


class CallUndo:
    """The last call that changed each subject (for example a session), with its undo step."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str, Callable[[], object]]] = {}

    def note(self, rid: str, subject: str, undo: Callable[[], object]) -> None:
        self._steps.pop(subject, None)
        self._steps[subject] = rid, undo
        if len(self._steps) > _MAX_STEPS:
            del self._steps[next(iter(self._steps))]

    def undo(self, rid: str) -> None:
        """Undo call `rid`, unless it changed nothing or its subject has changed since."""
        for subject, (noted, undo) in self._steps.items():
            if noted == rid:
                del self._steps[subject]
                undo()
                return
